//! The forwarding plane: shared tables that lanes read without waiting, and one lane of scratch per thread.

mod coalesce;
mod inbound;
mod outbound;
mod route;
mod segment;

use std::net::SocketAddr;
use std::ops::Range;

/// How an overlay (super-)packet must be cut and finished; what a virtio-net header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offload {
    /// Cut into segments of this many payload bytes; `None`: one packet.
    pub segment: Option<Segment>,
    /// The transport checksum holds only the pseudo-header sum: (start of the transport header, offset of the checksum in it).
    pub checksum: Option<(u16, u16)>,
}

/// Segmentation of a super-packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// TCP or UDP.
    pub kind: SegmentKind,
    /// Payload bytes of every segment but the last.
    pub size: u16,
}

/// Transport of a super-packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// TSO.
    Tcp,
    /// USO.
    Udp,
}

/// Sealed datagrams in the lane's arena that go to one endpoint: all `segment_size` long but the last, so one UDP GSO
/// send carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Destination.
    pub to: SocketAddr,
    /// Bytes in [`Lane::arena`].
    pub range: Range<usize>,
    /// Length of every datagram but the last.
    pub segment_size: usize,
}

/// One receive slot: one datagram, or several of equal size from one source (UDP GRO).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// Underlay source, IPv4-mapped addresses already unmapped.
    pub from: SocketAddr,
    /// Bytes in the receive buffer.
    pub range: Range<usize>,
    /// Length of every datagram but the last.
    pub segment_size: usize,
}

/// One packet for the overlay device: `header` (if any) followed by `payload` pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Rebuilt IP and transport header in [`Lane::headers`]; empty for a packet delivered as received.
    pub header: Range<usize>,
    /// First and last piece in [`Lane::pieces`]; each piece is a range of the receive buffer.
    pub pieces: Range<usize>,
    /// What the device must be told.
    pub offload: Offload,
    /// Length of IP and transport header together, for the virtio-net header.
    pub header_len: u16,
}

/// Shared tables. `&self` everywhere; only [`crate::Node`] publishes.
#[derive(Debug)]
pub struct Forwarder {}

/// One thread's scratch: arena, deliveries, punts, flow cache, counters. Nothing in it is shared.
#[derive(Debug)]
pub struct Lane {}

impl Lane {
    /// Sealed runs of [`Forwarder::outbound`] since the last [`Lane::clear`].
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        unimplemented!()
    }
    /// Memory the runs point into.
    #[must_use]
    pub fn arena(&self) -> &[u8] {
        unimplemented!()
    }
    /// Packets of [`Forwarder::inbound`] since the last [`Lane::clear`], in order per flow.
    #[must_use]
    pub fn deliveries(&self) -> &[Delivery] {
        unimplemented!()
    }
    /// Memory the headers of deliveries point into.
    #[must_use]
    pub fn headers(&self) -> &[u8] {
        unimplemented!()
    }
    /// Ranges of the receive buffer that deliveries point to.
    #[must_use]
    pub fn pieces(&self) -> &[Range<usize>] {
        unimplemented!()
    }
    /// Takes what the control plane must handle.
    pub fn take_punts(&mut self) -> impl Iterator<Item = crate::Punt> {
        std::iter::empty()
    }
    /// Whether another super-packet fits the arena before a flush.
    #[must_use]
    pub fn has_room(&self) -> bool {
        unimplemented!()
    }
    /// Forgets runs and deliveries; keeps memory.
    pub fn clear(&mut self) {
        unimplemented!()
    }
}

impl Forwarder {
    /// A lane for one thread.
    #[must_use]
    pub fn lane(&self) -> Lane {
        unimplemented!()
    }
    /// Overlay (super-)packet to sealed datagrams in `lane`.
    pub fn outbound(
        &self,
        _lane: &mut Lane,
        _now: std::time::Instant,
        _packet: &mut [u8],
        _offload: Offload,
    ) -> crate::Verdict {
        unimplemented!()
    }
    /// Underlay datagrams to overlay (super-)packets in `lane`. Opens in place in `buffer`; what it cannot finish is punted.
    pub fn inbound(&self, _lane: &mut Lane, _now: std::time::Instant, _buffer: &mut [u8], _received: &[Received]) {
        unimplemented!()
    }
}

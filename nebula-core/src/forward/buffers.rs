//! The layout of packets in the buffers that a lane reads and fills.

use std::net::SocketAddr;
use std::ops::Range;

use super::Offload;
use crate::index::LocalIndex;

/// Consecutive sealed datagrams in the lane's arena for one endpoint. All but the last are `segment_size` bytes long,
/// so one UDP GSO send carries them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Destination.
    pub to: SocketAddr,
    /// Bytes in [`Lane::arena`](crate::Lane::arena).
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

/// One packet for the overlay device: `header` (if any) followed by `pieces`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// Rebuilt IP and transport header in [`Lane::headers`](crate::Lane::headers), or a whole packet generated here;
    /// empty for a packet delivered as received.
    pub header: Range<usize>,
    /// Positions in [`Lane::pieces`](crate::Lane::pieces); each piece is a range of the receive buffer.
    pub pieces: Range<usize>,
    /// What the packet leaves to the device. A packet joined from several (only after
    /// [`Lane::set_coalesce`](crate::Lane::set_coalesce)) says where to cut it, and its transport checksum is
    /// partial: it holds only the sum of the pseudo-header. Every packet in it was authenticated and had a checksum
    /// of its own, so a receiver in this process need not complete it; [`cut_packet`](super::cut_packet) gives
    /// complete packets.
    pub offload: Offload,
    /// Length of IP and transport header together, for the virtio-net header.
    pub header_len: u16,
    /// The tunnel that it came by, of a super-packet its first packet; `None` for a packet generated here.
    pub tunnel: Option<LocalIndex>,
}

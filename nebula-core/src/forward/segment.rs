//! Cuts a super-packet into the packets to seal and completes their checksums (TSO, USO).
//!
//! On a path that carries more than the overlay device, a packet holds several of the segments that the kernel wants a
//! TCP super-packet to be cut into. Their size goes with it, so the peer's kernel gets the very same super-packet, and
//! the checksum is left to the peer, as a kernel leaves it to a network card.

use super::checksum::{self, Sum};
use super::layout::{Layout, TCP_CWR, TCP_FIN, TCP_PSH, read_u16};
#[cfg(feature = "io")]
use super::{Delivery, Lane};
use super::{Offload, SegmentKind};
use crate::DropReason;
use crate::wire::ip::Packet;

/// Splits a coalesced packet of `lane` into the packets it was joined from, and calls `each` with every one of them,
/// checksum completed. `memory` is the buffer that the lane's pieces point into.
#[cfg(feature = "io")]
pub(crate) fn cut_delivery(lane: &Lane, memory: &[u8], delivery: &Delivery, each: impl FnMut(&[u8])) {
    let mut whole = Vec::new();
    lane.copy_delivery(delivery, memory, &mut whole);
    cut_packet(&whole, delivery.offload, each);
}

/// Cuts a (super-)packet into the packets that it stands for, as a network card does: calls `each` with every one,
/// its lengths, identification, sequence number, flags and checksum completed. A packet that needs no cutting is
/// passed on with its checksum completed.
///
/// Returns the number of packets; 0 if the description contradicts the packet.
///
/// ```
/// use nebula_core::forward::{Offload, Segment, SegmentKind, cut_packet};
///
/// // UDP over IPv4 with 2500 bytes of payload, to be sent in datagrams of 1000 bytes.
/// let mut packet = vec![0x45, 0, 0x09, 0xe0, 0, 7, 0x40, 0, 64, 17, 0, 0, 10, 42, 0, 1, 10, 42, 0, 2];
/// packet.extend([0x30, 0x39, 0, 53, 0x09, 0xcc, 0, 0]);
/// packet.resize(28 + 2500, b'x');
/// let segment = Some(Segment { kind: SegmentKind::Udp, size: 1000 });
/// // Where the UDP header begins, and where its checksum is in it.
/// let offload = Offload { segment, checksum: Some((20, 6)) };
///
/// let mut lengths = Vec::new();
/// assert_eq!(cut_packet(&packet, offload, |packet| lengths.push(packet.len())), 3);
/// assert_eq!(lengths, [1028, 1028, 528]);
/// ```
pub fn cut_packet(whole: &[u8], offload: Offload, mut each: impl FnMut(&[u8])) -> usize {
    let Ok(parsed) = Packet::inbound(whole) else { return 0 };
    let Ok(cut) = Cut::new(whole, &parsed, offload) else { return 0 };
    let mut packet = Vec::new();
    for index in 0..cut.count() {
        packet.resize(cut.len(index), 0);
        cut.write(index, &mut packet);
        each(&packet);
    }
    cut.count()
}

/// The kernel makes at most about 1400 segments (64 KiB in segments of 48 bytes); a description with more is bogus.
const MAX_SEGMENTS: usize = 2048;

/// Smaller segments stay single: the peer's kernel would be asked to cut a packet into dozens.
pub(super) const MIN_JOINED: usize = 500;

/// How one (super-)packet is split into packets.
#[derive(Debug)]
pub(super) struct Cut<'a> {
    packet: &'a [u8],
    shape: Shape,
    /// Number of TCP segments in each packet but the last.
    together: u16,
}

/// How a (super-)packet is to be split, whatever its bytes are by then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan(Shape);

impl Plan {
    /// Checks `offload` against the packet.
    pub(super) fn new(packet: &[u8], parsed: &Packet, offload: Offload) -> Result<Self, DropReason> {
        Cut::shape(packet, parsed, offload).map(Self).ok_or(DropReason::BadOffload)
    }

    /// Number of packets that it is split into.
    pub(super) fn count(&self) -> usize {
        self.0.count()
    }

    /// Length of the longest of them, if the packet as a whole has `len` bytes.
    pub(super) fn longest(&self, len: usize) -> usize {
        match &self.0 {
            Shape::Whole { .. } => len,
            Shape::Segments { layout, size, .. } => layout.header + size,
        }
    }

    /// For the same packet, whose headers still have the same lengths.
    pub(super) fn of(self, packet: &[u8]) -> Cut<'_> {
        Cut { packet, shape: self.0, together: 1 }
    }

    /// For the same packet, in a tunnel whose path carries packets of up to `largest` bytes with several TCP segments;
    /// 0: none of them.
    #[inline]
    pub(super) fn with_larger(self, packet: &[u8], largest: impl FnOnce() -> u16) -> Cut<'_> {
        match self.0 {
            Shape::Segments { layout, size, .. } if layout.kind == SegmentKind::Tcp => {
                self.of(packet).joined(layout, size, largest().into())
            }
            Shape::Segments { .. } | Shape::Whole { .. } => self.of(packet),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Shape {
    /// Sent as it is, except for a checksum to complete: (start, offset).
    Whole { checksum: Option<(u16, u16)> },
    /// Split into `count` packets with `size` bytes of payload; the last carries the remainder.
    Segments { layout: Layout, size: usize, count: usize },
}

impl Shape {
    fn count(&self) -> usize {
        match self {
            Self::Whole { .. } => 1,
            Self::Segments { count, .. } => *count,
        }
    }
}

impl<'a> Cut<'a> {
    /// Checks `offload` against the packet.
    pub(super) fn new(packet: &'a [u8], parsed: &Packet, offload: Offload) -> Result<Self, DropReason> {
        let shape = Self::shape(packet, parsed, offload).ok_or(DropReason::BadOffload)?;
        Ok(Self { packet, shape, together: 1 })
    }

    fn shape(packet: &[u8], parsed: &Packet, offload: Offload) -> Option<Shape> {
        if let Some((start, offset)) = offload.checksum {
            // The checksum covers the packet to its end, so its field must lie inside.
            let end = usize::from(start) + usize::from(offset) + 2;
            if end > packet.len() {
                return None;
            }
        }
        let Some(segment) = offload.segment else {
            return Some(Shape::Whole { checksum: offload.checksum });
        };
        let layout = Layout::of(packet, parsed).filter(|layout| layout.kind == segment.kind)?;
        let size = usize::from(segment.size);
        let count = (packet.len() - layout.header).div_ceil(size.max(1));
        if count == 1 {
            return Some(Shape::Whole { checksum: offload.checksum });
        }
        let fits = size > 0 && count > 0 && count <= MAX_SEGMENTS && layout.header + size <= usize::from(u16::MAX);
        fits.then_some(Shape::Segments { layout, size, count })
    }

    /// Number of packets it is split into.
    pub(super) fn count(&self) -> usize {
        self.shape.count()
    }

    /// Length of all packets together.
    pub(super) fn total_len(&self) -> usize {
        match &self.shape {
            Shape::Whole { .. } => self.packet.len(),
            Shape::Segments { layout, count, .. } => self.packet.len() + (count - 1) * layout.header,
        }
    }

    /// Length of the `index`th packet.
    pub(super) fn len(&self, index: usize) -> usize {
        match &self.shape {
            Shape::Whole { .. } => self.packet.len(),
            Shape::Segments { layout, size, .. } => {
                let payload = self.packet.len() - layout.header;
                layout.header + (*size).min(payload - index * size)
            }
        }
    }

    /// The same with as many segments in a packet as fit into `largest` bytes.
    fn joined(self, layout: Layout, size: usize, largest: usize) -> Self {
        if largest < layout.header + 2 * size || size < MIN_JOINED || !layout.is_plain() {
            return self;
        }
        let together = (largest - layout.header) / size;
        let size = size * together;
        let count = (self.packet.len() - layout.header).div_ceil(size);
        Self { shape: Shape::Segments { layout, size, count }, together: together as u16, ..self }
    }

    /// Payload length of each segment but the last in the `index`th packet; 0 if it is a single one.
    #[inline]
    pub(super) fn segment_size(&self, index: usize) -> u16 {
        if self.together < 2 { 0 } else { self.joined_size(index) }
    }

    fn joined_size(&self, index: usize) -> u16 {
        let Shape::Segments { layout, size, .. } = &self.shape else { return 0 };
        let single = size / usize::from(self.together);
        if self.len(index) > layout.header + single { single as u16 } else { 0 }
    }

    /// Writes the `index`th packet into `out`, which must have exactly its length.
    pub(super) fn write(&self, index: usize, out: &mut [u8]) {
        match self.shape {
            Shape::Whole { checksum } => {
                out.copy_from_slice(self.packet);
                if let Some((start, offset)) = checksum {
                    checksum::finish_partial(out, start.into(), offset.into());
                }
            }
            Shape::Segments { layout, size, count } => {
                let (header, payload) = out.split_at_mut(layout.header);
                header.copy_from_slice(&self.packet[..layout.header]);
                let from = layout.header + index * size;
                payload.copy_from_slice(&self.packet[from..from + payload.len()]);
                self.patch(header, payload, &layout, index, size, count);
            }
        }
    }

    fn patch(&self, header: &mut [u8], payload: &[u8], layout: &Layout, index: usize, size: usize, count: usize) {
        let len = header.len() + payload.len();
        if !layout.v6 {
            let id = read_u16(header, 4).wrapping_add((index as u16).wrapping_mul(self.together));
            header[4..6].copy_from_slice(&id.to_be_bytes());
        }
        layout.set_lengths(header, len);
        if layout.kind == SegmentKind::Tcp {
            let sequence = layout.sequence(header).wrapping_add((index * size) as u32);
            header[layout.transport + 4..layout.transport + 8].copy_from_slice(&sequence.to_be_bytes());
            let flags = layout.tcp_flags(header);
            if index > 0 {
                *flags &= !TCP_CWR;
            }
            if index + 1 < count {
                *flags &= !(TCP_FIN | TCP_PSH);
            }
        }
        layout.set_checksum(header, 0);
        // Headers are whole 32-bit words, so the payload starts at an even offset of the sum.
        let pseudo: Sum = layout.pseudo_header(header, len);
        if self.segment_size(index) > 0 {
            // The peer hands its device a super-packet, whose checksums that completes, or makes packets of it. Until
            // then the tunnel's tag protects the packet.
            return layout.set_checksum(header, pseudo.partial());
        }
        let sum = pseudo.add(&header[layout.transport..]).add(payload);
        layout.set_checksum(header, sum.complement());
    }
}

//! Joins consecutive packets of a flow into a super-packet (GRO).
//!
//! Packets are joined only if segmentation restores them byte for byte (except for IPv4 identifiers without a
//! meaning), and the packets of a flow are never reordered. A packet that holds several TCP segments already is as
//! good as those segments.

use std::ops::Range;

use super::checksum::Sum;
use super::layout::{Layout, TCP_CWR, TCP_FIN, TCP_PSH, read_u16, read_u32};
use super::{Delivery, Offload, Segment, SegmentKind};
use crate::index::LocalIndex;
use crate::wire::ip::{FlowKey, Packet, protocol};

/// Older kernels refuse longer UDP chains; 64 packets of 1300 bytes exceed `MAX_LEN` anyway.
const MAX_PACKETS: usize = 64;
const MAX_LEN: usize = 65_535;
/// Maximum number of flows that are joined at the same time.
const MAX_OPEN: usize = 16;

const TCP_ACK: u8 = 0x10;
const TCP_ECE: u8 = 0x40;

/// The chains of packets built from one receive batch.
#[derive(Debug, Default)]
pub(super) struct Coalescer {
    tcp: bool,
    udp: bool,
    /// In order of their first packets.
    chains: Vec<Chain>,
    links: Vec<Link>,
    /// Positions of the chains that may still grow; at most one per flow.
    open: Vec<usize>,
    /// The tunnel that the next packets come by.
    pub(super) tunnel: Option<LocalIndex>,
}

/// Packets of one flow in the order of their arrival.
#[derive(Debug)]
struct Chain {
    flow: FlowKey,
    /// The whole first packet.
    first: Range<usize>,
    /// What the next packet must look like; `None` if nothing can be joined.
    joint: Option<Joint>,
    head: usize,
    tail: usize,
    packets: usize,
    /// Payload length of all packets together.
    payload: usize,
    /// Payload length of each TCP segment but the last, where packets hold several; 0: they are single.
    segment: u16,
    tunnel: Option<LocalIndex>,
}

/// What the next packet of a chain must look like.
#[derive(Debug, Clone, Copy)]
struct Joint {
    layout: Layout,
    /// Payload length of every packet but the last.
    size: usize,
    /// Next expected sequence number (TCP).
    sequence: u32,
    /// Next expected IPv4 identifier; `None` if identifiers have no meaning ("don't fragment" is set) or with IPv6.
    id: Option<u16>,
    pushed: bool,
}

/// What a packet says about the TCP segments in it.
#[derive(Debug, Clone, Copy)]
struct Segments {
    /// See [`Chain::segment`].
    size: u16,
    /// Whether another packet can follow in its chain.
    may_grow: bool,
}

#[derive(Debug)]
struct Link {
    payload: Range<usize>,
    next: Option<usize>,
}

impl Coalescer {
    pub(super) fn set_enabled(&mut self, tcp: bool, udp: bool) {
        (self.tcp, self.udp) = (tcp, udp);
    }

    pub(super) fn release_memory(&mut self) {
        *self = Self { tcp: self.tcp, udp: self.udp, ..Self::default() };
    }

    /// Adds the packet at `range` of `buffer`.
    pub(super) fn push(&mut self, buffer: &[u8], range: Range<usize>, packet: &Packet) {
        let joint = self.joint(&buffer[range.clone()], packet, TCP_PSH | TCP_ECE);
        self.add(buffer, range, packet, joint, Segments { size: 0, may_grow: true });
    }

    /// Adds a packet that holds several TCP segments of this size. Returns `false`, and adds nothing, if the device
    /// cannot take it apart.
    #[cold]
    pub(super) fn push_segments(&mut self, buffer: &[u8], range: Range<usize>, packet: &Packet, size: u16) -> bool {
        let bytes = &buffer[range.clone()];
        let Some(mut joint) = self.joint(bytes, packet, TCP_PSH | TCP_ECE | TCP_FIN | TCP_CWR) else { return false };
        let mut segments = Segments { size: 0, may_grow: true };
        if joint.size > size.into() {
            let count = joint.size.div_ceil(size.into());
            joint.id = joint.id.map(|next| next.wrapping_add(count as u16 - 1));
            // Each of these flags belongs to one segment only.
            let flags = bytes[joint.layout.transport + 13];
            segments = Segments { size, may_grow: flags & (TCP_FIN | TCP_CWR) == 0 };
        }
        self.add(buffer, range, packet, Some(joint), segments);
        true
    }

    #[inline(always)]
    fn add(&mut self, buffer: &[u8], range: Range<usize>, packet: &Packet, joint: Option<Joint>, segments: Segments) {
        let has_chains = matches!(packet.flow.protocol, protocol::TCP | protocol::UDP) && !packet.flow.fragment;
        let found = has_chains.then(|| self.open.iter().rposition(|at| self.chains[*at].flow == packet.flow)).flatten();
        if let Some(place) = found {
            let at = self.open[place];
            if let Some(joint) = joint
                && self.chains[at].takes(buffer, &range, &joint, segments.size)
            {
                let payload = range.start + joint.layout.header..range.end;
                let ends = self.chains[at].append(&joint, payload.len());
                let tail = std::mem::replace(&mut self.chains[at].tail, self.links.len());
                self.links[tail].next = Some(self.links.len());
                self.links.push(Link { payload, next: None });
                if ends {
                    self.open.remove(place);
                }
                return;
            }
            self.open.remove(place);
        }
        self.begin(range, packet.flow, joint, segments);
    }

    /// Turns all chains into deliveries. Returns how many of them are super-packets.
    pub(super) fn finish(
        &mut self,
        buffer: &[u8],
        deliveries: &mut Vec<Delivery>,
        headers: &mut Vec<u8>,
        pieces: &mut Vec<Range<usize>>,
    ) -> u64 {
        let mut joined = 0;
        for chain in &self.chains {
            let (header, first_piece) = (headers.len(), pieces.len());
            let joint = chain.joint.filter(|_| chain.packets > 1 || chain.segment > 0);
            if let Some(joint) = &joint {
                joined += 1;
                chain.write_header(&buffer[chain.first.clone()], joint, headers);
                let mut next = Some(chain.head);
                while let Some(link) = next.and_then(|at| self.links.get(at)) {
                    pieces.push(link.payload.clone());
                    next = link.next;
                }
            } else {
                pieces.push(chain.first.clone());
            }
            deliveries.push(Delivery {
                header: header..headers.len(),
                pieces: first_piece..pieces.len(),
                offload: joint.as_ref().map(|joint| joint.offload(chain.segment)).unwrap_or_default(),
                header_len: joint.map_or(0, |joint| joint.layout.header as u16),
                tunnel: chain.tunnel,
            });
        }
        self.chains.clear();
        self.links.clear();
        self.open.clear();
        joined
    }

    fn begin(&mut self, range: Range<usize>, flow: FlowKey, joint: Option<Joint>, segments: Segments) {
        let at = self.chains.len();
        let header = joint.map_or(0, |joint| joint.layout.header);
        let (link, payload) = (self.links.len(), range.start + header..range.end);
        // A packet with PSH should be delivered at once, so it ends its chain.
        if segments.may_grow && joint.is_some_and(|joint| !joint.pushed) {
            if self.open.len() == MAX_OPEN {
                self.open.remove(0);
            }
            self.open.push(at);
        }
        self.chains.push(Chain {
            flow,
            first: range,
            joint,
            head: link,
            tail: link,
            packets: 1,
            payload: payload.len(),
            segment: segments.size,
            tunnel: self.tunnel,
        });
        self.links.push(Link { payload, next: None });
    }

    /// Returns `None` for a packet that can neither begin nor continue a chain. `flags`: what a TCP packet may have
    /// beside the acknowledgement.
    #[inline(always)]
    fn joint(&self, bytes: &[u8], packet: &Packet, flags: u8) -> Option<Joint> {
        let layout = Layout::of(bytes, packet)?;
        let payload = bytes.len() - layout.header;
        let enabled = match layout.kind {
            SegmentKind::Tcp => self.tcp,
            SegmentKind::Udp => self.udp,
        };
        if !enabled || !layout.is_plain() || payload == 0 || bytes.len() > MAX_LEN {
            return None;
        }
        let mut id = None;
        if layout.v6 {
            if usize::from(read_u16(bytes, 4)) + 40 != bytes.len() {
                return None;
            }
        } else {
            const DONT_FRAGMENT: u8 = 0x40;
            const RESERVED: u8 = 0x80;
            let intact = Sum::default().add(&bytes[..20]).partial() == 0xffff;
            if usize::from(read_u16(bytes, 2)) != bytes.len() || !intact || bytes[6] & RESERVED != 0 {
                return None;
            }
            id = (bytes[6] & DONT_FRAGMENT == 0).then(|| read_u16(bytes, 4).wrapping_add(1));
        }
        let mut joint = Joint { layout, size: payload, sequence: 0, id, pushed: false };
        match layout.kind {
            SegmentKind::Tcp => {
                let set = bytes[layout.transport + 13];
                if set & !flags != TCP_ACK {
                    return None;
                }
                joint.pushed = set & TCP_PSH != 0;
                joint.sequence = layout.sequence(bytes).wrapping_add(payload as u32);
            }
            SegmentKind::Udp => {
                // Segmentation would add a checksum to datagrams that have none.
                let has_checksum = read_u16(bytes, layout.transport + 6) != 0;
                if !has_checksum || usize::from(read_u16(bytes, layout.transport + 4)) != 8 + payload {
                    return None;
                }
            }
        }
        Some(joint)
    }
}

impl Chain {
    /// Whether the packet at `range` continues the chain such that segmentation restores it.
    fn takes(&self, buffer: &[u8], range: &Range<usize>, next: &Joint, segment: u16) -> bool {
        let Some(joint) = &self.joint else {
            return false;
        };
        let (first, bytes) = (&buffer[self.first.clone()], &buffer[range.clone()]);
        let layout = &joint.layout;
        *layout == next.layout
            && next.size <= joint.size
            && (segment == self.segment || segment == 0 && next.size <= self.segment.into())
            && self.packets < MAX_PACKETS
            && layout.header + self.payload + next.size <= MAX_LEN
            && same_ip_header(layout, first, bytes)
            && joint.id.is_none_or(|id| read_u16(bytes, 4) == id)
            && (layout.kind == SegmentKind::Udp || joint.continues_tcp(first, bytes))
    }

    /// Counts a packet that was appended. Returns `true` if it must be the last of the chain.
    fn append(&mut self, next: &Joint, payload: usize) -> bool {
        self.packets += 1;
        self.payload += payload;
        let Some(joint) = &mut self.joint else {
            return true;
        };
        (joint.sequence, joint.id, joint.pushed) = (next.sequence, next.id, next.pushed);
        payload < joint.size || next.pushed
    }

    /// Writes the header of the super-packet: that of the first packet, with the total lengths and a partial
    /// checksum.
    fn write_header(&self, first: &[u8], joint: &Joint, headers: &mut Vec<u8>) {
        let (layout, start) = (&joint.layout, headers.len());
        headers.extend_from_slice(&first[..layout.header]);
        let (header, len) = (&mut headers[start..], layout.header + self.payload);
        layout.set_lengths(header, len);
        if joint.pushed {
            *layout.tcp_flags(header) |= TCP_PSH;
        }
        let sum = layout.pseudo_header(header, len).partial();
        layout.set_checksum(header, sum);
    }
}

/// Compares the IP header fields that must be equal: type of service with its ECN bits, flags, time to live.
/// Addresses are part of the flow.
fn same_ip_header(layout: &Layout, a: &[u8], b: &[u8]) -> bool {
    if layout.v6 { a[..4] == b[..4] && a[6..8] == b[6..8] } else { a[..2] == b[..2] && a[6..10] == b[6..10] }
}

impl Joint {
    /// Whether a packet is next in sequence and otherwise differs in PSH only; acknowledgement, window and options
    /// must be equal.
    fn continues_tcp(&self, first: &[u8], bytes: &[u8]) -> bool {
        let at = self.layout.transport;
        let same = |range: Range<usize>| first[range.clone()] == bytes[range];
        read_u32(bytes, at + 4) == self.sequence
            && same(at + 8..at + 13)
            && (first[at + 13] ^ bytes[at + 13]) & !TCP_PSH == 0
            && same(at + 14..at + 16)
            && same(at + 18..self.layout.header)
    }

    /// `segment`: see [`Chain::segment`].
    fn offload(&self, segment: u16) -> Offload {
        let size = if segment > 0 { segment } else { self.size as u16 };
        Offload {
            segment: Some(Segment { kind: self.layout.kind, size }),
            checksum: Some((self.layout.transport as u16, self.layout.checksum_offset() as u16)),
        }
    }
}

#[cfg(test)]
mod tests;

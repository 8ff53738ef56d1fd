//! Whole packets that wait to be sent: answers without a connection, and datagrams.

use std::collections::VecDeque;

use nebula_core::forward::Offload;

/// Packets in their order, bounded by the memory that they take.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    packets: VecDeque<(Vec<u8>, Offload)>,
    bytes: usize,
}

/// Room for a few thousand answers to SYNs, or a few hundred datagrams.
const MAX_BYTES: usize = 512 << 10;
/// What a packet takes beside its bytes.
const OVERHEAD: usize = 64;

impl Outgoing {
    /// Queues a packet. Returns whether there was room; the packet is dropped otherwise.
    pub(crate) fn push(&mut self, packet: Vec<u8>, offload: Offload) -> bool {
        let cost = packet.len() + OVERHEAD;
        let fits = self.bytes + cost <= MAX_BYTES;
        if fits {
            self.bytes += cost;
            self.packets.push_back((packet, offload));
        }
        fits
    }

    pub(crate) fn pop(&mut self) -> Option<(Vec<u8>, Offload)> {
        let (packet, offload) = self.packets.pop_front()?;
        self.bytes -= packet.len() + OVERHEAD;
        if self.packets.is_empty() && self.packets.capacity() > 64 {
            self.packets = VecDeque::new();
        }
        Some((packet, offload))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }
}

//! Whole packets that wait to be sent: answers without a connection, and datagrams.

use std::collections::VecDeque;

use nebula_core::forward::Offload;

use super::waiters::Waiters;

/// Packets in their order, bounded by the memory that they take.
#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    packets: VecDeque<(Vec<u8>, Offload)>,
    bytes: usize,
    /// Who waits until there is room.
    pub(crate) waiters: Waiters,
}

/// Room for a few thousand answers to SYNs, or a few hundred datagrams.
const MAX_BYTES: usize = 512 << 10;
/// What a packet takes beside its bytes.
const OVERHEAD: usize = 64;

impl Outgoing {
    /// Queues a packet. Returns whether there was room; the packet is dropped otherwise.
    pub(crate) fn push(&mut self, packet: Vec<u8>, offload: Offload) -> bool {
        let fits = self.has_room_for(packet.len());
        if fits {
            self.bytes += packet.len() + OVERHEAD;
            self.packets.push_back((packet, offload));
        }
        fits
    }

    pub(crate) fn has_room_for(&self, packet: usize) -> bool {
        self.bytes + packet + OVERHEAD <= MAX_BYTES
    }

    pub(crate) fn pop(&mut self) -> Option<(Vec<u8>, Offload)> {
        let (packet, offload) = self.packets.pop_front()?;
        self.bytes -= packet.len() + OVERHEAD;
        if !self.waiters.is_empty() {
            self.waiters.wake_one();
        }
        if self.packets.is_empty() && self.packets.capacity() > 64 {
            self.packets = VecDeque::new();
        }
        Some((packet, offload))
    }

    pub(crate) fn wake_all(&mut self) {
        self.waiters.wake_all();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }
}

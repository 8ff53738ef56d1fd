//! How much a node remembers, for metrics, and for tests that everything is given back.

use super::Node;

/// Entries in the tables of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableSizes {
    /// Live tunnels.
    pub tunnels: usize,
    /// Overlay addresses that a tunnel carries packets to.
    pub primaries: usize,
    /// Further ways to find a tunnel: by peer, by the peer's index, by its first message.
    pub lookups: usize,
    /// Handshakes this node answered, whose callers are not confirmed.
    pub half_open: usize,
    /// Handshakes this node started and that are under way.
    pub pending: usize,
    /// Bytes of overlay packets that wait for them.
    pub waiting_bytes: usize,
    /// Own indexes reserved for tunnels to come.
    pub reserved: usize,
    /// Peers whose endpoints are remembered.
    pub candidates: usize,
    /// Overlay addresses whose hosts reported to this lighthouse.
    pub reports: usize,
    /// Punches that wait for their delay.
    pub punches: usize,
    /// Hops through relays that this node is part of, as an end or in the middle.
    pub relay_hops: usize,
    /// Deadlines set.
    pub deadlines: usize,
    /// Flows the firewall remembers.
    pub flows: usize,
}

impl Node {
    /// How much this node remembers now.
    #[must_use]
    pub fn table_sizes(&self) -> TableSizes {
        TableSizes {
            tunnels: self.tunnels.iter().count(),
            primaries: self.forwarder.tunnels().primaries(),
            lookups: self.tunnels.lookups(),
            half_open: self.half_open.len(),
            pending: self.pending.len(),
            waiting_bytes: self.pending.waiting_bytes(),
            reserved: self.forwarder.tunnels().reserved(),
            candidates: self.lighthouse.len(),
            reports: self.server.len(),
            punches: self.punches.len(),
            relay_hops: self.forwarder.relays().len(),
            deadlines: self.timer.len(),
            flows: self.forwarder.flows(),
        }
    }
}

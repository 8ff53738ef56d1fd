//! All live tunnels: slot by local index, primary by overlay address (SA database). Read without a lock.

use std::net::IpAddr;
use std::sync::Arc;

use super::{LocalIndex, Tunnel};

/// Readers never wait; only the control plane publishes and retires.
#[derive(Debug, Default)]
pub struct TunnelTable {}

impl TunnelTable {
    /// Reserves an unused index, never 0. `random` picks the slot and generation. `None` if the table is full.
    #[must_use]
    pub fn reserve(&self, _random: u32) -> Option<LocalIndex> {
        unimplemented!()
    }
    /// Gives back an index that never became a tunnel.
    pub fn release(&self, _index: LocalIndex) {
        unimplemented!()
    }
    /// Makes `tunnel` reachable by its (reserved) index.
    pub fn publish(&self, _tunnel: Arc<Tunnel>) {
        unimplemented!()
    }
    /// Makes `tunnel` the one that carries packets to all of its peer's addresses.
    pub fn set_primary(&self, _tunnel: &Arc<Tunnel>) {
        unimplemented!()
    }
    /// Removes a tunnel; addresses that pointed to it point to nothing.
    pub fn retire(&self, _index: LocalIndex) -> Option<Arc<Tunnel>> {
        unimplemented!()
    }
    /// By own index.
    #[must_use]
    pub fn by_index(&self, _index: LocalIndex) -> Option<Arc<Tunnel>> {
        unimplemented!()
    }
    /// Primary tunnel to a peer.
    #[must_use]
    pub fn by_address(&self, _address: IpAddr) -> Option<Arc<Tunnel>> {
        unimplemented!()
    }
}

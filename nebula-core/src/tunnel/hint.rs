//! The tunnel of a lane's last packet, so that bulk traffic finds its tunnel without hashing an address.

use std::net::IpAddr;

use super::table::Lookup;
use super::{LocalIndex, TunnelTable};

/// Caches one lookup in the table. Holds an index and not the tunnel, so that a retired tunnel is freed.
#[derive(Debug, Default)]
pub(crate) struct TunnelHint(Option<Hint>);

#[derive(Debug, Clone, Copy)]
struct Hint {
    version: u64,
    peer: IpAddr,
    index: LocalIndex,
}

impl TunnelHint {
    /// The primary tunnel to a peer.
    pub(crate) fn look_up(&mut self, tunnels: &TunnelTable, peer: IpAddr) -> Lookup {
        // Read before the lookup: a change during it makes the hint stale, never wrong.
        let version = tunnels.version();
        let known = self.0.filter(|answer| answer.version == version && answer.peer == peer);
        let Some(index) = known.map(|answer| answer.index).or_else(|| tunnels.primary(peer)) else {
            return Lookup::nothing();
        };
        self.0 = Some(Hint { version, peer, index });
        tunnels.look_up(index)
    }
}

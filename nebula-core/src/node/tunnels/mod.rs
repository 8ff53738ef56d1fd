//! The live tunnels, and how they are found.

mod live;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::index::{LocalIndex, RemoteIndex};
use crate::tunnel::{Tunnel, TunnelTable};

pub(crate) use self::live::Established;
pub(super) use self::live::{Live, is_refused};

/// All live tunnels.
#[derive(Debug, Default)]
pub(super) struct Tunnels {
    live: BTreeMap<LocalIndex, Live>,
    /// Oldest first.
    by_peer: BTreeMap<IpAddr, Vec<LocalIndex>>,
    by_remote: BTreeSet<(RemoteIndex, LocalIndex)>,
    by_opening: BTreeMap<[u8; 32], LocalIndex>,
}

impl Tunnels {
    pub(super) fn insert(&mut self, live: Live) {
        let index = live.tunnel.local_index;
        for &address in &live.tunnel.peer_addresses {
            let indexes = self.by_peer.entry(address).or_default();
            let is_older = |other: &&LocalIndex| self.live.get(*other).is_some_and(|other| other.since <= live.since);
            let at = indexes.len() - indexes.iter().rev().take_while(|other| !is_older(other)).count();
            indexes.insert(at, index);
        }
        self.by_remote.insert((live.tunnel.remote_index, index));
        if let Some(digest) = live.opened_by {
            self.by_opening.insert(digest, index);
        }
        self.live.insert(index, live);
    }

    pub(super) fn remove(&mut self, index: LocalIndex) -> Option<Live> {
        let live = self.live.remove(&index)?;
        for address in &live.tunnel.peer_addresses {
            if let Some(indexes) = self.by_peer.get_mut(address) {
                indexes.retain(|other| *other != index);
                if indexes.is_empty() {
                    self.by_peer.remove(address);
                }
            }
        }
        self.by_remote.remove(&(live.tunnel.remote_index, index));
        if let Some(digest) = live.opened_by
            && self.by_opening.get(&digest) == Some(&index)
        {
            self.by_opening.remove(&digest);
        }
        Some(live)
    }

    pub(super) fn get(&self, index: LocalIndex) -> Option<&Live> {
        self.live.get(&index)
    }

    pub(super) fn get_mut(&mut self, index: LocalIndex) -> Option<&mut Live> {
        self.live.get_mut(&index)
    }

    /// The peer answered a test in this tunnel.
    pub(super) fn note_answer(&mut self, index: LocalIndex) {
        if let Some(live) = self.live.get_mut(&index) {
            live.answers += 1;
            live.path_mtu.note_test();
        }
    }

    /// The peer sent a test in this tunnel.
    pub(super) fn note_test(&mut self, index: LocalIndex) {
        if let Some(live) = self.live.get_mut(&index) {
            live.path_mtu.note_test();
        }
    }

    /// Number of entries in the lookup tables: by peer, by remote index and by message 1.
    pub(super) fn lookups(&self) -> usize {
        let by_peer: usize = self.by_peer.values().map(Vec::len).sum();
        by_peer + self.by_remote.len() + self.by_opening.len()
    }

    /// Iterates in order of the local indexes.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Live> {
        self.live.values()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Live> {
        self.live.values_mut()
    }

    pub(super) fn indexes(&self) -> Vec<LocalIndex> {
        self.live.keys().copied().collect()
    }

    /// Tunnels to the peer with this address, oldest first.
    pub(super) fn of_peer(&self, address: IpAddr) -> &[LocalIndex] {
        self.by_peer.get(&address).map_or(&[], Vec::as_slice)
    }

    /// The tunnel that takes over when the primary one to this peer is gone: the newest.
    pub(super) fn heir(&self, address: IpAddr) -> Option<&Arc<Tunnel>> {
        self.of_peer(address).last().and_then(|index| Some(&self.get(*index)?.tunnel))
    }

    /// Tunnels whose peer chose this index; several peers may choose the same.
    pub(super) fn of_remote(&self, index: RemoteIndex) -> impl Iterator<Item = &Live> {
        let range = (index, LocalIndex(0))..=(index, LocalIndex(u32::MAX));
        self.by_remote.range(range).filter_map(|(_, local)| self.live.get(local))
    }

    /// The tunnel that the message 1 with this digest opened.
    pub(super) fn opened_by(&self, digest: &[u8; 32]) -> Option<&Live> {
        self.by_opening.get(digest).and_then(|index| self.live.get(index))
    }

    /// Whether `tunnel` is newer than the primary one: the peer uses the tunnel that was made last.
    pub(super) fn is_newest(&self, tunnel: &Tunnel, table: &TunnelTable) -> bool {
        let Some(&peer) = tunnel.peer_addresses.first() else { return false };
        let Some(primary) = table.primary(peer) else { return true };
        let age = |index| self.of_peer(peer).iter().position(|other| *other == index);
        age(primary) < age(tunnel.local_index)
    }

    /// The tunnel to remove if there are too many to this peer: the oldest one that is not the primary one.
    pub(super) fn surplus(&self, peer: IpAddr, table: &TunnelTable) -> Option<LocalIndex> {
        let (_newest, older) = self.of_peer(peer).split_last()?;
        if older.len() < MAX_TUNNELS_PER_PEER {
            return None;
        }
        let is_spare = |index: &&LocalIndex| self.get(**index).is_some_and(|live| !table.is_primary(&live.tunnel));
        older.iter().find(is_spare).copied()
    }
}

/// Maximum number of tunnels to one peer: two nodes that call each other make two, and each new certificate one more.
const MAX_TUNNELS_PER_PEER: usize = 5;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::time::Duration;

    use super::live::tests::{base, live};
    use super::*;

    #[test]
    fn the_newest_tunnel_is_the_heir_and_the_oldest_spare_one_is_surplus() {
        let now = base();
        let (mut tunnels, table) = (Tunnels::default(), TunnelTable::new(1));
        let peer: IpAddr = "10.1.0.2".parse().unwrap();
        // Installed out of order: what counts is when the handshake was completed.
        for (index, second) in [(1, 3), (2, 1), (3, 2), (4, 5), (5, 4), (6, 6)] {
            assert_eq!(tunnels.surplus(peer, &table), None);
            tunnels.insert(live(index, now + Duration::from_secs(second)));
        }
        assert_eq!(tunnels.of_peer(peer), [2, 3, 1, 5, 4, 6].map(LocalIndex));
        assert_eq!(tunnels.heir(peer).unwrap().local_index, LocalIndex(6));
        assert_eq!(tunnels.surplus(peer, &table), Some(LocalIndex(2)));
        let oldest = Arc::clone(&tunnels.get(LocalIndex(2)).unwrap().tunnel);
        table.publish(Arc::clone(&oldest));
        table.set_primary(&oldest);
        assert_eq!(tunnels.surplus(peer, &table), Some(LocalIndex(3)), "the primary one stays");
    }
}

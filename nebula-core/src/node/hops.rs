//! The relay hops of a node: which are usable, what the data path knows about them, and when they end.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::tunnels::Tunnels;
use crate::Forwarder;
use crate::index::{Hop, LocalIndex, RelayIndex};
use crate::relay::{Entries, Entry, HopKey, Kind, Role, State};
use crate::tunnel::Tunnel;

/// The entries of all hops, and what decides whether a hop is usable.
#[derive(Debug)]
pub(super) struct Hops<'a> {
    pub(super) entries: &'a mut Entries,
    pub(super) tunnels: &'a Tunnels,
    pub(super) forwarder: &'a Forwarder,
    /// This node forwards datagrams as a relay.
    pub(super) am_relay: bool,
}

impl Hops<'_> {
    pub(super) fn publish(&mut self, index: RelayIndex) {
        let Some(key) = self.entries.get(index).map(|entry| entry.key) else { return };
        let role = match key.kind {
            Kind::Terminal => Role::Terminal,
            Kind::Forwarding if !self.am_relay => Role::Forward(None),
            Kind::Forwarding => {
                let others = self.counterparts(index).into_iter().filter_map(|other| self.entries.get(other));
                let usable = |hop: &Hop| self.forwarder.carrier_by(*hop).is_some();
                Role::Forward(others.filter_map(Entry::hop).find(usable))
            }
        };
        self.forwarder.relays().publish(index, key.tunnel, role);
    }

    /// Publishes a hop and those on its other side, whose datagrams may leave through it.
    pub(super) fn publish_around(&mut self, index: RelayIndex) {
        for other in self.counterparts(index) {
            self.publish(other);
        }
        self.publish(index);
    }

    /// Removes a hop of the neighbour with these addresses from the data path.
    pub(super) fn retire(&mut self, entry: &Entry, neighbour: &[IpAddr]) {
        self.forwarder.relays().retire(entry.index);
        match entry.key.kind {
            Kind::Terminal => self.choose(entry.key.far),
            Kind::Forwarding => {
                for index in self.beyond(entry.key, neighbour) {
                    self.publish(index);
                }
            }
        }
    }

    /// As the relay: the hops that continue this one on the other side, best first.
    pub(super) fn counterparts(&self, index: RelayIndex) -> Vec<RelayIndex> {
        let Some(entry) = self.entries.get(index) else { return Vec::new() };
        let Some(live) = self.tunnels.get(entry.key.tunnel) else { return Vec::new() };
        self.beyond(entry.key, &live.tunnel.peer_addresses)
    }

    /// Like [`Hops::counterparts`], for a hop of the neighbour with these addresses.
    fn beyond(&self, key: HopKey, neighbour: &[IpAddr]) -> Vec<RelayIndex> {
        if key.kind == Kind::Terminal {
            return Vec::new();
        }
        let primary = self.forwarder.tunnels().by_address(key.far).map(|tunnel| tunnel.local_index);
        let mut tunnels = self.tunnels.of_peer(key.far).to_vec();
        tunnels.sort_by_key(|tunnel| Some(*tunnel) != primary);
        let keys = tunnels
            .into_iter()
            .flat_map(|tunnel| neighbour.iter().map(move |&far| HopKey { tunnel, kind: Kind::Forwarding, far }));
        keys.filter_map(|key| self.entries.at(key).map(|entry| entry.index)).collect()
    }

    /// Usable hops to the peer of a tunnel: those of its present relay first, and those over primary tunnels first.
    pub(super) fn to(&self, tunnel: &Tunnel) -> Vec<Hop> {
        let present = self.forwarder.relay_of(tunnel);
        let entries = tunnel.peer_addresses.iter().flat_map(|address| self.entries.to_far(*address));
        let hops = entries.filter(|entry| entry.key.kind == Kind::Terminal).filter_map(Entry::hop);
        let mut ranked: Vec<_> = hops
            .take(MAX_HOPS)
            .filter_map(|hop| {
                let neighbour = self.forwarder.tunnels().by_index(hop.tunnel)?;
                neighbour.endpoint()?;
                let other = present.is_none_or(|present| !neighbour.peer_addresses.contains(&present));
                Some(((other, !self.forwarder.tunnels().is_primary(&neighbour)), hop))
            })
            .collect();
        ranked.sort_by_key(|(rank, _)| *rank);
        ranked.into_iter().map(|(_, hop)| hop).collect()
    }

    /// Reselects the hop that each tunnel to `peer` uses while it has no endpoint.
    pub(super) fn choose(&mut self, peer: IpAddr) {
        for index in self.tunnels.of_peer(peer) {
            if let Some(live) = self.tunnels.get(*index) {
                live.tunnel.set_hop(self.to(&live.tunnel).first().copied());
            }
        }
    }

    /// Keys of the hops that older tunnels to a neighbour have in use.
    pub(super) fn keys_in_use(&self, now: Instant, neighbour: IpAddr, primary: LocalIndex) -> Vec<HopKey> {
        let older = self.tunnels.of_peer(neighbour).iter().filter(|index| **index != primary);
        let entries = older.flat_map(|index| self.entries.of_tunnel(*index));
        entries.filter(|entry| self.is_in_use(now, entry)).map(|entry| entry.key).collect()
    }

    fn is_in_use(&self, now: Instant, entry: &Entry) -> bool {
        entry.state == State::Established
            && match entry.key.kind {
                Kind::Terminal => !self.tunnels.of_peer(entry.key.far).is_empty(),
                Kind::Forwarding => now < entry.touched + IN_USE_FOR,
            }
    }

    /// Notes which hops over a tunnel carried traffic.
    pub(super) fn note_traffic(&mut self, now: Instant, tunnel: LocalIndex) {
        let used = self.entries.of_tunnel(tunnel).filter(|entry| self.forwarder.relays().take_used(entry.index));
        for index in used.map(|entry| entry.index).collect::<Vec<_>>() {
            // Traffic in one direction keeps both hops in use.
            for index in self.counterparts(index).into_iter().chain([index]) {
                if let Some(entry) = self.entries.get_mut(index) {
                    entry.touched = now;
                }
            }
        }
    }

    /// A tunnel is gone: removes every hop over it.
    pub(super) fn forget_neighbour(&mut self, tunnel: &Tunnel) {
        for index in self.entries.of_tunnel(tunnel.local_index).map(|entry| entry.index).collect::<Vec<_>>() {
            if let Some(entry) = self.entries.remove(index) {
                self.retire(&entry, &tunnel.peer_addresses);
            }
        }
    }

    /// The last tunnel to a peer is gone: disestablishes the hops to it.
    pub(super) fn rest(&mut self, far: IpAddr) {
        let hops = self.entries.to_far(far).filter(|entry| entry.state == State::Established);
        for index in hops.map(|entry| entry.index).collect::<Vec<_>>() {
            if let Some(entry) = self.entries.get_mut(index) {
                entry.state = State::Disestablished;
            }
            self.publish_around(index);
        }
    }
}

/// Maximum number of hops considered for a choice: any neighbour may claim to reach a peer.
const MAX_HOPS: usize = 16;
/// A relay recreates a hop on a new tunnel only if it carried traffic within this time; others are recreated on demand.
const IN_USE_FOR: Duration = Duration::from_secs(60);

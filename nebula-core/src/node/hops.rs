//! The relay hops of a node: which of them are usable, what the data path knows about them, and when they end.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::tunnels::Tunnels;
use crate::forward::Carrier;
use crate::index::{Hop, LocalIndex, RelayIndex};
use crate::relay::{Entries, Entry, HopKey, Kind, Role, State};
use crate::tunnel::Tunnel;
use crate::{Forwarder, Origin};

/// Every hop that this node is part of, published to the data path as it changes.
#[derive(Debug)]
pub(super) struct Hops {
    pub(super) entries: Entries,
    forwarder: Arc<Forwarder>,
    /// This node forwards datagrams as a relay.
    am_relay: bool,
}

impl Hops {
    pub(super) fn new(forwarder: Arc<Forwarder>, am_relay: bool) -> Self {
        Self { entries: Entries::default(), forwarder, am_relay }
    }

    /// Starts or stops forwarding datagrams of others.
    pub(super) fn set_am_relay(&mut self, am_relay: bool, tunnels: &Tunnels) {
        self.am_relay = am_relay;
        for entry in self.entries.iter() {
            self.publish(entry.index, tunnels);
        }
    }

    /// Tells the data path what to do with datagrams that come through a hop.
    pub(super) fn publish(&self, index: RelayIndex, tunnels: &Tunnels) {
        let Some(key) = self.entries.get(index).map(|entry| entry.key) else { return };
        let role = match key.kind {
            Kind::Terminal => Role::Terminal,
            Kind::Forwarding if !self.am_relay => Role::Forward(None),
            Kind::Forwarding => {
                let others = self.counterparts(index, tunnels).into_iter().filter_map(|other| self.entries.get(other));
                let usable = |hop: &Hop| self.forwarder.carrier_by(*hop).is_some();
                Role::Forward(others.filter_map(Entry::hop).find(usable))
            }
        };
        self.forwarder.relays().publish(index, key.tunnel, role);
    }

    /// Publishes a hop and those on its other side, whose datagrams may leave through it.
    pub(super) fn publish_around(&self, index: RelayIndex, tunnels: &Tunnels) {
        for other in self.counterparts(index, tunnels) {
            self.publish(other, tunnels);
        }
        self.publish(index, tunnels);
    }

    /// The neighbour of a tunnel can be reached from now on: publishes the hops over it.
    pub(super) fn publish_over(&self, tunnel: LocalIndex, tunnels: &Tunnels) {
        for entry in self.entries.of_tunnel(tunnel) {
            self.publish_around(entry.index, tunnels);
            if entry.key.kind == Kind::Terminal {
                self.choose(entry.key.far, tunnels);
            }
        }
    }

    /// Removes a hop of the neighbour with these addresses from the data path.
    pub(super) fn retire(&self, entry: &Entry, neighbour: &[IpAddr], tunnels: &Tunnels) {
        self.forwarder.relays().retire(entry.index);
        match entry.key.kind {
            Kind::Terminal => self.choose(entry.key.far, tunnels),
            Kind::Forwarding => {
                for index in self.beyond(entry.key, neighbour, tunnels) {
                    self.publish(index, tunnels);
                }
            }
        }
    }

    /// As the relay: the hops that continue this one on the other side, best first.
    pub(super) fn counterparts(&self, index: RelayIndex, tunnels: &Tunnels) -> Vec<RelayIndex> {
        let Some(entry) = self.entries.get(index) else { return Vec::new() };
        let Some(live) = tunnels.get(entry.key.tunnel) else { return Vec::new() };
        self.beyond(entry.key, &live.tunnel.peer_addresses, tunnels)
    }

    /// Like [`Hops::counterparts`], for a hop of the neighbour with these addresses.
    fn beyond(&self, key: HopKey, neighbour: &[IpAddr], tunnels: &Tunnels) -> Vec<RelayIndex> {
        if key.kind == Kind::Terminal {
            return Vec::new();
        }
        let primary = self.forwarder.tunnels().by_address(key.far).map(|tunnel| tunnel.local_index);
        let mut through = tunnels.of_peer(key.far).to_vec();
        if let Some(at) = through.iter().position(|tunnel| Some(*tunnel) == primary) {
            through[..=at].rotate_right(1);
        }
        let keys = through
            .into_iter()
            .flat_map(|tunnel| neighbour.iter().map(move |&far| HopKey { tunnel, kind: Kind::Forwarding, far }));
        keys.filter_map(|key| self.entries.at(key).map(|entry| entry.index)).collect()
    }

    /// Usable hops to the peer of a tunnel: those of its present relay first, and those over primary tunnels first.
    pub(super) fn usable_to(&self, tunnel: &Tunnel) -> Vec<Hop> {
        let present = self.forwarder.relay_of(tunnel);
        let entries = tunnel.peer_addresses.iter().flat_map(|address| self.entries.to_far(*address));
        let hops = entries.filter(|entry| entry.key.kind == Kind::Terminal).filter_map(Entry::hop);
        let ranked: Vec<_> = hops
            .take(MAX_HOPS)
            .filter_map(|hop| {
                let neighbour = self.forwarder.tunnels().by_index(hop.tunnel)?;
                neighbour.endpoint()?;
                let other = present.is_none_or(|present| !neighbour.peer_addresses.contains(&present));
                Some(((other, !self.forwarder.tunnels().is_primary(&neighbour)), hop))
            })
            .collect();
        let ranks = [(false, false), (false, true), (true, false), (true, true)];
        ranks.iter().flat_map(|rank| ranked.iter().filter(move |(of, _)| of == rank).map(|(_, hop)| *hop)).collect()
    }

    /// Reselects the hop that each tunnel to `peer` uses while it has no endpoint.
    pub(super) fn choose(&self, peer: IpAddr, tunnels: &Tunnels) {
        for index in tunnels.of_peer(peer) {
            if let Some(live) = tunnels.get(*index) {
                live.tunnel.set_hop(self.usable_to(&live.tunnel).first().copied());
            }
        }
    }

    /// Gives a new tunnel the hop that its handshake came by, and returns the relay. A direct tunnel gets an existing
    /// hop, if any, to fall back on.
    pub(super) fn assign(&mut self, tunnel: &Tunnel, from: Origin) -> Option<IpAddr> {
        let Origin::Relayed { hop, .. } = from else {
            tunnel.set_hop(self.usable_to(tunnel).first().copied());
            return None;
        };
        // The peer sends through this hop, so it considers it usable.
        let entry = self.entries.get_mut(hop).filter(|entry| entry.remote.is_some())?;
        entry.state = State::Established;
        tunnel.set_hop(entry.hop());
        self.forwarder.relay_of(tunnel)
    }

    /// The path back to where a datagram came from.
    pub(super) fn path_back(&self, from: Origin) -> Option<Carrier> {
        match from {
            Origin::Direct(to) => Some(Carrier::direct(to)),
            Origin::Relayed { hop, .. } => self.forwarder.carrier_by(self.entries.get(hop)?.reply_hop()?),
        }
    }

    /// Whether something came by the path that this node uses to reach the peer of `tunnel`.
    pub(super) fn is_path_to(&self, tunnel: &Tunnel, from: Origin) -> bool {
        match from {
            Origin::Direct(from) => tunnel.endpoint() == Some(from),
            Origin::Relayed { hop, .. } => {
                let hop = self.entries.get(hop).and_then(Entry::reply_hop);
                tunnel.endpoint().is_none() && hop.is_some() && tunnel.hop() == hop
            }
        }
    }

    /// Keys of the hops that older tunnels to a neighbour have in use.
    pub(super) fn keys_in_use(
        &self,
        now: Instant,
        neighbour: IpAddr,
        primary: LocalIndex,
        tunnels: &Tunnels,
    ) -> Vec<HopKey> {
        let older = tunnels.of_peer(neighbour).iter().filter(|index| **index != primary);
        let entries = older.flat_map(|index| self.entries.of_tunnel(*index));
        entries.filter(|entry| Self::is_in_use(now, entry, tunnels)).map(|entry| entry.key).collect()
    }

    fn is_in_use(now: Instant, entry: &Entry, tunnels: &Tunnels) -> bool {
        entry.state == State::Established
            && match entry.key.kind {
                Kind::Terminal => !tunnels.of_peer(entry.key.far).is_empty(),
                Kind::Forwarding => now < entry.touched + IN_USE_FOR,
            }
    }

    /// Notes which hops over a tunnel carried traffic.
    pub(super) fn note_traffic(&mut self, now: Instant, tunnel: LocalIndex, tunnels: &Tunnels) {
        let used = self.entries.of_tunnel(tunnel).filter(|entry| self.forwarder.relays().take_used(entry.index));
        for index in used.map(|entry| entry.index).collect::<Vec<_>>() {
            // Traffic in one direction keeps both hops in use.
            for index in self.counterparts(index, tunnels).into_iter().chain([index]) {
                if let Some(entry) = self.entries.get_mut(index) {
                    entry.touched = now;
                }
            }
        }
    }

    /// A tunnel is gone: removes every hop over it.
    pub(super) fn forget_neighbour(&mut self, tunnel: &Tunnel, tunnels: &Tunnels) {
        for index in self.entries.of_tunnel(tunnel.local_index).map(|entry| entry.index).collect::<Vec<_>>() {
            if let Some(entry) = self.entries.remove(index) {
                self.retire(&entry, &tunnel.peer_addresses, tunnels);
            }
        }
    }

    /// The last tunnel to a peer is gone: disestablishes the hops to it.
    pub(super) fn disestablish(&mut self, far: IpAddr, tunnels: &Tunnels) {
        let hops = self.entries.to_far(far).filter(|entry| entry.state == State::Established);
        for index in hops.map(|entry| entry.index).collect::<Vec<_>>() {
            if let Some(entry) = self.entries.get_mut(index) {
                entry.state = State::Disestablished;
            }
            self.publish_around(index, tunnels);
        }
    }
}

/// Maximum number of hops considered for a choice: any neighbour may claim to reach a peer.
const MAX_HOPS: usize = 16;
/// A relay recreates a hop on a new tunnel only if it carried traffic within this time; others are recreated on demand.
const IN_USE_FOR: Duration = Duration::from_secs(60);

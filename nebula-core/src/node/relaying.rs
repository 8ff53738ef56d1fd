//! Relays in the middle: makes both hops for those who ask, and tells the data path where datagrams go on.

use std::net::IpAddr;
use std::time::Instant;

use super::Node;
use crate::index::{Hop, LocalIndex, RelayIndex, RemoteIndex};
use crate::relay::{Entry, Kind, Role, State, Way};
use crate::wire::messages::Control;

impl Node {
    /// As the relay: makes the hop to the target, through a new tunnel if there is none.
    pub(super) fn introduce(&mut self, now: Instant, asker: LocalIndex, request: Control) -> bool {
        let Some(live) = self.tunnels.get_mut(asker) else { return false };
        let Some(&from) = live.tunnel.peer_addresses.first() else { return false };
        let Some(target) = self.forwarder.tunnels().by_address(request.to) else {
            let may = self.pending.contains(request.to) || live.introductions.take(now);
            if may {
                self.start_handshake(now, request.to, None);
                self.pending.push_request(asker, request);
            }
            return may;
        };
        if target.endpoint().is_none() {
            return false;
        }
        let near = Way { tunnel: asker, kind: Kind::Forwarding, far: request.to };
        let beyond = Way { tunnel: target.local_index, kind: Kind::Forwarding, far: from };
        let Some(near) = self.entry(now, near, State::PeerRequested, request.version) else { return false };
        let Some(beyond) = self.entry(now, beyond, State::Requested, request.version) else { return false };
        self.relays.set_remote(near, RemoteIndex(request.initiator_index));
        if let Some(entry) = self.relays.get_mut(near) {
            (entry.owed, entry.form) = (true, request.version);
        }
        self.ask(now, beyond, request.to);
        self.publish_around(near);
        true
    }

    /// As the relay: one hop is ready. Tells whoever waits if the other one is, too.
    pub(super) fn join(&mut self, index: RelayIndex) {
        let mut joined = false;
        for other in self.counterparts(index) {
            let Some(entry) = self.relays.get_mut(other) else { continue };
            // Asked by this node, and not answered yet.
            if entry.state == State::Requested {
                continue;
            }
            entry.state = State::Established;
            joined = true;
            self.pay(other);
        }
        if joined {
            self.pay(index);
        }
        self.publish_around(index);
    }

    /// Sends the response that a neighbour waits for.
    pub(super) fn pay(&mut self, index: RelayIndex) {
        let Some(entry) = self.relays.get_mut(index).filter(|entry| entry.owed) else { return };
        entry.owed = false;
        let way = entry.way;
        let from = self.tunnels.get(way.tunnel).and_then(|live| live.tunnel.peer_addresses.first().copied());
        if let Some(from) = from {
            self.respond(index, from, way.far);
        }
    }

    /// The other hops of the ways that go over this one, as the relay; best first.
    pub(super) fn counterparts(&self, index: RelayIndex) -> Vec<RelayIndex> {
        let Some(entry) = self.relays.get(index) else { return Vec::new() };
        let Some(live) = self.tunnels.get(entry.way.tunnel) else { return Vec::new() };
        self.beyond(entry.way, &live.tunnel.peer_addresses)
    }

    /// As [`Node::counterparts`], for a hop by the neighbour with these addresses.
    pub(super) fn beyond(&self, way: Way, neighbour: &[IpAddr]) -> Vec<RelayIndex> {
        if way.kind == Kind::Terminal {
            return Vec::new();
        }
        let primary = self.forwarder.tunnels().by_address(way.far).map(|tunnel| tunnel.local_index);
        let mut tunnels = self.tunnels.of_peer(way.far).to_vec();
        tunnels.sort_by_key(|tunnel| Some(*tunnel) != primary);
        let ways = tunnels
            .into_iter()
            .flat_map(|tunnel| neighbour.iter().map(move |&far| Way { tunnel, kind: Kind::Forwarding, far }));
        ways.filter_map(|way| self.relays.at(way).map(|entry| entry.index)).collect()
    }

    /// Publishes a hop and those on its other side, whose datagrams may leave by it.
    pub(super) fn publish_around(&mut self, index: RelayIndex) {
        for other in self.counterparts(index) {
            self.publish_hop(other);
        }
        self.publish_hop(index);
    }

    pub(super) fn publish_hop(&mut self, index: RelayIndex) {
        let Some(way) = self.relays.get(index).map(|entry| entry.way) else { return };
        let role = match way.kind {
            Kind::Terminal => Role::Terminal,
            Kind::Forwarding if !self.config.relay.am_relay => Role::Forward(None),
            Kind::Forwarding => {
                let others = self.counterparts(index).into_iter().filter_map(|other| self.relays.get(other));
                let usable = |hop: &Hop| self.forwarder.carrier_by(*hop).is_some();
                Role::Forward(others.filter_map(Entry::hop).find(usable))
            }
        };
        self.forwarder.relays().publish(index, way.tunnel, role);
    }

    /// A hop by the neighbour with these addresses is gone.
    pub(super) fn retire_hop(&mut self, entry: &Entry, neighbour: &[IpAddr]) {
        self.forwarder.relays().retire(entry.index);
        match entry.way.kind {
            Kind::Terminal => self.choose_hops(entry.way.far),
            Kind::Forwarding => {
                for index in self.beyond(entry.way, neighbour) {
                    self.publish_hop(index);
                }
            }
        }
    }

    /// Notes which hops by the neighbour of a tunnel carried something.
    pub(super) fn note_relay_traffic(&mut self, now: Instant, tunnel: LocalIndex) {
        let used = self.relays.of_tunnel(tunnel).filter(|entry| self.forwarder.relays().take_used(entry.index));
        for index in used.map(|entry| entry.index).collect::<Vec<_>>() {
            // One direction keeps both hops.
            for index in self.counterparts(index).into_iter().chain([index]) {
                if let Some(entry) = self.relays.get_mut(index) {
                    entry.touched = now;
                }
            }
        }
    }
}

//! Relays: this node requests them and can be reached through them, or it is one and connects others.

mod exchange;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::Node;
use crate::DropReason;
use crate::diagnosis::RelayRefused;
use crate::index::{Hop, LocalIndex, RelayIndex};
use crate::relay::{Entry, HopKey, Kind};
use crate::tunnel::Tunnel;
use crate::wire::messages::{Control, ControlKind};

pub(super) use self::exchange::Relaying;

/// What needs a handshake, or belongs to one.
impl Node {
    /// Keeps a tunnel to each advertised relay, since the relay may have no other way to reach a host behind a NAT.
    pub(super) fn connect_relays(&mut self, now: Instant) {
        if self.config.relay.am_relay {
            return;
        }
        for relay in self.config.relay.relays.clone() {
            if self.forwarder.tunnels().by_address(relay).is_none() {
                self.start_handshake(now, relay, None);
            }
        }
    }

    /// Sends message 1 of the handshake with `peer` through each of its relays, and requests missing tunnels and
    /// hops.
    pub(super) fn try_relays(&mut self, now: Instant, peer: IpAddr) {
        let uses_relays = self.config.relay.use_relays && !self.config.relay.am_relay;
        if !uses_relays || self.pending.get_mut(peer).is_none_or(|pending| !pending.may_be_relayed()) {
            return;
        }
        for relay in self.lighthouse.relays(peer) {
            if relay == peer || self.config.is_own_address(relay) {
                continue;
            }
            self.try_relay_at(now, relay, peer);
        }
    }

    /// Like [`Node::try_relays`], for one relay, after a handshake with it if there is no tunnel.
    fn try_relay_at(&mut self, now: Instant, relay: IpAddr, peer: IpAddr) {
        self.config.relay.note_used(relay);
        match self.forwarder.tunnels().by_address(relay) {
            Some(tunnel) if tunnel.is_direct() => self.try_relay(now, &tunnel, peer),
            _ => {
                self.start_handshake(now, relay, None);
                self.pending.push_relayed(relay, peer);
            }
        }
    }

    /// Like [`Node::try_relays`], for one relay to which there is a tunnel.
    pub(super) fn try_relay(&mut self, now: Instant, relay: &Tunnel, peer: IpAddr) {
        if relay.peer_addresses.contains(&peer) || !relay.is_direct() {
            return;
        }
        let key = HopKey { tunnel: relay.local_index, kind: Kind::Terminal, far: peer };
        if let Some(hop) = self.hops.entries.at(key).and_then(Entry::hop) {
            self.open_through(hop, peer);
        } else {
            self.relaying(now).request(key, relay.peer.version(), peer);
        }
    }

    /// Requests a hop by each other relay of the peer of a relayed tunnel, if only one is usable: the second one
    /// carries on when the first one ends.
    pub(super) fn seek_second_relay(&mut self, now: Instant, tunnel: &Tunnel) {
        if !self.config.relay.use_relays || self.config.relay.am_relay || tunnel.is_direct() {
            return;
        }
        let relay_by = |hop: Hop| self.forwarder.tunnels().by_index(hop.tunnel)?.peer_addresses.first().copied();
        let mut usable = BTreeSet::new();
        usable.extend(self.hops.usable_to(tunnel).into_iter().filter_map(relay_by));
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return };
        if !live.relayed.get_or_insert_default().try_second(now, usable.len()) {
            return;
        }
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        for relay in self.lighthouse.relays(peer) {
            let is_end = tunnel.peer_addresses.contains(&relay) || self.config.is_own_address(relay);
            if !is_end && !usable.contains(&relay) {
                self.try_relay_at(now, relay, peer);
            }
        }
    }

    /// Sends message 1 of the handshake with `peer` through a hop, if one is pending.
    fn open_through(&mut self, hop: Hop, peer: IpAddr) {
        if self.pending.get_mut(peer).is_none_or(|pending| !pending.may_be_relayed()) {
            return;
        }
        let Some(message) = self.first_message(peer) else { return };
        if let Some(carrier) = self.forwarder.carrier_by(hop) {
            self.pending.note_relayed(peer);
            self.outbox.datagram_by(&carrier, message);
        }
    }

    pub(super) fn handle_control(&mut self, now: Instant, tunnel: &Arc<Tunnel>, body: &[u8]) {
        let Ok(message) = Control::parse(body) else { return self.outbox.count_drop(DropReason::BadMessage) };
        let served = match message.kind {
            // No relaying through another relay.
            _ if !tunnel.is_direct() => false,
            ControlKind::CreateRelayRequest => self.handle_relay_request(now, tunnel, message),
            ControlKind::CreateRelayResponse => {
                let hop = self.relaying(now).handle_response(tunnel, message);
                if let Some(hop) = hop {
                    self.note_relay_serves(tunnel, hop);
                }
                hop.is_some_and(|hop| self.hop_ready(hop))
            }
            ControlKind::Other(_) => true,
        };
        if !served {
            self.outbox.count_drop(DropReason::Relay);
        }
    }

    /// Returns whether the request is served.
    fn handle_relay_request(&mut self, now: Instant, tunnel: &Tunnel, request: Control) -> bool {
        let of_neighbour = |address: IpAddr| tunnel.peer_addresses.contains(&address);
        let (from, to) = (request.from, request.to);
        if request.initiator_index == 0 || self.config.is_own_address(from) {
            false
        } else if self.config.is_own_address(to) {
            let hop = if of_neighbour(from) { None } else { self.relaying(now).accept(tunnel, request) };
            hop.is_some_and(|hop| self.hop_ready(hop))
        } else if of_neighbour(from) && !of_neighbour(to) {
            let am_relay = self.config.relay.am_relay;
            let served = am_relay && self.introduce(now, tunnel.local_index, request);
            if !served {
                self.journal.relay_refused(RelayRefused { from, to, am_relay, last: now });
            }
            served
        } else {
            false
        }
    }

    /// As the relay: creates the hop to the target, after a handshake if there is no tunnel. Returns whether it
    /// serves the request.
    pub(super) fn introduce(&mut self, now: Instant, asker: LocalIndex, request: Control) -> bool {
        let Some(live) = self.tunnels.get_mut(asker) else { return false };
        let Some(target) = self.forwarder.tunnels().by_address(request.to) else {
            let may = self.pending.contains(request.to) || live.introductions.take(now);
            if may {
                self.start_handshake(now, request.to, None);
                self.pending.push_request(asker, request);
            }
            return may;
        };
        let asker = Arc::clone(&live.tunnel);
        target.is_direct() && self.relaying(now).connect(&asker, &target, request)
    }

    /// As an end: sends message 1 through a hop that is usable from now on. Returns `true`.
    fn hop_ready(&mut self, index: RelayIndex) -> bool {
        let entry = self.hops.entries.get(index).filter(|entry| entry.key.kind == Kind::Terminal);
        if let Some((hop, far)) = entry.and_then(|entry| Some((entry.hop()?, entry.key.far))) {
            self.open_through(hop, far);
        }
        true
    }

    pub(super) fn relaying(&mut self, now: Instant) -> Relaying<'_> {
        Relaying {
            now,
            config: &self.config,
            tunnels: &self.tunnels,
            hops: &mut self.hops,
            outbox: &mut self.outbox,
            rng: &mut self.rng,
            forwarder: &self.forwarder,
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

//! Relays: this node requests them and can be reached through them, or it is one and connects others.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::Version;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::RngCore as _;

use super::Node;
use super::hops::Hops;
use super::outbox::Outbox;
use super::tunnels::Tunnels;
use crate::diagnosis::RelayRefused;
use crate::index::{Hop, LocalIndex, RelayIndex, RemoteIndex};
use crate::relay::{Entry, HopKey, Kind, State};
use crate::tunnel::Tunnel;
use crate::wire::header::MessageType;
use crate::wire::messages::{Control, ControlKind};
use crate::{Config, DropReason, Forwarder};

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

    /// Sends message 1 of the handshake with `peer` through each of its relays, and requests missing tunnels and hops.
    pub(super) fn try_relays(&mut self, now: Instant, peer: IpAddr) {
        let uses_relays = self.config.relay.use_relays && !self.config.relay.am_relay;
        if !uses_relays || self.pending.get_mut(peer).is_none_or(|pending| pending.only.is_some()) {
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

    /// Requests a hop by each other relay of the peer of a relayed tunnel, if only one is usable: the second one carries on
    /// when the first one ends.
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
        if self.pending.get_mut(peer).is_none_or(|pending| pending.only.is_some()) {
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

    /// As the relay: creates the hop to the target, after a handshake if there is no tunnel. Returns whether it serves
    /// the request.
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

/// Sets hops up by control messages. Borrows what it needs of the node for one call, and starts no handshakes.
#[derive(Debug)]
pub(super) struct Relaying<'a> {
    now: Instant,
    config: &'a Config,
    tunnels: &'a Tunnels,
    hops: &'a mut Hops,
    outbox: &'a mut Outbox,
    rng: &'a mut ChaCha20Rng,
    forwarder: &'a Forwarder,
}

impl Relaying<'_> {
    /// Requests a hop. `to` is the address by which the target was named.
    pub(super) fn request(&mut self, key: HopKey, form: Version, to: IpAddr) {
        if let Some(index) = self.entry(key, State::Requested, form) {
            self.send_request(index, to);
        }
    }

    /// As the end: accepts that a peer can be reached through this neighbour. Returns the hop.
    fn accept(&mut self, tunnel: &Tunnel, request: Control) -> Option<RelayIndex> {
        let key = HopKey { tunnel: tunnel.local_index, kind: Kind::Terminal, far: request.from };
        let index = self.entry(key, State::Established, request.version)?;
        self.hops.entries.set_remote(index, RemoteIndex(request.initiator_index));
        if let Some(entry) = self.hops.entries.get_mut(index) {
            (entry.state, entry.form) = (State::Established, request.version);
        }
        self.send_response(index, request.from, request.to);
        self.publish_end(index);
        Some(index)
    }

    /// Handles the response to a request of this node, and returns the hop. `None` if there was no such request.
    fn handle_response(&mut self, tunnel: &Tunnel, response: Control) -> Option<RelayIndex> {
        let index = RelayIndex(response.initiator_index);
        let entry = self.hops.entries.get_mut(index).filter(|entry| entry.key.tunnel == tunnel.local_index);
        let entry = entry.filter(|entry| entry.asked.is_some() && response.responder_index != 0)?;
        (entry.state, entry.touched) = (State::Established, self.now);
        let kind = entry.key.kind;
        self.hops.entries.set_remote(index, RemoteIndex(response.responder_index));
        match kind {
            Kind::Terminal => self.publish_end(index),
            Kind::Forwarding => self.connect_hops(index),
        }
        Some(index)
    }

    /// As an end: publishes a hop that is usable from now on, and lets tunnels to the far end use it.
    fn publish_end(&mut self, index: RelayIndex) {
        self.hops.publish(index, self.tunnels);
        if let Some(entry) = self.hops.entries.get(index) {
            self.hops.choose(entry.key.far, self.tunnels);
        }
    }

    /// As the relay: creates the hops to both ends, and requests the one to the target. Returns whether there is room.
    fn connect(&mut self, asker: &Tunnel, target: &Tunnel, request: Control) -> bool {
        let Some(&from) = asker.peer_addresses.first() else { return false };
        let near = HopKey { tunnel: asker.local_index, kind: Kind::Forwarding, far: request.to };
        let beyond = HopKey { tunnel: target.local_index, kind: Kind::Forwarding, far: from };
        let Some(near) = self.entry(near, State::PeerRequested, request.version) else { return false };
        let Some(beyond) = self.entry(beyond, State::Requested, request.version) else { return false };
        self.hops.entries.set_remote(near, RemoteIndex(request.initiator_index));
        if let Some(entry) = self.hops.entries.get_mut(near) {
            (entry.owes_response, entry.form) = (true, request.version);
        }
        self.send_request(beyond, request.to);
        self.hops.publish_around(near, self.tunnels);
        true
    }

    /// As the relay: one hop is ready. If the other one is ready too, sends the response that an end waits for.
    fn connect_hops(&mut self, index: RelayIndex) {
        let mut connected = false;
        for other in self.hops.counterparts(index, self.tunnels) {
            let Some(entry) = self.hops.entries.get_mut(other) else { continue };
            // This node requested that hop, and has no answer yet.
            if entry.state == State::Requested {
                continue;
            }
            entry.state = State::Established;
            connected = true;
            self.send_owed_response(other);
        }
        if connected {
            self.send_owed_response(index);
        }
        self.hops.publish_around(index, self.tunnels);
    }

    /// Sends the response that a neighbour waits for.
    fn send_owed_response(&mut self, index: RelayIndex) {
        let Some(entry) = self.hops.entries.get_mut(index).filter(|entry| entry.owes_response) else { return };
        entry.owes_response = false;
        let key = entry.key;
        let from = self.tunnels.get(key.tunnel).and_then(|live| live.tunnel.peer_addresses.first().copied());
        if let Some(from) = from {
            self.send_response(index, from, key.far);
        }
    }

    /// Returns the entry for a hop. A new one starts in `state`; so does an old one that is neither established nor
    /// requested.
    fn entry(&mut self, key: HopKey, state: State, form: Version) -> Option<RelayIndex> {
        if let Some(index) = self.hops.entries.at(key).map(|entry| entry.index) {
            let entry = self.hops.entries.get_mut(index)?;
            entry.touched = self.now;
            if entry.state != State::Established {
                entry.state = if entry.state == State::Requested { State::Requested } else { state };
            }
            return Some(index);
        }
        let new = RelayIndex(self.rng.next_u32());
        let inserted = self.hops.entries.insert(self.now, new, key, state, form)?;
        if let Some(evicted) = inserted.evicted {
            let neighbour = self.tunnels.get(evicted.key.tunnel).map(|live| live.tunnel.peer_addresses.as_slice());
            self.hops.retire(&evicted, neighbour.unwrap_or_default(), self.tunnels);
        }
        self.hops.publish(new, self.tunnels);
        Some(inserted.entry.index)
    }

    /// Sends the neighbour of a hop a request to create it. `to` is the address by which the target was named.
    fn send_request(&mut self, index: RelayIndex, to: IpAddr) {
        let Some(entry) = self.hops.entries.get_mut(index) else { return };
        entry.asked = Some(self.now);
        let entry = *entry;
        let from = match entry.key.kind {
            Kind::Terminal => self.config.own_address(entry.form),
            Kind::Forwarding => Some(entry.key.far),
        };
        let Some(from) = from else { return };
        self.send_control(
            &entry,
            Control {
                kind: ControlKind::CreateRelayRequest,
                version: entry.form,
                initiator_index: index.0,
                responder_index: 0,
                from,
                to,
            },
        );
    }

    /// Repeats the request for a hop that has an entry.
    fn repeat_request(&mut self, index: RelayIndex) {
        let Some(entry) = self.hops.entries.get(index) else { return };
        let to = match entry.key.kind {
            Kind::Terminal => Some(entry.key.far),
            Kind::Forwarding => {
                self.tunnels.get(entry.key.tunnel).and_then(|it| it.tunnel.peer_addresses.first().copied())
            }
        };
        if let Some(to) = to {
            self.send_request(index, to);
        }
    }

    fn send_response(&mut self, index: RelayIndex, from: IpAddr, to: IpAddr) {
        let Some(entry) = self.hops.entries.get(index).copied() else { return };
        let Some(remote) = entry.remote else { return };
        self.send_control(
            &entry,
            Control {
                kind: ControlKind::CreateRelayResponse,
                version: entry.form,
                initiator_index: remote.0,
                responder_index: index.0,
                from,
                to,
            },
        );
    }

    fn send_control(&mut self, entry: &Entry, message: Control) {
        let Some(tunnel) = self.forwarder.tunnels().by_index(entry.key.tunnel) else { return };
        match message.encode() {
            Ok(body) => {
                tracing::debug!(peer = tunnel.peer.name(), kind = ?message.kind, relayFrom = %message.from,
                    relayTo = %message.to, "relay control message");
                self.outbox.message(&tunnel, MessageType::Control, &body);
            }
            Err(error) => tracing::debug!(peer = tunnel.peer.name(), %error, "cannot ask for a relay"),
        }
    }

    /// A neighbour reports that it does not know a hop. It may have restarted, so the hop is requested again.
    pub(super) fn renew(&mut self, from: SocketAddr, index: RemoteIndex) {
        let refused = self.hops.entries.of_remote(index).filter(|entry| {
            let neighbour = self.forwarder.tunnels().by_index(entry.key.tunnel);
            let is_there = neighbour.is_some_and(|tunnel| tunnel.endpoint() == Some(from));
            is_there && entry.asked.is_none_or(|asked| self.now >= asked + REPEAT_REQUEST_AFTER)
        });
        for index in refused.map(|entry| entry.index).collect::<Vec<_>>() {
            self.repeat_request(index);
        }
    }

    /// Recreates on the primary tunnel the hops of older tunnels to the same neighbour.
    pub(super) fn migrate(&mut self, tunnel: &Tunnel) {
        let Some(&neighbour) = tunnel.peer_addresses.first() else { return };
        let Some(primary) = self.forwarder.tunnels().by_address(neighbour) else { return };
        if !primary.is_direct() {
            return;
        }
        for key in self.hops.keys_in_use(self.now, neighbour, primary.local_index, self.tunnels) {
            let key = HopKey { tunnel: primary.local_index, ..key };
            let waits = self.hops.entries.at(key).is_none_or(|entry| entry.state == State::Requested);
            if waits && let Some(index) = self.entry(key, State::Requested, primary.peer.version()) {
                self.repeat_request(index);
            }
        }
    }
}

/// Minimum time before a hop is requested again.
const REPEAT_REQUEST_AFTER: Duration = Duration::from_secs(1);

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

//! This node as an end: requests relays, accepts them, chooses among them, and recreates their hops on new tunnels.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::Version;
use rand_chacha::rand_core::RngCore as _;

use super::Node;
use crate::diagnosis::RelayRefused;
use crate::index::{Hop, RelayIndex, RemoteIndex};
use crate::relay::{Entry, HopKey, Kind, State};
use crate::tunnel::Tunnel;
use crate::wire::header::MessageType;
use crate::wire::messages::{Control, ControlKind};
use crate::{DropReason, Origin};

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
        if !uses_relays || !self.pending.contains(peer) {
            return;
        }
        for relay in self.lighthouse.relays(peer) {
            if relay == peer || self.config.is_own_address(relay) {
                continue;
            }
            match self.forwarder.tunnels().by_address(relay) {
                Some(tunnel) if tunnel.endpoint().is_some() => self.try_relay(now, &tunnel, peer),
                _ => {
                    self.start_handshake(now, relay, None);
                    self.pending.push_relayed(relay, peer);
                }
            }
        }
    }

    /// Like [`Node::try_relays`], for one relay to which there is a tunnel.
    pub(super) fn try_relay(&mut self, now: Instant, relay: &Tunnel, peer: IpAddr) {
        if relay.peer_addresses.contains(&peer) || relay.endpoint().is_none() {
            return;
        }
        let key = HopKey { tunnel: relay.local_index, kind: Kind::Terminal, far: peer };
        if let Some(hop) = self.relays.at(key).and_then(Entry::hop) {
            self.open_through(hop, peer);
        } else if let Some(index) = self.entry(now, key, State::Requested, relay.peer.version()) {
            self.ask(now, index, peer);
        }
    }

    /// Sends message 1 of the handshake with `peer` through a hop.
    fn open_through(&mut self, hop: Hop, peer: IpAddr) {
        let Some(message) = self.first_message(peer) else { return };
        let Some(carrier) = self.forwarder.carrier_by(hop) else { return };
        self.outbox.datagram_by(&carrier, message);
    }

    pub(super) fn handle_control(&mut self, now: Instant, tunnel: &Arc<Tunnel>, body: &[u8]) {
        let Ok(message) = Control::parse(body) else { return self.outbox.count_drop(DropReason::BadMessage) };
        let served = match message.kind {
            // No relaying through another relay.
            _ if tunnel.endpoint().is_none() => false,
            ControlKind::CreateRelayRequest => self.handle_relay_request(now, tunnel, message),
            ControlKind::CreateRelayResponse => self.handle_relay_response(now, tunnel, message),
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
            !of_neighbour(from) && self.accept_relay(now, tunnel, request)
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

    /// As the end: accepts that a peer can be reached through this neighbour.
    fn accept_relay(&mut self, now: Instant, tunnel: &Tunnel, request: Control) -> bool {
        let key = HopKey { tunnel: tunnel.local_index, kind: Kind::Terminal, far: request.from };
        let Some(index) = self.entry(now, key, State::Established, request.version) else { return false };
        self.relays.set_remote(index, RemoteIndex(request.initiator_index));
        if let Some(entry) = self.relays.get_mut(index) {
            (entry.state, entry.form) = (State::Established, request.version);
        }
        self.respond(index, request.from, request.to);
        self.hop_opened(index);
        true
    }

    /// Returns whether the response answers a request of this node.
    fn handle_relay_response(&mut self, now: Instant, tunnel: &Tunnel, response: Control) -> bool {
        let index = RelayIndex(response.initiator_index);
        let entry = self.relays.get_mut(index).filter(|entry| entry.key.tunnel == tunnel.local_index);
        let Some(entry) = entry.filter(|entry| entry.asked.is_some() && response.responder_index != 0) else {
            return false;
        };
        (entry.state, entry.touched) = (State::Established, now);
        let kind = entry.key.kind;
        self.relays.set_remote(index, RemoteIndex(response.responder_index));
        match kind {
            Kind::Terminal => self.hop_opened(index),
            Kind::Forwarding => self.join(index),
        }
        true
    }

    /// As an end: publishes a hop that is now usable, and sends message 1 through it if a handshake with the far end is
    /// pending.
    fn hop_opened(&mut self, index: RelayIndex) {
        self.hops().publish(index);
        let Some(entry) = self.relays.get(index).copied() else { return };
        self.hops().choose(entry.key.far);
        if let Some(hop) = entry.hop() {
            self.open_through(hop, entry.key.far);
        }
    }

    /// Returns the entry for a hop. A new one starts in `state`; so does an old one that is neither established nor
    /// requested.
    pub(super) fn entry(&mut self, now: Instant, key: HopKey, state: State, form: Version) -> Option<RelayIndex> {
        if let Some(index) = self.relays.at(key).map(|entry| entry.index) {
            let entry = self.relays.get_mut(index)?;
            entry.touched = now;
            if entry.state != State::Established {
                entry.state = if entry.state == State::Requested { State::Requested } else { state };
            }
            return Some(index);
        }
        let new = RelayIndex(self.rng.next_u32());
        let inserted = self.relays.insert(now, new, key, state, form)?;
        if let Some(evicted) = inserted.evicted {
            let neighbour = self.tunnels.get(evicted.key.tunnel).map(|live| Arc::clone(&live.tunnel));
            self.hops().retire(&evicted, neighbour.as_ref().map_or(&[], |tunnel| &tunnel.peer_addresses));
        }
        self.hops().publish(new);
        Some(inserted.entry.index)
    }

    /// Sends the neighbour of a hop a request to create it. `to` is the address by which the target was named.
    pub(super) fn ask(&mut self, now: Instant, index: RelayIndex, to: IpAddr) {
        let Some(entry) = self.relays.get_mut(index) else { return };
        entry.asked = Some(now);
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
    fn ask_again(&mut self, now: Instant, index: RelayIndex) {
        let Some(entry) = self.relays.get(index) else { return };
        let to = match entry.key.kind {
            Kind::Terminal => Some(entry.key.far),
            Kind::Forwarding => {
                self.tunnels.get(entry.key.tunnel).and_then(|it| it.tunnel.peer_addresses.first().copied())
            }
        };
        if let Some(to) = to {
            self.ask(now, index, to);
        }
    }

    pub(super) fn respond(&mut self, index: RelayIndex, from: IpAddr, to: IpAddr) {
        let Some(entry) = self.relays.get(index).copied() else { return };
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

    /// Gives a new tunnel the hop that its handshake came by, and returns the relay. A direct tunnel gets an existing
    /// hop, if any, to fall back on.
    pub(super) fn set_relay_of(&mut self, tunnel: &Tunnel, from: Origin) -> Option<IpAddr> {
        let Origin::Relayed { hop, .. } = from else {
            tunnel.set_hop(self.hops().to(tunnel).first().copied());
            return None;
        };
        // The peer sends through this hop, so it considers it usable.
        let entry = self.relays.get_mut(hop).filter(|entry| entry.remote.is_some())?;
        entry.state = State::Established;
        tunnel.set_hop(entry.hop());
        self.forwarder.relay_of(tunnel)
    }

    /// A neighbour reports that it does not know a hop. It may have restarted, so the hop is requested again through
    /// its tunnel.
    pub(super) fn renew_relays(&mut self, now: Instant, from: SocketAddr, index: RemoteIndex) {
        let refused = self.relays.of_remote(index).filter(|entry| {
            let neighbour = self.forwarder.tunnels().by_index(entry.key.tunnel);
            let is_there = neighbour.is_some_and(|tunnel| tunnel.endpoint() == Some(from));
            is_there && entry.asked.is_none_or(|asked| now >= asked + ASK_AGAIN_AFTER)
        });
        for index in refused.map(|entry| entry.index).collect::<Vec<_>>() {
            self.ask_again(now, index);
        }
    }

    /// Recreates on the primary tunnel the hops of older tunnels to the same neighbour.
    pub(super) fn migrate_relays(&mut self, now: Instant, tunnel: &Tunnel) {
        let Some(&neighbour) = tunnel.peer_addresses.first() else { return };
        let Some(primary) = self.forwarder.tunnels().by_address(neighbour) else { return };
        if primary.endpoint().is_none() {
            return;
        }
        let keys = self.hops().keys_in_use(now, neighbour, primary.local_index);
        for key in keys {
            let key = HopKey { tunnel: primary.local_index, ..key };
            let waits = self.relays.at(key).is_none_or(|entry| entry.state == State::Requested);
            if waits && let Some(index) = self.entry(now, key, State::Requested, primary.peer.version()) {
                self.ask_again(now, index);
            }
        }
    }
}

/// Minimum time before a hop is requested again.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(1);

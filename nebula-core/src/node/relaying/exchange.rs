//! The exchange of control messages by which hops are set up, renewed and moved.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::Version;
use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::RngCore as _;

use crate::index::{RelayIndex, RemoteIndex};
use crate::node::hops::Hops;
use crate::node::outbox::Outbox;
use crate::node::tunnels::Tunnels;
use crate::relay::{Entry, HopKey, Kind, State};
use crate::tunnel::Tunnel;
use crate::wire::header::MessageType;
use crate::wire::messages::{Control, ControlKind};
use crate::{Config, Forwarder};

/// Sets hops up by control messages. Borrows what it needs of the node for one call, and starts no handshakes.
#[derive(Debug)]
pub(in crate::node) struct Relaying<'a> {
    pub(super) now: Instant,
    pub(super) config: &'a Config,
    pub(super) tunnels: &'a Tunnels,
    pub(super) hops: &'a mut Hops,
    pub(super) outbox: &'a mut Outbox,
    pub(super) rng: &'a mut ChaCha20Rng,
    pub(super) forwarder: &'a Forwarder,
}

impl Relaying<'_> {
    /// Requests a hop. `to` is the address by which the target was named.
    pub(in crate::node) fn request(&mut self, key: HopKey, form: Version, to: IpAddr) {
        if let Some(index) = self.entry(key, State::Requested, form) {
            self.send_request(index, to);
        }
    }

    /// As the end: accepts that a peer can be reached through this neighbour. Returns the hop.
    pub(super) fn accept(&mut self, tunnel: &Tunnel, request: Control) -> Option<RelayIndex> {
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
    pub(super) fn handle_response(&mut self, tunnel: &Tunnel, response: Control) -> Option<RelayIndex> {
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

    /// As the relay: creates the hops to both ends, and requests the one to the target. Returns whether there is
    /// room.
    pub(super) fn connect(&mut self, asker: &Tunnel, target: &Tunnel, request: Control) -> bool {
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
        // Datagrams may still come by an index of an earlier process.
        let is_free = |index: &RelayIndex| self.forwarder.relays().get(*index).is_none();
        let rng = &mut *self.rng;
        let new = std::iter::repeat_with(|| RelayIndex(rng.next_u32())).take(INDEXES_TRIED).find(is_free)?;
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
    pub(in crate::node) fn renew(&mut self, from: SocketAddr, index: RemoteIndex) {
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
    pub(in crate::node) fn migrate(&mut self, tunnel: &Tunnel) {
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
/// One of two random indexes is free, unless the random generator is broken.
const INDEXES_TRIED: usize = 8;

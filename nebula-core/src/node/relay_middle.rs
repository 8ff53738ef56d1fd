//! This node as the relay: creates both hops for a peer that asks, and tells the data path where to forward datagrams.

use std::time::Instant;

use super::Node;
use crate::index::{LocalIndex, RelayIndex, RemoteIndex};
use crate::relay::{HopKey, Kind, State};
use crate::wire::messages::Control;

impl Node {
    /// As the relay: creates the hop to the target, after a handshake if there is no tunnel. Returns whether it serves
    /// the request.
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
        let near = HopKey { tunnel: asker, kind: Kind::Forwarding, far: request.to };
        let beyond = HopKey { tunnel: target.local_index, kind: Kind::Forwarding, far: from };
        let Some(near) = self.entry(now, near, State::PeerRequested, request.version) else { return false };
        let Some(beyond) = self.entry(now, beyond, State::Requested, request.version) else { return false };
        self.relays.set_remote(near, RemoteIndex(request.initiator_index));
        if let Some(entry) = self.relays.get_mut(near) {
            (entry.owed, entry.form) = (true, request.version);
        }
        self.ask(now, beyond, request.to);
        self.hops().publish_around(near);
        true
    }

    /// As the relay: one hop is ready. If the other one is ready too, sends the response that an end waits for.
    pub(super) fn join(&mut self, index: RelayIndex) {
        let mut joined = false;
        for other in self.hops().counterparts(index) {
            let Some(entry) = self.relays.get_mut(other) else { continue };
            // This node requested that hop, and has no answer yet.
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
        self.hops().publish_around(index);
    }

    /// Sends the response that a neighbour waits for.
    pub(super) fn pay(&mut self, index: RelayIndex) {
        let Some(entry) = self.relays.get_mut(index).filter(|entry| entry.owed) else { return };
        entry.owed = false;
        let key = entry.key;
        let from = self.tunnels.get(key.tunnel).and_then(|live| live.tunnel.peer_addresses.first().copied());
        if let Some(from) = from {
            self.respond(index, from, key.far);
        }
    }
}

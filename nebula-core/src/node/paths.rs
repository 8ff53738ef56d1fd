//! Chooses the path of datagrams to a peer, direct or through a relay, and decides when it changes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Node;
use super::outbox::seal;
use super::timer::Due;
use crate::Origin;
use crate::index::LocalIndex;
use crate::relay::Entry;
use crate::tunnel::liveness::Liveness;
use crate::tunnel::{Traffic, Tunnel};
use crate::wire::header::MessageType;

impl Node {
    /// Answers a test request. If the tunnel has no endpoint or the request was relayed, the reply goes back by the
    /// same path, since the peer may be testing that path.
    pub(super) fn answer_test(&mut self, tunnel: &Tunnel, from: Origin, body: &[u8]) {
        match from {
            Origin::Direct(_) if tunnel.endpoint().is_some() => {
                self.outbox.message(tunnel, MessageType::TestReply, body)
            }
            Origin::Direct(at) if !self.may_try(tunnel, at) => {}
            Origin::Direct(_) | Origin::Relayed { .. } => {
                // A peer that tests another relay doubts the present one, so switch to that relay.
                if let Origin::Relayed { hop, .. } = from
                    && let Some(hop) = self.hops.entries.get(hop).and_then(Entry::hop)
                {
                    tunnel.set_hop(Some(hop));
                }
                if let Some(reply) = seal(tunnel, MessageType::TestReply, body) {
                    self.outbox.answer(&self.hops, from, reply);
                }
            }
        }
    }

    /// Handles a test reply, which shows that its path works in both directions.
    pub(super) fn handle_test_reply(&mut self, now: Instant, tunnel: &Tunnel, from: Origin) {
        let Some(live) = self.tunnels.get(tunnel.local_index) else { return };
        match from {
            Origin::Direct(at) if tunnel.endpoint().is_none() => self.follow(now, tunnel.local_index, at),
            Origin::Relayed { hop, .. } if live.liveness.is_awaiting() => {
                if let Some(hop) = self.hops.entries.get(hop).and_then(Entry::hop) {
                    tunnel.set_hop(Some(hop));
                }
                // The direct reply may come a little later; if there is none, the relay takes over.
                if tunnel.endpoint().is_some() {
                    self.timer.set_on_grid(Due::Tunnel(tunnel.local_index), now + DIRECT_REPLY_WITHIN);
                }
            }
            Origin::Direct(_) | Origin::Relayed { .. } => {}
        }
    }

    /// Sends a test request to a silent peer by every path there is.
    pub(super) fn probe(&mut self, tunnel: &Tunnel) {
        self.outbox.message(tunnel, MessageType::TestRequest, &[]);
        let used = if tunnel.endpoint().is_some() { None } else { tunnel.hop() };
        for hop in self.hops.usable_to(tunnel) {
            if let Some(carrier) = self.forwarder.carrier_by(hop).filter(|_| Some(hop) != used) {
                self.outbox.message_by(&carrier, tunnel, MessageType::TestRequest, &[]);
            }
        }
    }

    /// Shows every peer and lighthouse where this node is now. A peer that no longer knows the tunnel answers with a
    /// recv_error; one that does not answer is probed at the next traffic check.
    pub(super) fn announce(&mut self, now: Instant) {
        let table = self.forwarder.tunnels();
        let primaries = self.tunnels.iter().filter(|live| table.is_primary(&live.tunnel));
        let tunnels: Vec<_> = primaries.map(|live| Arc::clone(&live.tunnel)).collect();
        for tunnel in tunnels {
            if let Some(live) = self.tunnels.get_mut(tunnel.local_index) {
                // Earlier probes could not be answered.
                live.liveness = Liveness::default();
                live.announced = true;
            }
            self.timer.set_on_grid(Due::Tunnel(tunnel.local_index), now + self.config.timers.connection_alive_interval);
            self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
        }
        if self.has_lighthouses() {
            self.timer.set(Due::LighthouseUpdate, now);
        }
    }

    /// Sends a test request to an endpoint at which the peer of a relayed tunnel seems to be.
    ///
    /// Rate limited: the answer is a direct datagram, too, and may not be followed yet, so two peers that challenged
    /// each other for every datagram would send more and more of them.
    pub(super) fn challenge(&mut self, now: Instant, tunnel: &Tunnel, at: SocketAddr) {
        if tunnel.endpoint().is_some() || !self.may_try(tunnel, at) {
            return;
        }
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return };
        if live.challenge_after <= now {
            live.challenge_after = now + CHALLENGE_INTERVAL;
            self.try_endpoint(tunnel, at);
        }
    }

    /// Looks for a direct path for a relayed tunnel that is in use.
    pub(super) fn seek_direct_path(&mut self, now: Instant, tunnel: &Tunnel) {
        let Some(&peer) = tunnel.peer_addresses.first().filter(|_| tunnel.endpoint().is_none()) else { return };
        for endpoint in self.endpoints_of(peer) {
            self.try_endpoint(tunnel, endpoint);
        }
        let wait = self.config.timers.requery_wait;
        let Some(live) = self.tunnels.get_mut(tunnel.local_index).filter(|live| now >= live.ask_after) else { return };
        live.ask_after = now + wait;
        // The lighthouse also tells the peer to punch.
        self.ask_lighthouses(now, peer);
    }

    /// Sends a test request that does not count as traffic in the traffic check, where it would keep an idle tunnel
    /// alive.
    fn try_endpoint(&mut self, tunnel: &Tunnel, at: SocketAddr) {
        if let Some(request) = seal(tunnel, MessageType::TestRequest, &[]) {
            self.outbox.datagram(at, request);
        }
    }

    pub(super) fn may_try(&self, tunnel: &Tunnel, at: SocketAddr) -> bool {
        self.config.lighthouse.remote_allow.allows(&tunnel.peer_addresses, at.ip())
    }

    /// Falls back to the relay if the peer is heard only through it.
    pub(super) fn note_relayed(&mut self, now: Instant, index: LocalIndex, traffic: Traffic) {
        let Some(live) = self.tunnels.get_mut(index).filter(|_| traffic.relayed && !traffic.direct) else { return };
        let usable = live.tunnel.hop().is_some_and(|hop| self.forwarder.carrier_by(hop).is_some());
        if usable && let Some(silent) = live.tunnel.endpoint() {
            live.left = Some((silent, now));
            live.tunnel.set_endpoint(None);
        }
    }
}

/// How much later than the reply through a relay the direct reply may come.
const DIRECT_REPLY_WITHIN: Duration = Duration::from_secs(1);
/// Minimum time between two challenges of the same relayed peer.
const CHALLENGE_INTERVAL: Duration = Duration::from_secs(1);

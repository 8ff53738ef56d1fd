//! The path of datagrams to a peer, direct or through a relay, and when it changes.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Node;
use super::hops::Hops;
use super::outbox::{Outbox, seal};
use super::path_choice::Way;
use super::timer::{Due, Timer};
use super::tunnels::Tunnels;
use super::validation::Validations;
use crate::hole_punch::KEEPALIVE;
use crate::index::{LocalIndex, RelayIndex};
use crate::relay::Entry;
use crate::tunnel::liveness::Liveness;
use crate::tunnel::{Traffic, Tunnel};
use crate::wire::header::MessageType;
use crate::{Config, Event, Forwarder, Origin, lighthouse};

impl Node {
    pub(super) fn paths(&mut self, now: Instant) -> Paths<'_> {
        Paths {
            now,
            config: &self.config,
            tunnels: &mut self.tunnels,
            validations: &mut self.validations,
            hops: &self.hops,
            lighthouse: &mut self.lighthouse,
            timer: &mut self.timer,
            outbox: &mut self.outbox,
            forwarder: &self.forwarder,
        }
    }

    /// Sends packets for `peer` to `endpoint` from now on, until the peer is heard from somewhere else. Returns
    /// `false` if there is no tunnel or the remote allow list forbids `endpoint`.
    pub fn redirect(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) -> bool {
        self.now = now;
        let Some(tunnel) = self.forwarder.tunnels().by_address(peer) else { return false };
        if !self.config.may_be_at(&tunnel.peer_addresses, endpoint) {
            return false;
        }
        tunnel.set_endpoint(Some(endpoint));
        for &address in &tunnel.peer_addresses {
            self.lighthouse.candidates(address).learn(endpoint);
        }
        true
    }

    /// Looks for a better path for a tunnel that is in use.
    pub(super) fn seek_path(&mut self, now: Instant, tunnel: &Tunnel) {
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        if self.paths(now).try_better_endpoints(tunnel) {
            self.ask_lighthouses(now, peer);
        }
        if tunnel.endpoint().is_none() {
            if self.paths(now).try_direct(tunnel) {
                // The lighthouse also tells the peer to punch.
                self.ask_lighthouses(now, peer);
            }
            self.seek_second_relay(now, tunnel);
        }
    }
}

/// Tests paths and moves tunnels between them. Borrows what it needs of the node for one call, and starts no
/// handshakes.
#[derive(Debug)]
pub(super) struct Paths<'a> {
    pub(super) now: Instant,
    pub(super) config: &'a Config,
    pub(super) tunnels: &'a mut Tunnels,
    pub(super) validations: &'a mut Validations,
    pub(super) hops: &'a Hops,
    pub(super) lighthouse: &'a mut lighthouse::Client,
    pub(super) timer: &'a mut Timer,
    pub(super) outbox: &'a mut Outbox,
    pub(super) forwarder: &'a Forwarder,
}

impl Paths<'_> {
    /// Moves a tunnel to an endpoint at which its peer has answered what only somebody there could know.
    pub(super) fn follow(&mut self, index: LocalIndex, from: SocketAddr) {
        let Some(live) = self.tunnels.get_mut(index) else { return };
        let had_path = self.forwarder.carrier(&live.tunnel).is_some();
        if !self.config.may_be_at(&live.tunnel.peer_addresses, from) || !live.move_to(self.now, from) {
            return;
        }
        let peer = live.tunnel.peer_addresses.clone();
        for &address in &peer {
            self.lighthouse.candidates(address).learn(from);
        }
        if had_path {
            self.outbox.event(Event::Roamed { peer, endpoint: from });
        }
        self.end_validation(index);
    }

    /// Answers a test request with this body by the path that it came by, since the peer may be testing that path.
    pub(super) fn answer_test(&mut self, tunnel: &Tunnel, from: Origin, body: &[u8]) {
        match from {
            Origin::Direct(at) if tunnel.endpoint() == Some(at) => {
                self.outbox.message(tunnel, MessageType::TestReply, body)
            }
            Origin::Direct(at) if !self.config.may_be_at(&tunnel.peer_addresses, at) => {}
            _ if !self.may_answer(tunnel, from, body.len()) => {}
            Origin::Direct(_) | Origin::Relayed { .. } => {
                // A peer tests another relay when the present one seems dead, so switch to that relay.
                if let Origin::Relayed { hop, .. } = from {
                    self.follow_relay(tunnel, hop);
                }
                if let Some(reply) = seal(tunnel, MessageType::TestReply, body) {
                    self.outbox.answer(self.hops, from, reply);
                }
            }
        }
    }

    /// Handles a test reply. One that was relayed shows that this relay works in both directions.
    pub(super) fn handle_test_reply(&mut self, tunnel: &Tunnel, from: Origin) {
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return };
        match from {
            Origin::Relayed { hop, .. } if live.liveness.is_awaiting() => {
                // Where several relays work, the tunnel would go to and fro between them.
                if !std::mem::replace(&mut live.is_answered, true) {
                    self.follow_relay(tunnel, hop);
                }
                // The direct reply may come a little later; if there is none, the relay takes over. A relay may end,
                // which a peer that sends nothing of its own does not show: the next check does not wait as for a
                // silent peer.
                let wait = match tunnel.endpoint() {
                    Some(_) => DIRECT_REPLY_WITHIN,
                    None => self.config.timers.connection_alive_interval,
                };
                self.timer.set_on_grid(Due::Tunnel(tunnel.local_index), self.now + wait);
            }
            Origin::Direct(_) | Origin::Relayed { .. } => {}
        }
    }

    /// Sends by the relay that the peer was heard through from now on, unless measurements speak against it.
    fn follow_relay(&self, tunnel: &Tunnel, hop: RelayIndex) {
        let Some(hop) = self.hops.entries.get(hop).and_then(Entry::hop) else { return };
        let choice = self.tunnels.get(tunnel.local_index).and_then(|live| live.choice.as_ref());
        let is_relayed = tunnel.endpoint().is_none();
        if choice.is_none_or(|choice| !is_relayed || choice.may_follow(self.now, Way::Relayed(hop))) {
            tunnel.set_hop(Some(hop));
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
    pub(super) fn announce(&mut self) {
        let table = self.forwarder.tunnels();
        let primaries = self.tunnels.iter().filter(|live| table.is_primary(&live.tunnel));
        let tunnels: Vec<_> = primaries.map(|live| Arc::clone(&live.tunnel)).collect();
        for tunnel in tunnels {
            if let Some(live) = self.tunnels.get_mut(tunnel.local_index) {
                // Earlier probes could not be answered.
                live.liveness = Liveness::default();
                live.announced = true;
                live.relayed = None;
            }
            // This node may be in another network now.
            tunnel.path_limit.forget();
            self.timer
                .set_on_grid(Due::Tunnel(tunnel.local_index), self.now + self.config.timers.connection_alive_interval);
            self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
        }
        if self.config.has_lighthouses() {
            self.timer.set(Due::LighthouseUpdate, self.now);
        }
    }

    /// Tries preferred endpoints of a tunnel after a number of datagrams. Returns whether to ask the lighthouses for
    /// more, which is due after another number. The counts are read at the traffic check rather than per packet,
    /// which costs the data path nothing. The peer's answer shows whether an endpoint works.
    fn try_better_endpoints(&mut self, tunnel: &Tunnel) -> bool {
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return false };
        let due = live.search_due(self.now, &self.config.timers);
        if due.promote && !self.config.lighthouse.am_lighthouse {
            self.promote(tunnel);
        }
        due.ask
    }

    fn promote(&mut self, tunnel: &Tunnel) {
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        let known = || self.config.endpoints_of(peer, self.lighthouse);
        let better = match tunnel.endpoint() {
            Some(current) if self.config.is_preferred(current) => return,
            Some(_) => known().into_iter().filter(|at| self.config.is_preferred(*at)).collect(),
            None => known(),
        };
        for endpoint in better {
            self.try_endpoint(tunnel, endpoint);
        }
    }

    /// Tries every endpoint of the peer of a relayed tunnel, with backoff. Returns whether to ask the lighthouses for
    /// more.
    fn try_direct(&mut self, tunnel: &Tunnel) -> bool {
        let Some(&peer) = tunnel.peer_addresses.first() else { return false };
        let endpoints = self.config.endpoints_of(peer, self.lighthouse);
        let Some(live) = self.tunnels.get_mut(tunnel.local_index) else { return false };
        let Some(asks) = live.relayed.get_or_insert_default().try_direct(self.now, &endpoints) else { return false };
        let asks = asks && live.may_ask(self.now, self.config.timers.requery_wait);
        for endpoint in endpoints {
            self.try_endpoint(tunnel, endpoint);
        }
        asks
    }

    /// Sends one byte that keeps NAT mappings open. Lighthouses hear from this node often enough without it.
    pub(super) fn keep_mapping(&mut self, tunnel: &Tunnel) {
        let to_lighthouse = tunnel.peer_addresses.iter().any(|address| self.config.is_lighthouse(*address));
        if !self.config.punchy.punch || to_lighthouse {
            return;
        }
        let endpoints = match tunnel.peer_addresses.first() {
            Some(&peer) if self.config.punchy.target_all_remotes => self.config.endpoints_of(peer, self.lighthouse),
            _ => tunnel.endpoint().into_iter().collect(),
        };
        for endpoint in endpoints {
            self.outbox.datagram(endpoint, KEEPALIVE.to_vec());
        }
    }

    /// Falls back to the relay if the peer is heard only through it.
    pub(super) fn note_relayed(&mut self, index: LocalIndex, traffic: Traffic) {
        let Some(live) = self.tunnels.get_mut(index).filter(|_| traffic.relayed && !traffic.direct) else { return };
        let usable = live.tunnel.hop().is_some_and(|hop| self.forwarder.carrier_by(hop).is_some());
        if usable && let Some(silent) = live.tunnel.endpoint() {
            live.left = Some((silent, self.now));
            live.tunnel.set_endpoint(None);
        }
    }
}

/// How much later than the reply through a relay the direct reply may come.
const DIRECT_REPLY_WITHIN: Duration = Duration::from_secs(1);

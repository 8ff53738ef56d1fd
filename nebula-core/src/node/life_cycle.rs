//! The life of a tunnel: installed, checked from time to time, closed by either side or lost.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand_chacha::rand_core::RngCore as _;

use super::Node;
use super::timer::Due;
use super::tunnels::{Established, Live};
use crate::counters::Counter;
use crate::handshake::Waiting;
use crate::index::{LocalIndex, RemoteIndex};
use crate::tunnel::Tunnel;
use crate::tunnel::liveness::{Decision, Next};
use crate::wire::header::{Header, MessageType};
use crate::{Event, Origin, PostQuantum, TunnelDownReason};

impl Node {
    /// Installs a tunnel whose peer has proved that it holds the keys, and makes it the primary one unless there is a
    /// newer one.
    pub(crate) fn install(&mut self, now: Instant, established: Established) {
        let (tunnel, from, unproven) = (Arc::clone(&established.tunnel), established.from, established.unproven);
        let relay = self.hops.assign(&tunnel, from);
        self.journal.connected(&tunnel.peer_addresses, from.underlay());
        self.note_other_certificate(now, &tunnel, from.underlay());
        self.forwarder.tunnels().publish(Arc::clone(&tunnel));
        self.timer.set_on_grid(Due::Tunnel(tunnel.local_index), now + self.config.timers.connection_alive_interval);
        self.outbox.event(Event::TunnelUp {
            peer: tunnel.peer_addresses.clone(),
            name: tunnel.peer.name().to_owned(),
            endpoint: from.underlay(),
            relay,
            local_index: tunnel.local_index,
            remote_index: tunnel.remote_index,
            certificate: (&*tunnel.peer).into(),
            initiator: tunnel.initiator,
            took: established.took.unwrap_or_default(),
        });
        let mut live = Live::new(now, established);
        if let Some(directory) = &self.config.capture {
            live.incarnations.update(&tunnel.peer_addresses, &**directory);
        }
        self.prepare_path_mtu(now, &mut live);
        self.tunnels.insert(live);
        if let Some(&address) = tunnel.peer_addresses.first() {
            self.names.arrived(now, tunnel.peer.name(), address);
        }
        if let Some((at, bytes)) = unproven {
            self.paths(now).validate_first(tunnel.local_index, at, bytes);
        }
        self.inherit_measurements(tunnel.local_index);
        if self.tunnels.is_newest(&tunnel, self.forwarder.tunnels()) {
            self.forwarder.tunnels().set_primary(&tunnel);
            if unproven.is_none() {
                self.paths(now).end_older_validations(&tunnel);
            }
        }
        for &address in &tunnel.peer_addresses {
            while let Some(surplus) = self.tunnels.surplus(address, self.forwarder.tunnels()) {
                self.remove_tunnel(surplus, TunnelDownReason::Superseded);
            }
        }
        self.note_successor(now, &tunnel.peer_addresses);
        self.note_kept(now, &tunnel);
        self.note_offered(&tunnel);
        self.note_relay_standing(now, &tunnel.peer_addresses);
        self.put_to_use(now, &tunnel, relay);
    }

    /// Remembers the path by which a tunnel was made, and sends what waited for it. `relay` is the relay on that path.
    fn put_to_use(&mut self, now: Instant, tunnel: &Tunnel, relay: Option<IpAddr>) {
        for &address in &tunnel.peer_addresses {
            let known = self.lighthouse.candidates(address);
            known.reached();
            if let Some(endpoint) = tunnel.endpoint() {
                known.learn(endpoint);
            }
            if let Some(relay) = relay {
                known.report_relays(relay, vec![relay]);
            }
            for packet in self.pending.take_packets(address) {
                self.send_waiting(now, packet);
            }
        }
        if tunnel.initiator {
            self.relaying(now).migrate(tunnel);
        }
        if tunnel.peer_addresses.iter().any(|address| self.config.is_lighthouse(*address)) {
            self.rendezvous(now).send_update(tunnel);
        }
    }

    /// Sends what waited for the tunnel to `peer`.
    pub(super) fn flush(&mut self, now: Instant, peer: IpAddr, mut waiting: Waiting) {
        let Some(tunnel) = self.forwarder.tunnels().by_address(peer) else { return };
        for subject in std::mem::take(&mut waiting.queries) {
            self.rendezvous(now).send_query(&tunnel, subject);
        }
        if waiting.test {
            self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
        }
        for peer in std::mem::take(&mut waiting.relayed) {
            self.try_relay(now, &tunnel, peer);
        }
        for (from, request) in std::mem::take(&mut waiting.requests) {
            self.introduce(now, from, request);
        }
        for packet in waiting.take_packets() {
            self.send_waiting(now, packet);
        }
    }

    /// Records that the peer showed another certificate, from another endpoint, than in a tunnel that it still has. If
    /// the names differ, too, nobody has to wait for the turns that tell two hosts from a renewal.
    fn note_other_certificate(&mut self, now: Instant, tunnel: &Tunnel, at: SocketAddr) {
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        let Some(other) = self.tunnels.of_peer(peer).last().and_then(|index| self.tunnels.get(*index)) else { return };
        let (before, after) = (other.tunnel.peer.fingerprint(), tunnel.peer.fingerprint());
        let place = other.tunnel.endpoint();
        if before == after || place == Some(at) {
            return;
        }
        if let Some(place) = place {
            self.journal.replaced(now, peer, (before, place), (after, at));
        }
        let names = [other.tunnel.peer.name().to_owned(), tunnel.peer.name().to_owned()];
        if !names[0].eq_ignore_ascii_case(&names[1]) {
            self.journal.named_differently(now, peer, [&names[0], &names[1]]);
            self.outbox.counters().add(Counter::AddressConflicts, 1);
            self.outbox.event(Event::AddressConflict { address: peer, names, at, is_own: false });
        }
    }

    /// The traffic check of one tunnel.
    pub(super) fn check_tunnel(&mut self, now: Instant, index: LocalIndex) {
        self.forwarder.expire_flows(now);
        let Some(mut traffic) = self.tunnels.get_mut(index).map(|live| live.take_traffic(now)) else { return };
        if self.inheritance.is_some()
            && let Some(live) = self.tunnels.get(index)
        {
            let inherited = self.inherited_traffic(&live.tunnel.peer_addresses);
            (traffic.direct, traffic.relayed) =
                (traffic.direct || inherited.direct, traffic.relayed || inherited.relayed);
        }
        self.paths(now).note_relayed(index, traffic);
        self.hops.note_traffic(now, index, &self.tunnels);
        let at = self.wall.unix_seconds(now);
        let Some(live) = self.tunnels.get_mut(index) else { return };
        let primary = self.forwarder.tunnels().is_primary(&live.tunnel);
        let decision = live.decide(&self.config, (now, at), traffic, primary);
        let tunnel = Arc::clone(&live.tunnel);
        let timers = &self.config.timers;
        let wait = match decision {
            Decision::Alive { .. } | Decision::Idle => timers.connection_alive_interval,
            Decision::Probe | Decision::Await => timers.pending_deletion_interval,
            Decision::Close(reason) => return self.close_tunnel(index, reason),
            Decision::Remove(reason) => return self.remove_tunnel(index, reason),
        };
        self.timer.set_on_grid(Due::Tunnel(index), now + wait);
        match decision {
            Decision::Probe => {
                self.paths(now).probe(&tunnel);
                self.paths(now).expect_answer(&tunnel);
            }
            Decision::Alive { punch: true, .. } | Decision::Idle => self.paths(now).keep_mapping(&tunnel),
            _ => {}
        }
        match decision {
            Decision::Alive { next: Next::Rehandshake, .. } => self.rehandshake(now, index),
            Decision::Alive { next: Next::BecomePrimary, .. } => self.forwarder.tunnels().set_primary(&tunnel),
            Decision::Alive { .. } if !primary => self.relaying(now).migrate(&tunnel),
            _ => {}
        }
        if primary && traffic.sent {
            self.seek_path(now, &tunnel);
            self.look_after_path_mtu(now, index);
            self.paths(now).measure(index);
        }
    }

    fn rehandshake(&mut self, now: Instant, index: LocalIndex) {
        let Some(live) = self.tunnels.get(index) else { return };
        let version = live.version_to_upgrade_to(&self.config);
        if let Some(&peer) = live.tunnel.peer_addresses.first() {
            self.start_handshake(now, peer, version);
        }
    }

    /// Closes every tunnel whose peer is no longer trusted.
    pub(super) fn close_refused(&mut self, now: Instant) {
        let at = self.wall.unix_seconds(now);
        self.callers(now).give_up_refused(at);
        self.end_refused_inherited(now);
        let refused = self.tunnels.iter().filter(|live| live.is_refused(&self.config, self.wall.unix_seconds(now)));
        let refused: Vec<_> = refused.map(|live| live.tunnel.local_index).collect();
        for index in refused {
            self.close_tunnel(index, TunnelDownReason::CertificateInvalid);
        }
    }

    /// Closes every direct tunnel of those that may only be relayed; see [`crate::config::Relay::force`].
    pub(super) fn close_direct(&mut self, now: Instant) {
        self.now = now;
        let is_forbidden =
            |tunnel: &Tunnel| tunnel.endpoint().is_some() && self.config.keeps_to_relays(&tunnel.peer_addresses);
        let direct = self.tunnels.iter().filter(|live| is_forbidden(&live.tunnel));
        for index in direct.map(|live| live.tunnel.local_index).collect::<Vec<_>>() {
            self.close_tunnel(index, TunnelDownReason::ClosedHere);
        }
    }

    /// Handles a recv_error: the peer no longer knows the tunnel or relay. It is unauthenticated, so it is believed
    /// only if it comes from where the peer is.
    pub(super) fn handle_recv_error(&mut self, now: Instant, from: Origin, index: RemoteIndex) {
        if let Origin::Direct(at) = from
            && self.journal.probe_answered(now, at, index.0)
        {
            return;
        }
        if !self.config.accept_recv_error.covers(from.underlay().ip()) {
            return;
        }
        let lost = self.tunnels.of_remote(index).filter(|live| self.hops.is_path_to(&live.tunnel, from));
        let lost =
            lost.map(|live| (live.tunnel.local_index, live.announced, live.tunnel.peer_addresses.first().copied()));
        let lost: Vec<_> = lost.collect();
        for (index, announced, peer) in lost {
            self.remove_tunnel(index, TunnelDownReason::RecvError);
            if let Some(peer) = peer.filter(|_| announced) {
                // The peer dropped the tunnel while this node was away, and may have packets for it.
                self.connect(now, peer);
            }
        }
        if let Origin::Direct(from) = from {
            self.relaying(now).renew(from, index);
        }
    }

    pub(super) fn answer_unknown_index(&mut self, from: Origin, index: u32) {
        let index_of = LocalIndex(index);
        let in_use = self.tunnels.get(index_of).is_some() || self.half_open.contains(index_of);
        if in_use || self.pending.peer_of(index_of).is_some() {
            // The peer's data overtook its message 2, or was queued behind it. A recv_error would tear down the tunnel
            // that is being set up or has just been made.
            return;
        }
        if self.config.send_recv_error.covers(from.underlay().ip()) {
            let header = Header { kind: MessageType::RecvError, index, counter: 0 };
            self.outbox.answer(&self.hops, from, header.to_bytes().to_vec());
        }
    }

    /// Closes every tunnel to `peer`, and tells the peer unless `quietly`. Returns how many tunnels there were.
    pub fn close(&mut self, now: Instant, peer: IpAddr, quietly: bool) -> usize {
        self.now = now;
        let indexes = self.tunnels.of_peer(peer).to_vec();
        self.end_inherited_of(peer);
        for index in &indexes {
            if quietly {
                self.remove_tunnel(*index, TunnelDownReason::ClosedHere);
            } else {
                self.close_tunnel(*index, TunnelDownReason::ClosedHere);
            }
        }
        indexes.len()
    }

    /// Closes the tunnels whose keys do not come from ML-KEM, and gives up such callers, if that is required.
    pub(super) fn close_classical(&mut self, now: Instant) {
        if self.config.post_quantum != PostQuantum::Require {
            return;
        }
        let classical = self.tunnels.iter().filter(|live| !live.tunnel.post_quantum);
        for index in classical.map(|live| live.tunnel.local_index).collect::<Vec<_>>() {
            self.close_tunnel(index, TunnelDownReason::NotPostQuantum);
        }
        self.callers(now).give_up_classical();
    }

    /// Closes every tunnel with a CloseTunnel message; drain the transmits afterwards.
    pub fn close_all(&mut self, now: Instant) {
        self.now = now;
        let is_direct =
            |index: &LocalIndex| self.tunnels.get(*index).is_some_and(|live| live.tunnel.endpoint().is_some());
        let (direct, relayed): (Vec<_>, Vec<_>) = self.tunnels.indexes().into_iter().partition(is_direct);
        // Direct tunnels last: those to relays carry the CloseTunnel messages of relayed tunnels.
        for index in relayed.into_iter().chain(direct) {
            self.close_tunnel(index, TunnelDownReason::ClosedHere);
        }
    }

    /// Sends CloseTunnel to the peer and removes the tunnel.
    pub(super) fn close_tunnel(&mut self, index: LocalIndex, reason: TunnelDownReason) {
        if let Some(live) = self.tunnels.get(index) {
            let tunnel = Arc::clone(&live.tunnel);
            self.outbox.message(&tunnel, MessageType::CloseTunnel, &[]);
        }
        self.remove_tunnel(index, reason);
    }

    /// Removes a tunnel without telling the peer; another tunnel to the same peer takes over.
    pub(super) fn remove_tunnel(&mut self, index: LocalIndex, reason: TunnelDownReason) {
        let Some(live) = self.tunnels.remove(index) else { return };
        self.timer.cancel(Due::Tunnel(index));
        for due in [Due::PathMtu(index), Due::PathChoice(index), Due::Elsewhere(index)] {
            self.timer.cancel(due);
        }
        self.forget_validation(index);
        self.forwarder.tunnels().retire(index);
        let peer = live.tunnel.peer_addresses.clone();
        if let Some(&address) = peer.first() {
            self.names.left(self.now, live.tunnel.peer.name(), address);
        }
        for &address in &peer {
            if self.forwarder.tunnels().by_address(address).is_none() {
                if let Some(heir) = self.tunnels.heir(address) {
                    self.forwarder.tunnels().set_primary(heir);
                } else if self.expects_back(reason) {
                    self.lighthouse.expect_back(self.now, address);
                } else if !self.pending.contains(address) {
                    self.lighthouse.forget(address);
                }
            }
        }
        self.hops.forget_neighbour(&live.tunnel, &self.tunnels);
        let gone = peer.iter().all(|address| self.tunnels.of_peer(*address).is_empty());
        if gone {
            self.renew_kept(&peer);
            peer.iter().for_each(|address| self.hops.disestablish(*address, &self.tunnels));
            self.server.forget(&peer);
            self.forget_offered(&peer);
            self.note_relay_standing(self.now, &peer);
            self.note_gateway_down(self.now, &peer, reason);
        }
        if gone && peer.iter().any(|address| self.config.is_lighthouse(*address)) {
            match reason {
                TunnelDownReason::RecvError => self.timer.set(Due::LighthouseUpdate, self.now),
                // A lighthouse that shuts down closes the tunnels of all its hosts at once, so they spread their new
                // handshakes.
                TunnelDownReason::ClosedByPeer => {
                    let spread = self.rng.next_u32() % GOODBYE_SPREAD_MS;
                    self.timer.set(Due::LighthouseUpdate, self.now + Duration::from_millis(spread.into()));
                }
                _ => {}
            }
        }
        self.outbox.event(Event::TunnelDown {
            peer,
            name: live.tunnel.peer.name().to_owned(),
            endpoint: live.tunnel.endpoint(),
            local_index: index,
            remote_index: live.tunnel.remote_index,
            reason,
        });
    }

    /// Whether a peer whose last tunnel ended for this reason is probably reachable at the same endpoint, now or soon.
    fn expects_back(&self, reason: TunnelDownReason) -> bool {
        match reason {
            TunnelDownReason::RecvError => true,
            // The peer may only be restarting. A lighthouse expects nobody back: hosts call it by themselves, and a
            // whole fleet of them may leave.
            TunnelDownReason::ClosedByPeer => !self.config.lighthouse.am_lighthouse,
            _ => false,
        }
    }
}

/// The hosts of a lighthouse that shuts down spread their new handshakes over this time.
const GOODBYE_SPREAD_MS: u32 = 1000;

//! Handles each kind of deadline when it is due.

use std::net::IpAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Node;
use super::timer::Due;
use super::tunnels::Live;
use crate::TunnelDownReason;
use crate::hole_punch::{Action, KEEPALIVE, PUNCH};
use crate::index::LocalIndex;
use crate::tunnel::Tunnel;
use crate::tunnel::liveness::{Decision, Facts, Next};
use crate::wire::header::MessageType;

impl Node {
    pub(super) fn handle_due(&mut self, now: Instant, due: Due) {
        match due {
            Due::Handshake(peer) => self.handshake_due(now, peer),
            Due::Tunnel(index) => self.check_tunnel(now, index),
            Due::HalfOpen(index) => self.callers(now).due(index),
            Due::LighthouseUpdate => self.update_lighthouses(now),
            Due::HolePunch => self.punch_due(now),
            Due::Housekeeping => self.housekeeping(now),
        }
    }

    /// Expires flows and stale entries, and releases memory.
    pub(super) fn housekeeping(&mut self, now: Instant) {
        self.forwarder.expire_flows(now);
        self.outbox.release_memory();
        self.server.wanted().expire(now);
        // The endpoints of a peer that is expected back outlive its tunnel, but not forever.
        self.lighthouse.retain(now, |peer| !self.tunnels.of_peer(peer).is_empty() || self.pending.contains(peer));
        self.timer.set_on_grid(Due::Housekeeping, now + HOUSEKEEPING_INTERVAL);
    }

    /// The traffic check of one tunnel.
    fn check_tunnel(&mut self, now: Instant, index: LocalIndex) {
        self.forwarder.expire_flows(now);
        let Some(live) = self.tunnels.get_mut(index) else { return };
        let traffic = live.tunnel.take_traffic();
        let (received, sent) = (traffic.received(), traffic.sent);
        if received || sent {
            live.used = now;
        }
        live.announced &= !received;
        self.note_relayed(now, index, traffic);
        self.hops.note_traffic(now, index, &self.tunnels);
        let Some(live) = self.tunnels.get(index) else { return };
        let facts = self.facts(now, live, received, sent);
        let Some(live) = self.tunnels.get_mut(index) else { return };
        let decision = live.liveness.decide(facts);
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
            Decision::Probe => self.probe(&tunnel),
            Decision::Alive { punch: true, .. } | Decision::Idle => self.keep_mapping(&tunnel),
            _ => {}
        }
        match decision {
            Decision::Alive { next: Next::Rehandshake, .. } => self.rehandshake(now, index),
            Decision::Alive { next: Next::BecomePrimary, .. } => self.forwarder.tunnels().set_primary(&tunnel),
            Decision::Alive { .. } if !facts.primary => self.relaying(now).migrate(&tunnel),
            _ => {}
        }
        if facts.primary && sent {
            self.seek_better_path(now, index);
            self.seek_direct_path(now, &tunnel);
        }
    }

    /// Tries preferred endpoints, and asks the lighthouses for more, each after a number of datagrams. The count is
    /// read at the traffic check rather than per packet, which costs the data path nothing. The peer's answer shows
    /// whether an endpoint works.
    fn seek_better_path(&mut self, now: Instant, index: LocalIndex) {
        let timers = &self.config.timers;
        let Some(live) = self.tunnels.get_mut(index) else { return };
        let counter = live.tunnel.session.next_counter();
        let due = |since: u64, every: Option<NonZeroU64>| every.is_some_and(|every| counter - since >= every.get());
        let promote = due(live.promoted_at, timers.try_promote);
        let ask = due(live.asked_at, timers.requery_every) && now >= live.ask_after;
        if promote {
            live.promoted_at = counter;
        }
        if ask {
            (live.asked_at, live.ask_after) = (counter, now + timers.requery_wait);
        }
        let tunnel = Arc::clone(&live.tunnel);
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        if promote && !self.config.lighthouse.am_lighthouse {
            self.promote(&tunnel, peer);
        }
        if ask {
            self.ask_lighthouses(now, peer);
        }
    }

    fn promote(&mut self, tunnel: &Tunnel, peer: IpAddr) {
        let better = match tunnel.endpoint() {
            Some(current) if self.config.is_preferred(current) => return,
            Some(_) => self.endpoints_of(peer).into_iter().filter(|at| self.config.is_preferred(*at)).collect(),
            None => self.endpoints_of(peer),
        };
        for endpoint in better {
            self.outbox.message_to(endpoint, tunnel, MessageType::TestRequest, &[]);
        }
    }

    fn facts(&self, now: Instant, live: &Live, received: bool, sent: bool) -> Facts {
        let tunnel = &live.tunnel;
        let own = self.config.identity.networks().first().map(ipnet::IpNet::addr);
        let certificate = self.config.identity.certificate(tunnel.own_version);
        let certificate_in_use = certificate.is_none_or(|current| current.fingerprint() == live.own_certificate);
        Facts {
            received,
            sent,
            primary: self.forwarder.tunnels().is_primary(tunnel),
            certificate_refused: live.is_refused(&self.config, self.wall.unix_seconds(now)),
            inactive: self.config.timers.inactivity_timeout.is_some_and(|limit| now >= live.used + limit),
            exhausted: tunnel.session.is_exhausted(),
            outdated: live.is_outdated(&self.config),
            may_become_primary: own <= tunnel.peer_addresses.first().copied()
                && !tunnel.session.is_worn()
                && certificate_in_use,
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
        let refused = self.tunnels.iter().filter(|live| live.is_refused(&self.config, self.wall.unix_seconds(now)));
        let refused: Vec<_> = refused.map(|live| live.tunnel.local_index).collect();
        for index in refused {
            self.close_tunnel(index, TunnelDownReason::CertificateInvalid);
        }
    }

    /// Sends one byte that keeps NAT mappings open. Lighthouses hear from this node often enough without it.
    fn keep_mapping(&mut self, tunnel: &Tunnel) {
        let to_lighthouse = tunnel.peer_addresses.iter().any(|address| self.config.is_lighthouse(*address));
        if !self.config.punchy.punch || to_lighthouse {
            return;
        }
        let endpoints = match tunnel.peer_addresses.first() {
            Some(&peer) if self.config.punchy.target_all_remotes => self.endpoints_of(peer),
            _ => tunnel.endpoint().into_iter().collect(),
        };
        for endpoint in endpoints {
            self.outbox.datagram(endpoint, KEEPALIVE.to_vec());
        }
    }

    fn punch_due(&mut self, now: Instant) {
        while let Some(action) = self.punches.pop(now) {
            match action {
                Action::Punch(endpoints) => {
                    for endpoint in endpoints {
                        self.outbox.datagram(endpoint, PUNCH.to_vec());
                    }
                }
                Action::Respond(peer) => self.test(now, peer),
            }
        }
        if let Some(next) = self.punches.next() {
            self.timer.set(Due::HolePunch, next);
        }
    }

    /// Sends a test request, after a handshake if there is no tunnel.
    fn test(&mut self, now: Instant, peer: IpAddr) {
        if let Some(tunnel) = self.forwarder.tunnels().by_address(peer) {
            self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
        } else {
            self.start_handshake(now, peer, None);
            self.pending.push_test(peer);
        }
    }
}

/// By default, no flow times out faster than this.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(180);

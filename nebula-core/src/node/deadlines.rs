//! Handles each kind of deadline when it is due.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Node;
use super::timer::Due;
use crate::TunnelDownReason;
use crate::index::LocalIndex;
use crate::tunnel::liveness::{Decision, Next};

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
        let Some(traffic) = self.tunnels.get_mut(index).map(|live| live.take_traffic(now)) else { return };
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
            Decision::Probe => self.paths(now).probe(&tunnel),
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
}

/// By default, no flow times out faster than this.
const HOUSEKEEPING_INTERVAL: Duration = Duration::from_secs(180);

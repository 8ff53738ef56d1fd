//! Tunnels that are kept although nobody uses them, so that the first packet to a peer waits for no handshake.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::Node;
use super::timer::Due;
use crate::config::MAX_KEPT;
use crate::tunnel::Tunnel;
use crate::wire::header::MessageType;

/// Peers with a group whose tunnels are kept. That a peer is one of them is known once there was a tunnel to it.
#[derive(Debug, Default)]
pub(super) struct Warm {
    /// By first overlay address, with the time at which there last was a tunnel.
    members: BTreeMap<IpAddr, Instant>,
}

impl Warm {
    /// Remembers a member. There is no room for more than [`MAX_KEPT`].
    fn note(&mut self, now: Instant, peer: IpAddr) {
        if self.members.len() < MAX_KEPT || self.members.contains_key(&peer) {
            self.members.insert(peer, now);
        }
    }

    fn forget_missing(&mut self, now: Instant) {
        self.members.retain(|_, seen| now < *seen + FORGET_AFTER);
    }
}

impl Node {
    /// The setting changed, or the node starts.
    pub(super) fn apply_kept(&mut self, now: Instant) {
        self.warm = Warm::default();
        if self.config.keep.is_empty() {
            self.timer.cancel(Due::Warm);
            return;
        }
        let members: Vec<_> = self.tunnels.iter().filter_map(|live| self.member(&live.tunnel)).collect();
        for peer in members {
            self.warm.note(now, peer);
        }
        self.timer.set(Due::Warm, now);
    }

    /// There is a new tunnel.
    pub(super) fn note_kept(&mut self, now: Instant, tunnel: &Tunnel) {
        if let Some(peer) = self.member(tunnel) {
            self.warm.note(now, peer);
        }
    }

    /// A tunnel is gone that may have been the last one to its peer.
    pub(super) fn renew_kept(&mut self, peer: &[IpAddr]) {
        if peer.iter().any(|address| self.kept().contains(address)) {
            self.timer.set_on_grid(Due::Warm, self.now + RENEW_AFTER);
        }
    }

    /// Makes the tunnels that are missing, and tests those that nobody uses: a peer may be gone without a word.
    pub(super) fn keep_warm(&mut self, now: Instant) {
        for peer in self.kept() {
            let Some(tunnel) = self.forwarder.tunnels().by_address(peer) else {
                self.connect(now, peer);
                continue;
            };
            self.note_kept(now, &tunnel);
            let is_idle = self.tunnels.get(tunnel.local_index).is_some_and(|live| now >= live.used + IDLE_AFTER);
            if is_idle {
                self.outbox.message(&tunnel, MessageType::TestRequest, &[]);
            }
        }
        self.warm.forget_missing(now);
        if !self.config.keep.is_empty() {
            self.timer.set_on_grid(Due::Warm, now + INTERVAL);
        }
    }

    /// The peers whose tunnels are kept: those that are named first.
    fn kept(&self) -> Vec<IpAddr> {
        let named = self.config.keep.peers.iter().filter(|peer| !self.config.is_own_address(**peer));
        let members = self.warm.members.keys().filter(|peer| !self.config.keep.peers.contains(peer));
        named.chain(members).take(MAX_KEPT).copied().collect()
    }

    /// The first address of a peer that has a group whose tunnels are kept.
    fn member(&self, tunnel: &Tunnel) -> Option<IpAddr> {
        let groups = &self.config.keep.groups;
        let is_member = tunnel.peer.groups().iter().any(|group| groups.contains(group));
        tunnel.peer_addresses.first().copied().filter(|_| is_member)
    }
}

/// A kept tunnel costs two test requests and their answers a minute, as long as nobody uses it.
const INTERVAL: Duration = Duration::from_secs(30);
/// A tunnel without traffic for so long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(20);
/// The peer may only be restarting.
const RENEW_AFTER: Duration = Duration::from_secs(1);
/// Members of a group that were missing for so long are no longer called.
const FORGET_AFTER: Duration = Duration::from_secs(3600);

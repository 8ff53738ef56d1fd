//! Key confirmation: when a tunnel that this node answered takes the place of another.
//!
//! Anybody can send a copy of a first message, or one in the name of another: only what follows shows who it was. So while
//! a tunnel to the peer is in use, a new one that this node answered only receives, until something authenticated arrives in
//! it. A test provokes that, because a peer that has nothing to say uses the new tunnel all the same.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Node;
use super::timer::Due;
use crate::tunnel::{LocalIndex, Tunnel};
use crate::wire::header::MessageType;

impl Node {
    /// Whether a new tunnel may not carry packets yet.
    pub(super) fn must_wait(&self, tunnel: &Tunnel) -> bool {
        !tunnel.is_confirmed() && tunnel.peer_addresses.iter().any(|address| self.is_reachable(*address))
    }

    /// Whether the peer has yet to show that it has the keys, before this tunnel can be the primary one.
    pub(super) fn is_waiting(&self, tunnel: &Arc<Tunnel>) -> bool {
        !tunnel.is_confirmed() && !self.is_primary(tunnel)
    }

    /// Gives the peer a moment to be heard by itself: a caller mostly has something to say, and a test that overtakes the second
    /// message finds no tunnel.
    pub(super) fn await_confirmation(&mut self, now: Instant, index: LocalIndex) {
        self.timer.set(Due::Tunnel(index), now + MOMENT);
    }

    /// Sends a test into a tunnel that waits, and again after ever longer pauses. `false`: no more of them.
    pub(super) fn ask_to_confirm(&mut self, now: Instant, index: LocalIndex) -> bool {
        let waiting = self.tunnels.get(index).map(|live| &live.tunnel).filter(|tunnel| self.is_waiting(tunnel));
        let Some(tunnel) = waiting.map(Arc::clone) else { return false };
        let opening = self.tunnels.get_mut(index).and_then(|live| live.opening.as_mut());
        let Some(opening) = opening.filter(|opening| opening.asked < MOST_TESTS) else { return false };
        let pause = FIRST_PAUSE * (1 << opening.asked);
        opening.asked += 1;
        self.send(&tunnel, MessageType::TestRequest, &[]);
        self.timer.set(Due::Tunnel(index), now + pause);
        true
    }

    /// The peer was heard in a tunnel that this node answered.
    pub(super) fn handle_confirmed(&mut self, now: Instant, index: LocalIndex) {
        let Some(tunnel) = self.tunnels.get(index).map(|live| Arc::clone(&live.tunnel)) else { return };
        if !tunnel.confirm() || self.is_primary(&tunnel) {
            return;
        }
        self.timer.set(Due::Tunnel(index), self.coalesced(now + self.config.timers.connection_alive_interval));
        if self.is_newer_than_primary(&tunnel) {
            self.forwarder.tunnels().set_primary(&tunnel);
        }
        let relay = if tunnel.endpoint().is_none() { self.relay_of(&tunnel) } else { None };
        self.put_to_use(now, &tunnel, relay);
    }

    /// What was made later is what the peer uses; a primary tunnel in which nobody was heard proves nothing.
    fn is_newer_than_primary(&self, tunnel: &Tunnel) -> bool {
        let Some(&peer) = tunnel.peer_addresses.first() else { return false };
        let Some(primary) = self.forwarder.tunnels().by_address(peer) else { return true };
        let age = |index| self.tunnels.of_peer(peer).iter().position(|other| *other == index);
        !primary.is_confirmed() || age(primary.local_index) < age(tunnel.local_index)
    }

    /// A tunnel that has to go because there are too many to this peer: never the newest one, nor that in use, and first
    /// those that nobody confirmed.
    pub(super) fn surplus(&self, peer: IpAddr) -> Option<LocalIndex> {
        let (_newest, older) = self.tunnels.of_peer(peer).split_last()?;
        if older.len() < MOST_TUNNELS {
            return None;
        }
        let spare = || {
            older.iter().filter_map(|index| Some(&self.tunnels.get(*index)?.tunnel)).filter(|it| !self.is_primary(it))
        };
        let surplus = spare().find(|tunnel| !tunnel.is_confirmed()).or_else(|| spare().next());
        surplus.map(|tunnel| tunnel.local_index)
    }
}

const MOST_TUNNELS: usize = 5;
/// After these the traffic check decides.
const MOST_TESTS: u32 = 5;
const MOMENT: Duration = Duration::from_millis(10);
const FIRST_PAUSE: Duration = Duration::from_millis(100);

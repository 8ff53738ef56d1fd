//! The handshakes with the peers of an earlier process: the most recently active ones first, at a bounded rate.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Peers that still need a handshake.
#[derive(Debug, Default)]
pub(super) struct Reconnects {
    peers: VecDeque<IpAddr>,
    next: Option<Instant>,
}

impl Reconnects {
    /// Reconnects these peers, the first ones at once.
    pub(super) fn new(now: Instant, peers: Vec<IpAddr>) -> Self {
        Self { next: (!peers.is_empty()).then_some(now), peers: peers.into() }
    }

    /// When to call [`Reconnects::take`].
    pub(super) fn due(&self) -> Option<Instant> {
        self.next
    }

    /// The peers to begin a handshake with now; there is room for at most `room` handshakes.
    pub(super) fn take(&mut self, now: Instant, room: usize) -> Vec<IpAddr> {
        if self.next.is_none_or(|next| now < next) {
            return Vec::new();
        }
        let count = HANDSHAKES_PER_STEP.min(room).min(self.peers.len());
        let taken = self.peers.drain(..count).collect();
        self.next = (!self.peers.is_empty()).then_some(now + STEP);
        taken
    }
}

/// A first message takes about a tenth of a millisecond to make, so this is less than a third of a processor, and
/// leaves time for packets and for what peers answer.
const HANDSHAKES_PER_STEP: usize = 32;
const STEP: Duration = Duration::from_millis(10);

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn peers_come_in_their_order_some_at_a_time_and_only_while_there_is_room() {
        let start = base();
        let peers: Vec<IpAddr> = (0..200_u32).map(|n| IpAddr::from(n.to_be_bytes())).collect();
        let mut reconnects = Reconnects::new(start, peers.clone());
        assert_eq!(reconnects.take(start, 1000), peers[..HANDSHAKES_PER_STEP]);
        assert_eq!(reconnects.take(start, 1000), [] as [IpAddr; 0], "not so soon");
        assert_eq!(reconnects.due(), Some(start + STEP));
        assert_eq!(reconnects.take(start + STEP, 0), [] as [IpAddr; 0], "no room");
        assert_eq!(reconnects.take(start + 2 * STEP, 5), peers[HANDSHAKES_PER_STEP..HANDSHAKES_PER_STEP + 5]);
        let mut now = start + 2 * STEP;
        let mut rest = Vec::new();
        while let Some(due) = reconnects.due() {
            now = due;
            rest.extend(reconnects.take(now, 1000));
        }
        assert_eq!(rest, peers[HANDSHAKES_PER_STEP + 5..]);
        assert_eq!(now, start + 8 * STEP);
    }
}

//! Schedules hole punches (RFC 5128) when a lighthouse says that a peer is about to connect.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use crate::buckets::{Buckets, SLOTS};

/// Body of a punch that a lighthouse asked for.
pub(crate) const PUNCH: &[u8] = &[0];
/// Body of a punch that keeps a NAT mapping open.
pub(crate) const KEEPALIVE: &[u8] = &[1];

/// An action that is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    /// Send [`PUNCH`] to each.
    Punch(Vec<SocketAddr>),
    /// Send a test request to this peer, through a new tunnel if there is none.
    Respond(IpAddr),
}

/// Hole punches that wait for their delay. Bounded, so that a lighthouse cannot make it grow without limit.
#[derive(Debug)]
pub(crate) struct HolePunch {
    waiting: BTreeMap<(Instant, u64), Action>,
    order: u64,
    /// Punches towards each address.
    sent: Buckets,
}

impl HolePunch {
    /// `key` is random.
    pub(crate) fn new(now: Instant, key: u64) -> Self {
        let sent = Buckets::new(PUNCHES_PER_ADDRESS, PUNCHES_PER_SECOND, SLOTS, now, key);
        Self { waiting: BTreeMap::new(), order: 0, sent }
    }

    /// Whether one more punch may go to this address, however many members name it.
    pub(crate) fn may_punch(&mut self, now: Instant, address: IpAddr) -> bool {
        self.sent.take(now, address, 1)
    }

    /// Schedules `action`, or drops it if too many are waiting already.
    pub(crate) fn schedule(&mut self, at: Instant, action: Action) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.insert((at, self.order), action);
            self.order += 1;
        }
    }

    /// Takes one action that is due.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Action> {
        let entry = self.waiting.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn next(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((at, _), _)| *at)
    }
}

// With the default delay of one second, this is more peers per second than a host can answer with handshakes anyway.
const MAX_WAITING: usize = 1024;
/// All peers that may wait, behind one router; and how many more each second.
const PUNCHES_PER_ADDRESS: u32 = 1024;
const PUNCHES_PER_SECOND: u32 = 32;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_punch_waits_for_its_delay() {
        let start = base();
        let mut punches = HolePunch::new(start, 1);
        let peer: IpAddr = "10.1.0.2".parse().unwrap();
        punches.schedule(start + Duration::from_secs(5), Action::Respond(peer));
        punches.schedule(start + Duration::from_secs(1), Action::Punch(Vec::new()));
        assert_eq!(punches.pop(start), None);
        assert_eq!(punches.next(), Some(start + Duration::from_secs(1)));
        assert_eq!(punches.pop(start + Duration::from_secs(1)), Some(Action::Punch(Vec::new())));
        assert_eq!(punches.pop(start + Duration::from_secs(1)), None);
        assert_eq!(punches.pop(start + Duration::from_secs(9)), Some(Action::Respond(peer)));
    }

    #[test]
    fn the_number_of_waiting_punches_is_bounded() {
        let start = base();
        let mut punches = HolePunch::new(start, 1);
        for _ in 0..2 * MAX_WAITING {
            punches.schedule(start, Action::Punch(Vec::new()));
        }
        assert_eq!(std::iter::from_fn(|| punches.pop(start)).count(), MAX_WAITING);
    }
}

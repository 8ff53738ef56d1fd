//! Schedules hole punches (RFC 5128) when a lighthouse says that a peer is about to connect.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

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
#[derive(Debug, Default)]
pub(crate) struct HolePunch {
    waiting: BTreeMap<(Instant, u64), Action>,
    order: u64,
}

impl HolePunch {
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
        let mut punches = HolePunch::default();
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
        let mut punches = HolePunch::default();
        for _ in 0..2 * MAX_WAITING {
            punches.schedule(start, Action::Punch(Vec::new()));
        }
        assert_eq!(std::iter::from_fn(|| punches.pop(start)).count(), MAX_WAITING);
    }
}

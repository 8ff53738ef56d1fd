//! When to look for a direct path to the peer of a relayed tunnel, and for a second relay.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// What was tried for a relayed tunnel that is in use. Each kind of attempt has exponential backoff.
#[derive(Debug, Default)]
pub(super) struct Relayed {
    direct: Backoff,
    /// Where the peer was tried.
    tried: Vec<SocketAddr>,
    /// The endpoints are tried once more: the lighthouses were asked, so the peer punches meanwhile.
    again: bool,
    second: Backoff,
    /// Relays that were usable at the last look.
    relays: usize,
}

/// Pauses between attempts, each twice as long as the one before.
#[derive(Debug, Default)]
struct Backoff {
    attempts: u32,
    next: Option<Instant>,
}

impl Relayed {
    /// Whether to try these endpoints of the peer now, and if so, whether to ask the lighthouses for more.
    pub(super) fn try_direct(&mut self, now: Instant, endpoints: &[SocketAddr]) -> Option<bool> {
        if self.tried != endpoints {
            self.tried = endpoints.to_vec();
            self.direct = Backoff::default();
        }
        if self.direct.is_due(now) {
            self.again = true;
            return Some(true);
        }
        std::mem::take(&mut self.again).then_some(false)
    }

    /// There is a sign of a direct path.
    pub(super) fn hope(&mut self) {
        self.direct = Backoff::default();
    }

    /// Whether to request a hop by another relay now. `relays` are usable.
    pub(super) fn try_second(&mut self, now: Instant, relays: usize) -> bool {
        if relays < self.relays {
            self.second = Backoff::default();
        }
        self.relays = relays;
        relays < 2 && self.second.is_due(now)
    }

    /// The peer has other relays than before.
    pub(super) fn other_relays(&mut self) {
        self.second = Backoff::default();
    }
}

impl Backoff {
    /// Returns whether an attempt is due. It counts as made then.
    fn is_due(&mut self, now: Instant) -> bool {
        if self.next.is_some_and(|next| now < next) {
            return false;
        }
        let pause = FIRST_PAUSE.saturating_mul(1 << self.attempts.min(8)).min(MAX_PAUSE);
        self.attempts = self.attempts.saturating_add(1);
        // Checks of a tunnel are on a grid, so the next one may come a little early.
        self.next = Some(now + pause - GRID);
        true
    }
}

const FIRST_PAUSE: Duration = Duration::from_secs(5);
const MAX_PAUSE: Duration = Duration::from_secs(300);
const GRID: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    fn endpoint(port: u16) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, 1], port))
    }

    /// The seconds at which endpoints are tried in `time`, if a check comes every five.
    fn tries(relayed: &mut Relayed, from: Instant, time: u64, at: &[SocketAddr]) -> Vec<u64> {
        (0..time).step_by(5).filter(|n| relayed.try_direct(from + *n as u32 * SECOND, at).is_some()).collect()
    }

    #[test]
    fn a_direct_path_is_tried_less_and_less_often_and_twice_each_time() {
        let mut relayed = Relayed::default();
        let at = tries(&mut relayed, base(), 1800, &[endpoint(1)]);
        assert_eq!(at[..11], [0, 5, 10, 15, 20, 35, 40, 75, 80, 155, 160], "{at:?}");
        assert!(at.len() <= 22, "{at:?}");
        let pauses = at.windows(2).map(|two| two[1] - two[0]);
        assert_eq!(pauses.max(), Some(295), "{at:?}");
    }

    #[test]
    fn it_is_tried_at_once_where_the_peer_is_somewhere_else_or_was_heard() {
        let (mut relayed, start) = (Relayed::default(), base());
        tries(&mut relayed, start, 600, &[endpoint(1)]);
        let mut now = start + 601 * SECOND;
        while relayed.try_direct(now, &[endpoint(1)]).is_some() {
            now += SECOND;
        }
        assert!(relayed.try_direct(now, &[endpoint(2)]).is_some());
        assert!(relayed.try_direct(now, &[endpoint(2)]).is_some(), "once more");
        assert!(relayed.try_direct(now, &[endpoint(2)]).is_none());
        relayed.hope();
        assert!(relayed.try_direct(now, &[endpoint(2)]).is_some());
    }

    #[test]
    fn a_second_relay_is_sought_at_once_where_one_is_lost_and_less_and_less_often_where_there_is_none() {
        let (mut relayed, start) = (Relayed::default(), base());
        assert!(!relayed.try_second(start, 2));
        assert!(relayed.try_second(start, 1));
        assert!(!relayed.try_second(start, 1));
        let more = (0..600).step_by(5).filter(|n| relayed.try_second(start + *n * SECOND, 1)).count();
        assert!((5..=8).contains(&more), "{more}");
        let end = start + 600 * SECOND;
        assert!(!relayed.try_second(end, 1));
        relayed.other_relays();
        assert!(relayed.try_second(end, 1));
        assert!(relayed.try_second(end, 0), "another one is lost");
    }
}

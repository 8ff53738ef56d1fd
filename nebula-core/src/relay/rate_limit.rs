//! Rate limit on the handshakes that a peer may cause by asking for relays.

use std::time::{Duration, Instant};

/// Allows a fixed number of handshakes per time interval.
#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    since: Option<Instant>,
    taken: u32,
}

impl RateLimit {
    /// Takes one; false if there is none left.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now >= since + INTERVAL) {
            (self.since, self.taken) = (Some(now), 0);
        }
        self.taken += 1;
        self.taken <= MAX_PER_INTERVAL
    }
}

// A handshake that nobody answers is given up after about this interval, so about this many are in flight at most.
const INTERVAL: Duration = Duration::from_secs(5);
const MAX_PER_INTERVAL: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn what_is_used_up_comes_back_with_time() {
        let now = Instant::now();
        let mut limit = RateLimit::default();
        assert_eq!((0..100).filter(|_| limit.take(now)).count(), MAX_PER_INTERVAL as usize);
        assert!(!limit.take(now + INTERVAL / 2));
        assert!(limit.take(now + INTERVAL));
    }
}

//! How many handshakes with strangers a peer may cause by asking for relays.

use std::time::{Duration, Instant};

/// A number per time span. Holds nothing but what was taken.
#[derive(Debug, Default)]
pub(crate) struct Allowance {
    since: Option<Instant>,
    taken: u32,
}

impl Allowance {
    /// Takes one; false if there is none left.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now >= since + SPAN) {
            (self.since, self.taken) = (Some(now), 0);
        }
        self.taken += 1;
        self.taken <= PER_SPAN
    }
}

// A handshake that nobody answers is given up after about as long, so this many are under way at most.
const SPAN: Duration = Duration::from_secs(5);
const PER_SPAN: u32 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn what_is_used_up_comes_back_with_time() {
        let now = Instant::now();
        let mut allowance = Allowance::default();
        assert_eq!((0..100).filter(|_| allowance.take(now)).count(), PER_SPAN as usize);
        assert!(!allowance.take(now + SPAN / 2));
        assert!(allowance.take(now + SPAN));
    }
}

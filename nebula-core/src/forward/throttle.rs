//! Limits how often a lane tells the control plane the same thing.

use std::time::{Duration, Instant};

/// Lets each key through once per `INTERVAL_MS` milliseconds, and no more than `MAX_KEYS` different keys in that time.
#[derive(Debug)]
pub(super) struct Throttle<K, const INTERVAL_MS: u64, const MAX_KEYS: usize>(Vec<(K, Instant)>);

impl<K, const INTERVAL_MS: u64, const MAX_KEYS: usize> Default for Throttle<K, INTERVAL_MS, MAX_KEYS> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq, const INTERVAL_MS: u64, const MAX_KEYS: usize> Throttle<K, INTERVAL_MS, MAX_KEYS> {
    /// Whether `key` may pass. A key that passed is refused until the interval is over.
    pub(super) fn admits(&mut self, key: K, now: Instant) -> bool {
        self.0.retain(|(_, passed)| now < *passed + Duration::from_millis(INTERVAL_MS));
        let admitted = self.0.len() < MAX_KEYS && self.0.iter().all(|(recent, _)| *recent != key);
        if admitted {
            self.0.push((key, now));
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn a_key_passes_once_per_interval_and_the_number_of_keys_is_bounded() {
        let (mut throttle, start) = (Throttle::<u8, 100, 2>::default(), Instant::now());
        assert_eq!([1, 1, 2, 3].map(|key| throttle.admits(key, start)), [true, false, true, false]);
        assert!(!throttle.admits(1, start + Duration::from_millis(99)));
        assert!(throttle.admits(3, start + Duration::from_millis(100)));
    }
}

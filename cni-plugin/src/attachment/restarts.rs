//! Backoff for the restarts of one instance. It is kept in the record, so that the plugin, its timer and the node agent
//! share it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The restarts of an instance in a row, each soon after the one before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// How many there were.
    pub count: u32,
    /// When the last one was, in seconds since 1970.
    pub last: i64,
}

impl Restarts {
    /// Whether a dead instance may be restarted at `now` (seconds since 1970).
    #[must_use]
    pub fn is_due(self, now: i64) -> bool {
        // After the clock was set back, `last` says nothing.
        now < self.last || now - self.last >= self.wait()
    }

    /// These restarts and one more at `now`. If the instance had lived for a while, the count starts over.
    #[must_use]
    pub fn and_one(self, now: i64) -> Self {
        let was_calm = now < self.last || now - self.last >= self.wait() + CALM_SECONDS;
        Self { count: if was_calm { 1 } else { self.count.saturating_add(1) }, last: now }
    }

    /// The delay after the last restart before the next one.
    #[must_use]
    pub fn delay(self) -> Duration {
        Duration::from_secs(self.wait().unsigned_abs())
    }

    /// Whether the instance keeps dying soon after its start.
    #[must_use]
    pub fn is_crash_loop(self) -> bool {
        self.count > FREE
    }

    fn wait(self) -> i64 {
        match self.count.checked_sub(FREE) {
            None => 0,
            Some(step) => (1 << step.min(30)).min(MAX_SECONDS),
        }
    }
}

/// So many restarts are made at once: a process that was killed a few times does not loop.
const FREE: u32 = 5;
const MAX_SECONDS: i64 = 300;
// Longer than the interval at which the node agent looks for dead instances, which would otherwise seem to have lived
// all that time.
const CALM_SECONDS: i64 = 60;

#[cfg(test)]
mod tests {
    use super::*;

    /// When an instance that always dies at once is restarted, if somebody looks every `interval` seconds.
    fn times(interval: i64, until: i64) -> Vec<i64> {
        let mut restarts = Restarts { count: 0, last: 1000 };
        let mut times = Vec::new();
        for now in (1000..1000 + until).step_by(usize::try_from(interval).unwrap()) {
            if restarts.is_due(now) {
                restarts = restarts.and_one(now);
                times.push(now - 1000);
            }
        }
        times
    }

    #[test]
    fn a_crash_loop_slows_down_to_one_start_in_five_minutes() {
        let times = times(1, 3600);
        assert_eq!(times[..10], [0, 1, 2, 3, 4, 5, 7, 11, 19, 35]);
        assert_eq!(times.last_chunk().map(|[a, b]| b - a), Some(300));
        assert!(times.len() < 25, "{times:?}");
    }

    #[test]
    fn who_looks_only_every_half_minute_slows_down_too() {
        let times = times(30, 7200);
        assert_eq!(times.last_chunk().map(|[a, b]| b - a), Some(300), "{times:?}");
    }

    #[test]
    fn an_instance_that_lived_is_restarted_at_once_and_so_is_one_whose_clock_was_set_back() {
        let looping = Restarts { count: 9, last: 1000 };
        assert!(looping.is_crash_loop() && !looping.is_due(1015) && looping.is_due(1016));
        assert_eq!(looping.delay(), Duration::from_secs(16));
        assert_eq!(looping.and_one(1016).count, 10);
        assert_eq!(looping.and_one(1076), Restarts { count: 1, last: 1076 });
        assert!(looping.is_due(999));
        assert_eq!(looping.and_one(999).count, 1);
        assert!(!Restarts { count: u32::MAX, last: 0 }.is_due(299));
    }
}

//! How long an exporter waits after failures in a row: exponential backoff with jitter, and no less than the collector
//! asks for.

use std::time::Duration;

/// Failures in a row.
#[derive(Debug, Default)]
pub(super) struct Pauses(u32);

impl Pauses {
    /// The pause after a failure. `random` spreads the agents of all nodes, which lose a collector at once.
    pub(super) fn failed(&mut self, retry_after: Option<Duration>, random: u64) -> Duration {
        let backoff = (FIRST * 2_u32.pow(self.0.min(8))).min(LONGEST);
        self.0 = self.0.saturating_add(1);
        // From a half of it to the whole.
        let jitter = u32::try_from(random % 1024).unwrap_or_default();
        let pause = backoff / 2 + backoff / 2 * jitter / 1024;
        match retry_after.map(|after| after.min(LONGEST_ASKED)) {
            Some(after) if after > pause => after + after / 8 * jitter / 1024,
            _ => pause,
        }
    }

    pub(super) fn succeeded(&mut self) {
        self.0 = 0;
    }
}

const FIRST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(60);
/// A collector that asks for a year gets this.
const LONGEST_ASKED: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute_and_no_two_agents_wait_alike() {
        let mut pauses = Pauses::default();
        let mut last = Duration::ZERO;
        for _ in 0..6 {
            let pause = pauses.failed(None, 1023);
            assert!(pause > last, "{pause:?} after {last:?}");
            last = pause;
        }
        for random in 0..3000 {
            let pause = pauses.failed(None, random);
            assert!((LONGEST / 2..=LONGEST).contains(&pause), "{pause:?}");
        }
        assert!(pauses.failed(None, 0) < pauses.failed(None, 512));
        pauses.succeeded();
        assert!(pauses.failed(None, 1023) <= FIRST);
    }

    #[test]
    fn what_the_collector_asks_for_is_kept_within_a_bound() {
        let mut pauses = Pauses::default();
        let asked = |seconds| Some(Duration::from_secs(seconds));
        assert!(pauses.failed(asked(30), 0) >= Duration::from_secs(30));
        assert!(pauses.failed(asked(u64::MAX), 1023) <= LONGEST_ASKED + LONGEST_ASKED / 8);
        assert!(pauses.failed(asked(0), 0) >= FIRST / 2, "it cannot ask for no pause");
    }
}

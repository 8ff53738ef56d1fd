//! Decides when the memory that a burst of traffic touched goes back to the system.

use std::time::{Duration, Instant};

// Less than this touches a handful of pages, which are not worth a wake-up.
const HEAVY: usize = 16 << 10;
// Long enough that a pause within a transfer does not cost the page faults of a new start.
const KEEP: Duration = Duration::from_secs(10);

/// Remembers the last burst.
#[derive(Debug, Default)]
pub(super) struct Warmth {
    last_burst: Option<Instant>,
}

impl Warmth {
    /// Notes `bytes` handled in one turn.
    pub(super) fn note(&mut self, now: Instant, bytes: usize) {
        if bytes >= HEAVY {
            self.last_burst = Some(now);
        }
    }

    /// How long to wait before asking [`Warmth::cooled`]; `None`: there is nothing to give back.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.last_burst.map(|at| (at + KEEP).saturating_duration_since(now))
    }

    /// `true` once when the last burst is long enough ago.
    pub(super) fn cooled(&mut self, now: Instant) -> bool {
        self.last_burst.take_if(|at| now >= *at + KEEP).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_once_after_a_burst_and_not_for_thin_traffic() {
        let start = super::super::clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut warmth = Warmth::default();
        warmth.note(at(0), 100);
        assert_eq!(warmth.timeout(at(0)), None);
        warmth.note(at(1), 60_000);
        warmth.note(at(5), 100);
        assert_eq!(warmth.timeout(at(6)), Some(Duration::from_secs(5)));
        assert!(!warmth.cooled(at(10)));
        assert!(warmth.cooled(at(11)));
        assert!(!warmth.cooled(at(30)));
        assert_eq!(warmth.timeout(at(30)), None);
    }
}

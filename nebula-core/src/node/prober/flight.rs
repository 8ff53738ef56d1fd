//! The probe that is under way to one target, and how many were lost in a row.

use std::time::{Duration, Instant};

/// At most one probe at a time is under way.
#[derive(Debug, Clone, Default)]
pub(in crate::node) struct Flight {
    /// Its number.
    awaited: Option<u32>,
    /// When it, or the last one, was sent.
    sent_at: Option<Instant>,
    missed: u32,
}

impl Flight {
    pub(in crate::node) fn awaited(&self) -> Option<u32> {
        self.awaited
    }

    pub(in crate::node) fn sent_at(&self) -> Option<Instant> {
        self.sent_at
    }

    /// Probes lost since the last answer.
    pub(in crate::node) fn missed(&self) -> u32 {
        self.missed
    }

    /// Whether an answer is missing, or may be.
    pub(in crate::node) fn is_unanswered(&self) -> bool {
        self.awaited.is_some() || self.missed > 0
    }

    pub(in crate::node) fn sent(&mut self, now: Instant, number: u32) {
        (self.awaited, self.sent_at) = (Some(number), Some(now));
    }

    /// The answer to the probe with this number. Returns how long it took, if that probe is under way.
    pub(in crate::node) fn answered(&mut self, now: Instant, number: u32) -> Option<Duration> {
        self.awaited.take_if(|awaited| *awaited == number)?;
        self.missed = 0;
        Some(now.saturating_duration_since(self.sent_at?))
    }

    /// Gives up the probe under way. Returns whether there was one.
    pub(in crate::node) fn lose(&mut self) -> bool {
        let was_awaited = self.awaited.take().is_some();
        self.missed = self.missed.saturating_add(was_awaited.into());
        was_awaited
    }

    /// What becomes of the probe under way says nothing any more.
    pub(in crate::node) fn forget(&mut self) {
        self.awaited = None;
    }
}

/// How long an answer may take.
#[derive(Debug, Clone, Copy)]
pub(in crate::node) struct Patience {
    pub(in crate::node) least: Duration,
    /// Also where nothing is known about the target.
    pub(in crate::node) most: Duration,
}

impl Patience {
    /// Twice the usual round trip, and a little more.
    pub(in crate::node) fn of(self, usual: Option<Duration>) -> Duration {
        usual.map_or(self.most, |usual| (usual * 2 + self.least / 2).clamp(self.least, self.most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn only_the_answer_to_the_probe_under_way_counts_and_only_once() {
        let (mut flight, start) = (Flight::default(), base());
        flight.sent(start, 7);
        assert_eq!(flight.answered(start + MS, 6), None);
        assert_eq!(flight.answered(start + MS, 7), Some(MS));
        assert_eq!(flight.answered(start + MS, 7), None);
        assert!(!flight.is_unanswered());
    }

    #[test]
    fn losses_are_counted_until_an_answer_and_a_forgotten_probe_is_none() {
        let (mut flight, start) = (Flight::default(), base());
        assert!(!flight.lose() && !flight.is_unanswered());
        for number in 0..3 {
            flight.sent(start, number);
            assert!(flight.lose());
        }
        flight.sent(start, 3);
        flight.forget();
        assert!(!flight.lose() && flight.is_unanswered());
        assert_eq!((flight.missed(), flight.answered(start, 3)), (3, None));
        flight.sent(start, 4);
        flight.answered(start, 4);
        assert_eq!(flight.missed(), 0);
    }

    #[test]
    fn patience_follows_the_round_trip_between_its_bounds() {
        let patience = Patience { least: 50 * MS, most: 1000 * MS };
        let cases = [(None, 1000), (Some(1), 50), (Some(100), 225), (Some(900), 1000)];
        for (usual, expected) in cases {
            assert_eq!(patience.of(usual.map(|usual| usual * MS)), expected * MS);
        }
    }
}

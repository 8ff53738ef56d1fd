//! What test requests to one relay say about the way there.

use std::time::{Duration, Instant};

use crate::node::prober::{Patience, Prober, SILENT};

/// The latest probes of one relay. Sends nothing: it says when the next probe is due.
#[derive(Debug)]
pub(super) struct Gauge {
    prober: Prober,
    is_lossy: bool,
    /// Quick probes left after a loss, and when they began.
    burst: (u32, Option<Instant>),
}

impl Default for Gauge {
    fn default() -> Self {
        Self { prober: Prober::new(PATIENCE), is_lossy: false, burst: (0, None) }
    }
}

impl Gauge {
    /// The median of the last round trips; `None` if there is none.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.prober.round_trip()
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(super) fn loss(&self) -> Option<u32> {
        self.prober.loss()
    }

    /// Many of the last probes were lost.
    pub(super) fn is_lossy(&self) -> bool {
        self.is_lossy
    }

    /// It does not answer any more.
    pub(super) fn is_silent(&self) -> bool {
        self.prober.is_silent()
    }

    /// It was probed often enough to be compared with others.
    pub(super) fn is_trusted(&self) -> bool {
        let has_many_outcomes = self.prober.outcomes() >= u8::BITS;
        self.prober.is_known() || has_many_outcomes && self.prober.round_trips() > 0
    }

    /// Forgets everything but the round trip and the loss, before a new series of probes.
    pub(super) fn restart(&mut self) {
        self.prober.restart();
        self.burst = (0, None);
    }

    pub(super) fn probed(&mut self, now: Instant, number: u32) {
        self.prober.probed(now, number);
        self.burst.0 = self.burst.0.saturating_sub(1);
    }

    /// Returns whether this answers the probe under way.
    pub(super) fn answered(&mut self, now: Instant, number: u32) -> bool {
        let is_answer = self.prober.answered(now, number);
        if is_answer {
            self.judge_loss();
        }
        is_answer
    }

    /// The number of the probe under way.
    pub(super) fn awaited(&self) -> Option<u32> {
        self.prober.awaited()
    }

    /// Counts a probe as lost if its answer is overdue.
    pub(super) fn expire(&mut self, now: Instant) {
        if !self.prober.expire(now) {
            return;
        }
        self.judge_loss();
        if self.burst.1.is_none_or(|at| now >= at + BURST_EVERY) {
            self.burst = (BURST, Some(now));
        }
    }

    fn judge_loss(&mut self) {
        let lost = self.prober.lost_among(WINDOW);
        self.is_lossy = if self.is_lossy { lost > 1 } else { lost >= 3 };
    }

    /// When the next probe is due, or when the one under way counts as lost.
    pub(super) fn next(&self, now: Instant) -> Instant {
        self.prober.next(now, self.pause())
    }

    /// Whether to send a probe at this time.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.prober.is_due(now, self.pause())
    }

    fn pause(&self) -> Duration {
        match (self.prober.missed(), self.burst.0) {
            _ if self.prober.outcomes() < FIRST_PROBES => FIRST_PAUSE,
            (0, 0) => PROBE_EVERY,
            // A silent relay that is still used has no better one in its place.
            (missed, _) if missed > SILENT => PROBE_EVERY,
            _ => QUICK_PAUSE,
        }
    }
}

/// Losses count among so many probes.
const WINDOW: u32 = 6;
/// A relay that answers later is of little use.
const PATIENCE: Patience = Patience { least: Duration::from_secs(1), most: Duration::from_secs(1) };
/// Two datagrams each way in a minute. The tunnel needs them, too: they find out that the relay is gone.
const PROBE_EVERY: Duration = Duration::from_secs(30);
/// A new relay is measured at once.
const FIRST_PROBES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// After a loss, some probes follow quickly, so that loss is measured within a quarter of a minute; not more often
/// than this.
const BURST: u32 = 8;
const QUICK_PAUSE: Duration = Duration::from_secs(1);
const BURST_EVERY: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    /// Probes for `time`; the answers take `round_trip`, and those for which `is_lost` is true never come.
    fn run(gauge: &mut Gauge, from: Instant, time: Duration, is_lost: impl Fn(u32) -> bool) -> u32 {
        let (mut now, mut number) = (from, 0);
        while now < from + time {
            gauge.expire(now);
            if gauge.is_due(now) {
                gauge.probed(now, number);
                if !is_lost(number) {
                    gauge.answered(now + 20 * MS, number);
                }
                number += 1;
            }
            now += 100 * MS;
        }
        number
    }

    #[test]
    fn a_relay_that_answers_is_probed_twice_a_minute() {
        let mut gauge = Gauge::default();
        let probes = run(&mut gauge, base(), Duration::from_secs(600), |_| false);
        assert!((20..=24).contains(&probes), "{probes}");
        assert_eq!((gauge.round_trip(), gauge.loss()), (Some(20 * MS), Some(0)));
        assert!(gauge.is_trusted() && !gauge.is_lossy() && !gauge.is_silent());
    }

    #[test]
    fn silence_is_found_within_seconds_of_the_first_lost_probe_and_does_not_raise_the_rate_for_ever() {
        let (mut gauge, start) = (Gauge::default(), base());
        run(&mut gauge, start, Duration::from_secs(5), |_| false);
        run(&mut gauge, start + Duration::from_secs(60), Duration::from_secs(6), |_| true);
        assert!(gauge.is_silent());
        let probes = run(&mut gauge, start + Duration::from_secs(100), Duration::from_secs(600), |_| true);
        assert!(probes <= 50, "{probes} in ten minutes");
    }

    #[test]
    fn half_of_the_probes_lost_makes_a_lossy_relay_within_a_minute() {
        let (mut gauge, start) = (Gauge::default(), base());
        run(&mut gauge, start, Duration::from_secs(5), |_| false);
        run(&mut gauge, start + Duration::from_secs(60), Duration::from_secs(20), |n| n % 2 == 0);
        assert!(gauge.is_lossy());
        assert!(!gauge.is_silent());
    }

    #[test]
    fn only_the_answer_to_the_probe_under_way_counts() {
        let (mut gauge, start) = (Gauge::default(), base());
        gauge.probed(start, 7);
        assert!(!gauge.answered(start + MS, 6));
        assert!(gauge.answered(start + MS, 7));
        assert!(!gauge.answered(start + MS, 7));
        assert_eq!(gauge.round_trip(), Some(MS));
    }
}

//! What test requests to one relay say about the way there.

use std::time::{Duration, Instant};

use crate::node::samples::Samples;

/// The latest probes of one relay. Sends nothing: it says when the next probe is due.
#[derive(Debug, Default)]
pub(super) struct Gauge {
    /// The probe under way, and when it was sent.
    probe: Option<(u32, Instant)>,
    probed_at: Option<Instant>,
    samples: Samples,
    /// Probes lost since the last answer.
    missed: u32,
    is_lossy: bool,
    /// Quick probes left after a loss, and when they began.
    burst: (u32, Option<Instant>),
}

impl Gauge {
    /// The median of the last round trips; `None` if there is none.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.samples.round_trip()
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(super) fn loss(&self) -> Option<u32> {
        self.samples.loss()
    }

    /// Many of the last probes were lost.
    pub(super) fn is_lossy(&self) -> bool {
        self.is_lossy
    }

    /// It does not answer any more.
    pub(super) fn is_silent(&self) -> bool {
        self.missed >= SILENT
    }

    /// It was probed often enough to be compared with others.
    pub(super) fn is_trusted(&self) -> bool {
        let known = self.samples.round_trips();
        known >= TRUSTED || self.samples.outcomes() >= u8::BITS && known > 0
    }

    /// Forgets everything but the round trip and the loss, before a new series of probes.
    pub(super) fn restart(&mut self) {
        let mut samples = std::mem::take(&mut self.samples);
        samples.restart();
        *self = Self { samples, is_lossy: self.is_lossy, ..Self::default() };
    }

    pub(super) fn probed(&mut self, now: Instant, number: u32) {
        (self.probe, self.probed_at) = (Some((number, now)), Some(now));
        self.burst.0 = self.burst.0.saturating_sub(1);
    }

    /// Returns whether this answers the probe under way.
    pub(super) fn answered(&mut self, now: Instant, number: u32) -> bool {
        let Some((_, sent)) = self.probe.take_if(|(awaited, _)| *awaited == number) else { return false };
        self.samples.note_answer(now.saturating_duration_since(sent));
        self.missed = 0;
        self.judge_loss();
        true
    }

    /// The number of the probe under way.
    pub(super) fn awaited(&self) -> Option<u32> {
        self.probe.map(|(number, _)| number)
    }

    /// Counts a probe as lost if its answer is overdue.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.probe.take_if(|(_, sent)| now >= *sent + PATIENCE).is_none() {
            return;
        }
        self.missed += 1;
        self.samples.note_loss();
        self.judge_loss();
        if self.burst.1.is_none_or(|at| now >= at + BURST_EVERY) {
            self.burst = (BURST, Some(now));
        }
    }

    fn judge_loss(&mut self) {
        let lost = self.samples.lost_among(WINDOW);
        self.is_lossy = if self.is_lossy { lost > 1 } else { lost >= 3 };
    }

    /// When the next probe is due, or when the one under way counts as lost.
    pub(super) fn next(&self, now: Instant) -> Instant {
        let Some(last) = self.probed_at else { return now };
        if self.probe.is_some() {
            return last + PATIENCE;
        }
        let is_new = self.samples.outcomes() < FIRST_PROBES;
        last + if is_new { FIRST_PAUSE } else { self.pause() }
    }

    /// Whether to send a probe at this time.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.probe.is_none() && now >= self.next(now)
    }

    fn pause(&self) -> Duration {
        match (self.missed, self.burst.0) {
            (0, 0) => PROBE_EVERY,
            // A silent relay that is still used has no better one in its place.
            (missed, _) if missed > SILENT => PROBE_EVERY,
            _ => QUICK_PAUSE,
        }
    }
}

const TRUSTED: usize = 3;
/// Lost probes in a row after which a relay counts as dead.
const SILENT: u32 = 3;
/// Losses count among so many probes.
const WINDOW: u32 = 6;
/// A relay that answers later is of little use.
const PATIENCE: Duration = Duration::from_secs(1);
/// Two datagrams each way in a minute. The tunnel needs them, too: they find out that the relay is gone.
const PROBE_EVERY: Duration = Duration::from_secs(30);
/// A new relay is measured at once.
const FIRST_PROBES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// After a loss, some probes follow quickly, so that loss is measured within a quarter of a minute; not more often than this.
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

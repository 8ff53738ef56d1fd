//! What everything that probes shares: which probe is under way, which answer belongs to it, when it counts as lost,
//! and what the latest ones say about their target.
//!
//! The owners decide when to probe, and what follows from the outcome: the paths of a tunnel (`path_choice`), relays
//! (`relay_choice`), gateways (`gateways`), and the search for the size of a path (`path_mtu`). The last two need no
//! more than a [`Flight`]: gateways answer by any datagram, and of a size only the largest answer counts.

mod flight;
mod samples;

use std::time::{Duration, Instant};

pub(super) use self::flight::{Flight, Patience};
use self::samples::Samples;
pub(super) use self::samples::worth_a_change;

/// The latest probes of one target. Sends nothing.
#[derive(Debug)]
pub(super) struct Prober {
    patience: Patience,
    flight: Flight,
    samples: Samples,
}

impl Prober {
    pub(super) fn new(patience: Patience) -> Self {
        Self { patience, flight: Flight::default(), samples: Samples::default() }
    }

    /// The median of the last round trips; `None` if there is none.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        self.samples.round_trip()
    }

    pub(super) fn newest_round_trip(&self) -> Option<Duration> {
        self.samples.newest()
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(super) fn loss(&self) -> Option<u32> {
        self.samples.loss()
    }

    /// How many of so many last probes were lost; at most seven.
    pub(super) fn lost_among(&self, last: u32) -> u32 {
        self.samples.lost_among(last)
    }

    /// How many round trips are known, of the last five.
    pub(super) fn round_trips(&self) -> usize {
        self.samples.round_trips()
    }

    /// Number of probes that were answered or lost.
    pub(super) fn outcomes(&self) -> u32 {
        self.samples.outcomes()
    }

    /// Probes lost since the last answer.
    pub(super) fn missed(&self) -> u32 {
        self.flight.missed()
    }

    /// It does not answer any more, or never did.
    pub(super) fn is_silent(&self) -> bool {
        self.missed() >= SILENT
    }

    /// Enough round trips are known to compare it with others.
    pub(super) fn is_known(&self) -> bool {
        self.round_trips() >= ENOUGH
    }

    /// When the last probe was sent.
    pub(super) fn probed_at(&self) -> Option<Instant> {
        self.flight.sent_at()
    }

    /// The number of the probe under way.
    pub(super) fn awaited(&self) -> Option<u32> {
        self.flight.awaited()
    }

    /// A probe was sent.
    pub(super) fn probed(&mut self, now: Instant, number: u32) {
        self.flight.sent(now, number);
    }

    /// Returns whether this answers the probe under way.
    pub(super) fn answered(&mut self, now: Instant, number: u32) -> bool {
        let round_trip = self.flight.answered(now, number);
        if let Some(round_trip) = round_trip {
            self.samples.note_answer(round_trip);
        }
        round_trip.is_some()
    }

    /// Counts the probe under way as lost if its answer is overdue. Returns whether it is.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let is_lost = self.deadline().is_some_and(|deadline| now >= deadline) && self.flight.lose();
        if is_lost {
            self.samples.note_loss();
        }
        is_lost
    }

    /// When the probe under way counts as lost.
    fn deadline(&self) -> Option<Instant> {
        self.flight.awaited()?;
        Some(self.flight.sent_at()? + self.patience.of(self.round_trip()))
    }

    /// When the next probe is due, this long after the last one, or when the one under way counts as lost.
    pub(super) fn next(&self, now: Instant, pause: Duration) -> Instant {
        self.deadline().or_else(|| Some(self.flight.sent_at()? + pause)).unwrap_or(now)
    }

    /// Whether the next probe is due, this long after the last one.
    pub(super) fn is_due(&self, now: Instant, pause: Duration) -> bool {
        self.awaited().is_none() && now >= self.next(now, pause)
    }

    /// The answer to the probe under way would not be known.
    pub(super) fn forget_probe(&mut self) {
        self.flight.forget();
    }

    pub(super) fn forget_round_trips(&mut self) {
        self.samples.forget_round_trips();
    }

    /// Forgets everything but the losses, before a new series of probes.
    pub(super) fn restart(&mut self) {
        self.flight = Flight::default();
        self.samples.restart();
    }
}

/// Lost probes in a row after which a target counts as dead.
pub(super) const SILENT: u32 = 3;
/// Round trips to know before a target is chosen.
const ENOUGH: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PATIENCE: Patience = Patience { least: Duration::from_millis(100), most: Duration::from_secs(1) };

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn a_late_answer_is_none_and_how_long_one_may_take_depends_on_those_before() {
        let (mut prober, start) = (Prober::new(PATIENCE), base());
        prober.probed(start, 1);
        assert!(!prober.expire(start + 999 * MS), "nothing is known about the target");
        assert!(prober.answered(start + 20 * MS, 1));
        prober.probed(start, 2);
        assert!(!prober.expire(start + 99 * MS) && prober.expire(start + 100 * MS));
        assert!(!prober.answered(start + 101 * MS, 2));
        assert_eq!((prober.missed(), prober.outcomes(), prober.loss()), (1, 2, Some(50)));
    }

    #[test]
    fn the_next_probe_waits_for_the_outcome_of_the_last_one_and_then_for_the_pause() {
        let (mut prober, start) = (Prober::new(PATIENCE), base());
        assert!(prober.is_due(start, 500 * MS));
        prober.probed(start, 1);
        assert_eq!(prober.next(start, 500 * MS), start + 1000 * MS);
        assert!(!prober.is_due(start + 5000 * MS, 500 * MS));
        assert!(prober.answered(start + 10 * MS, 1));
        assert_eq!(prober.next(start, 500 * MS), start + 500 * MS);
        assert!(!prober.is_due(start + 499 * MS, 500 * MS) && prober.is_due(start + 500 * MS, 500 * MS));
    }

    #[test]
    fn three_losses_in_a_row_are_silence_and_one_answer_ends_it() {
        let (mut prober, start) = (Prober::new(PATIENCE), base());
        for number in 0..3 {
            assert!(!prober.is_silent());
            prober.probed(start, number);
            assert!(prober.expire(start + 1000 * MS));
        }
        assert!(prober.is_silent());
        prober.probed(start, 3);
        assert!(prober.answered(start + MS, 3) && !prober.is_silent());
    }

    #[test]
    fn a_restart_keeps_the_losses_and_awaits_nothing() {
        let (mut prober, start) = (Prober::new(PATIENCE), base());
        prober.probed(start, 1);
        prober.expire(start + 1000 * MS);
        prober.probed(start, 2);
        prober.restart();
        assert_eq!((prober.missed(), prober.awaited(), prober.probed_at()), (0, None, None));
        assert_eq!((prober.round_trip(), prober.lost_among(6)), (None, 1));
    }
}

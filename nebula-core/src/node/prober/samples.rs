//! What the latest probes of one path or relay say: round trips and losses.

use std::time::Duration;

/// The last round trips, and the outcomes of the last probes.
#[derive(Debug, Default)]
pub(super) struct Samples {
    /// Newest last.
    round_trips: Vec<Duration>,
    /// The newest outcome in the lowest bit; 1 is a loss.
    losses: u8,
    outcomes: u32,
}

impl Samples {
    /// The median of the last round trips; `None` if there is none.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        let mut sorted = self.round_trips.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }

    pub(super) fn newest(&self) -> Option<Duration> {
        self.round_trips.last().copied()
    }

    /// How many round trips are known, of the last five.
    pub(super) fn round_trips(&self) -> usize {
        self.round_trips.len()
    }

    /// Number of probes that were answered or lost.
    pub(super) fn outcomes(&self) -> u32 {
        self.outcomes
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(super) fn loss(&self) -> Option<u32> {
        let known = self.outcomes.min(u8::BITS);
        (known > 0).then(|| self.losses.count_ones() * 100 / known)
    }

    /// How many of so many last probes were lost; at most seven.
    pub(super) fn lost_among(&self, last: u32) -> u32 {
        (self.losses & ((1 << last) - 1)).count_ones()
    }

    pub(super) fn note_answer(&mut self, round_trip: Duration) {
        if self.round_trips.len() >= ROUND_TRIPS {
            self.round_trips.remove(0);
        }
        self.round_trips.push(round_trip);
        self.note(false);
    }

    pub(super) fn note_loss(&mut self) {
        self.note(true);
    }

    fn note(&mut self, is_lost: bool) {
        self.losses = self.losses << 1 | u8::from(is_lost);
        self.outcomes = self.outcomes.saturating_add(1);
    }

    pub(super) fn forget_round_trips(&mut self) {
        self.round_trips.clear();
    }

    /// Forgets everything but the losses.
    pub(super) fn restart(&mut self) {
        *self = Self { losses: self.losses, ..Self::default() };
    }
}

/// A longer round trip than the result is a reason to change to a path or relay with this one.
pub(in crate::node) fn worth_a_change(round_trip: Duration) -> Duration {
    round_trip + (round_trip / 100 * MARGIN_PERCENT).max(MARGIN)
}

const ROUND_TRIPS: usize = 5;
/// How much shorter a round trip has to be.
const MARGIN_PERCENT: u32 = 18;
const MARGIN: Duration = Duration::from_millis(1);

//! The probes of one search: their numbers and times, which answers are to them, and how long one may take.

use std::time::{Duration, Instant};

use crate::node::prober::{Flight, Patience};
use crate::wire::size_probe::SizeProbe;

#[derive(Debug, Clone)]
pub(super) struct Series {
    /// When the search began; stamps of probes are relative to this.
    epoch: Instant,
    /// The numbers of probes by the present path are at least this.
    first: u32,
    next: u32,
    /// The probe, or several of one number, whose answer decides what to send next. Late answers to others count,
    /// too.
    flight: Flight,
    round_trip: Duration,
}

impl Series {
    /// `round_trip` is what the handshake took.
    pub(super) fn new(now: Instant, round_trip: Duration) -> Self {
        let round_trip = round_trip.min(MAX_HANDSHAKE);
        Self { epoch: now, first: 0, next: 0, flight: Flight::default(), round_trip }
    }

    /// Answers to the probes so far say nothing any more.
    pub(super) fn forget(&mut self) {
        self.first = self.next;
    }

    /// Takes over how long answers take.
    pub(super) fn inherit(&mut self, older: &Self) {
        self.round_trip = older.round_trip;
    }

    /// How long answers take.
    pub(super) fn round_trip(&self) -> Duration {
        self.round_trip
    }

    /// Takes over how long answers took an earlier process of this node.
    pub(super) fn take_over(&mut self, round_trip: Duration) {
        self.round_trip = round_trip.min(MAX_HANDSHAKE);
    }

    /// Whether the peer is so near that a connection may wait for the first answers.
    pub(super) fn is_near(&self) -> bool {
        self.round_trip <= NEAR
    }

    /// Probes of these sizes, which nobody tried before.
    pub(super) fn first_try(&mut self, now: Instant, sizes: &[u16]) -> Vec<SizeProbe> {
        self.flight = Flight::default();
        self.next_try(now, sizes)
    }

    /// Probes of these sizes, after those before were lost.
    pub(super) fn next_try(&mut self, now: Instant, sizes: &[u16]) -> Vec<SizeProbe> {
        let number = self.next;
        let stamp = now.saturating_duration_since(self.epoch);
        self.next = self.next.wrapping_add(1);
        self.flight.sent(now, number);
        sizes.iter().map(|&size| SizeProbe { number, stamp, size }).collect()
    }

    /// The answer is overdue. Returns how many tries were in vain so far.
    pub(super) fn lose(&mut self) -> u32 {
        self.flight.lose();
        self.flight.missed()
    }

    /// Whether a try before the present one was in vain.
    pub(super) fn has_lost(&self) -> bool {
        self.flight.missed() > 0
    }

    /// How long an answer may take.
    pub(super) fn patience(&self) -> Duration {
        PATIENCE.of(Some(self.round_trip))
    }

    /// Whether this is the answer to a probe by the present path.
    pub(super) fn is_own(&self, probe: SizeProbe) -> bool {
        probe.number >= self.first && probe.number < self.next
    }

    /// Learns from an answer how long one takes.
    pub(super) fn measure(&mut self, now: Instant, probe: SizeProbe) {
        let Some(sample) = now.saturating_duration_since(self.epoch).checked_sub(probe.stamp) else { return };
        self.round_trip = (self.round_trip * 3 + sample.min(PATIENCE.most)) / 4;
    }
}

/// The answer may be computed by a busy host.
const PATIENCE: Patience = Patience { least: Duration::from_millis(50), most: Duration::from_secs(1) };
/// Connections to peers with a longer round trip do not wait, because users would notice the delay of two round
/// trips. If the path turns out to be too small, senders on this host are told. A distant Go Nebula peer does not
/// examine paths, so its first packets on such a connection may be lost.
const NEAR: Duration = Duration::from_millis(25);
/// A handshake that took longer was repeated.
const MAX_HANDSHAKE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn answers_to_forgotten_probes_and_invented_ones_are_not_to_this_series() {
        let start = base();
        let mut series = Series::new(start, MS);
        let old = series.first_try(start, &[1300])[0];
        assert!(series.is_own(old) && !series.is_own(SizeProbe { number: old.number + 1, ..old }));
        series.forget();
        assert!(!series.is_own(old));
        assert!(series.next_try(start, &[1300, 1200]).iter().all(|probe| series.is_own(*probe)));
    }

    #[test]
    fn tries_in_vain_are_counted_until_something_else_is_tried() {
        let start = base();
        let mut series = Series::new(start, MS);
        series.first_try(start, &[1300]);
        assert_eq!((series.has_lost(), series.lose()), (false, 1));
        series.next_try(start, &[1300]);
        assert_eq!((series.has_lost(), series.lose()), (true, 2));
        series.first_try(start, &[1200]);
        assert!(!series.has_lost());
    }

    #[test]
    fn patience_follows_what_answers_take() {
        let start = base();
        let mut series = Series::new(start, Duration::from_secs(5));
        assert_eq!(series.patience(), 225 * MS);
        for second in 1..30 {
            let probe = series.first_try(start + second * 1000 * MS, &[1300])[0];
            series.measure(start + second * 1000 * MS + 10 * MS, probe);
        }
        assert!(series.is_near() && series.patience() == 50 * MS);
    }
}

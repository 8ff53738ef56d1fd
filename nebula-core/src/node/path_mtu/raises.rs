//! When a path with a limit is tried with a larger packet.

use std::time::{Duration, Instant};

/// The attempts are close together at first where losses may have been taken for a smaller path.
#[derive(Debug, Clone)]
pub(super) struct Raises {
    at: Instant,
    /// The pause after that.
    pause: Duration,
    /// Whether to try the largest of all then, and not the next larger one.
    is_turn_of_top: bool,
    /// When a probe was lost that passed when it was sent again.
    lost_at: Option<Instant>,
}

impl Raises {
    pub(super) fn new(now: Instant) -> Self {
        Self { at: now, pause: FIRST_RAISE, is_turn_of_top: true, lost_at: None }
    }

    /// Takes over when the next attempt is due.
    pub(super) fn inherit(&mut self, older: &Self) {
        (self.at, self.pause) = (older.at, older.pause);
    }

    /// A limit was found. On a path that was examined before, the losses may be `by_chance`.
    pub(super) fn begin(&mut self, now: Instant, by_chance: bool) {
        let pause = if by_chance { FIRST_RAISE } else { RAISE_INTERVAL };
        (self.at, self.pause) = (now + pause, (2 * pause).min(RAISE_INTERVAL));
        self.is_turn_of_top = true;
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.at
    }

    /// Begins an attempt. Returns whether it is the turn of the largest packet of all.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        self.at = now + self.pause;
        self.pause = (2 * self.pause).min(RAISE_INTERVAL);
        self.is_turn_of_top = !self.is_turn_of_top;
        !self.is_turn_of_top
    }

    /// A probe was lost that passed when it was sent again.
    pub(super) fn note_loss(&mut self, now: Instant) {
        self.lost_at = Some(now);
    }

    /// Whether one lost probe says little, because the path loses packets whatever their size.
    pub(super) fn is_lossy(&self, now: Instant) -> bool {
        self.lost_at.is_some_and(|at| now < at + LOSSY_FOR)
    }
}

/// A limit that is found on a path in use is doubted after this time, then after twice as long, and so on.
const FIRST_RAISE: Duration = Duration::from_secs(5);
/// A path with a limit is tried with a larger packet after this time in the end: two probes a minute.
pub(super) const RAISE_INTERVAL: Duration = Duration::from_secs(30);
/// How long a path counts as one that loses packets, after a loss.
const LOSSY_FOR: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    /// The seconds of the first attempts, and which of them are with the largest packet.
    fn attempts(by_chance: bool) -> Vec<(u64, bool)> {
        let start = base();
        let mut raises = Raises::new(start);
        raises.begin(start, by_chance);
        let due = |second: u64| {
            let now = start + Duration::from_secs(second);
            raises.is_due(now).then(|| (second, raises.take(now)))
        };
        (0..110).filter_map(due).collect()
    }

    #[test]
    fn a_limit_that_may_be_by_chance_is_doubted_soon_and_every_second_attempt_is_with_the_largest_packet() {
        assert_eq!(attempts(true), [(5, true), (15, false), (35, true), (65, false), (95, true)]);
        assert_eq!(attempts(false), [(30, true), (60, false), (90, true)]);
    }
}

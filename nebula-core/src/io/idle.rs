//! Decides when the control thread has been idle long enough to say so to the program (`Options::on_idle`).

use std::time::{Duration, Instant};

// A handshake is work for several turns.
const PATIENCE: Duration = Duration::from_secs(1);
// Mapping the pages of a handshake again costs less than a tenth of the handshake.
const INTERVAL: Duration = Duration::from_secs(10);

// About a hundred kilobytes of flows.
const WORTH_IT: usize = 1000;

/// Decides when the control thread gives back what rare work has mapped.
#[derive(Debug, Default)]
pub(super) struct RareWork {
    happened: Option<Instant>,
    released: Option<Instant>,
}

impl RareWork {
    /// Notes a handshake or the like.
    pub(super) fn note(&mut self, now: Instant) {
        self.happened.get_or_insert(now);
    }

    /// When [`RareWork::is_over`] should be asked; `None`: there was none.
    pub(super) fn due(&self) -> Option<Instant> {
        let quiet = self.happened? + PATIENCE;
        Some(self.released.map_or(quiet, |at| quiet.max(at + INTERVAL)))
    }

    /// `true` once, a moment after rare work, if the last time is not just past.
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| now >= due);
        if due {
            *self = Self { happened: None, released: Some(now) };
        }
        due
    }
}

/// Notices when a table that had grown is small again: what it held is worth giving back.
#[derive(Debug, Default)]
pub(super) struct Ebb {
    most: usize,
}

impl Ebb {
    /// Whether `entries` are less than half of what there was since the last time.
    pub(super) fn is_low(&mut self, entries: usize) -> bool {
        self.most = self.most.max(entries);
        let low = self.most >= WORTH_IT && entries < self.most / 2;
        if low {
            self.most = entries;
        }
        low
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn pages_are_released_after_rare_work_and_not_after_every_piece_of_it() {
        let start = super::super::clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut work = RareWork::default();
        assert!(!work.is_over(at(0)));
        work.note(at(0));
        assert!(!work.is_over(at(0)), "the rest of it comes at once");
        assert!(work.is_over(at(1)));
        work.note(at(2));
        assert!(!work.is_over(at(3)));
        assert!(work.is_over(at(11)));
        assert!(!work.is_over(at(30)));
    }

    #[test]
    fn a_table_is_worth_a_look_once_after_it_shrank_much() {
        let mut ebb = Ebb::default();
        let low = [10, 900, 2, 5_000, 4_000, 2_400, 2_300, 1_300, 1_000].map(|entries| ebb.is_low(entries));
        assert_eq!(low, [false, false, false, false, false, true, false, false, true]);
    }
}

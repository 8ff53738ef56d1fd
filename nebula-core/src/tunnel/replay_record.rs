//! The content of a replay window as a value, so that another process can go on where this one stopped.

use super::ReplayWindow;

/// Which counters of a session were accepted. A window that is made from it refuses all that this one refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplayRecord {
    highest: u64,
    /// One word for each block of counters in the window, the oldest block first.
    blocks: Vec<u32>,
}

impl ReplayRecord {
    /// A record of these parts, of which another version of this program may have written more or fewer: blocks that
    /// are older than the window are left out, and those that are missing there count as accepted.
    pub(crate) fn new(highest: u64, blocks: &[u32]) -> Self {
        let wanted = ReplayWindow::blocks_below(highest).count();
        let known = &blocks[blocks.len().saturating_sub(wanted)..];
        let missing = std::iter::repeat_n(u32::MAX, wanted - known.len());
        Self { highest, blocks: missing.chain(known.iter().copied()).collect() }
    }

    /// Highest counter accepted.
    pub(crate) fn highest(&self) -> u64 {
        self.highest
    }

    /// The words of the blocks, the oldest block first.
    pub(crate) fn blocks(&self) -> &[u32] {
        &self.blocks
    }
}

impl From<&ReplayWindow> for ReplayRecord {
    fn from(window: &ReplayWindow) -> Self {
        let highest = window.highest();
        Self { highest, blocks: ReplayWindow::blocks_below(highest).map(|block| window.seen_in(block)).collect() }
    }
}

impl From<&ReplayRecord> for ReplayWindow {
    fn from(record: &ReplayRecord) -> Self {
        Self::restored(record.highest, Self::blocks_below(record.highest).zip(record.blocks.iter().copied()))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEN: u64 = ReplayWindow::LEN;

    fn copy(window: &ReplayWindow) -> ReplayWindow {
        let record = ReplayRecord::from(window);
        let again = ReplayRecord::new(record.highest(), record.blocks());
        assert_eq!(again, record);
        ReplayWindow::from(&again)
    }

    #[test]
    fn a_new_window_is_copied_with_the_counters_of_the_handshake() {
        let window = copy(&ReplayWindow::new());
        assert!(!window.check(0) && !window.check(2) && window.commit(3) && !window.commit(3));
    }

    #[test]
    fn of_too_many_blocks_the_newest_count_and_missing_ones_were_accepted() {
        for highest in [0, 31, 32, LEN - 1, LEN, 10 * LEN + 5, u64::MAX] {
            let count = ReplayWindow::blocks_below(highest).count();
            let longer = [vec![u32::MAX; 7], vec![0; count]].concat();
            assert_eq!(ReplayRecord::new(highest, &longer), ReplayRecord::new(highest, &vec![0; count]));
            let window = ReplayWindow::from(&ReplayRecord::new(highest, &[0]));
            assert!(window.check(highest), "its block is there, and is empty");
            assert!((0..highest / 32 * 32).rev().take(LEN as usize).all(|counter| !window.check(counter)));
        }
    }

    #[test]
    fn the_counters_after_a_copy_are_not_taken_for_lost_ones() {
        for highest in [5, 31, 32, 5000, LEN - 1, LEN, LEN + 31, LEN + 32, 20 * LEN + 7] {
            let window = ReplayWindow::new();
            for counter in 3..=highest {
                window.commit(counter);
            }
            let copied = copy(&window);
            let lost: u64 = (highest + 1..highest + 2 * LEN).map(|counter| copied.lose(counter)).sum();
            assert_eq!(lost, 0, "{highest}");
        }
    }

    proptest! {
        #[test]
        fn a_copy_answers_as_the_window_does(
            steps in prop::collection::vec((0_u64..3 * LEN, any::<bool>()), 0..300),
            base in prop_oneof![Just(0), Just(5 * LEN - 3), Just(1 << 40)],
        ) {
            let window = ReplayWindow::new();
            for (step, _) in steps.iter().filter(|(_, before)| *before) {
                window.commit(base + step);
            }
            let copied = copy(&window);
            prop_assert_eq!(copied.highest(), window.highest());
            for (step, _) in steps.iter().filter(|(_, before)| !*before) {
                prop_assert_eq!(copied.commit(base + step), window.commit(base + step), "{}", step);
            }
            for counter in (base.saturating_sub(LEN)..base + 4 * LEN).step_by(7) {
                prop_assert_eq!(copied.check(counter), window.check(counter), "{}", counter);
            }
        }
    }
}

//! Sliding bitmap against replays (RFC 6479): checked and committed by run.

const WORDS: usize = 128;

/// Accepted counters of one tunnel.
#[derive(Debug)]
pub struct ReplayWindow {
    /// Highest counter accepted.
    current: u64,
    /// Bit `counter mod LEN` for the last `LEN` counters up to `current`; bits ahead of it are stale.
    bits: [u64; WORDS],
}

impl ReplayWindow {
    /// Counters this wide below the highest are still accepted once.
    pub const LEN: u64 = 64 * WORDS as u64;
    /// A window that has seen counters 0, 1 and 2 (the handshake).
    #[must_use]
    pub fn new() -> Self {
        let mut bits = [0; WORDS];
        bits[0] = 0b111;
        Self { current: 2, bits }
    }
    /// Whether `counter` could be new. Before decryption.
    #[must_use]
    pub fn check(&self, counter: u64) -> bool {
        let Some(behind) = self.current.checked_sub(counter) else { return true };
        let (word, bit) = position(counter);
        behind < Self::LEN && self.bits[word] & bit == 0
    }
    /// Records `counter`; false if another lane was first or it is too old. After authentication.
    pub fn commit(&mut self, counter: u64) -> bool {
        if !self.check(counter) {
            return false;
        }
        if counter > self.current {
            self.forget_between(self.current, counter);
            self.current = counter;
        }
        let (word, bit) = position(counter);
        self.bits[word] |= bit;
        true
    }

    /// Clears the bits of all counters after `low` and before `high`, at most the whole window.
    fn forget_between(&mut self, low: u64, high: u64) {
        let mut left = high - low - 1;
        if left >= Self::LEN {
            self.bits = [0; WORDS];
            return;
        }
        let mut next = low + 1;
        while left > 0 {
            let (word, bit) = position(next);
            let take = left.min(64 - u64::from(bit.trailing_zeros()));
            let ones = if take == 64 { u64::MAX } else { (1 << take) - 1 };
            self.bits[word] &= !(ones << bit.trailing_zeros());
            next += take;
            left -= take;
        }
    }
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self::new()
    }
}

/// Word and bit of a counter in the ring.
fn position(counter: u64) -> (usize, u64) {
    ((counter / 64) as usize % WORDS, 1 << (counter % 64))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const LEN: u64 = ReplayWindow::LEN;

    /// The rule as the protocol states it, with a set.
    struct Model {
        current: u64,
        seen: BTreeSet<u64>,
    }

    impl Model {
        fn new() -> Self {
            Self { current: 2, seen: BTreeSet::from([0, 1, 2]) }
        }
        fn check(&self, i: u64) -> bool {
            let in_window = if self.current < LEN { i < LEN } else { i > self.current - LEN };
            i > self.current || (in_window && !self.seen.contains(&i))
        }
        fn commit(&mut self, i: u64) -> bool {
            let fresh = self.check(i);
            if fresh {
                self.seen.insert(i);
                self.current = self.current.max(i);
            }
            fresh
        }
    }

    #[test]
    fn handshake_counters_are_seen_and_three_is_the_first() {
        let mut window = ReplayWindow::new();
        for counter in 0..3 {
            assert!(!window.check(counter) && !window.commit(counter));
        }
        assert!(window.check(3) && window.commit(3));
        assert!(!window.check(3) && !window.commit(3));
    }

    #[test]
    fn exactly_the_window_below_the_highest_is_accepted() {
        let mut window = ReplayWindow::new();
        assert!(window.commit(100_000));
        assert!(!window.check(100_000 - LEN));
        assert!(window.commit(100_000 - LEN + 1));
        assert!(!window.commit(100_000 - LEN + 1));
        assert!(window.commit(99_999));
    }

    #[test]
    fn the_ring_does_not_remember_counters_that_left_it() {
        let mut window = ReplayWindow::new();
        for counter in 3..LEN {
            assert!(window.commit(counter));
        }
        // One step further reuses the bit of counter 0, and a gap those of the skipped ones.
        assert!(window.commit(LEN));
        assert!(window.commit(LEN + 10));
        for counter in LEN + 1..LEN + 10 {
            assert!(window.commit(counter), "{counter}");
        }
    }

    #[test]
    fn a_jump_of_the_whole_window_forgets_everything() {
        for jump in [LEN - 1, LEN, LEN + 1, LEN + 2, 5 * LEN] {
            let mut window = ReplayWindow::new();
            for counter in 3..LEN {
                window.commit(counter);
            }
            let high = LEN - 1 + jump;
            assert!(window.commit(high));
            for counter in high - LEN + 1..high {
                assert_eq!(window.commit(counter), counter >= LEN, "{counter} after {high}");
            }
        }
    }

    #[test]
    fn the_last_counter_does_not_overflow() {
        let mut window = ReplayWindow::new();
        assert!(window.commit(u64::MAX));
        assert!(!window.commit(u64::MAX));
        assert!(window.commit(u64::MAX - 1));
        assert!(window.commit(u64::MAX - LEN + 1));
        assert!(!window.commit(u64::MAX - LEN));
        assert!(!window.commit(3));
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_model(steps in proptest::collection::vec(
            prop_oneof![
                4 => -20_i64..20,
                2 => -70_i64..200,
                1 => -9000_i64..9000,
                1 => prop_oneof![Just(-8193_i64), Just(-8192), Just(-8191), Just(8191), Just(8192), Just(8193)],
            ], 1..400))
        {
            let (mut window, mut model) = (ReplayWindow::new(), Model::new());
            for step in steps {
                let counter = model.current.saturating_add_signed(step);
                prop_assert_eq!(window.check(counter), model.check(counter), "check {}", counter);
                prop_assert_eq!(window.commit(counter), model.commit(counter), "commit {}", counter);
            }
        }
    }
}

//! Sliding bitmap against replays (RFC 6479), used by any number of lanes at once without a lock.
//!
//! The ring holds blocks of 32 counters. One atomic word per block says which of them were accepted, and which lap of
//! the ring they belong to. Accepting a counter is one compare-and-swap of its block, so of several lanes that hold the
//! same counter exactly one succeeds. Nothing is cleared when the window moves on: a word of an older lap means that
//! nothing of its block was accepted yet. `highest` is updated before the block is written, so a lane that finds its
//! block on a newer lap also finds `highest` so far ahead that its counter is too old.

use crate::sync::atomic::{AtomicU64, Ordering};

/// Number of counters in a block.
const BLOCK: u64 = 32;
/// One block more than the window is long: the newest and the oldest block can both be partly in it.
const BLOCKS: u64 = ReplayWindow::LEN / BLOCK + 1;

/// Accepted counters of one tunnel.
#[derive(Debug)]
pub struct ReplayWindow {
    /// Highest counter accepted, or about to be.
    highest: AtomicU64,
    /// Low half: bit n is counter n of the block. High half: the lap, modulo 2^32. It wraps only after 2^45 counters,
    /// and the worst consequence is a refusal: a counter far behind `highest` is too old whatever the word says.
    blocks: [AtomicU64; BLOCKS as usize],
}

/// Counters of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CounterSet {
    block: u64,
    bits: u32,
}

impl CounterSet {
    /// An empty set for the block of `counter`.
    pub(crate) fn around(counter: u64) -> Self {
        Self { block: counter / BLOCK, bits: 0 }
    }

    /// Whether two counters can be in one set.
    pub(crate) fn spans(one: u64, other: u64) -> bool {
        one / BLOCK == other / BLOCK
    }

    /// Adds a counter; false if it is in the set already.
    pub(crate) fn insert(&mut self, counter: u64) -> bool {
        let known = self.contains(counter);
        self.bits |= bit(counter);
        !known
    }

    /// Whether the counter is in the set.
    pub(crate) fn contains(self, counter: u64) -> bool {
        debug_assert_eq!(self.block, counter / BLOCK);
        self.bits & bit(counter) != 0
    }
}

impl ReplayWindow {
    /// Length of the window: counters less than this far below the highest are still accepted once.
    pub const LEN: u64 = if cfg!(all(test, loom)) { 2 * BLOCK } else { 8192 };
    /// A window that has seen counters 0, 1 and 2 (the handshake).
    #[must_use]
    pub fn new() -> Self {
        let blocks = std::array::from_fn(|block| AtomicU64::new(if block == 0 { 0b111 } else { 0 }));
        Self { highest: AtomicU64::new(2), blocks }
    }

    /// Highest counter accepted.
    #[must_use]
    pub fn highest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// Whether `counter` could be new. To be called before decryption.
    #[must_use]
    pub fn check(&self, counter: u64) -> bool {
        self.check_around(counter).contains(counter)
    }

    /// Whether `counter` is below the window, so that nobody can tell whether it was seen.
    #[must_use]
    pub(crate) fn is_too_old(&self, counter: u64) -> bool {
        counter < self.lowest()
    }

    /// Records `counter`; false if another lane was first or it is too old. To be called after authentication.
    pub fn commit(&self, counter: u64) -> bool {
        let set = CounterSet { bits: bit(counter), ..CounterSet::around(counter) };
        self.commit_set(set).0.bits != 0
    }

    /// Which counters of the block of `counter` could be new.
    #[must_use]
    pub(crate) fn check_around(&self, counter: u64) -> CounterSet {
        let set = CounterSet::around(counter);
        let (word, lap) = self.place(set.block);
        CounterSet { bits: self.unseen(set.block, lap, word.load(Ordering::Acquire)), ..set }
    }

    /// Records all counters of a set and returns those that were new, as [`ReplayWindow::commit`] would one by one in
    /// ascending order. Also returns how many counters this found to be lost: those of the laps before in the block's
    /// place that never came.
    pub(crate) fn commit_set(&self, set: CounterSet) -> (CounterSet, u64) {
        let Some(highest_bit) = set.bits.checked_ilog2() else { return (set, 0) };
        let last = set.block * BLOCK + u64::from(highest_bit);
        if last > self.highest.load(Ordering::Relaxed) {
            self.highest.fetch_max(last, Ordering::Relaxed);
        }
        let (word, lap) = self.place(set.block);
        let mut current = word.load(Ordering::Acquire);
        loop {
            let fresh = set.bits & self.unseen(set.block, lap, current);
            if fresh == 0 {
                return (CounterSet { bits: 0, ..set }, 0);
            }
            let new = u64::from(lap) << 32 | u64::from(seen(lap, current) | fresh);
            // Release, so that a lane that finds this lap in the word also finds `highest` updated.
            match word.compare_exchange_weak(current, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return (CounterSet { bits: fresh, ..set }, lost_before(lap, current)),
                Err(changed) => current = changed,
            }
        }
    }

    /// Which counters of a block are in the window and not recorded in `word`. `word` must have been read before the
    /// call.
    fn unseen(&self, block: u64, lap: u32, word: u64) -> u32 {
        let too_old = self.lowest().saturating_sub(block * BLOCK);
        if too_old >= BLOCK { 0 } else { u32::MAX << too_old & !seen(lap, word) }
    }

    /// How many of the `span` counters below the highest have not come, as far as the window tells: it knows no older
    /// ones.
    #[must_use]
    pub(crate) fn missing(&self, span: u64) -> u64 {
        let highest = self.highest();
        let first = highest.saturating_sub(span).max(self.lowest());
        let missing = (first / BLOCK..=highest / BLOCK).map(|block| {
            let start = block * BLOCK;
            let above = if highest - start >= BLOCK { u32::MAX } else { bit(highest) - 1 };
            let below = u32::MAX << first.saturating_sub(start);
            let (word, lap) = self.place(block);
            (self.unseen(block, lap, word.load(Ordering::Acquire)) & above & below).count_ones()
        });
        missing.map(u64::from).sum()
    }

    /// The blocks of the window of which this is the highest counter, the oldest first.
    pub(super) fn blocks_below(highest: u64) -> std::ops::RangeInclusive<u64> {
        lowest(highest) / BLOCK..=highest / BLOCK
    }

    /// Which counters of a block of the window were accepted.
    pub(super) fn seen_in(&self, block: u64) -> u32 {
        let (word, lap) = self.place(block);
        seen(lap, word.load(Ordering::Acquire))
    }

    /// A window with this highest counter and these counters in [its blocks](Self::blocks_below).
    pub(super) fn restored(highest: u64, blocks: impl Iterator<Item = (u64, u32)>) -> Self {
        let window = Self { highest: AtomicU64::new(highest), blocks: std::array::from_fn(|_| AtomicU64::new(0)) };
        // A place without a block of the window is the next one's. That its last lap is complete keeps counters of
        // which nothing is known from being taken for lost.
        let next = highest / BLOCK + 1;
        if let (word, lap @ 1..) = window.place(next) {
            word.store(u64::from(lap - 1) << 32 | u64::from(u32::MAX), Ordering::Relaxed);
        }
        for (block, seen) in blocks {
            let (word, lap) = window.place(block);
            word.store(u64::from(lap) << 32 | u64::from(seen), Ordering::Release);
        }
        window
    }

    /// Records a counter, and returns how many this found to be lost.
    #[cfg(test)]
    pub(super) fn lose(&self, counter: u64) -> u64 {
        self.commit_set(CounterSet { bits: bit(counter), ..CounterSet::around(counter) }).1
    }

    /// Lowest counter in the window.
    fn lowest(&self) -> u64 {
        lowest(self.highest.load(Ordering::Relaxed))
    }

    /// Word of a block, and the lap in which it holds that block.
    fn place(&self, block: u64) -> (&AtomicU64, u32) {
        (&self.blocks[(block % BLOCKS) as usize], (block / BLOCKS) as u32)
    }
}

impl Default for ReplayWindow {
    fn default() -> Self {
        Self::new()
    }
}

fn lowest(highest: u64) -> u64 {
    highest.saturating_sub(ReplayWindow::LEN - 1)
}

fn bit(counter: u64) -> u32 {
    1 << (counter % BLOCK)
}

/// Counters in the place of a block that are not in `word` and came before this lap.
fn lost_before(lap: u32, word: u64) -> u64 {
    match lap.wrapping_sub((word >> 32) as u32) {
        0 => 0,
        laps => u64::from(laps) * BLOCK - u64::from((word as u32).count_ones()),
    }
}

/// Recorded counters of a block; none if the word belongs to another lap.
fn seen(lap: u32, word: u64) -> u32 {
    if (word >> 32) as u32 == lap { word as u32 } else { 0 }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const LEN: u64 = ReplayWindow::LEN;

    /// Reference model: the rule as the protocol states it, with a set.
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
        let window = ReplayWindow::new();
        for counter in 0..3 {
            assert!(!window.check(counter) && !window.commit(counter));
        }
        assert!(window.check(3) && window.commit(3));
        assert!(!window.check(3) && !window.commit(3));
    }

    #[test]
    fn exactly_the_window_below_the_highest_is_accepted() {
        let window = ReplayWindow::new();
        assert!(window.commit(100_000));
        assert!(!window.check(100_000 - LEN));
        assert!(window.commit(100_000 - LEN + 1));
        assert!(!window.commit(100_000 - LEN + 1));
        assert!(window.commit(99_999));
    }

    #[test]
    fn the_ring_does_not_remember_counters_that_left_it() {
        let window = ReplayWindow::new();
        for counter in 3..LEN {
            assert!(window.commit(counter));
        }
        // One step further reuses the bit of counter 0; a gap reuses those of the skipped ones.
        assert!(window.commit(LEN));
        assert!(window.commit(LEN + 10));
        for counter in LEN + 1..LEN + 10 {
            assert!(window.commit(counter), "{counter}");
        }
    }

    #[test]
    fn a_jump_of_the_whole_window_forgets_everything() {
        for jump in [LEN - 1, LEN, LEN + 1, LEN + 2, 5 * LEN] {
            let window = ReplayWindow::new();
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
        let window = ReplayWindow::new();
        assert!(window.commit(u64::MAX));
        assert!(!window.commit(u64::MAX));
        assert!(window.commit(u64::MAX - 1));
        assert!(window.commit(u64::MAX - LEN + 1));
        assert!(!window.commit(u64::MAX - LEN));
        assert!(!window.commit(3));
    }

    #[test]
    fn a_set_is_recorded_as_its_counters_would_be_one_by_one() {
        let (window, single) = (ReplayWindow::new(), ReplayWindow::new());
        // The newest block, then the oldest of which a part is too old, then one that is too old as a whole.
        let newest = 100_000;
        for first in [newest, newest - LEN, newest - LEN - 40] {
            for step in [3, 1] {
                let counters = || (first..first + 32).step_by(step).filter(|counter| counter / BLOCK == first / BLOCK);
                let mut set = CounterSet::around(first);
                assert!(counters().all(|counter| set.insert(counter)) && !set.insert(first));
                let possible = window.check_around(first);
                assert!(counters().all(|counter| possible.contains(counter) == single.check(counter)));
                let (fresh, _) = window.commit_set(set);
                for counter in counters() {
                    assert_eq!(fresh.contains(counter), single.commit(counter), "{counter}");
                }
            }
        }
    }

    #[test]
    fn counters_that_never_came_are_lost_when_the_window_has_moved_past_them() {
        let window = ReplayWindow::new();
        let ring = BLOCKS * BLOCK;
        let commit = |counter: u64| {
            let mut set = CounterSet::around(counter);
            set.insert(counter);
            window.commit_set(set).1
        };
        let first: u64 = (3..ring).filter(|counter| counter % 100 != 0).map(commit).sum();
        assert_eq!(first, 0, "all of them may still come");
        // A late one is not lost.
        assert_eq!((commit(8_100), commit(8_100)), (0, 0));
        let second: u64 = (ring..2 * ring).map(commit).sum();
        assert_eq!(second, ring / 100 - 1);
        // Three laps further: the two between, of one block.
        assert_eq!(commit(4 * ring), 2 * BLOCK);
        assert!(window.is_too_old(4 * ring - LEN) && !window.is_too_old(4 * ring - LEN + 1));
    }

    #[test]
    fn what_is_missing_below_the_highest_is_counted_and_nothing_older_than_the_window() {
        let window = ReplayWindow::new();
        for counter in (3..1000).filter(|counter| counter % 4 != 0) {
            window.commit(counter);
        }
        assert_eq!((window.missing(100), window.missing(4), window.missing(0)), (25, 1, 0));
        window.commit(1_000_000);
        assert_eq!(window.missing(u64::MAX), LEN - 1);
    }

    #[test]
    fn an_empty_set_moves_nothing() {
        let window = ReplayWindow::new();
        assert_eq!(window.commit_set(CounterSet::around(50_000)), (CounterSet::around(50_000), 0));
        assert!(window.commit(3));
    }

    #[test]
    fn lanes_that_race_for_the_same_counters_accept_each_once_and_all_in_the_window() {
        const LANES: usize = 4;
        const COUNTERS: u64 = 3 * LEN;
        let window = ReplayWindow::new();
        let accepted: Vec<AtomicU64> = (0..COUNTERS).map(|_| AtomicU64::new(0)).collect();
        // The lanes stay close enough to each other that no counter leaves the window before every lane has tried it.
        let step = std::sync::Barrier::new(LANES);
        std::thread::scope(|scope| {
            for lane in 0..LANES as u64 {
                let (window, accepted, step) = (&window, &accepted, &step);
                scope.spawn(move || {
                    for part in 0..COUNTERS / 1024 {
                        for n in 0..1024 {
                            let counter = part * 1024 + (n * (2 * lane + 1)) % 1024;
                            if window.check(counter) && window.commit(counter) {
                                accepted[counter as usize].fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        step.wait();
                    }
                });
            }
        });
        for (counter, times) in accepted.iter().enumerate() {
            assert_eq!(times.load(Ordering::Relaxed), u64::from(counter > 2), "{counter}");
        }
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
            let (window, mut model) = (ReplayWindow::new(), Model::new());
            for step in steps {
                let counter = model.current.saturating_add_signed(step);
                prop_assert_eq!(window.check(counter), model.check(counter), "check {}", counter);
                prop_assert_eq!(window.commit(counter), model.commit(counter), "commit {}", counter);
            }
        }
    }
}

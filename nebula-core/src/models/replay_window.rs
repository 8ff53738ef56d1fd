//! Models of the replay window: no counter is accepted twice, and none that is new and in the window is refused.

use std::sync::Arc;

use loom::thread;

use super::check;
use crate::tunnel::{CounterSet, ReplayWindow};

const LEN: u64 = ReplayWindow::LEN;

fn accept(window: &ReplayWindow, counter: u64) -> bool {
    window.check(counter) && window.commit(counter)
}

/// Accepts a run of counters as a lane does.
fn accept_run(window: &ReplayWindow, counters: &[u64]) -> Vec<u64> {
    let mut accepted = Vec::new();
    for block in counters.chunk_by(|a, b| CounterSet::spans(*a, *b)) {
        let possible = window.check_around(block[0]);
        let mut opened = CounterSet::around(block[0]);
        for counter in block.iter().filter(|counter| possible.contains(**counter)) {
            opened.insert(*counter);
        }
        let (fresh, _) = window.commit_set(opened);
        accepted.extend(block.iter().filter(|counter| fresh.contains(**counter)));
    }
    accepted
}

#[test]
fn three_lanes_with_the_same_counter_accept_it_once() {
    check(3, || {
        let window = Arc::new(ReplayWindow::new());
        let lanes: Vec<_> = (0..2)
            .map(|_| {
                let window = Arc::clone(&window);
                thread::spawn(move || accept(&window, 7))
            })
            .collect();
        let mut accepted = usize::from(accept(&window, 7));
        accepted += lanes.into_iter().map(|lane| usize::from(lane.join().unwrap())).sum::<usize>();
        assert_eq!(accepted, 1);
        assert!(!window.check(7));
    });
}

#[test]
fn lanes_with_different_counters_of_a_block_accept_all_of_them() {
    check(3, || {
        let window = Arc::new(ReplayWindow::new());
        let lanes: Vec<_> = [5, 4]
            .map(|counter| {
                let window = Arc::clone(&window);
                thread::spawn(move || accept(&window, counter))
            })
            .into();
        assert!(accept(&window, 3));
        assert!(lanes.into_iter().all(|lane| lane.join().unwrap()));
        assert!((3..6).all(|counter| !window.check(counter)));
    });
}

#[test]
fn runs_that_overlap_accept_each_counter_once() {
    check(3, || {
        let window = Arc::new(ReplayWindow::new());
        let other = {
            let window = Arc::clone(&window);
            thread::spawn(move || accept_run(&window, &[31, 32, 33]))
        };
        let mut accepted = accept_run(&window, &[30, 31, 32]);
        accepted.extend(other.join().unwrap());
        accepted.sort_unstable();
        assert_eq!(accepted, [30, 31, 32, 33]);
    });
}

/// The word of counter 5 is reused one lap later. In either order, counter 5 is accepted at most once, and the counters
/// of the new lap exactly once.
#[test]
fn a_window_that_moves_on_accepts_nothing_twice() {
    let lap = LEN + 32;
    check(3, move || {
        let window = Arc::new(ReplayWindow::new());
        let [old, new] = [[5, 5], [lap + 5, lap + 6]].map(|counters| {
            let window = Arc::clone(&window);
            thread::spawn(move || counters.map(|counter| accept(&window, counter)))
        });
        let late = accept(&window, lap + 5);
        let (old, new) = (old.join().unwrap(), new.join().unwrap());
        assert!(!(old[0] && old[1]), "the old one twice");
        assert!(late != new[0], "the new one once");
        assert!(new[1]);
        assert!(!accept(&window, 5) && !accept(&window, lap + 5) && !accept(&window, lap + 6));
    });
}

/// The window jumps so far that all old counters leave it. Counters inside the new window were not seen and must be
/// accepted.
#[test]
fn a_jump_refuses_nothing_that_is_in_the_window() {
    check(3, || {
        let window = Arc::new(ReplayWindow::new());
        let far = 10 * LEN;
        let lanes = [far, far - LEN + 1].map(|counter| {
            let window = Arc::clone(&window);
            thread::spawn(move || accept(&window, counter))
        });
        // In its lap, the word of this counter holds counters that are too old after the jump.
        let before = accept(&window, 40);
        assert!(lanes.into_iter().all(|lane| lane.join().unwrap()));
        assert!(accept(&window, far - 1));
        assert!(!accept(&window, 40) && !accept(&window, far - LEN), "too old, accepted before: {before}");
    });
}

//! Which connection is due next. A timer that moves later costs nothing until it would have fired.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Instant;

use super::Id;

/// Timers of connections, each with at most one that counts: the one that its entry names.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, Id)>>,
}

impl Timers {
    /// Wakes `id` at `at`.
    pub(crate) fn push(&mut self, at: Instant, id: Id) {
        self.heap.push(Reverse((at, id)));
    }

    /// Frees what is kept for timers that were there.
    pub(crate) fn shrink(&mut self) {
        self.heap.shrink_to_fit();
    }

    /// The earliest timer, which may be one that counts no more.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes the earliest timer if it is due.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<(Instant, Id)> {
        self.next().filter(|at| *at <= now)?;
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}

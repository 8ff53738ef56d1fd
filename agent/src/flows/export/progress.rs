//! How far exporters are: they say so, and the writer of the store keeps it there.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Target;
use crate::readiness::Standing;

/// Shared by the writer of the store and the exporters.
#[derive(Debug)]
pub(in crate::flows) struct Progress {
    targets: Vec<Target>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Rises with each opening of a store.
    opening: u64,
    /// Whether one is open.
    is_open: bool,
    after: [u64; Target::ALL.len()],
    /// Why an exporter does not get on.
    failing: [Option<String>; Target::ALL.len()],
}

/// Where an exporter is in the store that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    /// Which store: another one has other numbers.
    pub(super) opening: u64,
    pub(super) after: u64,
}

impl Progress {
    pub(in crate::flows) fn new(targets: Vec<Target>) -> Self {
        Self { targets, state: Mutex::default() }
    }

    /// All exporters.
    pub(in crate::flows) fn targets(&self) -> &[Target] {
        &self.targets
    }

    /// A store is open, in which exporters are here. One that was open before may have them further than the file
    /// says; that is only so for the same file.
    pub(in crate::flows) fn opened(&self, positions: &[(Target, u64)], newest: u64) {
        let mut state = self.state();
        (state.opening, state.is_open) = (state.opening + 1, true);
        for (target, after) in positions {
            let known = &mut state.after[*target as usize];
            *known = if *known <= newest { *after.max(known) } else { *after };
        }
    }

    /// No store is open, or another one will be.
    pub(in crate::flows) fn closed(&self, is_replaced: bool) {
        let mut state = self.state();
        state.is_open = false;
        if is_replaced {
            state.after = Default::default();
        }
    }

    /// Where each exporter is.
    pub(in crate::flows) fn all(&self) -> Vec<(Target, u64)> {
        let state = self.state();
        self.targets.iter().map(|target| (*target, state.after[*target as usize])).collect()
    }

    /// Where an exporter is; `None`: there is no store.
    pub(super) fn position(&self, target: Target) -> Option<Position> {
        let state = self.state();
        state.is_open.then(|| Position { opening: state.opening, after: state.after[target as usize] })
    }

    /// An exporter is done with all up to this number.
    pub(super) fn exported(&self, target: Target, of: Position, number: u64) {
        let mut state = self.state();
        // Another store may have taken the place of the one that was read.
        if state.opening == of.opening {
            let known = &mut state.after[target as usize];
            *known = number.max(*known);
        }
    }

    /// Notes why an exporter does not get on, or that it does. Returns how all of them stand.
    pub(super) fn failing(&self, target: Target, why: Option<String>) -> Standing {
        let mut state = self.state();
        state.failing[target as usize] = why;
        let reasons: Vec<&str> = state.failing.iter().flatten().map(String::as_str).collect();
        if reasons.is_empty() { Standing::good("flow records are exported") } else { Standing::bad(reasons.join("; ")) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

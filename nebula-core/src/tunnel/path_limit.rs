//! The largest overlay packet that the path of a tunnel carries, as lanes see it (path MTU).

use std::sync::atomic::{AtomicU32, Ordering};

/// Shared by the control plane, which finds the limit out, and all lanes, which keep to it.
///
/// In the usual state, in which packets of every length pass, a packet costs one load and one comparison.
#[derive(Debug)]
pub(crate) struct PathLimit(AtomicU32);

/// What is known about a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PathState {
    /// Nothing, and nobody examines it.
    Unexamined,
    /// Nothing yet.
    UnderExamination,
    /// Packets of at most this many bytes pass.
    Limited(u16),
    /// Every packet passes, or nobody wants to know.
    Open,
}

impl PathLimit {
    /// A path that nobody wants to be examined.
    pub(crate) fn off() -> Self {
        Self(AtomicU32::new(OFF))
    }

    /// Whether every packet of the overlay device passes.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= OPEN
    }

    /// What is known.
    pub(crate) fn state(&self) -> PathState {
        match self.0.load(Ordering::Relaxed) {
            UNEXAMINED => PathState::Unexamined,
            UNDER_EXAMINATION => PathState::UnderExamination,
            limit => u16::try_from(limit).map_or(PathState::Open, PathState::Limited),
        }
    }

    /// Sets what is known.
    pub(crate) fn set(&self, state: PathState) {
        let value = match state {
            PathState::Unexamined => UNEXAMINED,
            PathState::UnderExamination => UNDER_EXAMINATION,
            PathState::Limited(limit) => u32::from(limit).max(UNDER_EXAMINATION + 1),
            PathState::Open => OPEN,
        };
        self.0.store(value, Ordering::Relaxed);
    }

    /// Whether paths of this tunnel are to be examined. Forgets what is known.
    pub(crate) fn switch(&self, on: bool) {
        self.0.store(if on { UNEXAMINED } else { OFF }, Ordering::Relaxed);
    }

    /// Forgets what is known, because there is another path.
    pub(crate) fn forget(&self) {
        if self.0.load(Ordering::Relaxed) != OFF {
            self.set(PathState::Unexamined);
        }
    }

    /// Returns `true` to the first caller since the path became unexamined, who has to ask for an examination.
    pub(crate) fn claim(&self) -> bool {
        self.0.compare_exchange(UNEXAMINED, UNDER_EXAMINATION, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

const UNEXAMINED: u32 = 0;
const UNDER_EXAMINATION: u32 = 1;
const OPEN: u32 = u32::MAX - 1;
const OFF: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_claimed_once_until_it_changes() {
        let limit = PathLimit::off();
        limit.switch(true);
        assert!(!limit.is_open() && limit.state() == PathState::Unexamined);
        assert!(limit.claim() && !limit.claim());
        assert!(!limit.is_open() && limit.state() == PathState::UnderExamination);
        for state in [PathState::Limited(1140), PathState::Limited(u16::MAX), PathState::Open] {
            limit.set(state);
            assert!(!limit.claim() && limit.is_open() == (state == PathState::Open));
            assert_eq!(limit.state(), state);
        }
        limit.forget();
        assert!(limit.claim());
    }

    #[test]
    fn a_path_that_nobody_wants_to_be_examined_is_open_wherever_it_leads() {
        let limit = PathLimit::off();
        for _ in 0..2 {
            assert!(limit.is_open() && !limit.claim());
            limit.forget();
        }
        limit.switch(true);
        limit.switch(false);
        assert!(limit.is_open());
    }
}

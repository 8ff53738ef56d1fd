//! The largest overlay packet that the path of a tunnel carries, as lanes see it (path MTU).

use std::sync::atomic::{AtomicU32, Ordering};

/// Shared by the control plane, which finds the limit out, and all lanes, which keep to it.
///
/// In the usual state, in which packets of every length pass, a packet costs one load and one comparison. That
/// comparison also finds the tunnels whose peer is about to move (see [`Trial`](super::Trial)). A TCP super-packet
/// costs another load, of how many of its segments may be joined.
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
    /// Every packet passes, and so do packets of this length, larger than those of the device, with several TCP
    /// segments: the peer takes them apart.
    Joined(u16),
}

impl PathLimit {
    /// A path that nobody wants to be examined.
    pub(crate) fn off() -> Self {
        Self(AtomicU32::new(OFF))
    }

    /// Whether every packet of the overlay device passes, by the one path that there is.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= OPEN
    }

    /// Length of the largest packet with several TCP segments, where the path is open; 0: none.
    #[inline]
    pub(crate) fn joined(&self) -> u16 {
        let value = self.0.load(Ordering::Relaxed);
        if value >= OPEN { value as u16 } else { 0 }
    }

    /// What is known.
    pub(crate) fn state(&self) -> PathState {
        match self.0.load(Ordering::Relaxed) | NO_TRIAL {
            UNEXAMINED => PathState::Unexamined,
            UNDER_EXAMINATION => PathState::UnderExamination,
            OPEN | OFF => PathState::Open,
            joined @ OPEN.. => PathState::Joined(joined as u16),
            limit => PathState::Limited(limit as u16),
        }
    }

    /// Sets what is known.
    pub(crate) fn set(&self, state: PathState) {
        let value = match state {
            PathState::Unexamined => UNEXAMINED,
            PathState::UnderExamination => UNDER_EXAMINATION,
            PathState::Limited(limit) => (NO_TRIAL | u32::from(limit)).max(UNDER_EXAMINATION + 1),
            PathState::Open => OPEN,
            PathState::Joined(length) => OPEN | u32::from(length),
        };
        self.replace(value);
    }

    /// Whether paths of this tunnel are to be examined. Forgets what is known.
    pub(crate) fn switch(&self, on: bool) {
        self.replace(if on { UNEXAMINED } else { OFF });
    }

    /// Forgets what is known, because there is another path.
    pub(crate) fn forget(&self) {
        if self.0.load(Ordering::Relaxed) | NO_TRIAL != OFF {
            self.set(PathState::Unexamined);
        }
    }

    /// Whether the tunnel has an endpoint on trial.
    pub(super) fn is_on_trial(&self) -> bool {
        self.0.load(Ordering::Relaxed) & NO_TRIAL == 0
    }

    /// Begins or ends a trial.
    pub(super) fn set_trial(&self, on: bool) {
        if on {
            self.0.fetch_and(!NO_TRIAL, Ordering::Relaxed);
        } else {
            self.0.fetch_or(NO_TRIAL, Ordering::Relaxed);
        }
    }

    /// Changes what is known, and leaves the trial as it is. Only the control plane does this, and begins trials.
    fn replace(&self, value: u32) {
        self.0.store(if self.is_on_trial() { value & !NO_TRIAL } else { value }, Ordering::Relaxed);
    }

    /// Returns `true` to the first caller since the path became unexamined, who has to ask for an examination.
    /// Nothing is examined during a trial: the path is about to change.
    pub(crate) fn claim(&self) -> bool {
        self.0.compare_exchange(UNEXAMINED, UNDER_EXAMINATION, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

/// Without this bit, every value is less than [`OPEN`].
const NO_TRIAL: u32 = 1 << 31;
const UNEXAMINED: u32 = NO_TRIAL;
const UNDER_EXAMINATION: u32 = NO_TRIAL | 1;
/// This and more, with the length of joined segments in the low half: open.
const OPEN: u32 = NO_TRIAL | 1 << 30;
const OFF: u32 = OPEN | 1 << 29;

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
        let open = [PathState::Open, PathState::Joined(3940), PathState::Joined(u16::MAX)];
        for state in [PathState::Limited(1140), PathState::Limited(u16::MAX)].into_iter().chain(open) {
            limit.set(state);
            assert!(!limit.claim() && limit.is_open() == open.contains(&state));
            assert_eq!(limit.joined(), if let PathState::Joined(length) = state { length } else { 0 });
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

    #[test]
    fn during_a_trial_no_path_is_open_and_what_is_known_stays() {
        let limit = PathLimit::off();
        for known in [PathState::Open, PathState::Limited(1140), PathState::Unexamined, PathState::UnderExamination] {
            limit.set(known);
            limit.set_trial(true);
            assert!(!limit.is_open() && limit.is_on_trial() && !limit.claim() && limit.state() == known);
            limit.set(PathState::Limited(9));
            assert!(limit.is_on_trial() && limit.state() == PathState::Limited(9));
            limit.set(known);
            limit.set_trial(false);
            assert!(limit.state() == known && limit.is_open() == (known == PathState::Open));
        }
        limit.switch(false);
        limit.set_trial(true);
        limit.forget();
        assert!(!limit.is_open() && limit.state() == PathState::Open);
        limit.set_trial(false);
        assert!(limit.is_open());
    }
}

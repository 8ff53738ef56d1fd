//! The largest overlay packet that the path of a tunnel carries, as lanes see it (path MTU).

use std::sync::atomic::{AtomicU32, Ordering};

/// Shared by the control plane, which finds the limit out, and all lanes, which keep to it.
///
/// In the usual state, in which packets of every length pass, a packet costs one load and one comparison.
#[derive(Debug)]
pub(crate) struct PathLimit(AtomicU32);

impl PathLimit {
    /// A path that nobody has examined.
    pub(crate) fn unexamined() -> Self {
        Self(AtomicU32::new(UNEXAMINED))
    }

    /// Whether every packet of the overlay device passes.
    #[inline]
    pub(crate) fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) == OPEN
    }

    /// Whether nobody has examined the path.
    pub(crate) fn is_unexamined(&self) -> bool {
        self.0.load(Ordering::Relaxed) == UNEXAMINED
    }

    /// The largest packet that passes, in bytes; `None` if there is no known limit.
    pub(crate) fn get(&self) -> Option<u16> {
        u16::try_from(self.0.load(Ordering::Relaxed)).ok().filter(|limit| u32::from(*limit) != UNEXAMINED)
    }

    /// Sets the largest packet that passes; `None`: every packet passes.
    pub(crate) fn set(&self, limit: Option<u16>) {
        self.0.store(limit.map_or(OPEN, u32::from), Ordering::Relaxed);
    }

    /// Returns to the state of a path that nobody has examined, because there is another path.
    pub(crate) fn forget(&self) {
        self.0.store(UNEXAMINED, Ordering::Relaxed);
    }

    /// Returns `true` to the first caller since the path became unexamined, who has to ask for an examination. Every packet
    /// passes meanwhile.
    pub(crate) fn claim(&self) -> bool {
        self.0.compare_exchange(UNEXAMINED, OPEN, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

const UNEXAMINED: u32 = 0;
const OPEN: u32 = u32::MAX;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_claimed_once_until_it_changes_and_has_no_limit_until_one_is_set() {
        let limit = PathLimit::unexamined();
        assert!(!limit.is_open() && limit.get().is_none());
        assert!(limit.claim() && !limit.claim());
        assert!(limit.is_open() && limit.get().is_none());
        limit.set(Some(1140));
        assert!(!limit.is_open() && !limit.claim());
        assert_eq!(limit.get(), Some(1140));
        limit.forget();
        assert!(limit.get().is_none() && limit.claim());
        limit.set(None);
        assert!(limit.is_open());
    }
}

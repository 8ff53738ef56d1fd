//! The building blocks of everything that lanes share: std's atomics and locks, and lock-free cells and maps. In models
//! (`.ci/loom`) they are loom's, which tries every interleaving of their steps.

#[cfg(not(all(test, loom)))]
mod real {
    #[cfg(feature = "io")]
    pub(crate) use std::sync::Condvar;
    pub(crate) use std::sync::{Mutex, MutexGuard, atomic};

    pub(crate) use arc_swap::ArcSwapOption;
    pub(crate) use papaya::HashMap;

    /// Result of [`ArcSwapOption::load`]: a value held without a write to memory that others read.
    pub(crate) type Loaded<T> = arc_swap::Guard<Option<std::sync::Arc<T>>>;
}

#[cfg(all(test, loom))]
mod modelled;

#[cfg(all(test, loom))]
pub(crate) use modelled::*;
#[cfg(not(all(test, loom)))]
pub(crate) use real::*;

/// A value in cache lines of its own, so that writing it does not slow down readers of its neighbours. Two lines,
/// because processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(value)
    }

    pub(crate) fn into_inner(self) -> T {
        self.0
    }
}

impl<T> std::ops::Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

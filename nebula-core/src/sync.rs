//! What lanes share is built from these: std's atomics and locks or, in models (`.ci/loom`), loom's, which tries every
//! order of their steps.

#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::atomic;

#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic;

/// A value in cache lines of its own, so that writing it does not slow down who reads its neighbours. Two lines, because
/// processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct CachePadded<T>(T);

impl<T> CachePadded<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(value)
    }
}

impl<T> std::ops::Deref for CachePadded<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

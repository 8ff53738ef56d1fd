//! A counting allocator: measures the bytes that are requested from the heap and the memory that they take.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator with two counters. They are global, so no other thread may allocate during a measurement.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static ASKED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static HEAP: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(chunk(layout.size()), Ordering::Relaxed);
        ASKED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(chunk(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(memory, layout) }
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_add(chunk(size), Ordering::Relaxed);
        LIVE.fetch_sub(chunk(layout.size()), Ordering::Relaxed);
        ASKED.fetch_add(size, Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// Memory that the C library's allocator uses for a request of this size: 8 bytes more, rounded up to a multiple of 16,
/// and at least 32.
fn chunk(size: usize) -> usize {
    ((size + 8).div_ceil(16) * 16).max(32)
}

/// Bytes that all live allocations take, including the allocator's overhead.
#[must_use]
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// Total bytes requested so far, whether or not they have been freed.
#[must_use]
pub fn asked() -> usize {
    ASKED.load(Ordering::Relaxed)
}

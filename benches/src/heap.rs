//! Counts what the heap is asked for, and what that costs.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator with two counters. Other threads than the one that measures must be quiet.
struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static ASKED: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static HEAP: Counting = Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(chunk(layout.size()), Ordering::Relaxed);
        ASKED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(chunk(layout.size()), Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(memory, layout) }
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LIVE.fetch_add(chunk(size), Ordering::Relaxed);
        LIVE.fetch_sub(chunk(layout.size()), Ordering::Relaxed);
        ASKED.fetch_add(size, Ordering::Relaxed);
        // SAFETY: as the caller promised.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// What the C library's allocator takes for this many bytes: 8 more, in steps of 16, and at least 32.
fn chunk(size: usize) -> usize {
    ((size + 8).div_ceil(16) * 16).max(32)
}

/// Bytes that all live allocations take, with what the allocator adds to each.
#[must_use]
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

/// Bytes asked for so far, whatever became of them.
#[must_use]
pub fn asked() -> usize {
    ASKED.load(Ordering::Relaxed)
}

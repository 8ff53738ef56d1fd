//! How much memory the allocator of the C library keeps.
#![allow(unsafe_code)]

/// Makes all threads allocate from one heap instead of one each, and lets large blocks stay outside of it. Data threads
/// allocate nothing once they are warm, so heaps of their own would only be memory that is hardly used. Call it before
/// threads are started.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        // The usual value, but it does not grow with the largest block that was freed: blocks of this size go back to the
        // system at once.
        (libc::M_MMAP_THRESHOLD, 128 << 10),
    ] {
        // SAFETY: only sets a parameter of the allocator, which may be done at any time. A refusal changes nothing.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives pages of the heap back that hold nothing any more. Call it after work that needed much for a moment, like a start.
pub fn release_free_heap() {
    // SAFETY: looks for free blocks under the allocator's own lock; nobody has a reference into them.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::malloc_trim(0) };
}

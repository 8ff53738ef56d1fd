//! How much memory the allocator of the C library keeps.
#![allow(unsafe_code)]

/// Makes all threads allocate from one heap instead of one each. Data threads allocate nothing once they are warm, so
/// heaps of their own would only be memory that is hardly used. Call it before threads are started.
pub fn share_one_heap() {
    // SAFETY: only sets a parameter of the allocator, which may be done at any time. A refusal changes nothing.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

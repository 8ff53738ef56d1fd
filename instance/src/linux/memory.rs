//! Memory of the whole process: how the allocator of the C library keeps it, and which pages of the program stay
//! mapped.
#![allow(unsafe_code)]

use nebula_core::io::Idle;

/// Makes all threads allocate from one heap instead of one each, and lets large blocks stay outside of it. Data threads
/// allocate nothing once they are warm, so heaps of their own would only be memory that is hardly used. Call it before
/// threads are started.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        // The usual value, but it does not grow with the largest block that was freed: blocks of this size go back to
        // the system at once.
        (libc::M_MMAP_THRESHOLD, 128 << 10),
    ] {
        // SAFETY: only sets a parameter of the allocator, which may be done at any time. A refusal changes nothing.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Gives pages of the heap back that hold nothing any more. Call it after work that needed much for a moment, like a
/// start.
pub fn release_free_heap() {
    // SAFETY: looks for free blocks under the allocator's own lock; nobody has a reference into them.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Unmaps code and constants of this program. What is needed again is mapped with its next use, from the file in
/// memory. Call it after work that does not come back soon, like reading a configuration.
pub fn release_program_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            // Made by the linker: the first byte of the program, and the first one after its code.
            static __executable_start: u8;
            static etext: u8;
        }
        let (start, end) = ((&raw const __executable_start).addr(), (&raw const etext).addr());
        // SAFETY: asks for a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        if page == 0 || !start.is_multiple_of(page) {
            return;
        }
        let len = end.saturating_sub(start) / page * page;
        let start = (&raw const __executable_start).cast_mut();
        // SAFETY: from its header to the end of its code a program consists of private read-only mappings of its file,
        // which cannot be written while it runs; nothing relocates them. Their pages come back from the file as they
        // were. A refusal (locked memory) changes nothing.
        let _ = unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) };
    }
}

/// For [`nebula_core::io::Options::on_idle`]: gives back what the control thread of a driver no longer needs.
pub(crate) fn release(idle: Idle) {
    match idle {
        Idle::ControlWorkOver => {
            release_program_pages();
            // Tables that shrank, and all that handshakes without an answer held.
            release_free_heap();
        }
        // For a host with a hundred pods the list took hundreds of KiB for a moment.
        Idle::InterfacesListed => release_free_heap(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped_kilobytes() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssFile:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn released_pages_are_no_longer_mapped_and_come_back_as_they_were() {
        let table: &[&str] = &["constants", "with", "relocations"];
        let before = (mapped_kilobytes(), table.join(" "));
        release_program_pages();
        let after = (mapped_kilobytes(), table.join(" "));
        assert!(after.0 < before.0, "{} kB mapped, {} kB before", after.0, before.0);
        assert_eq!(after.1, before.1);
    }
}

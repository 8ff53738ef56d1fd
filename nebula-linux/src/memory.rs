//! Memory of the whole process: how the C library's allocator keeps it, and which pages of the program stay mapped.
#![allow(unsafe_code)]

/// Makes all threads share one malloc arena instead of one each, and keeps large blocks outside it. Data threads
/// allocate nothing once they are warm, so their own arenas would be mostly unused memory. Call it before starting
/// threads.
pub fn share_one_heap() {
    #[cfg(target_env = "gnu")]
    for (parameter, value) in [
        (libc::M_ARENA_MAX, 1),
        // The default value; setting it keeps it from growing with the largest block freed, so blocks of this size
        // always go back to the system at once.
        (libc::M_MMAP_THRESHOLD, 128 << 10),
    ] {
        // SAFETY: only sets an allocator parameter, which is allowed at any time. A refusal changes nothing.
        let _ = unsafe { libc::mallopt(parameter, value) };
    }
}

/// Returns unused heap pages to the system. Call it after work with a short peak in memory use, such as startup.
pub fn release_free_heap() {
    // SAFETY: looks for free blocks under the allocator's own lock; no reference points into them.
    #[cfg(target_env = "gnu")]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Returns the pages of the main thread's stack that deeper calls than this one used, and does nothing on other
/// threads. Call it after work with a deep stack, such as startup.
#[inline(never)]
pub fn release_main_stack() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: only reads a system parameter.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        if page == 0 || nix::unistd::gettid() != nix::unistd::getpid() {
            return;
        }
        let here = 0_u8;
        let here = (&raw const here).cast_mut();
        // The page below this one is for the frames of this function and of the call.
        let end = here.wrapping_byte_sub(here.addr() % page + page);
        let start = end.wrapping_byte_sub(MAIN_STACK);
        // SAFETY: nothing that lives is below the stack pointer. What is below the main thread's stack is the gap that
        // the kernel keeps free there (1 MiB), which is no mapping and so is passed over.
        let _ = unsafe { libc::madvise(start.cast(), MAIN_STACK, libc::MADV_DONTNEED) };
    }
}

/// As deep as calls go that are not recursive; a multiple of the page size.
#[cfg(target_os = "linux")]
const MAIN_STACK: usize = 256 << 10;

/// Unmaps this program's code and constants. A page is mapped again from the page cache when it is next used. Call it
/// after work that is not repeated soon, such as reading a configuration.
pub fn release_program_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            // Defined by the linker: the first byte of the program, and the first one after its code.
            static __executable_start: u8;
            static etext: u8;
        }
        let (start, end) = ((&raw const __executable_start).addr(), (&raw const etext).addr());
        // SAFETY: only reads a system parameter.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        if page == 0 || !start.is_multiple_of(page) {
            return;
        }
        let len = end.saturating_sub(start) / page * page;
        let start = (&raw const __executable_start).cast_mut();
        // SAFETY: from its header to the end of its code, a program consists of private read-only mappings of its file,
        // which cannot be written while it runs and has no relocations there. The pages come back from the file
        // unchanged. A refusal (locked memory) changes nothing.
        let _ = unsafe { libc::madvise(start.cast(), len, libc::MADV_DONTNEED) };
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

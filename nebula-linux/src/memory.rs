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

/// Returns the pages of this thread's stack that deeper calls than this one used. Call it after work with a deep
/// stack, such as startup or the exchange of post-quantum keys.
#[inline(never)]
pub fn release_stack() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: only reads a system parameter.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(0);
        if page == 0 {
            return;
        }
        let here = 0_u8;
        let here = (&raw const here).cast_mut();
        // The page below this one is for the frames of this function and of the call.
        let end = here.wrapping_byte_sub(here.addr() % page + page);
        let below = end.addr().saturating_sub(lowest_of_stack().unwrap_or(usize::MAX));
        let len = below.min(DEEPEST) / page * page;
        // SAFETY: nothing that lives is below the stack pointer, and the range is of this thread's stack, or of the gap
        // that the kernel keeps free below that of the main thread (1 MiB), which is no mapping and so is passed over.
        let _ = unsafe { libc::madvise(end.wrapping_byte_sub(len).cast(), len, libc::MADV_DONTNEED) };
    }
}

/// The lowest address of this thread's stack; of the main thread, whose stack grows, one that it does not reach.
#[cfg(target_os = "linux")]
fn lowest_of_stack() -> Option<usize> {
    if nix::unistd::gettid() == nix::unistd::getpid() {
        return Some(0);
    }
    let mut attributes = std::mem::MaybeUninit::uninit();
    let (mut lowest, mut len) = (std::ptr::null_mut(), 0);
    // SAFETY: the attributes are filled in before they are read, and freed once.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let found = libc::pthread_attr_getstack(attributes.as_ptr(), &raw mut lowest, &raw mut len);
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        (found == 0).then(|| lowest.addr())
    }
}

/// As deep as calls go that are not recursive.
#[cfg(target_os = "linux")]
const DEEPEST: usize = 256 << 10;

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

    /// Bytes of the mapping of this address that are in memory.
    fn resident_around(address: usize) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| {
            let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
            let [start, end] = range.map_or([0; 2], |(start, end)| {
                [start, end].map(|text| usize::from_str_radix(text, 16).unwrap_or_default())
            });
            !(start..end).contains(&address)
        });
        let line = lines.find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    #[inline(never)]
    fn deep() -> u8 {
        std::hint::black_box([7_u8; 128 << 10])[100]
    }

    #[test]
    fn pages_of_a_stack_that_are_in_use_no_more_are_given_back() {
        let thread = std::thread::Builder::new().stack_size(1 << 20).spawn(|| {
            let kept = std::hint::black_box([3_u8; 4 << 10]);
            let here = (&raw const kept).addr();
            deep();
            let before = resident_around(here);
            release_stack();
            let after = resident_around(here);
            assert!(before - after >= 120 << 10, "{before} bytes, then {after}");
            assert_eq!((kept, deep()), ([3; 4 << 10], 7));
        });
        thread.unwrap().join().unwrap();
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

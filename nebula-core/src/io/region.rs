//! Page-aligned buffer that uses memory only where it was touched, and releases it on request.
#![allow(unsafe_code)]

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Anonymous private memory, zero until written.
#[derive(Debug)]
pub(super) struct Region {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned by this value alone and is reached only through its borrows.
unsafe impl Send for Region {}

impl Region {
    /// Reserves `len` bytes (more than zero).
    pub(super) fn new(len: usize) -> io::Result<Self> {
        // SAFETY: a new private anonymous mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // A huge page would make the first touched byte cost 2 MiB. Kernels without huge pages refuse, which is fine.
        // SAFETY: the range is the mapping made above.
        let _ = unsafe { libc::madvise(start, len, libc::MADV_NOHUGEPAGE) };
        NonNull::new(start.cast())
            .map(|start| Self { start, len })
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    /// Releases the memory; the bytes read as zero afterwards.
    pub(super) fn release(&mut self) {
        // SAFETY: the range is this value's mapping, and `&mut self` proves that nothing borrows it.
        let _ = unsafe { libc::madvise(self.start.as_ptr().cast(), self.len, libc::MADV_DONTNEED) };
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is `len` initialised (zero-filled) bytes and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is this value's mapping; no borrow can outlive it.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_region_reads_as_zero_and_can_be_written_again() {
        let mut region = Region::new(3 << 12).unwrap();
        assert_eq!(region.len(), 3 << 12);
        region.fill(7);
        region.release();
        assert!(region.iter().all(|&byte| byte == 0));
        region[4096] = 1;
        assert_eq!(region[4096], 1);
    }
}

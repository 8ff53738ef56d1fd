//! A file that all instances of a node share: mapped read-only, so that it is in memory once.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

/// The bytes of a file that is replaced by a rename and never changed or truncated, which only its owner, root, could
/// do.
#[derive(Debug)]
pub struct MappedFile {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is read-only, owned by this value alone, and reached only through its borrows.
unsafe impl Send for MappedFile {}
// SAFETY: as above; nobody writes to it.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Opens a file of the folder. See [`MappedFile::map`].
    pub fn open_at(folder: impl AsFd, name: &OsStr) -> io::Result<File> {
        // Neither a link elsewhere nor a pipe whose other end decides when this returns.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        Ok(openat(folder, name, flags, Mode::empty())?.into())
    }

    /// Maps a whole file of at most `max_bytes`.
    ///
    /// # Errors
    /// Returns an error if anybody but root (or this process's own user) can write to the file, if it is not a regular
    /// file, is empty or too long, or if the kernel refuses to map it.
    pub fn map(file: &File, max_bytes: u64) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let refused = |why: String| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        if !metadata.is_file() {
            return refused("it is not a regular file".to_owned());
        }
        // Whoever could truncate it could end this process by that.
        let is_own = [0, nix::unistd::geteuid().as_raw()].contains(&metadata.uid());
        if !is_own || metadata.mode() & 0o022 != 0 {
            let (uid, mode) = (metadata.uid(), metadata.mode() & 0o7777);
            return refused(format!("others than root may write to it (owner {uid}, mode {mode:o})"));
        }
        let len = match usize::try_from(metadata.len()) {
            Ok(len) if len > 0 && metadata.len() <= max_bytes => len,
            _ => return refused(format!("it has {} bytes, and may have from 1 to {max_bytes}", metadata.len())),
        };
        let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(start.cast())
            .map(|start| Self { start, len })
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `len` readable bytes and lives as long as `self`. Its owner never changes the file,
        // but replaces it; whatever the bytes are, they are checked where they are used.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the range is this value's mapping; no borrow can outlive it.
        let _ = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn map(folder: &tempfile::TempDir, max_bytes: u64) -> io::Result<MappedFile> {
        let place = File::open(folder.path()).unwrap();
        MappedFile::map(&MappedFile::open_at(place, OsStr::new("table"))?, max_bytes)
    }

    #[test]
    fn a_mapped_file_stays_as_it_was_when_another_takes_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        std::fs::write(&path, "first").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let first = map(&folder, 5).unwrap();
        std::fs::write(folder.path().join("next"), "second").unwrap();
        std::fs::rename(folder.path().join("next"), &path).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!((&*first, &*map(&folder, 6).unwrap()), (&b"first"[..], &b"second"[..]));
    }

    #[test]
    fn what_others_could_change_or_is_no_file_of_that_size_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table");
        assert_eq!(map(&folder, 9).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert!(map(&folder, 9).unwrap_err().to_string().contains("0 bytes"));
        std::fs::write(&path, "0123456789").unwrap();
        assert!(map(&folder, 9).unwrap_err().to_string().contains("10 bytes"));
        std::fs::set_permissions(&path, Permissions::from_mode(0o664)).unwrap();
        assert!(map(&folder, 10).unwrap_err().to_string().contains("mode 664"));
        std::fs::rename(&path, folder.path().join("elsewhere")).unwrap();
        symlink("elsewhere", &path).unwrap();
        assert_eq!(map(&folder, 10).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(map(&folder, 10).unwrap_err().to_string().contains("regular"));
    }
}

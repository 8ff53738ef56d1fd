//! The files of the client, which others replace by rename while this program runs: the token, and the root
//! certificates of the CA service.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;
use zeroize::Zeroizing;

/// A file that was opened, with its folder, while that was permitted, because the program was about to switch to a user
/// that cannot reach it by its path.
#[derive(Debug, Clone)]
pub(super) struct HeldFile {
    folder: Arc<OwnedFd>,
    file: Arc<File>,
}

impl HeldFile {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = Arc::new(File::open(path)?);
        let folder = path.parent().unwrap_or_else(|| Path::new("/"));
        let folder = open(folder, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(Self { folder: Arc::new(folder), file })
    }

    /// Whether the file was replaced by one that this program may not read.
    pub(super) fn is_stale(&self, path: &Path) -> bool {
        self.file.metadata().is_ok_and(|file| file.nlink() == 0) && self.present(path).is_err()
    }

    /// The file of that name that is in the folder now.
    fn present(&self, path: &Path) -> io::Result<File> {
        let name = path.file_name().unwrap_or_default();
        let opened = openat(&*self.folder, name, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(File::from(opened))
    }
}

/// Reads the file at `path`; where it is held, the one that is in its folder now, or else the held one.
pub(super) fn read(path: &Path, held: Option<&HeldFile>) -> io::Result<Zeroizing<String>> {
    let Some(held) = held else { return read_from_start(&File::open(path)?) };
    match held.present(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => read_from_start(&held.file),
        opened => read_from_start(&opened?),
    }
}

fn read_from_start(file: &File) -> io::Result<Zeroizing<String>> {
    // Files that are not regular report length 0.
    let length = usize::try_from(file.metadata()?.len()).unwrap_or(MAX_FILE_BYTES);
    let most = if length == 0 { MAX_FILE_BYTES } else { length.min(MAX_FILE_BYTES) };
    // Reserves everything at once, because growing would leave copies of a secret behind, plus a little more, so that
    // the library reads directly into this buffer. All of it is overwritten at the end, so reserving much more would
    // cost memory.
    nebula_cert::text::read(FromStart { file, at: 0 }.take(most as u64), most + 64)
}

/// Reads a file from its start without using its offset, which others share.
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(bytes, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

const MAX_FILE_BYTES: usize = 256 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_replaced_is_read_again_through_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "first").unwrap();
        let held = HeldFile::open(&path).unwrap();
        assert_eq!(*read(&path, Some(&held)).unwrap(), "first");
        std::fs::write(folder.path().join("next"), "second").unwrap();
        std::fs::rename(folder.path().join("next"), &path).unwrap();
        // The folder need not be reachable by its path.
        let elsewhere = Path::new("/nonexistent/token");
        assert_eq!(*read(elsewhere, Some(&held)).unwrap(), "second");
        assert!(!held.is_stale(elsewhere));
        std::fs::remove_file(&path).unwrap();
        assert!(held.is_stale(&path));
        assert!(read(&path, Some(&held)).is_err());
    }

    #[test]
    fn a_token_that_was_saved_as_utf_16_is_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let wide: Vec<u8> = "\u{feff}token".encode_utf16().flat_map(u16::to_le_bytes).collect();
        std::fs::write(file.path(), wide).unwrap();
        assert_eq!(*read(file.path(), None).unwrap(), "token");
        std::fs::write(file.path(), b"\xf6\xdf").unwrap();
        assert!(read(file.path(), None).unwrap_err().to_string().contains("save it as UTF-8"));
    }
}

//! Files that others read while we replace them: written beside, synced, renamed. A reader sees the old or the new
//! content, and so does the node after a crash.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Replaces a file. `check` may look at the complete new file before it takes the old one's place.
///
/// # Errors
/// Returns the file system's error or that of `check`; the old file is then untouched and nothing else is left.
pub fn replace(
    path: &Path,
    mode: u32,
    content: &mut dyn Read,
    check: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    put_in_place(path, mode, content, check, || Ok(()))
}

/// As [`replace`], for a file that one process at a time writes: what earlier ones left, when they were killed, is
/// removed.
///
/// # Errors
/// As [`replace`].
pub fn replace_alone(
    path: &Path,
    mode: u32,
    content: &mut dyn Read,
    check: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    remove_own_stale(path);
    replace(path, mode, content, check)
}

/// As [`replace_alone`], for a file that belongs to another one: that is renamed, `from` to `to`, right behind it, so
/// that the two are of different age only for a moment.
///
/// # Errors
/// As [`replace`]; the new file is in place if only the other one cannot be renamed.
pub fn replace_pair(path: &Path, mode: u32, content: &mut dyn Read, (from, to): (&Path, &Path)) -> io::Result<()> {
    remove_own_stale(path);
    put_in_place(path, mode, content, |_| Ok(()), || fs::rename(from, to))
}

/// Writes a file beside `path`, moves it there and calls `and_then` before the folder is synced.
fn put_in_place(
    path: &Path,
    mode: u32,
    content: &mut dyn Read,
    check: impl FnOnce(&Path) -> io::Result<()>,
    and_then: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let temporary = temporary(path);
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
        io::copy(content, &mut file)?;
        // The umask may have taken bits away.
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        // A program that is still open for writing cannot be run.
        drop(file);
        check(&temporary)?;
        fs::rename(&temporary, path)?;
        and_then()?;
        sync_parent(path)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes a file durably.
///
/// # Errors
/// Returns the file system's error; a missing file is not an error.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => sync_parent(path),
    }
}

fn remove_own_stale(path: &Path) {
    if let (Some(dir), Some(name)) = (path.parent(), path.file_name()) {
        remove_stale(dir, |stale| name == stale);
    }
}

/// Removes what killed writers of files in `dir` left behind. Only names that [`replace`] makes, for which `is_ours`
/// says yes, are touched.
pub fn remove_stale(dir: &Path, is_ours: impl Fn(&str) -> bool) {
    let names =
        fs::read_dir(dir).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    for name in names {
        let target = name.strip_prefix('.').and_then(|rest| rest.rsplit_once(MARK)).map(|(target, _)| target);
        if target.is_some_and(&is_ours) {
            // It is tried again at the next start.
            let _ = fs::remove_file(dir.join(name));
        }
    }
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    File::open(dir)?.sync_all()
}

// Runtimes load no file with such an extension, and take the rename of a file in the same directory as a reason to
// reload.
fn temporary(path: &Path) -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!("{MARK}{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
    path.with_file_name(name)
}

const MARK: &str = ".tmp-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, 0o755, &mut &b"one"[..], |_| Ok(())).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o755);
        let error = replace(&path, 0o600, &mut &b"two"[..], |new| {
            assert_eq!(fs::read(new).unwrap(), b"two");
            Err(io::Error::other("no good"))
        });
        assert!(error.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"one");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the failed attempt left a file");
        remove(&path).unwrap();
        remove(&path).unwrap();
    }

    #[test]
    fn a_writer_that_is_alone_removes_what_killed_ones_left() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".file.tmp-7-0", ".other.tmp-7-0"] {
            fs::write(dir.path().join(name), b"half a secret").unwrap();
        }
        replace_alone(&dir.path().join("file"), 0o600, &mut &b"one"[..], |_| Ok(())).unwrap();
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".other.tmp-7-0", "file"]);
    }

    #[test]
    fn two_files_that_belong_together_change_together_or_the_second_stays() {
        let dir = tempfile::tempdir().unwrap();
        let [certificate, next, key] = ["certificate", "key.next", "key"].map(|name| dir.path().join(name));
        fs::write(&next, b"two").unwrap();
        replace_pair(&certificate, 0o644, &mut &b"of two"[..], (&next, &key)).unwrap();
        assert_eq!([fs::read(&certificate).unwrap(), fs::read(&key).unwrap()], [b"of two".to_vec(), b"two".to_vec()]);
        assert!(!next.exists());
        assert!(replace_pair(&certificate, 0o644, &mut &b"of three"[..], (&next, &key)).is_err());
        assert_eq!([fs::read(&certificate).unwrap(), fs::read(&key).unwrap()], [b"of three".to_vec(), b"two".to_vec()]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "the failed attempt left a file");
    }

    #[test]
    fn only_our_own_leftovers_are_swept() {
        let dir = tempfile::tempdir().unwrap();
        for name in [".plugin.tmp-7-0", ".other.tmp-7-0", "plugin.tmp-7-0", ".plugin", "plugin"] {
            fs::write(dir.path().join(name), b"x").unwrap();
        }
        remove_stale(dir.path(), |name| name == "plugin");
        let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".other.tmp-7-0", ".plugin", "plugin", "plugin.tmp-7-0"]);
    }
}

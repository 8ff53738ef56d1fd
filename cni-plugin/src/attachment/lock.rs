//! An advisory file lock that lets one verb at a time work on an attachment, across processes.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};

use crate::attachment::files::Files;
use crate::reply::{Error, code};

/// A held lock. The kernel releases it when the process ends, even if it is killed.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    dir: PathBuf,
    _file: File,
}

impl Lock {
    /// Waits for the lock; creates the directory of the records if it does not exist.
    ///
    /// # Errors
    /// Code 11 if another process still holds the lock at the deadline, code 5 for a file system error.
    pub fn acquire(files: &Files, clock: &dyn Clock, deadline: Deadline) -> Result<Self, Error> {
        let path = files.lock();
        let failed = |e: io::Error| Error::new(code::IO, format!("cannot lock {}: {e}", path.display()));
        loop {
            let file = match open(files) {
                Err(e) if has_vanished(&e, files) && !deadline.is_over(clock) => {
                    clock.sleep(VANISHED_RETRY_INTERVAL);
                    continue;
                }
                other => other.map_err(failed)?,
            };
            match file.try_lock() {
                // The previous holder removed the file after we opened it, so nobody else will ever see this lock. Open
                // it again.
                Ok(()) if !is_still_there(&file, &path) => {}
                Ok(()) => return Ok(Self { path, dir: files.dir(), _file: file }),
                Err(TryLockError::WouldBlock) if deadline.is_over(clock) => {
                    let msg = format!("another call still works on {}", files.record().display());
                    return Err(Error::new(code::TRY_AGAIN, msg).details("try again"));
                }
                Err(TryLockError::WouldBlock) => clock.sleep(LOCK_POLL_INTERVAL),
                Err(TryLockError::Error(e)) => return Err(failed(e)),
            }
        }
    }

    /// Removes the lock file, and the directory if this was the last attachment of the network.
    pub fn remove(self) {
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_dir(&self.dir);
    }
}

fn open(files: &Files) -> io::Result<File> {
    files.create_dir()?;
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(files.lock())
}

/// Whether the directory vanished meanwhile, because another process removed the network's last attachment. If it does
/// so while it is created, that fails because it exists.
fn has_vanished(error: &io::Error, files: &Files) -> bool {
    match error.kind() {
        io::ErrorKind::NotFound => true,
        io::ErrorKind::AlreadyExists => !files.dir().is_file(),
        _ => false,
    }
}

fn is_still_there(file: &File, path: &PathBuf) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(held), Ok(named)) => (held.dev(), held.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(10);
// Usually the next try succeeds; a path that stays unusable must not keep a processor busy until the deadline.
const VANISHED_RETRY_INTERVAL: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;
    use crate::request::Key;
    use nebula_cni_contract::clock::SystemClock;

    fn files(dir: &std::path::Path) -> Files {
        Files::new(dir, &Key { network: "n".into(), container_id: "c".into(), ifname: "eth0".into() })
    }

    #[test]
    fn a_second_caller_is_told_to_try_again() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let soon = || Deadline::after(&SystemClock, Duration::from_millis(30));
        let held = Lock::acquire(&files, &SystemClock, soon()).unwrap();
        assert_eq!(Lock::acquire(&files, &SystemClock, soon()).unwrap_err().code, 11);
        drop(held);
        Lock::acquire(&files, &SystemClock, soon()).unwrap().remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_in_place_of_the_directory_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        fs::write(files.dir(), "").unwrap();
        let began = SystemClock.now();
        let deadline = Deadline::after(&SystemClock, Duration::from_secs(30));
        assert_eq!(Lock::acquire(&files, &SystemClock, deadline).unwrap_err().code, code::IO);
        assert!(SystemClock.now() - began < Duration::from_secs(10));
    }

    #[test]
    fn removal_never_lets_two_hold_it_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let inside = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let deadline = Deadline::after(&SystemClock, Duration::from_secs(30));
                        let lock = Lock::acquire(&files, &SystemClock, deadline).unwrap();
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        lock.remove();
                    }
                });
            }
        });
    }
}

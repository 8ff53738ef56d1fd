//! The files of an attachment: their names, how they are replaced, and their end.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::launch;

use crate::link::guard;
use crate::request::Key;

/// The files of one attachment. They are all removed with it.
#[derive(Debug, Clone)]
pub struct Files {
    state_dir: PathBuf,
    key: Key,
}

impl Files {
    /// Derives the paths; creates nothing.
    #[must_use]
    pub fn new(state_dir: &Path, key: &Key) -> Self {
        Self { state_dir: state_dir.to_owned(), key: key.clone() }
    }

    /// The attachment these files belong to.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// Directory of the network's records.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        self.state_dir.join(&self.key.network)
    }

    /// The record file.
    #[must_use]
    pub fn record(&self) -> PathBuf {
        self.named("json")
    }

    /// The launch contract file.
    #[must_use]
    pub fn launch(&self) -> PathBuf {
        self.named("launch")
    }

    /// Where a changed launch contract is whole while the launch file is overwritten.
    #[must_use]
    pub fn launch_copy(&self) -> PathBuf {
        launch::copy_of(&self.launch())
    }

    /// Directory that holds the records of all networks.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.state_dir.clone()
    }

    /// Names of the attachment's systemd units. It has the first, unless another instance took over from that: then the
    /// other one, and so on.
    #[must_use]
    pub fn units(&self) -> [String; 2] {
        ["", "-b"].map(|end| format!("nebula-pod-{:016x}{end}.service", self.hash()))
    }

    /// Prefix of the names of the tables that hold the rules for the attachment's link.
    #[must_use]
    pub fn guard_tables(&self) -> String {
        guard::table_prefix(self.hash())
    }

    /// Part of the names of what captures the attachment's traffic.
    #[must_use]
    pub fn capture(&self) -> String {
        format!("{:016x}", self.hash())
    }

    /// Log file with what the instance writes to stderr.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.named("log")
    }

    /// Lock file, held while a verb works on the attachment.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.named("lock")
    }

    /// The instance's room: a directory that only the instance's user may enter.
    #[must_use]
    pub fn room(&self) -> PathBuf {
        self.state_dir.join(format!(".{:016x}", self.hash()))
    }

    /// Socket on which the instance reports its status.
    #[must_use]
    pub fn status_socket(&self) -> PathBuf {
        self.room().join("pod.status")
    }

    /// Socket on which the instance reports that it is ready.
    #[must_use]
    pub fn notify_socket(&self) -> PathBuf {
        self.state_dir.join(format!(".{:016x}.notify", self.hash()))
    }

    /// Socket to which the instance hands its device when it ends; the same path as
    /// [`nebula_cni_contract::launch::LaunchSpec::device_socket`].
    #[must_use]
    pub fn device_socket(&self) -> PathBuf {
        self.room().join("pod.device")
    }

    /// Whether there is no trace of an earlier ADD of this attachment. Its lock does not count: every call makes one.
    #[must_use]
    pub fn have_left_nothing(&self) -> bool {
        let left = [self.record(), self.launch(), self.launch_copy(), self.room(), self.log(), self.notify_socket()];
        left.iter().all(|path| path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound))
    }

    /// Creates the directory of the network's records.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn create_dir(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(self.dir())
    }

    /// Removes everything but the lock. The record goes last, so that a retry still knows what to undo.
    ///
    /// # Errors
    /// Returns one line per file that could not be removed.
    pub fn remove(&self) -> Result<(), Vec<String>> {
        let (record, launch) = (self.record(), self.launch());
        let mut problems = Vec::new();
        let sockets = [self.notify_socket(), self.status_socket(), self.device_socket()];
        let first = sockets.into_iter().chain([
            temporary(&launch),
            temporary(&self.launch_copy()),
            self.launch_copy(),
            launch,
            self.log(),
            temporary(&record),
        ]);
        let mut note = |path: &Path, removed: io::Result<()>| match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                problems.push(format!("cannot remove {}: {e}", path.display()));
            }
            _ => {}
        };
        for path in first {
            note(&path, fs::remove_file(&path));
        }
        // The instance may have left other files in its room.
        note(&self.room(), fs::remove_dir_all(self.room()));
        if problems.is_empty()
            && let Err(e) = fs::remove_file(&record)
            && e.kind() != io::ErrorKind::NotFound
        {
            problems.push(format!("cannot remove {}: {e}", record.display()));
        }
        if problems.is_empty() { Ok(()) } else { Err(problems) }
    }

    fn named(&self, suffix: &str) -> PathBuf {
        self.dir().join(format!("{}-{}.{suffix}", self.key.container_id, self.key.ifname))
    }

    // A socket address holds 107 bytes and a container id alone takes 64, so sockets are named by a hash. They live
    // next to the networks' directories, whose names never begin with a dot.
    fn hash(&self) -> u64 {
        let Key { network, container_id, ifname } = &self.key;
        fnv1a(&[network, "\0", container_id, "\0", ifname])
    }
}

/// Removes stale files that a killed verb left behind: those next to a lock that nobody holds and that has no record.
/// Without a record nothing was started. Files that cannot be removed now are left for the next sweep.
pub fn sweep(state_dir: &Path, network: &str) {
    let dir = state_dir.join(network);
    let Ok(entries) = fs::read_dir(&dir) else { return };
    let locks =
        entries.filter_map(|entry| Some(entry.ok()?.path())).filter(|p| p.extension().is_some_and(|e| e == "lock"));
    for path in locks {
        let Ok(lock) = OpenOptions::new().write(true).open(&path) else { continue };
        if lock.try_lock().is_err() || with_suffix(&path, "json").exists() {
            continue;
        }
        for left in ["json.tmp", "launch.tmp", "launch.copy.tmp", "launch.copy", "launch", "log", "lock"] {
            let _ = fs::remove_file(with_suffix(&path, left));
        }
    }
    let _ = fs::remove_dir(&dir);
}

fn with_suffix(lock: &Path, suffix: &str) -> PathBuf {
    let mut name = lock.as_os_str().to_owned().into_vec();
    name.truncate(name.len() - "lock".len());
    name.extend(suffix.bytes());
    PathBuf::from(OsString::from_vec(name))
}

/// Replaces a file atomically: after a crash it holds either the old or the new bytes. Only its owner can read it.
///
/// # Errors
/// Returns the file system's error.
pub fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace_durably(path, bytes, 0o600)
}

/// Like [`write_durably`], for a file with these permissions, whatever the umask is.
///
/// # Errors
/// Returns the file system's error.
pub fn replace_durably(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let temporary = temporary(path);
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&temporary)?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all())
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    PathBuf::from(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path) -> Files {
        let key = Key { network: "net".into(), container_id: "c".repeat(64), ifname: "eth0".into() };
        Files::new(dir, &key)
    }

    #[test]
    fn socket_names_fit_a_socket_address() {
        let state_dir = PathBuf::from(format!("/{}", "x".repeat(69)));
        assert!(files(&state_dir).status_socket().as_os_str().len() < 108);
        assert!(files(&state_dir).notify_socket().as_os_str().len() < 108);
        assert!(files(&state_dir).device_socket().as_os_str().len() < 108);
    }

    #[test]
    fn the_instance_finds_the_socket_for_its_device_beside_the_one_of_its_status() {
        let files = files(Path::new("/run/nebula-cni"));
        assert_eq!(files.status_socket().with_extension("device"), files.device_socket());
    }

    #[test]
    fn remove_takes_all_files_and_may_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        files.create_dir().unwrap();
        write_durably(&files.record(), b"{}").unwrap();
        fs::create_dir(files.room()).unwrap();
        let sockets = [files.status_socket(), files.notify_socket(), files.device_socket()];
        for path in [files.launch(), files.log(), temporary(&files.record())].into_iter().chain(sockets) {
            fs::write(path, b"x").unwrap();
        }
        files.remove().unwrap();
        files.remove().unwrap();
        assert_eq!(fs::read_dir(files.dir()).unwrap().count(), 0);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

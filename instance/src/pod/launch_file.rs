//! Reads the launch contract, and makes sure that only one instance serves it.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::launch::{self, LaunchSpec, contract_hash};
use nebula_linux::errno;
use nix::fcntl::{Flock, FlockArg};

use crate::pod::error::{Cause, Error};
use crate::pod::predecessor::is_same_file;

/// A launch file in use. A second instance of the same pod waits briefly for this value to be dropped.
#[derive(Debug)]
pub struct Launch {
    /// Its contents.
    pub spec: LaunchSpec,
    /// Held while the pod is served.
    pub(crate) lock: Lock,
}

/// The lock of a launch file.
#[derive(Debug)]
pub(crate) enum Lock {
    /// Ends with this value.
    Claimed(Flock<File>),
    /// That of the previous instance: it ends when neither of them has the file open any more.
    Inherited(File),
}

impl Lock {
    /// Duplicates the open file.
    pub(crate) fn file(&self) -> std::io::Result<File> {
        match self {
            Self::Claimed(lock) => lock.try_clone(),
            Self::Inherited(file) => file.try_clone(),
        }
    }
}

impl Launch {
    /// Goes on with the lock of the previous instance, which it holds until this one serves.
    ///
    /// # Errors
    /// Returns an error if that is not the lock of the file at `path`.
    pub(crate) fn inherit(path: &Path, spec: LaunchSpec, lock: OwnedFd) -> std::io::Result<Self> {
        if !is_same_file(&launch::open(path)?, &lock)? {
            return Err(std::io::Error::other("it has locked another launch file"));
        }
        // Succeeds only with the description that holds the lock, or where nobody holds it.
        let held = Flock::lock(File::from(lock), FlockArg::LockExclusiveNonblock);
        let held = held.map_err(|_| std::io::Error::other("it has not locked the launch file"))?;
        let lock = Lock::Inherited(held.try_clone()?);
        // Its drop would unlock the file for the other process, too.
        std::mem::forget(held);
        Ok(Self { spec, lock })
    }

    /// Reads the file and locks it, so that no other instance serves it.
    ///
    /// # Errors
    /// Returns an error if [`read`] does, or if another instance serves this pod.
    pub fn claim(path: &Path) -> Result<Self, Error> {
        let spec = read(path)?;
        let refuse = |cause: Cause| Error::launch(path, cause);
        let mut file = File::open(path).map_err(|error| refuse(errno::Plain(error).into()))?;
        for _ in 0..MAX_LOCK_TRIES {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self { spec, lock: Lock::Claimed(lock) }),
                Err((back, nix::errno::Errno::EWOULDBLOCK)) => file = back,
                Err((_, errno)) => return Err(refuse(format!("cannot lock it: {}", errno.desc()).into())),
            }
            std::thread::sleep(LOCK_INTERVAL);
        }
        Err(refuse("another instance serves this pod".into()))
    }
}

/// The launch file of a running instance, which stays open: once the instance is confined, it cannot be opened again.
/// The plugin writes other settings of the tunnel into it and sends SIGHUP.
#[derive(Debug)]
pub(crate) struct OpenLaunch {
    file: File,
    path: PathBuf,
}

impl OpenLaunch {
    /// Keeps the file of `launch`, read from `path`, open.
    pub(crate) fn of(launch: &Launch, path: &Path) -> std::io::Result<Self> {
        Ok(Self { file: launch.lock.file()?, path: path.to_owned() })
    }

    /// Reads it again. Returns the contract and its [`hash`](contract_hash).
    ///
    /// # Errors
    /// As [`read`].
    pub(crate) fn read(&self) -> Result<(LaunchSpec, String), Error> {
        let refuse = |cause: Cause| Error::launch(&self.path, cause);
        let mut text = Vec::new();
        let mut part = vec![0; 16 << 10];
        while text.len() as u64 <= MAX_LAUNCH_BYTES {
            let read = self.file.read_at(&mut part, text.len() as u64);
            match read.map_err(|error| refuse(errno::Plain(error).into()))? {
                0 => break,
                count => text.extend_from_slice(&part[..count]),
            }
        }
        Ok((parse(&self.path, &text)?, contract_hash(&text)))
    }
}

/// Reads the launch contract.
///
/// # Errors
/// Returns an error if the file is unreadable, malformed, too long or of another version.
pub fn read(path: &Path) -> Result<LaunchSpec, Error> {
    let refuse = |cause: Cause| Error::launch(path, cause);
    let mut text = Vec::new();
    let file = launch::open(path).map_err(|error| refuse(errno::Plain(error).into()))?;
    file.take(MAX_LAUNCH_BYTES + 1).read_to_end(&mut text).map_err(|error| refuse(errno::Plain(error).into()))?;
    parse(path, &text)
}

fn parse(path: &Path, text: &[u8]) -> Result<LaunchSpec, Error> {
    let refuse = |cause: Cause| Error::launch(path, cause);
    if text.len() as u64 > MAX_LAUNCH_BYTES {
        return Err(refuse(format!("longer than {} KiB", MAX_LAUNCH_BYTES >> 10).into()));
    }
    LaunchSpec::parse(text).map_err(|why| refuse(format!("{why}; install plugin and instance from one release").into()))
}

const MAX_LAUNCH_BYTES: u64 = 1 << 20;
// A stopping instance needs a moment to close its tunnels.
const MAX_LOCK_TRIES: u32 = 20;
const LOCK_INTERVAL: Duration = Duration::from_millis(100);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn file(change: impl FnOnce(&mut serde_json::Value)) -> tempfile::NamedTempFile {
        let mut spec = serde_json::json!({
            "version": 1,
            "network": "mesh",
            "container_id": "c0ffee",
            "ifname": "eth0",
            "netns": "/run/netns/x",
            "netns_id": [4, 4026531840u64],
            "pod": {"namespace": "shop", "name": "web-1", "uid": "u"},
            "pod_address": "10.244.1.7",
            "device": "nebula0",
            "mode": "strict",
            "overlay": ["10.42.0.0/16"],
            "budget_seconds": 18,
            "port_range": [20000, 20003],
            "ca": {"url": "https://ca:8443", "tls_ca_file": "/a", "token_file": "/b"},
            "nebula": {},
            "status_socket": "/run/x.sock",
        });
        change(&mut spec);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), spec.to_string()).unwrap();
        file
    }

    pub(crate) fn launch(change: impl FnOnce(&mut serde_json::Value)) -> Result<LaunchSpec, Error> {
        read(file(change).path())
    }

    #[test]
    fn a_launch_file_of_a_newer_version_is_refused_by_its_version() {
        assert_eq!(launch(|_| ()).unwrap().target.pod.name, "web-1");
        let error = launch(|spec| {
            spec["version"] = 2.into();
            spec["new_field"] = true.into();
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("by a newer program (format 2, this one knows 1); install plugin and"), "{error}");
    }

    #[test]
    fn a_launch_file_with_an_unknown_field_or_of_absurd_size_is_refused() {
        assert!(launch(|spec| spec["surprise"] = true.into()).unwrap_err().to_string().contains("surprise"));
        let error = launch(|spec| spec["nebula"] = "x".repeat(2 << 20).into()).unwrap_err();
        assert!(error.to_string().contains("longer than"), "{error}");
    }

    #[test]
    fn an_instance_starts_from_the_whole_copy_of_a_file_that_is_torn() {
        let file = file(|spec| spec["target_was"] = 7.into());
        let copy = launch::copy_of(file.path());
        let whole = self::file(|spec| spec["device"] = "nebula7".into());
        std::fs::copy(whole.path(), &copy).unwrap();
        let claimed = Launch::claim(file.path());
        std::fs::remove_file(&copy).unwrap();
        assert_eq!(claimed.unwrap().spec.target.device, "nebula7");
        assert!(Launch::claim(file.path()).is_err(), "this is the torn one");
    }

    #[test]
    fn a_second_instance_of_a_pod_is_refused_while_the_first_lives() {
        let file = file(|_| ());
        let first = Launch::claim(file.path()).unwrap();
        let error = Launch::claim(file.path()).unwrap_err();
        assert!(error.to_string().contains("another instance serves this pod"), "{error}");
        drop(first);
        assert!(Launch::claim(file.path()).is_ok());
    }

    #[test]
    fn only_the_lock_of_this_launch_file_is_taken_over() {
        let (ours, other) = (file(|_| ()), file(|_| ()));
        let spec = || read(ours.path()).unwrap();
        let first = Launch::claim(ours.path()).unwrap();
        let inherit = |lock: OwnedFd| Launch::inherit(ours.path(), spec(), lock).map(drop).map_err(|e| e.to_string());
        let held = first.lock.file().unwrap().into();
        assert_eq!(inherit(held), Ok(()));
        let reopened = File::open(ours.path()).unwrap().into();
        assert!(inherit(reopened).unwrap_err().contains("has not locked"), "another description of the same file");
        let foreign = Launch::claim(other.path()).unwrap();
        assert!(inherit(foreign.lock.file().unwrap().into()).unwrap_err().contains("another launch file"));
        let pair = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(inherit(pair.0.into()).is_err());
        assert!(Launch::claim(ours.path()).is_err(), "the first one holds it all the time");
    }
}

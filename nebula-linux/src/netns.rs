//! Network namespaces: enters one on a separate thread, keeps an executor inside it, and detects that it is gone.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::thread::Builder;

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::{fstat, fstatat, stat};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A namespace to work in: the caller's own, or one with a path and a known identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namespace {
    /// The namespace of the calling thread.
    Own,
    /// Another one, for example a pod's.
    At {
        /// File that names it.
        path: PathBuf,
        /// Device and inode that it must have, because the path can later refer to another namespace.
        id: (u64, u64),
    },
}

/// Why a namespace cannot be entered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No such file.
    #[error("cannot open the network namespace {}: {source}", path.display())]
    Open {
        /// File.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The path now refers to another namespace.
    #[error("{} is another network namespace than the one this instance was started for", .0.display())]
    Replaced(PathBuf),
    /// The kernel refused.
    #[error("cannot enter the network namespace {}: {source} (CAP_SYS_ADMIN is needed)", path.display())]
    Enter {
        /// File.
        path: PathBuf,
        /// The kernel's error.
        source: nix::Error,
    },
    /// A thread inside could not drop its privileges.
    #[error("cannot confine a thread in the network namespace")]
    Confine(#[source] std::io::Error),
    /// No thread could be started.
    #[error("cannot start a thread (clone3(2) must be allowed, or answered with ENOSYS)")]
    Thread(#[source] std::io::Error),
    /// The work panicked.
    #[error("work in a network namespace failed unexpectedly")]
    Panicked,
}

impl Namespace {
    /// Runs `work` on a new thread inside the namespace and waits for it. The calling thread stays where it is.
    ///
    /// # Errors
    /// Returns an error if the namespace cannot be entered.
    pub fn run<T: Send>(&self, name: &str, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        std::thread::scope(|scope| {
            let thread = Builder::new().name(name.to_owned());
            let thread = thread.spawn_scoped(scope, || self.enter().map(|()| work())).map_err(Error::Thread)?;
            thread.join().unwrap_or(Err(Error::Panicked))
        })
    }

    /// Starts an executor inside the namespace, for work that comes after this process has lost the right to enter it.
    /// `confine` drops the privileges that this work does not need.
    ///
    /// # Errors
    /// Returns an error if the namespace cannot be entered or the thread cannot be confined.
    pub fn executor(
        &self,
        confine: impl FnOnce() -> std::io::Result<()> + Send + 'static,
    ) -> Result<NamespaceExecutor, Error> {
        if *self == Self::Own {
            return Ok(NamespaceExecutor::Here);
        }
        let (jobs, waiting) = channel::<Job>();
        let (report, entered) = sync_channel(1);
        let namespace = self.clone();
        let serve = move || {
            let inside = namespace.enter().and_then(|()| confine().map_err(Error::Confine));
            let is_inside = inside.is_ok();
            if report.send(inside).is_err() || !is_inside {
                return;
            }
            run_jobs(&waiting);
        };
        Builder::new().name("netns-executor".to_owned()).stack_size(STACK_BYTES).spawn(serve).map_err(Error::Thread)?;
        entered.recv().unwrap_or(Err(Error::Panicked)).map(|()| NamespaceExecutor::Inside(jobs))
    }

    fn enter(&self) -> Result<(), Error> {
        let Self::At { path, id } = self else { return Ok(()) };
        let open = |source| Error::Open { path: path.clone(), source };
        let file = File::open(path).map_err(open)?;
        let metadata = file.metadata().map_err(open)?;
        if (metadata.st_dev(), metadata.st_ino()) != *id {
            return Err(Error::Replaced(path.clone()));
        }
        setns(&file, CloneFlags::CLONE_NEWNET).map_err(|source| Error::Enter { path: path.clone(), source })
    }
}

/// Runs work inside a network namespace without the privilege to enter it.
#[derive(Debug, Clone)]
pub enum NamespaceExecutor {
    /// Runs the work on the calling thread, in its own namespace.
    Here,
    /// Sends the work to a thread inside another namespace, which stays alive at least as long as this value.
    Inside(Sender<Job>),
}

/// The name of the job's thread, and the work.
pub type Job = (&'static str, Box<dyn FnOnce() + Send>);

impl NamespaceExecutor {
    /// Runs `work` in the namespace and waits for it.
    ///
    /// # Errors
    /// Returns an error if no thread can be started for it, or it panicked.
    pub fn run<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Error> {
        let Self::Inside(jobs) = self else { return Ok(work()) };
        let (sender, result) = sync_channel(1);
        let job = Box::new(move || drop(sender.send(work())));
        jobs.send((name, job)).map_err(|_| Error::Panicked)?;
        result.recv().map_err(|_| Error::Panicked)
    }
}

/// Runs each job on a new thread, which inherits this thread's namespace; jobs may take long. If no thread can be
/// started, the job is dropped and its caller gets an error.
fn run_jobs(waiting: &Receiver<Job>) {
    for (name, work) in waiting {
        let _ = Builder::new().name(name.to_owned()).spawn(work);
    }
}

/// Detects that a namespace is gone, even if its path belongs to a process that this one may not inspect.
#[derive(Debug)]
pub struct Presence {
    namespace: Namespace,
    /// The folder of the path: folders above it may be inaccessible to the user that this program switches to.
    folder: Option<File>,
    /// A pidfd of the process in the path, which cannot refer to a later process with the same id.
    process: Option<OwnedFd>,
}

impl Presence {
    /// Starts to watch a namespace that exists now.
    ///
    /// # Errors
    /// Returns an error if the namespace is named by a process that is gone, or its folder cannot be opened.
    pub fn of(namespace: Namespace) -> std::io::Result<Self> {
        let Namespace::At { path, .. } = &namespace else {
            return Ok(Self { namespace, folder: None, process: None });
        };
        let process = match process_in(path).map(|number| pidfd_open(number, PidfdFlags::empty())) {
            // Linux before 5.3.
            None | Some(Err(rustix::io::Errno::NOSYS)) => None,
            Some(opened) => Some(opened?),
        };
        let at = |folder| OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(folder);
        let folder = path.parent().filter(|_| process.is_none()).map(at).transpose()?;
        Ok(Self { namespace, folder, process })
    }

    /// Whether the path still refers to the namespace. An open tun keeps the namespace alive, so its inode number
    /// cannot be reused meanwhile.
    #[must_use]
    pub fn is_there(&self) -> bool {
        let Namespace::At { path, id } = &self.namespace else { return true };
        if let Some(process) = &self.process {
            let mut ends = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
            return poll(&mut ends, PollTimeout::ZERO) == Ok(0);
        }
        let found = match (&self.folder, path.file_name()) {
            (Some(folder), Some(name)) => fstatat(folder, name, AtFlags::empty()),
            _ => stat(path),
        };
        match found {
            Ok(found) => (found.st_dev, found.st_ino) == *id,
            // Behind a folder that only root may search. Who removes the folder, too, ends the namespace, as the node
            // agent does with an interrupted self-test; otherwise the plugin stops this program.
            Err(Errno::EACCES) => !self.folder.as_ref().is_some_and(is_removed),
            Err(_) => false,
        }
    }
}

fn is_removed(folder: &File) -> bool {
    fstat(folder).is_ok_and(|folder| folder.st_nlink == 0)
}

/// The process id in `/proc/PID/...`.
fn process_in(path: &Path) -> Option<Pid> {
    let mut parts = path.components();
    let begins = parts.next() == Some(Component::RootDir) && parts.next()?.as_os_str() == "proc";
    let number: u32 = parts.next()?.as_os_str().to_str()?.parse().ok()?;
    Pid::from_raw(i32::try_from(number).ok()?).filter(|_| begins)
}

/// Device and inode of the namespace at `path`.
///
/// # Errors
/// Returns an error if they cannot be read.
pub fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|metadata| (metadata.st_dev(), metadata.st_ino()))
}

const STACK_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use rustix::thread::CapabilitySet;

    use super::*;
    use crate::capabilities;

    #[test]
    fn a_path_that_means_something_else_is_refused() {
        let path = PathBuf::from("/proc/self/ns/net");
        let (device, inode) = identity(&path).unwrap();
        let namespace = Namespace::At { path: path.clone(), id: (device, inode + 1) };
        assert!(matches!(namespace.run("test", || ()), Err(Error::Replaced(_))));
        assert!(matches!(namespace.executor(|| Ok(())), Err(Error::Replaced(_))));
        assert!(!Presence::of(namespace).unwrap().is_there());
        assert!(Presence::of(Namespace::At { path, id: (device, inode) }).unwrap().is_there());
    }

    /// As root, the process has capabilities that the watching thread lacks, so that thread may not inspect it.
    #[test]
    fn a_namespace_of_a_process_is_gone_with_the_process_also_for_who_may_not_look_into_it() {
        let mut process = Command::new("sleep").arg("60").spawn().unwrap();
        let path = PathBuf::from(format!("/proc/{}/ns/net", process.id()));
        let presence = Presence::of(Namespace::At { id: identity(&path).unwrap(), path }).unwrap();
        let looks = std::thread::spawn(move || {
            capabilities::hold(CapabilitySet::empty()).unwrap();
            let before = presence.is_there();
            process.kill().unwrap();
            process.wait().unwrap();
            (before, presence.is_there())
        });
        assert_eq!(looks.join().unwrap(), (true, false));
    }

    #[test]
    fn a_namespace_in_a_folder_that_may_not_be_searched_is_gone_with_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("closed");
        let path = folder.join("netns");
        let mode = |mode| fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
        fs::create_dir(&folder).unwrap();
        fs::write(&path, "").unwrap();
        let presence = Presence::of(Namespace::At { id: identity(&path).unwrap(), path: path.clone() }).unwrap();
        std::thread::scope(|scope| {
            let looks = scope.spawn(|| {
                capabilities::hold(CapabilitySet::empty()).unwrap();
                mode(0);
                assert!(presence.is_there(), "whether it is there cannot be known");
                mode(0o700);
                fs::remove_file(&path).unwrap();
                assert!(!presence.is_there(), "it can be searched");
                mode(0);
                assert!(presence.is_there(), "not known again");
                fs::remove_dir(&folder).unwrap();
                assert!(!presence.is_there(), "the folder is gone");
            });
            looks.join().unwrap();
        });
    }

    #[test]
    fn the_process_of_a_path_is_known_by_its_number_alone() {
        assert_eq!(process_in(Path::new("/proc/17/ns/net")), Pid::from_raw(17));
        for path in ["/proc/self/ns/net", "/run/netns/17", "/proc", "proc/17/ns/net", "/proc/-1/ns/net"] {
            assert_eq!(process_in(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn work_at_a_foothold_is_done_while_other_work_waits() {
        assert_eq!(NamespaceExecutor::Here.run("test", || 7).unwrap(), 7);
        let (jobs, waiting) = channel();
        std::thread::spawn(move || run_jobs(&waiting));
        let there = NamespaceExecutor::Inside(jobs);
        let (release, held) = sync_channel::<()>(0);
        let first = std::thread::spawn({
            let there = there.clone();
            move || there.run("first", move || held.recv().is_ok())
        });
        assert_eq!(there.run("second", || 2).unwrap(), 2);
        release.send(()).unwrap();
        assert!(first.join().unwrap().unwrap());
        assert!(matches!(there.run("broken", || panic!("on purpose")), Err::<(), _>(Error::Panicked)));
    }

    #[test]
    fn a_missing_path_is_named_in_the_error() {
        let namespace = Namespace::At { path: "/nonexistent/netns".into(), id: (1, 2) };
        let error = namespace.run("test", || ()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/netns"), "{error}");
    }
}

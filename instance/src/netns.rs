//! Network namespaces: enter one on a thread of its own, and notice that it is gone.

use std::fs::File;
use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, setns};

/// A namespace to work in: the caller's own, or one with a path and a known identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Namespace {
    /// Where the calling thread is.
    Own,
    /// Somebody else's, for example a pod's.
    At {
        /// File that names it.
        path: PathBuf,
        /// Device and inode it must have: a path can come to mean another namespace.
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
        /// The system's answer.
        source: std::io::Error,
    },
    /// The path means another namespace than it did.
    #[error("{} is another network namespace than the one this instance was started for", .0.display())]
    Replaced(PathBuf),
    /// The kernel refused.
    #[error("cannot enter the network namespace {}: {source} (CAP_SYS_ADMIN is needed)", path.display())]
    Enter {
        /// File.
        path: PathBuf,
        /// The kernel's answer.
        source: nix::Error,
    },
    /// No thread.
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    /// The work panicked.
    #[error("work in a network namespace failed unexpectedly")]
    Panicked,
}

impl Namespace {
    /// Runs `work` on a new thread inside the namespace and waits for it. The caller's thread never moves.
    ///
    /// # Errors
    /// The namespace cannot be entered.
    pub fn run<T: Send>(&self, name: &str, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            let thread = thread.spawn_scoped(scope, || self.enter().map(|()| work())).map_err(Error::Thread)?;
            thread.join().unwrap_or(Err(Error::Panicked))
        })
    }

    /// Whether the path still means this namespace. An open tun keeps the namespace itself alive, so its inode
    /// number is not reused while we look.
    #[must_use]
    pub fn still_exists(&self) -> bool {
        match self {
            Self::Own => true,
            Self::At { path, id } => std::fs::metadata(path).is_ok_and(|m| (m.st_dev(), m.st_ino()) == *id),
        }
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

/// Device and inode of the namespace behind `path`.
///
/// # Errors
/// It cannot be read.
pub fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    std::fs::metadata(path).map(|metadata| (metadata.st_dev(), metadata.st_ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_means_something_else_is_refused() {
        let path = PathBuf::from("/proc/self/ns/net");
        let (device, inode) = identity(&path).unwrap();
        let namespace = Namespace::At { path: path.clone(), id: (device, inode + 1) };
        assert!(!namespace.still_exists());
        assert!(matches!(namespace.run("test", || ()), Err(Error::Replaced(_))));
        assert!(Namespace::At { path, id: (device, inode) }.still_exists());
    }

    #[test]
    fn a_missing_path_is_named_in_the_error() {
        let namespace = Namespace::At { path: "/nonexistent/netns".into(), id: (1, 2) };
        let error = namespace.run("test", || ()).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/netns"), "{error}");
    }
}

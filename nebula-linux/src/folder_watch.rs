//! Notices files that are renamed into a folder (inotify(7)).

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use rustix::thread::{Gid, Uid};

use crate::confinement::hide_memory;
use crate::netns::{self, Namespace};

/// Watches one folder, as long as that exists.
#[derive(Debug)]
pub struct FolderWatch(Inotify);

impl FolderWatch {
    /// Starts to watch `folder`. The queue counts as one of `user`, if there is one: root may have 128 of them by
    /// default, and the container runtime and the kubelet need theirs.
    ///
    /// # Errors
    /// Returns an error if that user has too many already, or there is no such folder.
    pub fn new(folder: &Path, user: Option<u32>) -> io::Result<Self> {
        let failed = |error: netns::Error| io::Error::other(error);
        let inotify = Namespace::Own.run("folder-watch", || open_as(user)).map_err(failed)??;
        let news = AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF;
        inotify.add_watch(folder, news | AddWatchFlags::IN_ONLYDIR)?;
        Ok(Self(inotify))
    }

    /// Whether anything happened since the last call.
    pub fn changed(&self) -> bool {
        let mut has_changed = false;
        // Writers may be faster than this; what is left is read next time.
        for _ in 0..MAX_READS {
            match self.0.read_events() {
                Ok(events) if !events.is_empty() => has_changed = true,
                _ => break,
            }
        }
        has_changed
    }
}

impl AsFd for FolderWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Becomes `user` for good, so this must be a thread that ends afterwards.
fn open_as(user: Option<u32>) -> io::Result<Inotify> {
    if let Some(user) = user {
        let (uid, gid) = (Uid::from_raw(user), Gid::from_raw(user));
        rustix::thread::set_thread_res_gid(gid, gid, gid)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid)?;
        // Changing the user reset it.
        hide_memory()?;
    }
    Ok(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?)
}

const MAX_READS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_renamed_into_the_folder_is_noticed_once_and_one_that_is_written_there_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let watch = FolderWatch::new(folder.path(), None).unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("new"), "1").unwrap();
        assert!(!watch.changed());
        std::fs::rename(at("new"), at("table")).unwrap();
        assert!(watch.changed());
        assert!(!watch.changed());
        for n in 0..1000 {
            std::fs::write(at("new"), n.to_string()).unwrap();
            std::fs::rename(at("new"), at("table")).unwrap();
        }
        assert!(watch.changed());
        std::fs::remove_dir_all(folder.path()).unwrap();
        assert!(watch.changed(), "the folder itself is gone");
        assert!(FolderWatch::new(folder.path(), None).is_err());
    }
}

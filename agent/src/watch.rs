//! Watches directories: wakes on any change in them, and from time to time without one, since notifications can get lost
//! (a queue that overflows, a directory that is replaced, a file system that sends none).

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::net::unix::pipe::Receiver;

/// Watches any number of directories. Which ones is said at every wait, so that one that is replaced or created later is
/// watched from then on.
pub struct DirectoryWatch {
    inotify: Inotify,
    /// The same queue of events. Like a pipe it can be waited for and read.
    queue: Receiver,
    watched: HashMap<PathBuf, WatchDescriptor>,
}

impl DirectoryWatch {
    /// Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// Returns the system's error, most likely that root has no inotify instances left.
    pub fn new() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let queue = Receiver::from_owned_fd_unchecked(inotify.as_fd().try_clone_to_owned()?)?;
        Ok(Self { inotify, queue, watched: HashMap::new() })
    }

    /// Waits for a change in one of these directories, for at most `within`. Changes since the previous call count.
    pub async fn changed(&mut self, directories: &[PathBuf], within: Duration) {
        if self.look_at(directories) {
            self.drain();
            return;
        }
        if let Ok(Ok(())) = tokio::time::timeout(within, self.queue.readable()).await {
            // A writer often makes several changes in a row.
            tokio::time::sleep(SETTLE).await;
        }
        self.drain();
    }

    /// Adds the watches; returns whether one is new although the directory was watched before: what happened in between
    /// is not known.
    fn look_at(&mut self, directories: &[PathBuf]) -> bool {
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_MOVED_FROM
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_ONLYDIR;
        let mut is_new = false;
        self.watched.retain(|path, watch| {
            let is_wanted = directories.contains(path);
            if !is_wanted {
                // A directory that is gone has no watch any more.
                let _ = self.inotify.rm_watch(*watch);
            }
            is_wanted
        });
        for directory in directories {
            // For a directory that is watched already the kernel returns the same number.
            match self.inotify.add_watch(directory, flags) {
                Ok(watch) => is_new |= self.watched.insert(directory.clone(), watch) != Some(watch),
                Err(_) => is_new |= self.watched.remove(directory).is_some(),
            }
        }
        is_new
    }

    fn drain(&self) {
        // Which file changed does not matter: everything is looked at again.
        let mut events = [0; 4096];
        while self.queue.try_read(&mut events).is_ok_and(|read| read > 0) {}
    }
}

const SETTLE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::fs;
    use tokio::time::{Instant, timeout};

    use super::*;

    async fn wakes(watch: &mut DirectoryWatch, dirs: &[PathBuf]) -> bool {
        let began = Instant::now();
        watch.changed(dirs, Duration::from_secs(3)).await;
        began.elapsed() < Duration::from_secs(2)
    }

    #[tokio::test]
    async fn every_kind_of_change_wakes_also_in_a_directory_that_was_replaced() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("d");
        fs::create_dir(&dir).unwrap();
        let dirs = [dir.clone()];
        let mut watch = DirectoryWatch::new().unwrap();
        assert!(wakes(&mut watch, &dirs).await, "a new directory is looked at once");
        let file = dir.join("a");
        for change in [
            &(|| fs::write(&file, "x").unwrap()) as &dyn Fn(),
            &|| fs::rename(&file, dir.join("b")).unwrap(),
            &|| fs::remove_file(dir.join("b")).unwrap(),
            &|| fs::remove_dir(&dir).unwrap(),
        ] {
            change();
            assert!(wakes(&mut watch, &dirs).await);
        }
        watch.changed(&dirs, Duration::ZERO).await;
        fs::create_dir(&dir).unwrap();
        assert!(wakes(&mut watch, &dirs).await, "it is back");
        fs::write(&file, "x").unwrap();
        assert!(wakes(&mut watch, &dirs).await);
    }

    #[tokio::test]
    async fn without_a_change_it_wakes_in_time() {
        let root = tempfile::tempdir().unwrap();
        let dirs = [root.path().to_owned(), root.path().join("missing")];
        let mut watch = DirectoryWatch::new().unwrap();
        watch.changed(&dirs, Duration::ZERO).await;
        timeout(Duration::from_secs(5), watch.changed(&dirs, Duration::from_millis(50))).await.unwrap();
    }
}

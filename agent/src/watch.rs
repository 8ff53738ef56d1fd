//! Watches directories: wakes on any change in them, and from time to time without one, since notifications can get
//! lost (a queue that overflows, a directory that is replaced, a file system that sends none).

use std::collections::HashMap;
use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::net::unix::pipe::Receiver;

/// Watches any number of directories. Which ones is said at every wait, so that one that is replaced or created later
/// is watched from then on. Where root has no inotify instance or watch left, as on nodes with many programs that use
/// them, it wakes every `BLIND_POLL` instead, and asks again for one each time.
pub(crate) struct DirectoryWatch {
    /// `None` while there is no inotify instance.
    events: Option<Events>,
    /// A directory that is there could not be watched.
    lacks_watches: bool,
    watched: HashMap<PathBuf, WatchDescriptor>,
}

struct Events {
    inotify: Inotify,
    /// The same queue of events. Like a pipe it can be waited for and read.
    queue: Receiver,
}

impl Events {
    fn open() -> io::Result<Self> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let queue = Receiver::from_owned_fd_unchecked(inotify.as_fd().try_clone_to_owned()?)?;
        Ok(Self { inotify, queue })
    }
}

impl DirectoryWatch {
    /// Must be called inside a tokio runtime.
    #[must_use]
    pub(crate) fn new() -> Self {
        let events = Events::open().inspect_err(|error| {
            tracing::warn!(%error, "{BLIND}");
        });
        Self { events: events.ok(), lacks_watches: false, watched: HashMap::new() }
    }

    /// What the operator should know about it.
    #[must_use]
    pub(crate) fn remark(&self) -> Option<&'static str> {
        (self.events.is_none() || self.lacks_watches).then_some(BLIND)
    }

    /// Waits for a change in one of these directories, for at most `within`. Changes since the previous call count.
    pub(crate) async fn changed(&mut self, directories: &[PathBuf], within: Duration) {
        if self.events.is_none() {
            self.events = Events::open().ok();
            if self.events.is_some() {
                tracing::info!("directories are watched: an inotify instance is free");
            }
        }
        if self.look_at(directories) {
            self.drain();
            return;
        }
        self.sleep(within).await;
        self.drain();
    }

    async fn sleep(&self, within: Duration) {
        let within = if self.remark().is_some() { within.min(BLIND_POLL) } else { within };
        let Some(events) = &self.events else { return tokio::time::sleep(within).await };
        if let Ok(Ok(())) = tokio::time::timeout(within, events.queue.readable()).await {
            // A writer often makes several changes in a row.
            tokio::time::sleep(SETTLE).await;
        }
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
        let Some(Events { inotify, .. }) = &self.events else { return false };
        let mut is_new = false;
        self.lacks_watches = false;
        self.watched.retain(|path, watch| {
            let is_wanted = directories.contains(path);
            if !is_wanted {
                // A directory that is gone has no watch any more.
                let _ = inotify.rm_watch(*watch);
            }
            is_wanted
        });
        for directory in directories {
            // For a directory that is watched already the kernel returns the same number.
            match inotify.add_watch(directory, flags) {
                Ok(watch) => is_new |= self.watched.insert(directory.clone(), watch) != Some(watch),
                Err(error) => {
                    self.lacks_watches |= error == Errno::ENOSPC;
                    is_new |= self.watched.remove(directory).is_some();
                }
            }
        }
        is_new
    }

    fn drain(&self) {
        // Which file changed does not matter: everything is looked at again.
        let mut bytes = [0; 4096];
        while self.events.as_ref().is_some_and(|events| events.queue.try_read(&mut bytes).is_ok_and(|read| read > 0)) {}
    }
}

impl Default for DirectoryWatch {
    fn default() -> Self {
        Self::new()
    }
}

const SETTLE: Duration = Duration::from_millis(10);
/// How often everything is looked at without notifications.
const BLIND_POLL: Duration = Duration::from_secs(2);
const BLIND: &str = "directories are looked at every 2 seconds, because no inotify instance or watch is left: raise \
                     fs.inotify.max_user_instances or fs.inotify.max_user_watches";

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
        let mut watch = DirectoryWatch::new();
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
    async fn without_an_inotify_instance_it_wakes_often_and_takes_one_when_it_is_free() {
        let root = tempfile::tempdir().unwrap();
        let dirs = [root.path().to_owned()];
        let mut watch = DirectoryWatch { events: None, lacks_watches: false, watched: HashMap::new() };
        assert!(watch.remark().is_some());
        // There is one in this test, so it is taken.
        watch.changed(&dirs, Duration::ZERO).await;
        assert_eq!(watch.remark(), None);
        assert!(fs::write(root.path().join("a"), "x").is_ok() && wakes(&mut watch, &dirs).await);
        let began = Instant::now();
        let blind = DirectoryWatch { events: None, lacks_watches: true, watched: HashMap::new() };
        timeout(BLIND_POLL * 2, blind.sleep(Duration::from_secs(30))).await.unwrap();
        assert!(began.elapsed() >= BLIND_POLL);
    }

    #[tokio::test]
    async fn without_a_change_it_wakes_in_time() {
        let root = tempfile::tempdir().unwrap();
        let dirs = [root.path().to_owned(), root.path().join("missing")];
        let mut watch = DirectoryWatch::new();
        watch.changed(&dirs, Duration::ZERO).await;
        timeout(Duration::from_secs(5), watch.changed(&dirs, Duration::from_millis(50))).await.unwrap();
    }
}

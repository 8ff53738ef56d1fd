//! Detects changed files by polling, debounced: a change counts once it has settled.
//!
//! Polling notices what inotify misses: symlinks replaced somewhere along the path, as Kubernetes does with mounted
//! secrets, and changes made by other hosts on network file systems.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Remembers the state of files.
#[derive(Debug, Default)]
pub(crate) struct FileWatch {
    /// State at the last poll.
    seen: Vec<Stamp>,
    /// State when the files were last read.
    read: Vec<Stamp>,
}

/// State of a file at one moment; `None` if it did not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stamp {
    path: PathBuf,
    state: Option<[i64; 5]>,
}

/// The present state of `files`. Take it before reading them: a change while they are read then counts as one.
pub(crate) fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    files.iter().map(|file| Stamp::of(file)).collect()
}

impl FileWatch {
    /// Takes the present state of the files as the one that was read.
    pub(crate) fn forget_changes(&mut self, files: &[PathBuf]) {
        self.seen = stamps(files);
        self.read.clone_from(&self.seen);
    }

    /// Records that the files were read, for whatever reason, after these stamps had been taken.
    pub(crate) fn were_read(&mut self, stamps: Vec<Stamp>) {
        self.read = stamps;
    }

    /// Whether the files changed since they were last read and were the same at the previous poll, so that no writer is
    /// still busy. Reports each change once.
    pub(crate) fn has_settled_change(&mut self, files: &[PathBuf]) -> bool {
        let now = stamps(files);
        let settled = now == self.seen;
        self.seen = now;
        let changed = settled && self.seen != self.read;
        if changed {
            self.read.clone_from(&self.seen);
        }
        changed
    }
}

impl Stamp {
    fn of(path: &Path) -> Self {
        let state = std::fs::metadata(path).ok().map(|found| {
            [
                found.dev().cast_signed(),
                found.ino().cast_signed(),
                found.size().cast_signed(),
                found.mtime(),
                found.mtime_nsec(),
            ]
        });
        Self { path: path.to_owned(), state }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_change_is_told_once_and_only_when_nobody_writes_any_more() {
        let folder = tempfile::tempdir().unwrap();
        let files = [folder.path().join("a.crt"), folder.path().join("a.key")];
        std::fs::write(&files[0], "1").unwrap();
        let mut watch = FileWatch::default();
        watch.forget_changes(&files);
        assert!(!watch.has_settled_change(&files));
        std::fs::write(&files[0], "22").unwrap();
        assert!(!watch.has_settled_change(&files), "it may still be written");
        std::fs::write(&files[1], "3").unwrap();
        assert!(!watch.has_settled_change(&files), "there is more");
        assert!(watch.has_settled_change(&files));
        assert!(!watch.has_settled_change(&files));
        std::fs::remove_file(&files[1]).unwrap();
        assert!(!watch.has_settled_change(&files));
        assert!(watch.has_settled_change(&files));
    }

    #[test]
    fn a_change_that_was_read_meanwhile_is_not_told_and_a_later_one_is() {
        let folder = tempfile::tempdir().unwrap();
        let files = [folder.path().join("config.yml")];
        std::fs::write(&files[0], "1").unwrap();
        let mut watch = FileWatch::default();
        watch.forget_changes(&files);
        std::fs::write(&files[0], "22").unwrap();
        watch.were_read(stamps(&files));
        assert!(!watch.has_settled_change(&files));
        assert!(!watch.has_settled_change(&files), "it was read");
        // Changed while it was read: the stamps are older.
        let before = stamps(&files);
        std::fs::write(&files[0], "333").unwrap();
        watch.were_read(before);
        assert!(!watch.has_settled_change(&files));
        assert!(watch.has_settled_change(&files));
    }

    #[test]
    fn a_swapped_link_to_a_folder_is_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for version in ["..v1", "..v2"] {
            std::fs::create_dir(at(version)).unwrap();
            std::fs::write(at(version).join("host.crt"), "same size").unwrap();
        }
        symlink("..v1", at("..data")).unwrap();
        symlink("..data/host.crt", at("host.crt")).unwrap();
        let files = [at("host.crt")];
        let mut watch = FileWatch::default();
        watch.forget_changes(&files);
        symlink("..v2", at("..data_tmp")).unwrap();
        std::fs::rename(at("..data_tmp"), at("..data")).unwrap();
        assert!(!watch.has_settled_change(&files));
        assert!(watch.has_settled_change(&files));
    }
}

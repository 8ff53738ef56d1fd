//! Writes the table into its file: beside it and renamed, with a version that only rises, and not at all if nothing is
//! different.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_plugin::attachment::record;
use nebula_cni_plugin::clock::{Clock, SystemClock};
use nebula_cni_plugin::cluster_table::{Layout, MAX_BYTES};

use super::facts::Facts;
use crate::durable;

/// The only writer of the file on this node.
#[derive(Debug, Default)]
pub struct Writer {
    path: PathBuf,
    /// Version of the table that is there; 0 if there is none.
    version: u64,
    /// [`Facts::changes`] of the table that is there; `None` if an earlier agent wrote it.
    written: Option<u64>,
}

/// What became of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// The version that is there now.
    pub version: u64,
    /// Its length in bytes; `None`: the file says all of it already.
    pub bytes: Option<usize>,
    /// How long it took.
    pub took: Duration,
}

/// A table cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the cluster table {path}: {source}")]
pub struct WriteError {
    /// Where.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl Writer {
    /// Goes on with the file that an earlier agent left, and removes what a killed one left beside it.
    #[must_use]
    pub fn open(path: &Path) -> Self {
        if let (Some(folder), Some(name)) = (path.parent(), path.file_name()) {
            durable::remove_stale(folder, |file| name == file);
        }
        let version = read(path).as_deref().and_then(version_of).unwrap_or_default();
        Self { path: path.to_owned(), version, written: None }
    }

    /// Version of the table that is there; 0 if there is none.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Writes the table for `node`. Blocks.
    ///
    /// # Errors
    /// Returns the file system's error; the table before is untouched.
    pub fn write(&mut self, facts: &Facts, node: &str) -> Result<Written, WriteError> {
        let began = SystemClock.now();
        let failed = |source| WriteError { path: self.path.clone(), source };
        let is_current = match self.written {
            // A change can be in a table that was written before its notification was handled.
            Some(changes) => changes == facts.changes && self.is_there(),
            None => self.version > 0 && read(&self.path).is_some_and(|here| here == facts.table(node, self.version)),
        };
        if is_current {
            self.written = Some(facts.changes);
            return Ok(Written { version: self.version, bytes: None, took: took(began) });
        }
        let version = self.version.saturating_add(1);
        let bytes = facts.table(node, version);
        make_folder(&self.path).map_err(failed)?;
        durable::replace(&self.path, 0o644, &mut bytes.as_slice(), |_| Ok(())).map_err(failed)?;
        self.version = version;
        self.written = Some(facts.changes);
        Ok(Written { version, bytes: Some(bytes.len()), took: took(began) })
    }

    /// Whether the file is as it was written last. Somebody may have removed it.
    #[must_use]
    pub fn is_there(&self) -> bool {
        self.version > 0 && fs::symlink_metadata(&self.path).is_ok_and(|found| found.is_file())
    }
}

/// Makes the folder, as the plugin does for the first captured pod.
fn make_folder(path: &Path) -> io::Result<()> {
    let Some(folder) = path.parent().filter(|folder| !folder.is_dir()) else { return Ok(()) };
    let Some(state_dir) = folder.parent() else { return Ok(()) };
    DirBuilder::new().recursive(true).mode(0o700).create(state_dir)?;
    record::make_cluster_folder(state_dir)
}

fn took(began: std::time::Instant) -> Duration {
    SystemClock.now().saturating_duration_since(began)
}

fn read(path: &Path) -> Option<Vec<u8>> {
    durable::read_bounded(path, MAX_BYTES).ok()
}

fn version_of(bytes: &[u8]) -> Option<u64> {
    Layout::read(bytes).ok().map(|layout| layout.version())
}

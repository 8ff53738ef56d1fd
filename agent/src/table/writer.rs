//! Writes the table into its file: beside it and renamed, with a version that only rises, and not at all if nothing is
//! different.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::cluster_table::{MAX_BYTES, version_of};
use nebula_cni_plugin::attachment::shared;
use nebula_cni_plugin::link::service_choice::Choice;

use super::facts::Facts;
use super::judgement::Judgement;
use crate::durable;
use crate::metrics::Written;

/// The only writer of the file on this node.
#[derive(Debug, Default)]
pub struct Writer {
    path: PathBuf,
    /// Version of the table that is there; 0 if there is none.
    version: u64,
    /// [`Facts::changes`] of the table that is there; `None` if an earlier agent wrote it.
    written: Option<u64>,
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
        // Whatever the rest of the file is like: instances may have read it, and use no table with a lower version.
        let mut head = Vec::new();
        let read = File::open(path).and_then(|file| file.take(HEAD).read_to_end(&mut head));
        let version = read.ok().and_then(|_| version_of(&head)).unwrap_or_default();
        Self { path: path.to_owned(), version, written: None }
    }

    /// Version of the table that is there; 0 if there is none.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Whether this agent wrote the table that is there, or found it to say the same.
    #[must_use]
    pub fn is_of_this_agent(&self) -> bool {
        self.written.is_some()
    }

    /// Writes the table for `node`; returns also what the node chooses for Services, if that may have changed. Blocks.
    ///
    /// # Errors
    /// Returns the file system's error, or that the table would be longer than readers take; the table before is
    /// untouched.
    pub fn write(
        &mut self,
        facts: &Facts,
        judgement: &Judgement,
        node: &str,
    ) -> Result<(Written, Option<Vec<Choice>>), WriteError> {
        let began = SystemClock.now();
        // A change can be in a table that was written before its notification was handled.
        if self.written == Some(facts.changes) && self.is_there() {
            return Ok((Written { version: self.version, bytes: None, took: took(began) }, None));
        }
        if self.written.is_none() && self.version > 0 {
            let (bytes, choices) = facts.table(judgement, node, self.version);
            if durable::read_bounded(&self.path, MAX_BYTES).is_ok_and(|here| here == bytes) {
                self.written = Some(facts.changes);
                return Ok((Written { version: self.version, bytes: None, took: took(began) }, Some(choices)));
            }
        }
        let version = next_version(self.version, SystemClock.unix_seconds());
        let (bytes, choices) = facts.table(judgement, node, version);
        if bytes.len() as u64 > MAX_BYTES {
            let text = format!("{} bytes are more than instances read", bytes.len());
            return Err(self.failed(io::Error::new(io::ErrorKind::FileTooLarge, text)));
        }
        self.put(facts, &bytes, version)?;
        Ok((Written { version, bytes: Some(bytes.len()), took: took(began) }, Some(choices)))
    }

    /// Number of changes since the table that is there; `None` if an earlier agent wrote it.
    pub(super) fn changes_since(&self, facts: &Facts) -> Option<u64> {
        self.written.and_then(|written| facts.changes.checked_sub(written))
    }

    /// Replaces the table by what `revise` makes of its bytes and the next version; `None` if the file is not the one
    /// that was written last, or `revise` returns nothing.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn revise(
        &mut self,
        facts: &Facts,
        revise: impl FnOnce(&[u8], u64) -> Option<Vec<u8>>,
    ) -> Result<Option<Written>, WriteError> {
        let began = SystemClock.now();
        let Ok(here) = durable::read_bounded(&self.path, MAX_BYTES) else { return Ok(None) };
        let version = next_version(self.version, SystemClock.unix_seconds());
        let is_ours = version_of(&here) == Some(self.version);
        let Some(bytes) = is_ours.then(|| revise(&here, version)).flatten() else { return Ok(None) };
        if bytes.len() as u64 > MAX_BYTES {
            return Ok(None);
        }
        self.put(facts, &bytes, version)?;
        Ok(Some(Written { version, bytes: Some(bytes.len()), took: took(began) }))
    }

    fn put(&mut self, facts: &Facts, bytes: &[u8], version: u64) -> Result<(), WriteError> {
        make_folder(&self.path).map_err(|error| self.failed(error))?;
        let put = durable::replace(&self.path, 0o644, &mut &*bytes, |_| Ok(()));
        put.map_err(|error| self.failed(error))?;
        (self.version, self.written) = (version, Some(facts.changes));
        Ok(())
    }

    fn failed(&self, source: io::Error) -> WriteError {
        WriteError { path: self.path.clone(), source }
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
    shared::make_cluster_folder(state_dir)
}

fn took(began: std::time::Instant) -> Duration {
    SystemClock.now().saturating_duration_since(began)
}

/// The version after `last`. It follows the clock, so that it rises also when the file is gone: not even an agent
/// that starts again must begin with a version that instances take for an older one.
pub(super) fn next_version(last: u64, unix_seconds: i64) -> u64 {
    let by_clock = u64::try_from(unix_seconds).unwrap_or_default().saturating_mul(VERSIONS_OF_SECOND);
    last.saturating_add(1).max(by_clock)
}

/// More than a table is written in a second.
const VERSIONS_OF_SECOND: u64 = 1_024;
/// Bytes of the header, at least.
const HEAD: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_rise_whatever_becomes_of_the_file_and_the_clock() {
        let first = next_version(0, 1_800_000_000);
        assert!(next_version(first, 1_800_000_000) > first && next_version(first, 1_700_000_000) > first);
        // Somebody removed the file, and the agent started again a second later.
        let many = first + 900;
        assert!(next_version(0, 1_800_000_001) > many);
        assert_eq!(next_version(7, -5), 8);
        assert_eq!(next_version(u64::MAX, 0), u64::MAX);
    }

    #[test]
    fn the_version_of_a_table_that_nobody_can_read_counts_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let high = next_version(0, 4_000_000_000);
        let mut bytes = nebula_cni_contract::cluster_table::Builder::new().finish(high);
        bytes[48] = 0xff;
        fs::write(&path, &bytes).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(MAX_BYTES + 1).unwrap();
        assert_eq!(Writer::open(&path).version(), high);
        fs::write(&path, b"nonsense").unwrap();
        assert_eq!(Writer::open(&path).version(), 0);
    }
}

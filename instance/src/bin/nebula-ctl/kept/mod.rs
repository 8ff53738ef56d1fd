//! Records of flows on disk, on a host without the node agent: a process that asks the daemon every few seconds and
//! appends to a file, and a reader of that file, which needs no daemon.
//!
//! The daemon keeps them in memory only. It may write almost nowhere, and no disk that hangs can stop it.

mod keeper;
mod reader;

use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use keeper::run;
pub(crate) use reader::read;

/// How much is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bound {
    /// Of both files together.
    pub(crate) bytes: u64,
    /// Age of the oldest record, more or less: whole files are removed.
    pub(crate) age: Duration,
}

/// Where `keep-flows` writes by default.
pub(crate) const FOLDER: &str = "/var/lib/nebula-flows";

fn file_in(folder: &Path) -> PathBuf {
    folder.join("flows.jsonl")
}

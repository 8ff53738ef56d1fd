//! What is handed to operators beside the programs: the Debian package, the systemd units, the schema of the
//! configuration.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod debian;
mod schema;
mod systemd;

use std::path::PathBuf;

/// A path of the repository.
fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

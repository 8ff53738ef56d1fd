//! What operators get besides the programs: the Debian package, the systemd units, the configuration schema.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod debian;
mod descriptor_store;
mod flow_keeper;
mod kept_flows;
mod postinst;
mod proxy_restart;
mod schema;
mod systemd;
mod user_unit;

use std::path::PathBuf;

/// A path in the repository.
fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

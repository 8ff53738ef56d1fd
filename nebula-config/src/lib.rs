//! Reads `config.yml` as Go Nebula does, and turns it into typed settings.
//!
//! [`load`] and [`parse`] return a tree; [`Settings::read`] checks all of it and returns the typed form. Neither
//! touches the network or changes the system. Beside it is what goes with a configuration:
//!
//! - [`loaded`], [`reloaded`]: one that a program starts with, and one that it goes on with; [`report`] says what is
//!   wrong with either
//! - [`names`]: looks up the names in it
//! - [`log`]: lines in the format that it asks for
//! - [`go`]: what follows Go Nebula's own conventions

mod allow_list;
mod announced;
mod discovery;
mod findings;
mod firewall;
pub mod go;
mod hosts;
mod keys;
mod listen;
pub mod loaded;
pub mod log;
mod logging;
mod merge;
pub mod names;
mod operation;
mod pki;
mod places;
pub mod reloaded;
pub mod report;
mod resolver;
mod routes;
mod section;
mod settings;
#[cfg(feature = "ssh")]
mod sshd;
mod stats;
#[cfg(test)]
mod tests;
mod tun;
mod value;
mod yaml;

use std::path::{Path, PathBuf};

pub use announced::{ANNOUNCED, Announced, enrolment_folder, usable as usable_lighthouses};
pub use discovery::Dns;
pub use findings::{Invalid, Refusals, Refused, Remark};
pub use hosts::{HostTarget, NameFamily, StaticHosts};
pub use listen::Listen;
pub use logging::{LogFormat, LogLevel, Logging};
pub use operation::{ControlPath, Operation, Whois};
pub use pki::Pki;
pub use places::Places;
pub use resolver::Resolver;
pub use routes::{OwnRoute, Routes, UnsafeRoute};
pub use settings::Settings;
#[cfg(feature = "ssh")]
pub use sshd::Sshd;
pub use stats::{Sink, Stats};
pub use tun::TunSettings;
pub use value::{GoDuration, Value};
pub use yaml::{MAX_TEXT, parse};

/// Reads the configuration at `path`, a file or a directory of files, and adds what a CA announced to this host.
/// Returns the tree, and remarks about values that failed to override those of earlier files.
///
/// # Errors
/// Returns an error if there is nothing to read, a file is unreadable or not YAML, a key is a list in one file and a
/// map in another, or what was announced cannot be read.
pub fn load(path: &Path) -> Result<(Value, Vec<Remark>), Error> {
    let (mut tree, remarks) = merge::read(path)?;
    announced::add_to(&mut tree)?;
    Ok((tree, remarks))
}

/// The files from which the configuration at `path` is read.
#[must_use]
pub fn files(path: &Path) -> Vec<PathBuf> {
    merge::find(path).unwrap_or_default()
}

/// The certificate and key files that a configuration names.
#[must_use]
pub fn credential_files(tree: &Value) -> Vec<PathBuf> {
    let keys = [
        "pki.ca",
        "pki.cert",
        "pki.key",
        #[cfg(feature = "ssh")]
        "sshd.host_key",
    ];
    let named = keys.into_iter().filter_map(|key| tree.at(key)?.text());
    let named = named.filter(|text| !text.contains("-----BEGIN")).map(|path| PathBuf::from(path.into_owned()));
    named.chain(enrolment_folder(tree).map(|folder| folder.join(ANNOUNCED))).collect()
}

/// Why a configuration cannot be loaded into a tree.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path is missing or unreadable, or is a directory without configuration files.
    #[error("no config files found at {}", .0.display())]
    NoFiles(PathBuf),
    /// A file exists but cannot be read.
    #[error("unable to read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A file is not valid YAML.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Self>,
    },
    /// The text is not valid YAML.
    #[error("yaml: {0}")]
    Yaml(String),
    /// A key is a list in one file and a map in another.
    #[error("{}: cannot merge {key}: it is a list in one file and a map in another", path.display())]
    MergeKinds {
        /// The later file.
        path: PathBuf,
        /// The key.
        key: String,
    },
}

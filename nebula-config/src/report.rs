//! Logs problems found in a configuration, with file, line and key.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use crate::{Places, Refused, Remark};

/// Reports on the configuration at a path. The files are read again for line numbers at the first report only.
pub struct Report {
    path: PathBuf,
    places: OnceCell<Places>,
}

impl Report {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), places: OnceCell::new() }
    }

    /// Logs an error, or a warning if `stops` is false.
    pub fn refused(&self, refused: &Refused, stops: bool) {
        let (key, error, message) = (refused.key.as_str(), refused.cause.as_str(), refused.message);
        match (self.place(key), stops) {
            (Some((file, line)), true) => tracing::error!(error, key, file, line, "{message}"),
            (None, true) => tracing::error!(error, key, "{message}"),
            (Some((file, line)), false) => tracing::warn!(error, key, file, line, "{message}{AT_START}"),
            (None, false) => tracing::warn!(error, key, "{message}{AT_START}"),
        }
    }

    /// Logs a warning, or an error if `stops` is true.
    pub fn remark(&self, Remark { key, text }: &Remark, stops: bool) {
        match (self.place(key), stops) {
            (Some((file, line)), false) => tracing::warn!(key, file, line, "{text}"),
            (None, false) => tracing::warn!(key, "{text}"),
            (Some((file, line)), true) => tracing::error!(key, file, line, "{text}"),
            (None, true) => tracing::error!(key, "{text}"),
        }
    }

    /// The text that [`Report::refused`] logs, as one line for the client that asked.
    pub fn refused_text(&self, refused: &Refused) -> String {
        self.with_place(&refused.key, &refused.to_string())
    }

    /// The text that [`Report::remark`] logs, as one line for the client that asked.
    pub fn remark_text(&self, remark: &Remark) -> String {
        self.with_place(&remark.key, &remark.text)
    }

    fn with_place(&self, key: &str, text: &str) -> String {
        let place = self.place(key).map(|(file, line)| format!("{file}:{line}: ")).unwrap_or_default();
        let key = if key.is_empty() { String::new() } else { format!("{key}: ") };
        format!("{place}{key}{text}")
    }

    fn place(&self, key: &str) -> Option<(String, u64)> {
        let (file, line) = self.places.get_or_init(|| Places::read(&self.path)).of(key)?;
        Some((file.display().to_string(), line))
    }
}

const AT_START: &str = " (the node would not start)";

//! Findings about a configuration: key, message and severity.

use std::fmt;

/// A remark on one key; it does not stop the start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// Dotted path, with list indices from 0; empty if the remark is about the whole configuration.
    pub key: String,
    /// What is wrong, what follows from it, and the likely fix.
    pub text: String,
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One reason why a tree is not a usable configuration: what was being read, and what is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}: {cause}")]
pub struct Refused {
    /// What failed, in Go Nebula's words where scripts match on them.
    pub message: &'static str,
    /// Why, and where.
    pub cause: String,
    /// As [`Remark::key`].
    pub key: String,
    /// Go Nebula detects it only when it starts, not with `-test`.
    pub at_start: bool,
}

impl Refused {
    pub(crate) fn new(message: &'static str, cause: impl Into<String>) -> Self {
        Self { message, cause: cause.into(), key: String::new(), at_start: false }
    }

    /// Sets the key to `key`, unless a narrower one is known.
    pub(crate) fn at(self, key: &str) -> Self {
        if self.key.is_empty() { Self { key: key.to_owned(), ..self } } else { self }
    }
}

/// What is wrong with one value. Its reader adds what was being read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

impl From<String> for Invalid {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl From<&str> for Invalid {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// All reasons why a tree is not a usable configuration, and the remarks on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusals {
    /// At least one.
    pub refused: Vec<Refused>,
    /// The same remarks as on a usable configuration.
    pub remarks: Vec<Remark>,
}

impl fmt::Display for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, refused) in self.refused.iter().enumerate() {
            write!(f, "{}{refused}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

impl std::error::Error for Refusals {}

impl From<Refused> for Refusals {
    fn from(refused: Refused) -> Self {
        Self { refused: vec![refused], remarks: Vec::new() }
    }
}

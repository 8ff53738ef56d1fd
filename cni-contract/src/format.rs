//! Formats on disk: reading a JSON document that a program of another release may have written.
//!
//! Its key `version` is looked at before the rest; a document without one has version 1. A higher one than this
//! program knows is refused: what it says may mean something else by then. Within a version, releases only add what
//! an earlier one may ignore.

use serde::de::DeserializeOwned;
use serde_json::Value;

/// Why a document is not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// A newer program wrote it.
    #[error("it was written by a newer program (format {found}, this one knows {known})")]
    Newer {
        /// Its version.
        found: u64,
        /// The highest version that this program reads.
        known: u32,
    },
    /// It is whole, and this program does not understand what it says: it lacks a key, or has one too many or a word
    /// that is not known.
    #[error("it was written by a program of another release: {0}")]
    Foreign(String),
    /// It is no JSON object, or has no version that could be one.
    #[error("it is damaged: {0}")]
    Damaged(String),
}

/// Reads a document of version `known` or an earlier one.
///
/// # Errors
/// Says who can read it instead, or that nobody can.
pub fn read<T: DeserializeOwned>(text: &[u8], known: u32) -> Result<T, Unreadable> {
    let document: Value = serde_json::from_slice(text).map_err(|error| Unreadable::Damaged(error.to_string()))?;
    let Value::Object(keys) = &document else { return Err(Unreadable::Damaged("it is no JSON object".to_owned())) };
    match keys.get("version") {
        None => {}
        Some(version) => match version.as_u64() {
            Some(found) if found > u64::from(known) => return Err(Unreadable::Newer { found, known }),
            Some(1..) => {}
            _ => return Err(Unreadable::Damaged(format!("{version} is no version"))),
        },
    }
    serde_json::from_value(document).map_err(|error| Unreadable::Foreign(error.to_string()))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Deserialize)]
    struct Document {
        name: String,
    }

    fn read(text: &str) -> Result<String, Unreadable> {
        super::read::<Document>(text.as_bytes(), 2).map(|document| document.name)
    }

    #[test]
    fn a_document_of_a_known_version_is_read_and_one_without_a_version_is_of_the_first() {
        for text in [r#"{"name":"a"}"#, r#"{"version":1,"name":"a"}"#, r#"{"name":"a","later":{"x":1},"version":2}"#] {
            assert_eq!(read(text).as_deref(), Ok("a"), "{text}");
        }
    }

    #[test]
    fn a_newer_document_is_refused_by_its_version_whatever_else_it_says() {
        for text in [r#"{"version":3,"name":"a"}"#, r#"{"colour":7,"version":3}"#] {
            assert_eq!(read(text), Err(Unreadable::Newer { found: 3, known: 2 }), "{text}");
        }
        let said = read(r#"{"version":3}"#).unwrap_err().to_string();
        assert_eq!(said, "it was written by a newer program (format 3, this one knows 2)");
    }

    #[test]
    fn what_is_whole_but_not_understood_is_no_damage() {
        assert!(matches!(read(r#"{"name":7}"#), Err(Unreadable::Foreign(_))));
        for damaged in ["", "{", "[1]", "7", r#"{"version":0,"name":"a"}"#, r#"{"version":"2","name":"a"}"#] {
            assert!(matches!(read(damaged), Err(Unreadable::Damaged(_))), "{damaged}");
        }
    }
}

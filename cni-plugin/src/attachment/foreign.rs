//! Records that a program of another release wrote and this one does not understand, as after a roll-back beyond what
//! releases have in common. Their attachments stay as they are: nothing of them is removed, and what they share with
//! others of the node is kept.

use std::path::Path;
use std::str::FromStr;

use serde_json::Value;

use super::record::{self, Found, Record};
use crate::reply::{Error, code};

/// Refuses to work on the attachment with such a record.
#[must_use]
pub fn refusal(record: &Path, why: &str) -> Error {
    let msg = format!("the record {} cannot be used: {why}", record.display());
    Error::new(code::IO, msg).details(
        "the pod's tunnel and rules stay as they are: install the release again that wrote it. If that is impossible, \
         delete the pod and then this file; what is left of the pod is found without the file",
    )
}

/// Whether there is such a record in this network.
#[must_use]
pub fn is_any_in(state_dir: &Path, network: &str) -> bool {
    record::list(state_dir, network).unwrap_or_default().iter().any(|path| is_foreign(path))
}

/// All networks or addresses that these documents name.
pub(super) fn named<T: FromStr>(documents: &[Value]) -> Vec<T> {
    let mut named = Vec::new();
    documents.iter().for_each(|document| collect(document, &mut named));
    named
}

fn is_foreign(path: &Path) -> bool {
    matches!(Record::load(path), Ok(Found::Foreign(_)))
}

/// No deeper than the parser goes, which has a limit of its own.
fn collect<T: FromStr>(document: &Value, into: &mut Vec<T>) {
    match document {
        Value::String(text) => into.extend(text.parse().ok()),
        Value::Array(values) => values.iter().for_each(|value| collect(value, into)),
        Value::Object(values) => values.values().for_each(|value| collect(value, into)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_newer_record_is_one_of_another_release_and_a_torn_one_is_not() {
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(state.path().join("net")).unwrap();
        fs::write(state.path().join("net/d-eth0.json"), "{").unwrap();
        assert!(!is_any_in(state.path(), "net"));
        fs::write(state.path().join("net/c-eth0.json"), r#"{"version":2}"#).unwrap();
        assert!(is_any_in(state.path(), "net") && !is_any_in(state.path(), "other"));
    }
}

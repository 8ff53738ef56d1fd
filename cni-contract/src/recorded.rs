//! For tests of formats: documents as the programs of each release wrote them, in `tests/documents/RELEASE/` of the
//! crate that has the format.

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads the document `file` of every release, and checks that this release, `release`, writes back all that it says,
/// under the same keys. The document of this release must be all that it writes: so a key that is added is recorded,
/// and one that is renamed or removed is noticed as long as a release that wrote it counts.
///
/// # Errors
/// Says what is missing where, and what to do.
pub fn hold<T: Serialize + DeserializeOwned>(folder: &Path, release: &str, file: &str) -> Result<Vec<T>, String> {
    let mut documents = Vec::new();
    let mut has_own = false;
    let releases = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for path in releases.flatten().map(|entry| entry.path()).filter(|path| path.join(file).exists()) {
        let name = path.join(file).display().to_string();
        let failed = |why: &dyn std::fmt::Display| format!("{name}: {why}");
        let text = fs::read(path.join(file)).map_err(|error| failed(&error))?;
        let recorded: Value = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
        let document: T = serde_json::from_value(recorded.clone()).map_err(|error| failed(&error))?;
        let written = serde_json::to_value(&document).map_err(|error| failed(&error))?;
        if let Some(place) = missing(&recorded, &written) {
            return Err(failed(&format!(
                "{place} is gone or changed: give the format another version, or take it back"
            )));
        }
        if path.ends_with(release) {
            has_own = true;
            if let Some(place) = missing(&written, &recorded) {
                return Err(failed(&format!("{place} is new: record it here, if an earlier release may ignore it")));
            }
        }
        documents.push(document);
    }
    if has_own { Ok(documents) } else { Err(format!("{}/{release}/{file} is not recorded", folder.display())) }
}

/// The place of the first value of `expected` that `found` does not have.
fn missing(expected: &Value, found: &Value) -> Option<String> {
    match (expected, found) {
        (Value::Object(expected), Value::Object(found)) => expected.iter().find_map(|(key, value)| {
            let below = |place: String| format!("{key}{}{place}", if place.is_empty() { "" } else { "." });
            found.get(key).map_or_else(|| Some(String::new()), |found| missing(value, found)).map(below)
        }),
        (Value::Array(expected), Value::Array(found)) if expected.len() == found.len() => {
            expected.iter().zip(found).find_map(|(expected, found)| missing(expected, found))
        }
        _ => (expected != found).then(String::new),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Default, Serialize, Deserialize)]
    #[serde(default)]
    struct Pod {
        name: String,
        peers: Vec<Peer>,
    }

    #[derive(Debug, Default, Serialize, Deserialize)]
    #[serde(default)]
    struct Peer {
        address: String,
    }

    #[test]
    fn a_key_that_is_gone_new_or_not_recorded_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let hold = || hold::<Pod>(folder.path(), "0.2.0", "pod.json").map(|pods| pods.len());
        let write = |release: &str, text: &str| {
            fs::create_dir_all(folder.path().join(release)).unwrap();
            fs::write(folder.path().join(release).join("pod.json"), text).unwrap();
        };
        write("0.1.0", r#"{"name":"a"}"#);
        assert!(hold().unwrap_err().ends_with("0.2.0/pod.json is not recorded"));
        write("0.2.0", r#"{"name":"a","peers":[{"address":"b"}]}"#);
        assert_eq!(hold(), Ok(2));
        write("0.1.0", r#"{"name":"a","peers":[{"endpoint":"b"}]}"#);
        assert!(hold().unwrap_err().contains("peers.endpoint is gone"));
        write("0.1.0", r#"{"label":"a"}"#);
        assert!(hold().unwrap_err().contains("label is gone"));
        write("0.1.0", "{}");
        write("0.2.0", r#"{"name":"a"}"#);
        assert!(hold().unwrap_err().contains("peers is new: record it"));
    }
}

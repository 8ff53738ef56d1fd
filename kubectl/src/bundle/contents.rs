//! The files of a bundle, and what is missing in it. Every text passes through here, so nothing gets in unscrubbed or
//! unbounded.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nebula_cert::{json_line, visible};
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde::Serialize;
use serde_json::Value;

use super::scrub::{scrub, scrub_value};

/// Files and gaps.
pub(super) struct Contents {
    files: BTreeMap<String, Vec<u8>>,
    missing: Vec<String>,
    room: usize,
    ends: Instant,
}

impl Contents {
    /// What is not there when the time is over is missing.
    pub(super) fn new(ends: Instant) -> Self {
        Self { files: BTreeMap::new(), missing: Vec::new(), room: MOST_BYTES, ends }
    }

    /// The time that is left.
    pub(super) fn left(&self) -> Duration {
        self.ends.saturating_duration_since(SystemClock.now())
    }

    /// Waits for something no longer than there is time. `None`: there is none left, and that is noted.
    pub(super) async fn in_time<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        let done = tokio::time::timeout(self.left(), work).await.ok();
        if done.is_none() {
            let text = "everything: the time was over before all was read (--within)".to_owned();
            if !self.missing.contains(&text) {
                self.missing.push(text);
            }
        }
        done
    }

    /// Adds a document.
    pub(super) fn document(&mut self, name: &str, document: &impl Serialize) {
        self.documents(name, std::slice::from_ref(document));
    }

    /// Adds documents, one a line.
    pub(super) fn documents<T: Serialize>(&mut self, name: &str, documents: &[T]) {
        let mut text = String::new();
        for (number, document) in documents.iter().enumerate() {
            match serde_json::to_value(document) {
                Ok(value) => text += &json_line(scrub_value(value).to_string()),
                Err(error) => self.missing(name, &error.to_string()),
            }
            if text.len() > MOST_OF_FILE {
                self.missing(
                    name,
                    &format!("{} documents beyond the first {} MiB", documents.len() - number - 1, MOST_OF_FILE >> 20),
                );
                break;
            }
        }
        self.add(name, text);
    }

    /// Adds text, such as the lines of a log.
    pub(super) fn text(&mut self, name: &str, text: &str) {
        let lines: String = scrub(text).lines().map(|line| format!("{}\n", visible(line))).collect();
        self.add(name, lines);
    }

    fn add(&mut self, name: &str, text: String) {
        if text.len() > self.room {
            return self.missing(name, "the bundle is full");
        }
        self.room -= text.len();
        self.files.insert(name.to_owned(), text.into_bytes());
    }

    /// Notes what could not be read, and why.
    pub(super) fn missing(&mut self, what: &str, why: &str) {
        let why: String = scrub(why).chars().take(MOST_OF_REASON).collect();
        let line = visible(&format!("{what}: {}", why.replace('\n', " "))).into_owned();
        if self.missing.len() < MOST_MISSING && !self.missing.contains(&line) {
            self.missing.push(line);
        }
    }

    pub(super) fn all_missing(&self) -> &[String] {
        &self.missing
    }

    pub(super) fn count(&self) -> usize {
        self.files.len()
    }

    /// All files, with one that says what is missing.
    pub(super) fn finish(&mut self) -> &BTreeMap<String, Vec<u8>> {
        let lines: String = self.missing.iter().map(|line| format!("{line}\n")).collect();
        let text = if lines.is_empty() { "nothing is missing\n".to_owned() } else { lines };
        self.files.insert("missing.txt".to_owned(), text.into_bytes());
        &self.files
    }
}

/// A text of a document; `null` becomes empty.
pub(super) fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Of all files, before they are compressed.
const MOST_BYTES: usize = 256 << 20;
const MOST_OF_FILE: usize = 32 << 20;
const MOST_MISSING: usize = 2000;
const MOST_OF_REASON: usize = 500;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn what_does_not_fit_or_comes_too_late_is_missing_and_said() {
        let mut contents = Contents::new(SystemClock.now() + Duration::from_secs(60));
        contents.document("a.json", &json!({"x": "a\u{1b}[2J"}));
        contents.room = 10;
        contents.text("logs/b.log", "longer than ten");
        contents.missing("logs/c.log", "not\nallowed\u{1b}");
        contents.ends = SystemClock.now();
        assert_eq!(contents.in_time(std::future::pending::<()>()).await, None);
        let files = contents.finish().clone();
        assert_eq!(files.keys().collect::<Vec<_>>(), ["a.json", "missing.txt"]);
        assert_eq!(files["a.json"], b"{\"x\":\"a\\u001b[2J\"}\n");
        let missing = String::from_utf8(files["missing.txt"].clone()).unwrap();
        let lines: Vec<&str> = missing.lines().collect();
        assert_eq!(lines[..2], ["logs/b.log: the bundle is full", "logs/c.log: not allowed\\u{1b}"]);
        assert!(lines[2].contains("the time was over"), "{missing}");
    }
}

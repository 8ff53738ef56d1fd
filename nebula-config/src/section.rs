//! Typed access to scalars by dotted path, with Go's silent defaults, each reported by a remark.

use std::cell::RefCell;
use std::time::Duration;

use super::Value;
use super::findings::{Refusals, Refused, Remark};

/// A tree being read, and the findings so far.
#[derive(Debug)]
pub(super) struct Section<'a> {
    root: &'a Value,
    remarks: RefCell<Vec<Remark>>,
    refused: RefCell<Vec<Refused>>,
}

impl<'a> Section<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, remarks: RefCell::default(), refused: RefCell::default() }
    }

    pub(super) fn get(&self, path: &str) -> Option<&'a Value> {
        self.root.at(path)
    }

    pub(super) fn warn(&self, key: impl Into<String>, text: impl Into<String>) {
        let mut remarks = self.remarks.borrow_mut();
        if remarks.len() < MAX_REMARKS {
            remarks.push(Remark { key: key.into(), text: text.into() });
        }
    }

    /// Returns the value, or records a reason to refuse the configuration. `key` is what was read.
    pub(super) fn keep<T>(&self, key: &str, read: Result<T, Refused>) -> Option<T> {
        read.map_err(|refused| self.refused.borrow_mut().push(refused.at(key))).ok()
    }

    /// As [`Section::keep`], for errors that Go Nebula detects only when it starts.
    pub(super) fn keep_at_start<T>(&self, key: &str, read: Result<T, Refused>) -> Option<T> {
        self.keep(key, read.map_err(|refused| Refused { at_start: true, ..refused }))
    }

    pub(super) fn into_remarks(self) -> Vec<Remark> {
        self.remarks.into_inner()
    }

    pub(super) fn into_refusals(self) -> Refusals {
        Refusals { refused: self.refused.into_inner(), remarks: self.remarks.into_inner() }
    }

    /// Any scalar as text. For a list or a map, the text that Go prints for it, with a remark.
    pub(super) fn string(&self, path: &str) -> Option<String> {
        let value = self.get(path)?;
        if value.text().is_none() {
            self.warn(path, format!("{path} is {} where a single value is expected; it is read as text", value.kind()));
        }
        Some(value.printed().into_owned())
    }

    pub(super) fn boolean(&self, path: &str, default: bool) -> bool {
        self.read(path, "true or false", Value::boolean).unwrap_or(default)
    }

    /// An integer within `range`.
    pub(super) fn int(&self, path: &str, range: std::ops::RangeInclusive<i64>) -> Option<i64> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.read(path, &expected, |value| value.int().filter(|number| range.contains(number)))
    }

    /// A duration of zero or more; Go panics on some negative ones.
    pub(super) fn duration(&self, path: &str, default: Duration) -> Duration {
        let read = |value: &Value| value.duration().filter(|d| !d.negative).map(|d| d.magnitude);
        self.read(path, "a duration with a unit, such as 10s or 5m,", read).unwrap_or(default)
    }

    /// A list of scalars; other items become the text that Go prints for them. A bare scalar is ignored with a remark,
    /// as in Go.
    pub(super) fn strings(&self, path: &str) -> Vec<String> {
        self.read(path, "a list", |value| match value {
            Value::List(items) => Some(items.iter().map(|item| item.printed().into_owned()).collect()),
            _ => None,
        })
        .unwrap_or_default()
    }

    fn read<T>(&self, path: &str, expected: &str, read: impl FnOnce(&Value) -> Option<T>) -> Option<T> {
        let value = self.get(path)?;
        let result = read(value);
        if result.is_none() {
            self.warn(path, format!("{path} is not {expected} and is ignored"));
        }
        result
    }
}

const MAX_REMARKS: usize = 200;

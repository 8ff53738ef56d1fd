//! Typed reading of scalars by dotted path: Go's silent defaults, but never silent here.

use std::cell::RefCell;
use std::time::Duration;

use super::Value;

/// A tree being read, and the remarks made meanwhile.
#[derive(Debug)]
pub(super) struct Section<'a> {
    root: &'a Value,
    warnings: RefCell<Vec<String>>,
}

impl<'a> Section<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, warnings: RefCell::default() }
    }

    pub(super) fn get(&self, path: &str) -> Option<&'a Value> {
        self.root.at(path)
    }

    pub(super) fn warn(&self, text: impl Into<String>) {
        let mut warnings = self.warnings.borrow_mut();
        if warnings.len() < MAX_WARNINGS {
            warnings.push(text.into());
        }
    }

    pub(super) fn into_warnings(self) -> Vec<String> {
        self.warnings.into_inner()
    }

    pub(super) fn string(&self, path: &str) -> Option<String> {
        self.read(path, "a string", |value| value.text().map(std::borrow::Cow::into_owned))
    }

    pub(super) fn boolean(&self, path: &str, default: bool) -> bool {
        self.read(path, "true or false", Value::boolean).unwrap_or(default)
    }

    /// An integer inside `range`.
    pub(super) fn int(&self, path: &str, range: std::ops::RangeInclusive<i64>) -> Option<i64> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.read(path, &expected, |value| value.int().filter(|number| range.contains(number)))
    }

    /// A duration of zero or more; Go panics on some negative ones.
    pub(super) fn duration(&self, path: &str, default: Duration) -> Duration {
        let read = |value: &Value| value.duration().filter(|d| !d.negative).map(|d| d.magnitude);
        self.read(path, "a duration with a unit, such as 10s or 5m,", read).unwrap_or(default)
    }

    /// A list of scalars. A bare scalar is ignored, as in Go, with a warning.
    pub(super) fn strings(&self, path: &str) -> Vec<String> {
        self.read(path, "a list", |value| match value {
            Value::List(items) => {
                Some(items.iter().filter_map(|item| item.text().map(std::borrow::Cow::into_owned)).collect())
            }
            _ => None,
        })
        .unwrap_or_default()
    }

    fn read<T>(&self, path: &str, expected: &str, read: impl FnOnce(&Value) -> Option<T>) -> Option<T> {
        let value = self.get(path)?;
        let result = read(value);
        if result.is_none() {
            self.warn(format!("{path} is not {expected} and is ignored"));
        }
        result
    }
}

const MAX_WARNINGS: usize = 200;

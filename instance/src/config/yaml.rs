//! Parses YAML text into a [`Value`] by the rules of go-yaml v3.

use std::borrow::Cow;

use serde::de::DeserializeOwned;

use super::{Error, Value};

/// Bytes read again because of tabs: each line with one is a reading.
const MAX_WORK_FOR_TABS: usize = 8 << 20;

/// Longest text of one configuration file, in bytes.
pub const MAX_TEXT: usize = 8 << 20;

/// Parses the first document of `text`. The root must be a mapping; an empty text is an empty mapping.
///
/// # Errors
/// Returns an error if the text is not YAML, has a duplicate key or another kind of root, or is too long or too deep.
pub fn parse(text: &str) -> Result<Value, Error> {
    if text.len() > MAX_TEXT {
        return Err(Error::Yaml(format!("longer than {} MiB", MAX_TEXT >> 20)));
    }
    match read(text)?.unwrap_or(Value::Null) {
        Value::Null => Ok(Value::empty()),
        map @ Value::Map(_) => Ok(map),
        other => Err(Error::Yaml(format!(
            "cannot unmarshal {} into map[string]interface {{}}: the file must hold `key: value` pairs",
            match other {
                Value::List(_) => "!!seq",
                Value::String(_) => "!!str",
                Value::Bool(_) => "!!bool",
                _ => "a number",
            }
        ))),
    }
}

/// Reads the first document; `None` if there is none.
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Result<Option<T>, Error> {
    let (mut text, mut work) = (Cow::Borrowed(text), MAX_WORK_FOR_TABS);
    loop {
        let error = match read_with_tabs_refused(&text) {
            Ok(value) => return Ok(value),
            Err(error) => error,
        };
        let left = work.checked_sub(text.len());
        let Some((spaced, left)) = left.and_then(|left| Some((without_leading_tab(&text, &error)?, left))) else {
            return Err(Error::Yaml(own_words(error.to_string())));
        };
        (text, work) = (Cow::Owned(spaced), left);
    }
}

/// The text with blanks for the tabs that a line begins with, if these are why it was refused and go-yaml takes them:
/// inside of brackets and of quoted text.
fn without_leading_tab(text: &str, error: &serde_saphyr::Error) -> Option<String> {
    let said = error.to_string();
    let is_quoted = said.starts_with("tab cannot be used as indentation");
    if !is_quoted && !said.starts_with("tabs disallowed within this context") {
        return None;
    }
    let line = usize::try_from(error.location()?.line()).ok()?.checked_sub(1)?;
    let start: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
    let (before, rest) = text.split_at_checked(start)?;
    let content = rest.trim_start_matches([' ', '\t']);
    let tabs = &rest[..rest.len() - content.len()];
    // What comes before tells where the line is: only brackets stay open at its end.
    let is_inside = is_quoted
        || read_with_tabs_refused::<serde::de::IgnoredAny>(before)
            .is_err_and(|error| error.to_string().starts_with("unclosed bracket"));
    (is_inside && tabs.contains('\t')).then(|| format!("{before}{}{content}", tabs.replace('\t', "        ")))
}

fn read_with_tabs_refused<T: DeserializeOwned>(text: &str) -> Result<Option<T>, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: 64,
            max_nodes: 500_000,
            max_events: 2_000_000,
            max_total_scalar_bytes: MAX_TEXT,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 200_000 },
        strict_booleans: true,
        legacy_octal_numbers: true,
        non_finite_float_policy: serde_saphyr::options::NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
        // Otherwise 33 comment lines where a value could follow are an error, and the published example has more.
        emit_comments: false,
    };
    // Go reads one document and ignores the rest: once there is a value, errors after it do not count.
    let mut first = None;
    let read = serde_saphyr::with_deserializer_from_str_with_options(text, options, |document| {
        first = Some(T::deserialize(document)?);
        Ok(())
    });
    match (first, read) {
        (Some(value), _) => Ok(Some(value)),
        (None, Ok(())) => Ok(None),
        (None, Err(error)) => Err(error),
    }
}

/// Removes the advice that the parser gives to its users' programmers.
fn own_words(text: String) -> String {
    match text.strip_prefix("duplicate mapping key: ").and_then(|rest| rest.split_once(", set DuplicateKeyPolicy")) {
        Some((key, rest)) => {
            let place = rest.rsplit_once(" at line ").map(|(_, place)| format!(" at line {place}")).unwrap_or_default();
            format!("mapping key {key:?} already defined{place}")
        }
        None => text,
    }
}

//! YAML text to a [`Value`], with the rules go-yaml v3 applies.

use super::{Error, Value};

/// Longest text of one configuration file, in bytes.
pub const MAX_TEXT: usize = 8 << 20;

/// Reads the first document of `text`. The root must be a mapping; an empty text is an empty mapping.
///
/// # Errors
/// Not YAML, a duplicate key, another kind of root, too long or too deep.
pub fn parse(text: &str) -> Result<Value, Error> {
    if text.len() > MAX_TEXT {
        return Err(Error::Yaml(format!("longer than {} MiB", MAX_TEXT >> 20)));
    }
    match first_document(text)? {
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

fn first_document(text: &str) -> Result<Value, Error> {
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
    };
    let mut reader = text.as_bytes();
    // Go reads one document and ignores what follows it; so the second one is never looked at.
    let mut documents = serde_saphyr::read_with_options::<_, Value>(&mut reader, options);
    match documents.next() {
        None => Ok(Value::Null),
        Some(Ok(value)) => Ok(value),
        Some(Err(error)) => Err(Error::Yaml(error.to_string())),
    }
}

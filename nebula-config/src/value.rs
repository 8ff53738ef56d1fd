//! A configuration tree as it was written, and Go Nebula's lenient way of reading scalars from it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

/// Any YAML or JSON value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// No value, `null` or `~`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A whole number above `i64::MAX`.
    Uint(u64),
    /// Any other number.
    Float(f64),
    /// Everything else that is not a collection.
    String(String),
    /// A sequence.
    List(Vec<Self>),
    /// A mapping, sorted.
    Map(BTreeMap<String, Self>),
    /// A mapping inside of the root with a key that is not text, as in `1: x`. Go Nebula finds no key in it.
    Mixed(BTreeMap<String, Self>),
}

impl Value {
    /// An empty mapping.
    #[must_use]
    pub fn empty() -> Self {
        Self::Map(BTreeMap::new())
    }

    /// The value at a dotted path; `null` counts as absent.
    #[must_use]
    pub fn at(&self, path: &str) -> Option<&Self> {
        let found = path.split('.').try_fold(self, |value, key| match value {
            Self::Map(map) => map.get(key),
            _ => None,
        })?;
        (*found != Self::Null).then_some(found)
    }

    /// The text Go would print for a scalar; `None` for collections and null.
    #[must_use]
    pub fn text(&self) -> Option<Cow<'_, str>> {
        Some(match self {
            Self::Bool(value) => Cow::Borrowed(if *value { "true" } else { "false" }),
            Self::Int(value) => value.to_string().into(),
            Self::Uint(value) => value.to_string().into(),
            Self::Float(value) => go_float(*value).into(),
            Self::String(value) => Cow::Borrowed(value),
            Self::Null | Self::List(_) | Self::Map(_) | Self::Mixed(_) => return None,
        })
    }

    /// The text Go would print for any value, which is what it reads where it expects a scalar.
    #[must_use]
    pub fn printed(&self) -> Cow<'_, str> {
        let join = |parts: Vec<String>| parts.join(" ");
        match self {
            Self::List(items) => {
                format!("[{}]", join(items.iter().map(|item| item.printed().into_owned()).collect())).into()
            }
            Self::Map(map) | Self::Mixed(map) => {
                let pair = |(key, value): (&String, &Self)| format!("{key}:{}", value.printed());
                format!("map[{}]", join(map.iter().map(pair).collect())).into()
            }
            scalar => scalar.text().unwrap_or(Cow::Borrowed("<nil>")),
        }
    }

    /// Reads decimal text only, after YAML's own number rules.
    #[must_use]
    pub fn int(&self) -> Option<i64> {
        let text = self.text()?;
        let digits = text.strip_prefix(['-', '+']).unwrap_or(&text);
        (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
    }

    /// Reads 1/0, t/f, true/false, y/n or yes/no in any case.
    #[must_use]
    pub fn boolean(&self) -> Option<bool> {
        match self.text()?.to_lowercase().as_str() {
            "1" | "t" | "true" | "y" | "yes" => Some(true),
            "0" | "f" | "false" | "n" | "no" => Some(false),
            _ => None,
        }
    }

    /// Reads a Go duration: numbers with units, such as `1h30m` or `1.5s`.
    #[must_use]
    pub fn duration(&self) -> Option<GoDuration> {
        let nebula_cert::GoDuration(nanoseconds) = self.text()?.parse().ok()?;
        Some(GoDuration { negative: nanoseconds < 0, magnitude: Duration::from_nanos(nanoseconds.unsigned_abs()) })
    }

    /// What kind of thing this is, for messages.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Bool(_) => "a boolean",
            Self::Int(_) | Self::Uint(_) | Self::Float(_) => "a number",
            Self::String(_) => "a string",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
            Self::Mixed(_) => "a map with a key that is not text",
        }
    }

    /// Whether Go's merge treats it as unset: `false`, `0`, `""`, null, an empty collection.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Bool(value) => !value,
            Self::Int(value) => *value == 0,
            Self::Uint(value) => *value == 0,
            Self::Float(value) => *value == 0.0,
            Self::String(value) => value.is_empty(),
            Self::List(items) => items.is_empty(),
            Self::Map(map) | Self::Mixed(map) => map.is_empty(),
        }
    }

    /// Writes block-style YAML with sorted keys.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        let mut out = String::new();
        write_yaml(self, 0, &mut out);
        out
    }
}

impl From<&serde_json::Value> for Value {
    fn from(json: &serde_json::Value) -> Self {
        match json {
            serde_json::Value::Null => Self::Null,
            serde_json::Value::Bool(value) => Self::Bool(*value),
            serde_json::Value::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Self::Int(value),
                (None, Some(value)) => Self::Uint(value),
                (None, None) => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(value) => Self::String(value.clone()),
            serde_json::Value::Array(items) => Self::List(items.iter().map(Self::from).collect()),
            serde_json::Value::Object(map) => Self::Map(map.iter().map(|(k, v)| (k.clone(), v.into())).collect()),
        }
    }
}

/// A Go duration, which can be negative; the reader decides what that means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoDuration {
    /// Whether it is below zero.
    pub negative: bool,
    /// Its absolute value.
    pub magnitude: Duration,
}

/// Shortest form, as Go's `%v` prints it.
fn go_float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    // Go assumes a precision of six for this decision when it prints the shortest form.
    if (-4..GO_EXPONENT).contains(&exponent) {
        return format!("{value}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

fn write_yaml(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Map(map) | Value::Mixed(map) if !map.is_empty() => {
            for (key, value) in map {
                push_indent(indent, out);
                out.push_str(&yaml_scalar(key));
                out.push(':');
                write_child(value, indent + 4, out);
            }
        }
        Value::List(items) if !items.is_empty() => {
            for item in items {
                push_indent(indent, out);
                out.push_str("- ");
                let mut block = String::new();
                write_yaml(item, indent + 2, &mut block);
                out.push_str(block.trim_start_matches(' '));
            }
        }
        scalar => {
            out.push_str(&scalar_yaml(scalar));
            out.push('\n');
        }
    }
}

fn write_child(value: &Value, indent: usize, out: &mut String) {
    if matches!(value, Value::Map(map) | Value::Mixed(map) if !map.is_empty())
        || matches!(value, Value::List(list) if !list.is_empty())
    {
        out.push('\n');
        write_yaml(value, indent, out);
    } else {
        out.push(' ');
        out.push_str(&scalar_yaml(value));
        out.push('\n');
    }
}

fn scalar_yaml(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::List(_) => "[]".to_owned(),
        Value::Map(_) | Value::Mixed(_) => "{}".to_owned(),
        Value::String(text) => yaml_scalar(text),
        other => other.text().unwrap_or_default().into_owned(),
    }
}

/// Writes plain text where it cannot be misread, otherwise a double-quoted string (JSON rules).
fn yaml_scalar(text: &str) -> String {
    let plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c))
        && !["true", "false", "null", "yes", "no", "on", "off", "y", "n"].contains(&text.to_lowercase().as_str());
    if plain { text.to_owned() } else { serde_json::Value::from(text).to_string() }
}

fn push_indent(indent: usize, out: &mut String) {
    out.extend(std::iter::repeat_n(' ', indent));
}

// Numbers from 10^6 on print as `1e+06`, so that they are not valid integers in a configuration.
const GO_EXPONENT: i32 = 6;

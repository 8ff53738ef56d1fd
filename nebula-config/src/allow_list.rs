//! `lighthouse.remote_allow_list`, `remote_allow_ranges` and `local_allow_list`, which are parsed more strictly than
//! the other settings.

use std::collections::BTreeMap;

use ipnet::IpNet;
use nebula_core::config::{AllowList, InterfaceRules, LocalAllowList, RemoteAllowList};

use super::section::Section;
use super::{Refused, Value};
use crate::go::netip;

pub(super) fn remote(section: &Section<'_>) -> Result<RemoteAllowList, Refused> {
    let path = "lighthouse.remote_allow_list";
    let everybody = map(section, path)?.map_or_else(|| Ok(AllowList::default()), |rules| list(path, rules))?;
    let path = "lighthouse.remote_allow_ranges";
    let mut ranges = Vec::new();
    for (range, rules) in map(section, path)?.into_iter().flatten() {
        let at = format!("{path}.{range}");
        let Value::Map(rules) = rules else { return Err(invalid_type(&at, rules)) };
        ranges.push((prefix(path, range)?, list(&at, rules)?));
    }
    Ok(RemoteAllowList::new(everybody, ranges))
}

pub(super) fn local(section: &Section<'_>) -> Result<LocalAllowList, Refused> {
    let path = "lighthouse.local_allow_list";
    let Some(rules) = map(section, path)? else { return Ok(LocalAllowList::default()) };
    let mut rules = rules.clone();
    let interfaces = match rules.remove("interfaces") {
        None => InterfaceRules::default(),
        Some(Value::Map(patterns)) => interfaces(path, &patterns)?,
        Some(other) => {
            return Err(refuse(format!(
                "config `{path}.interfaces` is invalid (type {}): {}",
                go_type(&other),
                shown(&other)
            )));
        }
    };
    Ok(LocalAllowList { addresses: list(path, &rules)?, interfaces })
}

fn interfaces(path: &str, patterns: &BTreeMap<String, Value>) -> Result<InterfaceRules, Refused> {
    let mut values = Vec::new();
    for value in patterns.values() {
        let at = format!("{path}.interfaces");
        values.push(strict_boolean(value).ok_or_else(|| invalid_value(&at, value))?);
    }
    let allowed = values.first().copied().unwrap_or_default();
    if values.iter().any(|value| *value != allowed) {
        return Err(refuse(format!("config `{path}.interfaces` values must all be the same true/false value")));
    }
    InterfaceRules::new(patterns.keys().map(String::as_str), allowed)
        .map_err(|error| refuse(format!("config `{path}.interfaces` has invalid key: {error}")))
}

fn list(path: &str, rules: &BTreeMap<String, Value>) -> Result<AllowList, Refused> {
    let mut parsed = Vec::new();
    for (text, value) in rules {
        let allowed = strict_boolean(value).ok_or_else(|| invalid_value(path, value))?;
        parsed.push((prefix(path, text)?, allowed));
    }
    AllowList::new(parsed).map_err(|error| refuse(format!("config `{path}` {error}")))
}

pub(super) fn prefix(path: &str, text: &str) -> Result<IpNet, Refused> {
    netip::prefix(text).ok_or_else(|| {
        let cause = format!("{text:?} is not a prefix such as 10.0.0.0/8");
        refuse(format!("config `{path}` has invalid CIDR: {text}. {cause}"))
    })
}

pub(super) fn map<'a>(section: &Section<'a>, path: &str) -> Result<Option<&'a BTreeMap<String, Value>>, Refused> {
    match section.get(path) {
        None => Ok(None),
        Some(Value::Map(map)) => Ok(Some(map)),
        Some(other) => Err(invalid_type(path, other)),
    }
}

/// Reads a boolean, or one of the words that old YAML reads as one. Nothing else, because a mistake here would open
/// something.
fn strict_boolean(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::String(text) => match text.as_str() {
            "y" | "yes" => Some(true),
            "n" | "no" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

fn invalid_type(path: &str, value: &Value) -> Refused {
    refuse(format!("config `{path}` has invalid type: {}", go_type(value)))
}

fn invalid_value(path: &str, value: &Value) -> Refused {
    refuse(format!("config `{path}` has invalid value (type {}): {}", go_type(value), shown(value)))
}

pub(super) fn shown(value: &Value) -> String {
    value.text().map_or_else(|| value.kind().to_owned(), std::borrow::Cow::into_owned)
}

/// The type's name in Go.
pub(super) fn go_type(value: &Value) -> &'static str {
    match value {
        Value::Null => "<nil>",
        Value::Bool(_) => "bool",
        Value::Int(_) => "int",
        Value::Uint(_) => "uint64",
        Value::Float(_) => "float64",
        Value::String(_) => "string",
        Value::List(_) => "[]interface {}",
        Value::Map(_) => "map[string]interface {}",
        Value::Mixed(_) => "map[interface {}]interface {}",
    }
}

pub(super) fn refuse(cause: String) -> Refused {
    Refused::new("Failed to initialize lighthouse handler", cause)
}

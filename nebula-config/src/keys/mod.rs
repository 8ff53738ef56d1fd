//! Which keys exist, and remarks on those that are unknown, of the wrong type, or without effect here.

mod likely;
#[cfg(test)]
mod reference;
mod table;

use super::Value;
use super::section::Section;
use table::{Effect, KEYS, Key, Kind};

/// Adds a remark for every key that is not read.
pub(super) fn check(section: &Section<'_>, tree: &Value) {
    for key in KEYS {
        let Some(value) = section.get(key.path) else { continue };
        if let Kind::Entries(fields) = key.kind {
            check_entries(section, key.path, value, fields);
        }
        match key.effect {
            Effect::OnReload | Effect::OnStart => {}
            Effect::Ignored(_) => check_kind(section, key, value),
            // Read and checked as a whole, or by `check_without_console`.
            Effect::Console => {}
        }
    }
    check_unknown(section, tree, String::new());
}

/// Adds remarks on the keys of the SSH console for a program that has none.
pub(super) fn check_without_console(section: &Section<'_>, why: &str) {
    for key in KEYS.iter().filter(|key| matches!(key.effect, Effect::Console)) {
        let Some(value) = section.get(key.path) else { continue };
        check_kind(section, key, value);
        // The others have no effect anyway; only the switch is reported.
        if key.path == "sshd.enabled" && value.boolean() == Some(true) {
            section.warn(key.path, format!("sshd.enabled is not supported and has no effect {why}"));
        }
    }
}

/// Checks the type of a key that is not read; other keys are checked where they are read.
fn check_kind(section: &Section<'_>, key: &Key, value: &Value) {
    let expected = match key.kind {
        Kind::Boolean if value.boolean().is_none() => "true or false".to_owned(),
        Kind::Number(from, to) if value.int().is_none_or(|number| !(from..=to).contains(&number)) => {
            format!("a whole number from {from} to {to}")
        }
        Kind::Duration if value.duration().is_none() => "a duration with a unit, such as 10s or 5m,".to_owned(),
        Kind::Texts | Kind::Cidrs | Kind::Entries(_) if !matches!(value, Value::List(_)) => "a list".to_owned(),
        Kind::Map if !matches!(value, Value::Map(_)) => "a map".to_owned(),
        Kind::Text | Kind::Pem | Kind::Address | Kind::Choice(_) if value.text().is_none() => {
            "a single value".to_owned()
        }
        _ => return,
    };
    section.warn(key.path, format!("{} is not {expected} and is ignored", key.path));
}

fn check_entries(section: &Section<'_>, path: &str, value: &Value, fields: &[&'static str]) {
    let Value::List(items) = value else { return };
    for (index, item) in items.iter().enumerate() {
        let Value::Map(map) = item else { continue };
        let is_remark = |field: &str| path.starts_with("firewall.") && RULE_REMARKS.contains(&field);
        for field in map.keys().filter(|field| !fields.contains(&field.as_str()) && !is_remark(field)) {
            let at = format!("{path}.{index}.{field}");
            let hint = likely::field(field, fields).map(|name| format!("; did you mean {name}?")).unwrap_or_default();
            section.warn(at, format!("unknown field {field} in entry #{index} of {path} is ignored{hint}"));
        }
    }
}

/// Fields of rules that are only notes for people.
const RULE_REMARKS: &[&str] = &["description", "name", "comment"];

/// Writes `a.b` as `a: {b: ...}`.
fn nested(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').collect();
    let open = parts.join(": {");
    format!("{open}: ...{}", "}".repeat(parts.len().saturating_sub(1)))
}

/// Whether a name is reserved for people: YAML anchors and notes.
fn is_private(name: &str) -> bool {
    name.starts_with("x-") || name.starts_with('_')
}

fn is_known(path: &str) -> bool {
    KEYS.iter().any(|key| key.path.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

fn check_unknown(section: &Section<'_>, value: &Value, prefix: String) {
    let Value::Map(map) = value else { return };
    let join = |name: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
    let names = map.keys().map(String::as_str);
    let unknown: Vec<&str> = names.filter(|name| !is_private(name) && !is_known(&join(name))).collect();
    let header = likely::missing_header(&prefix, &unknown);
    for (name, value) in map.iter().filter(|(name, _)| !is_private(name)) {
        let path = join(name);
        if name.contains('.') {
            let text = format!("key {name:?} is ignored: a dot is a part of its name; write {}", nested(name));
            section.warn(&path, text);
            continue;
        }
        let exact = KEYS.iter().any(|key| key.path == path);
        let is_section =
            KEYS.iter().any(|key| key.path.strip_prefix(path.as_str()).is_some_and(|rest| rest.starts_with('.')));
        match value {
            Value::Map(_) if is_section => check_unknown(section, value, path),
            Value::Null if is_section => {}
            _ if exact => {}
            _ if is_section => {
                section.warn(
                    &path,
                    format!("{path} is {} where keys below it are expected, and is ignored", value.kind()),
                );
            }
            _ => {
                let belongs = header.map(|header| format!("it belongs under {header}, whose line is missing"));
                let hint = belongs.or_else(|| likely::key(&path)).map(|hint| format!("; {hint}")).unwrap_or_default();
                section.warn(&path, format!("unknown key {path} is ignored{hint}"));
            }
        }
    }
}

//! Generates the reference of all keys and the JSON schema for editors, and compares both with the committed files.
//! `UPDATE_REFERENCE=1 cargo test -p nebula-instance reference` writes them.

use serde_json::{Map, Value, json};

use super::table::{Effect, KEYS, Key, Kind};

#[test]
fn the_committed_reference_is_that_of_the_code() {
    hold("docs/configuration.md", &reference());
}

#[test]
fn the_committed_schema_is_that_of_the_code() {
    hold("deploy/nebula.schema.json", &format!("{:#}\n", schema()));
}

#[test]
fn every_key_stands_in_the_table_once() {
    let mut paths: Vec<_> = KEYS.iter().map(|key| key.path).collect();
    paths.sort_unstable();
    let count = paths.len();
    paths.dedup();
    assert_eq!(paths.len(), count);
}

fn hold(path: &str, made: &str) {
    let file = format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&file, made).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(committed == made, "{path} is not what the code says; UPDATE_REFERENCE=1 writes it");
}

fn reference() -> String {
    let mut text = String::from(
        "# Configuration reference\n\n\
         Made from the table of keys in the code (`nebula-config/src/keys/table.rs`); a test compares both. A value\n\
         of another type than the one named is replaced by the default, with a warning. `reload`: a change takes effect on\n\
         SIGHUP; `start`: at the next start. `deploy/nebula.schema.json` is the same for editors.\n",
    );
    let mut section = "";
    for key in KEYS {
        let this = key.path.split('.').next().unwrap_or_default();
        if this != section && !(section == "punchy" && this == "punch_back") {
            section = this;
            text += &format!(
                "\n## {section}\n\n| Key | Type | Default | Change | Meaning |\n| --- | --- | --- | --- | --- |\n"
            );
        }
        let (effect, note) = match key.effect {
            Effect::OnReload => ("reload", String::new()),
            Effect::OnStart => ("start", String::new()),
            Effect::Ignored(why) => ("-", format!(" (no effect: {why})")),
            Effect::Console => ("reload", " (host daemon only)".to_owned()),
        };
        let Key { path, default, about, .. } = key;
        text += &format!("| `{path}` | {} | {default} | {effect} | {about}{note} |\n", kind(key.kind));
    }
    text
}

fn kind(kind: Kind) -> String {
    match kind {
        Kind::Boolean => "boolean".to_owned(),
        Kind::Number(from, to) => format!("{from} to {to}"),
        Kind::Duration => "duration".to_owned(),
        Kind::Text => "text".to_owned(),
        Kind::Choice(words) => {
            words.iter().filter(|word| !word.is_empty()).map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ")
        }
        Kind::Pem => "file or PEM".to_owned(),
        Kind::Address => "host:port".to_owned(),
        Kind::Texts => "list".to_owned(),
        Kind::Cidrs => "list of prefixes".to_owned(),
        Kind::Entries(fields) => format!("list of maps: {}", fields.join(", ")),
        Kind::Map => "map".to_owned(),
    }
}

/// The schema, as JSON Schema 2020-12.
fn schema() -> Value {
    let mut root = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Nebula configuration",
        "type": "object",
        "properties": {},
    });
    for key in KEYS {
        let mut at = &mut root;
        let mut segments = key.path.split('.').peekable();
        while let Some(segment) = segments.next() {
            let properties = properties(at);
            if segments.peek().is_none() {
                let value = properties.entry(segment).or_insert_with(|| json!({}));
                if let (Value::Object(value), Value::Object(made)) = (value, of_key(key)) {
                    value.extend(made);
                }
                break;
            }
            at = properties
                .entry(segment)
                .or_insert_with(|| json!({"type": ["object", "null"], "additionalProperties": false}));
        }
    }
    // This section has a short form.
    root["properties"]["punchy"]["type"] = json!(["object", "boolean", "string", "null"]);
    root["additionalProperties"] = json!(false);
    root
}

fn properties(at: &mut Value) -> &mut Map<String, Value> {
    if at.get("properties").is_none() {
        at["properties"] = json!({});
    }
    // In the table, `punchy` comes before its own keys.
    if at.get("additionalProperties").is_none() {
        at["additionalProperties"] = json!(false);
    }
    at["properties"].as_object_mut().unwrap()
}

fn of_key(key: &Key) -> Value {
    let mut made = match key.kind {
        Kind::Boolean => json!({"type": ["boolean", "string", "integer", "null"]}),
        Kind::Number(from, to) => json!({"type": ["integer", "string", "null"], "minimum": from, "maximum": to}),
        Kind::Duration => {
            let unit = r"^([0-9]*\.?[0-9]+(ns|us|µs|ms|s|m|h))+$";
            json!({"type": ["string", "null"], "pattern": unit, "examples": ["10s", "5m"]})
        }
        Kind::Text | Kind::Pem | Kind::Address => json!({"type": ["string", "number", "null"]}),
        Kind::Choice(words) => {
            let mut all: Vec<Value> = words.iter().map(|word| json!(word)).collect();
            if words.contains(&"true") {
                all.extend([json!(true), json!(false)]);
            }
            all.push(Value::Null);
            json!({"enum": all})
        }
        Kind::Texts | Kind::Cidrs => json!({"type": ["array", "null"], "items": {"type": ["string", "integer"]}}),
        Kind::Entries(fields) => {
            let made: Map<String, Value> = fields.iter().map(|field| ((*field).to_owned(), of_field(field))).collect();
            let required = required(fields);
            let item =
                json!({"type": "object", "properties": made, "required": required, "additionalProperties": false});
            json!({"type": ["array", "null"], "items": item})
        }
        Kind::Map => json!({"type": ["object", "null"]}),
    };
    made["description"] = json!(format!("{} (default: {})", key.about, key.default));
    made
}

/// Schema of a field of a list entry; the same name means the same in every list.
fn of_field(name: &str) -> Value {
    let texts = json!({"type": "array", "items": {"type": "string"}});
    match name {
        "proto" => json!({"enum": ["any", "tcp", "udp", "icmp"]}),
        "group" | "groups" | "keys" => json!({"anyOf": [{"type": "string"}, texts]}),
        "port" | "code" => json!({"type": ["string", "integer"]}),
        "mtu" | "metric" => json!({"type": ["integer", "string"], "minimum": 0}),
        "install" | "inside" => json!({"type": ["boolean", "string", "integer"]}),
        "via" => {
            let number = |least: u32| json!({"type": ["integer", "string"], "minimum": least});
            let gateway = json!({"type": "object", "required": ["gateway"], "properties":
                {"gateway": {"type": "string"}, "weight": number(1), "priority": number(0)}});
            json!({"anyOf": [{"type": "string"}, {"type": "array", "items": gateway}]})
        }
        _ => json!({"type": "string"}),
    }
}

fn required(fields: &[&str]) -> &'static [&'static str] {
    if fields.contains(&"proto") {
        &["proto"]
    } else if fields.contains(&"via") {
        &["route", "via"]
    } else if fields.contains(&"route") {
        &["route", "mtu"]
    } else {
        &["user"]
    }
}

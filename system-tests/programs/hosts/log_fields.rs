//! Our log lines compared with those of Go Nebula 1.11.0: the same messages with the same fields, in JSON and in text.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::loopback;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use loopback::{Network, free_udp_port, go, ours};
use serde_json::Value;

/// Fields and their types by message, from a lighthouse and from a client that starts, stops, and cannot reach a peer.
type Lines = BTreeMap<String, BTreeSet<String>>;

fn record(program: &Path, format: &str) -> String {
    let network = Network::new();
    let (port, nobody) = (free_udp_port(), free_udp_port());
    let common = format!(
        "logging: {{format: {format}}}\nfirewall: {{outbound: [{{port: 1-2, proto: tcp, groups: [a, b]}}], \
         inbound: [{{port: any, proto: any, host: any}}]}}\n"
    );
    let lighthouse = network.start(
        program,
        "lighthouse",
        &["10.42.0.1/16"],
        &format!("{common}listen: {{host: 127.0.0.1, port: {port}}}\nlighthouse: {{am_lighthouse: true}}"),
    );
    let client = network.start(
        program,
        "client",
        &["10.42.0.7/16"],
        &format!(
            "{common}listen: {{host: 127.0.0.1}}\nhandshakes: {{try_interval: 20ms, retries: 3}}\n\
             static_host_map: {{10.42.0.1: ['127.0.0.1:{port}'], 10.42.0.2: ['127.0.0.1:{nobody}']}}\n\
             lighthouse: {{hosts: [10.42.0.1, 10.42.0.2], interval: 1}}"
        ),
    );
    let wait = |text: &str, log: &dyn Fn() -> String| {
        let until = Instant::now() + Duration::from_secs(20);
        while !log().contains(text) {
            assert!(Instant::now() < until, "no {text} in {}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    wait("Handshake message received", &|| client.log());
    wait("Handshake timed out", &|| client.log());
    let of_client = client.log();
    drop(client);
    wait("Close tunnel received", &|| lighthouse.log());
    of_client + &lighthouse.log()
}

fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(items) => format!("[{}]", items.first().map(kind).unwrap_or_default()),
        Value::Object(map) => {
            format!(
                "{{{}}}",
                map.iter().map(|(key, value)| format!("{key}:{}", kind(value))).collect::<Vec<_>>().join(" ")
            )
        }
    }
}

fn in_json(log: &str) -> Lines {
    let mut lines = Lines::new();
    for line in log.lines() {
        let Ok(Value::Object(fields)) = serde_json::from_str(line) else { panic!("no object: {line}") };
        let text = fields["msg"].as_str().unwrap().to_owned();
        let others = fields.iter().filter(|(key, _)| !matches!(key.as_str(), "time" | "level" | "msg"));
        lines.entry(text).or_default().extend(others.map(|(key, value)| format!("{key}: {}", kind(value))));
    }
    lines
}

/// Names of the fields, and whether their values are quoted, lists or maps.
fn in_text(log: &str) -> Lines {
    let mut lines = Lines::new();
    for line in log.lines() {
        let text = line.split("msg=").nth(1).unwrap();
        let (text, rest) = match text.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap(),
            None => text.split_once(' ').unwrap_or((text, "")),
        };
        let mut fields = BTreeSet::new();
        let mut rest = rest.trim_start();
        while let Some((name, value)) = rest.split_once('=') {
            let (form, end) = match value.as_bytes().first() {
                Some(b'"') if value.starts_with("\"map[") => ("map", value[1..].find('"').unwrap() + 2),
                Some(b'"') => ("quoted", value[1..].find('"').unwrap() + 2),
                Some(b'[') => ("list", value.find(' ').unwrap_or(value.len())),
                _ => ("bare", value.find(' ').unwrap_or(value.len())),
            };
            fields.insert(format!("{name}: {form}"));
            rest = value[end..].trim_start();
        }
        lines.entry(text.to_owned()).or_default().extend(fields);
    }
    lines
}

#[test]
#[ignore = "needs Go Nebula, which .ci/go-nebula fetches"]
fn events_have_the_fields_of_go() {
    for (format, read) in [("json", in_json as fn(&str) -> Lines), ("text", in_text)] {
        let (own, go) = (read(&record(&ours(), format)), read(&record(&go(), format)));
        for text in [
            "Firewall rule added",
            "Firewall started",
            "listening",
            "Main HostMap created",
            "Loaded send_recv_error config",
            "Loaded accept_recv_error config",
            "Nebula interface is active",
            "Handshake message received",
            "Handshake message sent",
            "Handshake timed out",
            "Close tunnel received, tearing down.",
        ] {
            let of_go = go.get(text).unwrap_or_else(|| panic!("Go says no {text}: {go:?}"));
            let of_own = own.get(text).unwrap_or_else(|| panic!("ours says no {text}: {own:?}"));
            let missing: Vec<_> = of_go.difference(of_own).filter(|field| !is_left_out(field)).collect();
            assert!(missing.is_empty(), "{format}, {text}: {missing:?} of Go is not among {of_own:?}");
        }
    }
}

/// Ours counts packets that waited for a handshake, but does not log them.
fn is_left_out(field: &str) -> bool {
    field.starts_with("sentCachedPackets")
}

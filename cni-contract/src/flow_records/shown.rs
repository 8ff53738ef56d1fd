//! Records as a table for people.

use std::net::SocketAddr;

use super::{Filter, FlowEnd, FlowRecord, PolicyDecision};
use crate::columns::{bytes, columns, optional, or_dash, span};

/// One line for each record; `now` in milliseconds since 1970. All texts in the records are printed as they are.
#[must_use]
pub fn table(records: &[FlowRecord], now: u64) -> String {
    let row = |record: &FlowRecord| {
        [
            format!("{} ago", span(seconds(now.saturating_sub(record.last_ms)))),
            verdict(record),
            event(record),
            Filter::protocol_name(record.protocol),
            end(&record.source, None),
            end(&record.destination, record.original.as_ref().map(|original| original.destination)),
            format!("{} / {}", bytes(record.forward.bytes), record.forward.packets),
            format!("{} / {}", bytes(record.reply.bytes), record.reply.packets),
            span(seconds(record.duration_ms())),
            cause(record),
            way(record),
        ]
    };
    let head =
        ["SEEN", "VERDICT", "EVENT", "PROTO", "FROM", "TO", "SENT / PACKETS", "BACK / PACKETS", "LASTED", "BY", "WAY"];
    columns(head, records.iter().map(row))
}

fn seconds(millis: u64) -> i64 {
    i64::try_from(millis / 1000).unwrap_or(i64::MAX)
}

fn verdict(record: &FlowRecord) -> String {
    match &record.reason {
        Some(reason) => format!("{}: {reason}", record.verdict),
        None => or_dash(&record.verdict),
    }
}

fn event(record: &FlowRecord) -> String {
    match &record.end {
        Some(end) => format!("{} ({end})", record.event),
        None => or_dash(&record.event),
    }
}

/// Name, address and port; and what a Service was asked by.
fn end(end: &FlowEnd, before: Option<SocketAddr>) -> String {
    let address = match (end.address, end.port) {
        (Some(address), Some(port)) => SocketAddr::new(address, port).to_string(),
        (address, _) => optional(address),
    };
    let name = end.pod.as_ref().or(end.name.as_ref()).map(|name| format!("{name} ")).unwrap_or_default();
    let before = before.map(|before| format!(" ({before})")).unwrap_or_default();
    name + &address + &before
}

fn cause(record: &FlowRecord) -> String {
    let rule = record.rule.map(|rule| format!("firewall.{}[{rule}]", record.direction));
    let policy = record.policy.as_ref().map(policy);
    let all: Vec<_> = rule.into_iter().chain(policy).collect();
    or_dash(&all.join(", "))
}

fn policy(policy: &PolicyDecision) -> String {
    match (&policy.policy, &policy.tier) {
        (Some(name), tier) => {
            let tier = tier.as_ref().map(|tier| format!("{tier} ")).unwrap_or_default();
            let rule = policy.rule.map(|rule| format!(" rule {rule}")).unwrap_or_default();
            let rule_name = policy.rule_name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
            format!("{tier}{name}{rule}{rule_name}")
        }
        (None, _) => policy.reason.clone(),
    }
}

fn way(record: &FlowRecord) -> String {
    match (record.path.as_deref(), record.relay) {
        (Some("relay"), Some(relay)) => format!("relay {relay}"),
        (path, _) => optional(path),
    }
}

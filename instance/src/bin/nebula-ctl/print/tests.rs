use nebula_cni_contract::flow_records::Conditions;
use nebula_instance::host::documents::{Status, Tunnel};
use serde_json::{Value, json};

use super::{expiry, flows, readable, span, status, tunnel, visible_values};
use crate::answer::Answer;
use crate::arguments::Command;

fn answer(command: &Command, document: Value) -> Answer {
    Answer::read(command, document).expect("an answer")
}

#[test]
fn columns_line_up_and_names_of_peers_cannot_move_the_cursor() {
    let peer = json!({"name": "web\n10.0.0.1\u{1b}[2J", "addresses": ["10.42.0.7"], "endpoint": null, "relay": "10.42.0.1",
        "messages_sent": 1, "messages_received": 22, "bytes_sent": 900, "bytes_received": 3_221_225_472_u64,
        "certificate_version": 2});
    let shown = visible_values(&json!({"peers": [peer], "more": 0, "handshaking": []}));
    let text = readable(&answer(&Command::Peers, shown), &[]);
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert_eq!(lines[0].find("ADDRESSES"), lines[1].find("10.42.0.7"));
    assert!(lines[1].contains("900 B") && lines[1].contains("3.0 GiB"), "{text}");
    assert!(lines[1].starts_with("web\\n10.0.0.1\\u{1b}[2J  10.42.0.7"), "{text}");
}

#[test]
fn measured_paths_are_listed_with_the_reason_for_the_choice() {
    let tunnel = json!({"paths": [
        {"endpoint": "192.0.2.1:4242", "relay": null, "round_trip_ms": 1.25, "loss_percent": 0, "in_use": true,
            "verdict": "in_use", "reason": "its round trip is shorter"},
        {"endpoint": null, "relay": "10.42.0.9", "round_trip_ms": null, "loss_percent": 100, "in_use": false,
            "verdict": "silent", "reason": "does not answer"},
        {"endpoint": "[2001:db8::1]:4242", "relay": null, "round_trip_ms": null, "loss_percent": null,
            "in_use": false, "verdict": "excluded", "reason": "excluded by an allow list"}]});
    let tunnel: Tunnel = serde_json::from_value(tunnel).expect("a tunnel");
    let text = tunnel::paths(&tunnel.paths);
    let lines: Vec<String> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(lines[1], "192.0.2.1:4242 1.2 ms 0 % in use: its round trip is shorter", "{text}");
    assert_eq!(lines[2], "relay 10.42.0.9 - 100 % does not answer", "{text}");
    assert_eq!(lines[3], "[2001:db8::1]:4242 - - excluded by an allow list", "{text}");
}

#[test]
fn offered_relays_are_listed_with_the_reason_why_each_is_chosen_or_not() {
    let relay = |n: u8, chosen: bool, round_trip: Value, reason: Value, trouble: Value| {
        json!({"relay": format!("10.42.0.{n}"), "chosen": chosen, "tried": false, "round_trip_ms": round_trip,
            "loss_percent": if round_trip.is_null() { Value::Null } else { json!(0) }, "reason": reason,
            "trouble_text": trouble})
    };
    let status = json!({"relays": [
        relay(1, true, json!(1.25), json!("its round trip is shorter"), Value::Null),
        relay(2, false, Value::Null, Value::Null, json!("it refuses to relay")),
        relay(3, false, json!(40.0), Value::Null, Value::Null),
        relay(4, false, Value::Null, Value::Null, Value::Null)]});
    let status: Status = serde_json::from_value(status).expect("a status");
    let text = status::relays(&status.relays);
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].contains("1.2 ms") && lines[1].ends_with("chosen: its round trip is shorter"), "{text}");
    assert!(lines[2].ends_with("not chosen: it refuses to relay"), "{text}");
    assert!(lines[3].ends_with("no better than those that are") && lines[4].ends_with("not tried yet"), "{text}");
}

#[test]
fn flows_name_both_ends_the_service_the_rule_and_the_way_and_hostile_names_stay_on_their_line() {
    let record = json!({"event": "ended", "end": "idle", "verdict": "allowed", "direction": "outbound", "protocol": 6,
        "source": {"address": "10.42.0.1", "port": 5000, "name": "web\n\u{1b}[2J"},
        "destination": {"address": "10.42.0.2", "port": 8080, "name": "db"},
        "original": {"source": "10.42.0.1:5000", "destination": "10.96.0.7:80"},
        "forward": {"packets": 3, "bytes": 2048}, "reply": {"packets": 2, "bytes": 200}, "rule": 4,
        "policy": {"reason": "rule", "tier": "Admin", "policy": "p", "rule": 2},
        "path": "relay", "relay": "10.42.0.9", "started_ms": 1_000, "last_ms": 91_000});
    let refused = json!({"event": "refused", "verdict": "refused", "reason": "no_rule", "direction": "inbound",
        "protocol": 17, "source": {"address": "10.42.0.3", "name": "c"}, "destination": {"address": "10.42.0.1", "port": 53},
        "forward": {"packets": 7, "bytes": 700}, "last_ms": 99_000});
    let document = json!({"records": [record, refused], "lost": 5, "is_on": true});
    let Answer::Flows(records) = answer(&flows_command(), visible_values(&document)) else { panic!("flows") };
    let text = flows::flows(&records, 100_000);
    let lines: Vec<String> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(
        lines[1],
        "9s ago allowed ended (idle) tcp web\\n\\u{1b}[2J 10.42.0.1:5000 db 10.42.0.2:8080 (10.96.0.7:80) \
         2.0 KiB / 3 200 B / 2 1m 30s firewall.outbound[4], Admin p rule 2 relay 10.42.0.9",
        "{text}"
    );
    assert_eq!(lines[2], "1s ago refused: no_rule refused udp c 10.42.0.3 10.42.0.1:53 700 B / 7 0 B / 0 1m 39s - -");
    assert_eq!(lines[3], "5 more since the start had to give way (flows.ring)");
    let json = super::json_lines(&document);
    assert_eq!((json.lines().count(), json.contains('\u{1b}')), (2, false));
    let first: Value = serde_json::from_str(json.lines().next().expect("a line")).expect("an object");
    assert_eq!(first, document["records"][0]);
    let off = answer(&flows_command(), json!({"records": [], "is_on": false}));
    assert!(readable(&off, &[]).contains("flows.records"));
}

fn flows_command() -> Command {
    Command::Flows { kept: None, wanted: Conditions::default() }
}

#[test]
fn times_are_shown_in_two_units() {
    for (seconds, expected) in [(5, "5s"), (65, "1m 5s"), (7_260, "2h 1m"), (90_000, "1d 1h")] {
        assert_eq!(span(seconds), expected);
    }
    assert_eq!(expiry(-65), "EXPIRED 1m 5s ago");
}

#[test]
fn a_trace_names_the_rule_and_why_a_packet_is_dropped() {
    let document = json!({"direction": "inbound", "route": {"peer": "10.42.0.7", "unsafe_route": null,
        "other_gateways": []}, "tunnel": {"name": "web", "endpoint": "192.0.2.1:4242"},
        "firewall": {"addresses": "belong to the certificates", "conntrack": null, "rule": null},
        "outcome": "dropped", "reason": "no_rule"});
    let trace = Command::Trace { protocol: "tcp".to_owned(), ends: Vec::new() };
    let answer = answer(&trace, document);
    let text = readable(&answer, &[]);
    assert!(text.contains("web at 192.0.2.1:4242") && text.contains("dropped: no_rule"), "{text}");
    assert!(answer.is_bad_news(&[]));
}

#[test]
fn a_trace_tells_why_a_known_flow_is_refused() {
    let document = json!({"direction": "inbound", "firewall": {"addresses": "belong to the certificates",
        "conntrack": {"began": "outbound", "answered": true, "idle_seconds": 3, "ended": "network_policy"}, "rule": null},
        "outcome": "dropped", "reason": "network_policy"});
    let trace = Command::Trace { protocol: "tcp".to_owned(), ends: Vec::new() };
    let text = readable(&answer(&trace, document), &[]);
    assert!(text.contains("began outbound") && text.contains("no longer allowed (network_policy)"), "{text}");
}

#[test]
fn a_trace_tells_a_route_of_the_kernel_that_leads_elsewhere() {
    let document = json!({"direction": "outbound", "route": {"peer": "10.42.0.7", "unsafe_route": null,
        "other_gateways": []}, "tunnel": null, "firewall": null, "outcome": "not sent", "reason": "kernel_route",
        "kernel_route": {"to_overlay": false, "device": "eth0"}});
    let trace = Command::Trace { protocol: "tcp".to_owned(), ends: Vec::new() };
    let answer = answer(&trace, document);
    let text = readable(&answer, &[]);
    assert!(text.contains("by eth0, not into the overlay") && text.contains("not sent: kernel_route"), "{text}");
    assert!(answer.is_bad_news(&[]));
}

#[test]
fn a_lighthouse_that_does_not_know_a_host_does_not_look_dead() {
    let query = Command::Query { peer: String::new() };
    let said = |connected: bool, alive: bool| {
        let lighthouse = json!({"lighthouse": "10.42.0.1", "answered": false, "alive": alive, "connected": connected});
        let known = json!({"peer": "10.42.9.9", "lighthouses": [lighthouse]});
        readable(&answer(&query, known), &[])
    };
    assert!(said(true, true).contains("alive, and does not know it"));
    assert!(said(true, false).contains("no answer"));
    assert!(said(false, false).contains("no tunnel with it"));
}

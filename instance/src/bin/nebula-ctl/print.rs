//! Formats answers for people and programs.

use nebula_cert::{visible, visible_json};
use serde_json::Value;

use crate::arguments::Command;
use crate::doctor::{self, Finding};

/// The answer with all texts in it as they may be printed: names of peers and certificates, and what others said.
pub(crate) fn visible_values(answer: &Value) -> Value {
    match answer {
        Value::String(text) => visible(text).into(),
        Value::Array(items) => items.iter().map(visible_values).collect(),
        Value::Object(entries) => {
            let entry = |(key, value): (&String, &Value)| (visible(key).into_owned(), visible_values(value));
            Value::Object(entries.iter().map(entry).collect())
        }
        other => other.clone(),
    }
}

/// The document for a program, which may show it on a terminal.
pub(crate) fn json(document: &Value) -> String {
    format!("{}\n", visible_json(&format!("{document:#}")))
}

/// Formats the answer to a command, line by line. `answer` and `findings` are visible.
pub(crate) fn readable(command: &Command, answer: &Value, findings: &[Finding]) -> String {
    match command {
        Command::Status => status(answer) + &doctor::readable(findings),
        Command::Doctor => diagnosis(findings),
        Command::Why { .. } => doctor::state(answer) + &diagnosis(findings),
        Command::Peers => peers(answer),
        Command::Gateways => gateways(answer),
        Command::Whois { .. } => identity(answer),
        Command::Tunnel { .. } => tunnel(answer),
        Command::Close { .. } => format!("closed {} tunnel(s)\n", show(&answer["closed"])),
        Command::Query { .. } => whereabouts(answer),
        Command::Reload => "reloaded\n".to_owned(),
        Command::Cert => certificates(answer),
        Command::LogLevel { .. } => format!("{}\n", show(&answer["level"])),
        Command::Trace { .. } => trace(answer),
        Command::Completion { .. } => String::new(),
    }
}

fn diagnosis(findings: &[Finding]) -> String {
    if findings.is_empty() {
        "nothing is wrong as far as this host can tell\n".to_owned()
    } else {
        doctor::readable(findings)
    }
}

fn status(answer: &Value) -> String {
    let lighthouses = items(&answer["lighthouses"]).iter().map(|lighthouse| {
        let state = if lighthouse["connected"] == true { "connected" } else { "not connected" };
        format!("{} ({state})", show(&lighthouse["address"]))
    });
    let lighthouses: Vec<_> = lighthouses.collect();
    let roles = [("am_lighthouse", "lighthouse"), ("am_relay", "relay")];
    let roles: Vec<_> = roles.into_iter().filter(|(key, _)| answer[*key] == true).map(|(_, role)| role).collect();
    let reload = match &answer["last_reload"] {
        Value::Null => "none since the start".to_owned(),
        last if last["error"].is_null() => "in force".to_owned(),
        // Of several findings, each is a line.
        last => format!("REFUSED: {}", show(&last["error"]).replace("\\n", "; ")),
    };
    let left = answer["certificate_seconds_left"].as_i64();
    let text = fields(&[
        ("name", show(&answer["name"])),
        ("overlay", list(&answer["networks"])),
        ("groups", list(&answer["groups"])),
        ("device", show(&answer["device"])),
        ("underlay", show(&answer["udp"])),
        ("roles", if roles.is_empty() { "-".to_owned() } else { roles.join(", ") }),
        ("lighthouses", if lighthouses.is_empty() { "-".to_owned() } else { lighthouses.join(", ") }),
        ("peers", format!("{} ({} handshaking)", show(&answer["peers"]), show(&answer["handshaking"]))),
        ("tunnels", show(&answer["tunnels"])),
        ("flows", flows(answer)),
        ("certificate", left.map_or_else(|| "-".to_owned(), expiry)),
        ("renewal", renewal(&answer["enrolment"])),
        ("configuration", show(&answer["config"])),
        ("last reload", reload),
        ("at next start", list(&answer["at_next_start"])),
        ("not listening", not_listening(&answer["missing_listeners"])),
        ("log level", show(&answer["log_level"])),
        ("version", format!("{} (pid {})", show(&answer["version"]), show(&answer["pid"]))),
        ("uptime", answer["uptime_seconds"].as_i64().map_or_else(|| "-".to_owned(), span)),
    ]);
    if items(&answer["relays"]).is_empty() { text } else { text + "\n" + &relays(answer) }
}

fn flows(answer: &Value) -> String {
    let flows = show(&answer["flows"]);
    if answer["full_flow_table"].is_object() { format!("{flows} (FULL: new ones are refused)") } else { flows }
}

fn not_listening(missing: &Value) -> String {
    let told = items(missing).iter().map(|it| format!("{} ({})", show(&it["section"]), show(&it["error"])));
    let told: Vec<_> = told.collect();
    if told.is_empty() { "-".to_owned() } else { told.join(", ") }
}

fn renewal(enrolment: &Value) -> String {
    match enrolment["failing_seconds"].as_i64() {
        _ if enrolment.is_null() => "-".to_owned(),
        None => "by itself".to_owned(),
        Some(seconds) => format!("FAILS for {}: {}", span(seconds), show(&enrolment["error"])),
    }
}

fn identity(answer: &Value) -> String {
    let name = show(&answer["name"]);
    fields(&[
        ("name", if answer["own"] == true { format!("{name} (this host)") } else { name }),
        ("addresses", list(&answer["addresses"])),
        ("groups", list(&answer["groups"])),
        ("issuer", show(&answer["issuer"])),
        ("fingerprint", show(&answer["fingerprint"])),
    ])
}

fn peers(answer: &Value) -> String {
    let rows = items(&answer["peers"]).iter().map(|peer| {
        [
            show(&peer["name"]),
            list(&peer["addresses"]),
            way(peer),
            show(&peer["mtu"]),
            show(&peer["messages_sent"]),
            show(&peer["messages_received"]),
            bytes(&peer["bytes_sent"]),
            bytes(&peer["bytes_received"]),
            format!("v{}", show(&peer["certificate_version"])),
        ]
    });
    let head = ["NAME", "ADDRESSES", "ENDPOINT", "MTU", "SENT", "RECEIVED", "BYTES OUT", "BYTES IN", "CERT"];
    let mut text = table(head, rows);
    if answer["more"].as_u64().unwrap_or(0) > 0 {
        text += &format!("and {} more\n", show(&answer["more"]));
    }
    if !items(&answer["handshaking"]).is_empty() {
        text += &format!("handshaking with {}\n", list(&answer["handshaking"]));
    }
    text
}

fn gateways(answer: &Value) -> String {
    let rows = items(&answer["gateways"]).iter().map(|gateway| {
        [
            show(&gateway["network"]),
            show(&gateway["gateway"]),
            show(&gateway["priority"]),
            show(&gateway["weight"]),
            show(&gateway["state"]),
            gateway["state_seconds"].as_i64().map_or_else(|| "-".to_owned(), span),
            show(&gateway["flows"]),
        ]
    });
    let text = table(["NETWORK", "GATEWAY", "PRIORITY", "WEIGHT", "STATE", "FOR", "FLOWS"], rows);
    text + &match answer["moved_flows"].as_u64() {
        Some(moved @ 1..) => format!("{moved} flow(s) stay where they moved while their own gateway was dead\n"),
        _ => String::new(),
    }
}

fn way(tunnel: &Value) -> String {
    match (&tunnel["endpoint"], &tunnel["relay"]) {
        (Value::Null, Value::Null) => "-".to_owned(),
        (Value::Null, relay) => format!("relay {}", show(relay)),
        (endpoint, _) => show(endpoint),
    }
}

fn tunnel(answer: &Value) -> String {
    let mut text = String::new();
    for tunnel in items(&answer["tunnels"]) {
        let certificate = &tunnel["certificate"];
        let role = if tunnel["initiator"] == true { "initiator" } else { "responder" };
        text += &fields(&[
            ("name", show(&tunnel["name"])),
            ("addresses", list(&tunnel["addresses"])),
            ("endpoint", way(tunnel)),
            ("MTU", show(&tunnel["mtu"])),
            ("state", state(tunnel)),
            ("indexes", format!("{} here, {} there", show(&tunnel["local_index"]), show(&tunnel["remote_index"]))),
            (
                "messages",
                format!("{} sent, {} received", show(&tunnel["messages_sent"]), show(&tunnel["messages_received"])),
            ),
            (
                "handshake",
                match tunnel["handshake_ms"].as_f64() {
                    Some(took) => format!("{role}, took {took:.1} ms"),
                    None => role.to_owned(),
                },
            ),
            ("groups", list(&certificate["details"]["groups"])),
            ("behind it", list(&certificate["details"]["unsafeNetworks"])),
            ("certificate", certificate["secondsLeft"].as_i64().map_or_else(|| "-".to_owned(), expiry)),
            ("fingerprint", show(&certificate["fingerprint"])),
        ]);
        text.push('\n');
        if !items(&tunnel["paths"]).is_empty() {
            text += &paths(tunnel);
            text.push('\n');
        }
    }
    text + &whereabouts(&answer["known"])
}

/// The relays that lighthouses offered, and why each is chosen or not.
fn relays(status: &Value) -> String {
    let rows = items(&status["relays"]).iter().map(|relay| {
        let round_trip = relay["round_trip_ms"].as_f64().map_or_else(|| "-".to_owned(), |time| format!("{time:.1} ms"));
        let loss = if relay["loss_percent"].is_null() {
            "-".to_owned()
        } else {
            format!("{} %", show(&relay["loss_percent"]))
        };
        let why = match (&relay["chosen"], &relay["tried"]) {
            (Value::Bool(true), _) => format!("chosen: {}", show(&relay["reason"])),
            (_, Value::Bool(true)) => "being tried".to_owned(),
            _ if !relay["trouble_text"].is_null() => format!("not chosen: {}", show(&relay["trouble_text"])),
            _ if relay["round_trip_ms"].is_null() => "not tried yet".to_owned(),
            _ => "not chosen: no better than those that are".to_owned(),
        };
        [show(&relay["relay"]), round_trip, loss, why]
    });
    table(["RELAY", "ROUND TRIP", "LOSS", ""], rows)
}

/// The paths of a tunnel, and why each is used or not.
fn paths(tunnel: &Value) -> String {
    let rows = items(&tunnel["paths"]).iter().map(|path| {
        let place =
            if path["relay"].is_null() { show(&path["endpoint"]) } else { format!("relay {}", show(&path["relay"])) };
        let round_trip = path["round_trip_ms"].as_f64().map_or_else(|| "-".to_owned(), |time| format!("{time:.1} ms"));
        let loss = path["loss_percent"].as_u64().map_or_else(|| "-".to_owned(), |loss| format!("{loss} %"));
        let reason = show(&path["reason"]);
        let reason = if path["in_use"] == true { format!("in use: {reason}") } else { reason };
        [place, round_trip, loss, reason]
    });
    table(["PATH", "ROUND TRIP", "LOSS", "REASON"], rows)
}

fn state(tunnel: &Value) -> String {
    if tunnel["primary"] == true { "in use".to_owned() } else { "spare".to_owned() }
}

fn whereabouts(answer: &Value) -> String {
    let mut text = fields(&[
        ("peer", show(&answer["peer"])),
        ("endpoints", list(&answer["endpoints"])),
        ("relays", list(&answer["relays"])),
        ("handshaking", if answer["handshaking"] == true { "yes" } else { "no" }.to_owned()),
    ]);
    let rows = items(&answer["lighthouses"]).iter().map(|lighthouse| {
        let said = match (&lighthouse["answered"], &lighthouse["alive"], &lighthouse["connected"]) {
            (Value::Bool(true), _, _) => list(&lighthouse["endpoints"]),
            (_, Value::Bool(true), _) => "alive, and does not know it".to_owned(),
            (_, _, Value::Bool(false)) => "no tunnel with it".to_owned(),
            _ => "no answer".to_owned(),
        };
        [show(&lighthouse["lighthouse"]), said, list(&lighthouse["relays"])]
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        text += &table(["LIGHTHOUSE", "ENDPOINTS", "RELAYS"], rows);
    }
    if !answer["reported"].is_null() {
        let reported = &answer["reported"];
        text += &table(["REPORTED HERE", "RELAYS"], [[list(&reported["endpoints"]), list(&reported["relays"])]]);
    }
    text
}

fn certificates(answer: &Value) -> String {
    let row = |certificate: &Value| {
        let details = &certificate["details"];
        [
            show(&details["name"]),
            format!("v{}", show(&certificate["version"])),
            list(&details["networks"]),
            list(&details["groups"]),
            certificate["secondsLeft"].as_i64().map_or_else(|| "-".to_owned(), expiry),
            show(&certificate["fingerprint"]),
        ]
    };
    let rows = |key: &str| items(&answer[key]).iter().map(row).collect::<Vec<_>>();
    let own = table(["NAME", "VERSION", "NETWORKS", "GROUPS", "VALID", "FINGERPRINT"], rows("certificates"));
    own + "\n" + &table(["CA", "VERSION", "NETWORKS", "GROUPS", "VALID", "FINGERPRINT"], rows("cas"))
}

fn trace(answer: &Value) -> String {
    let (route, firewall) = (&answer["route"], &answer["firewall"]);
    let by = if route["unsafe_route"].is_null() {
        String::new()
    } else {
        let others = list(&route["other_gateways"]);
        let others = if others == "-" { String::new() } else { format!(", or {others}") };
        format!(" (unsafe route {}{others})", show(&route["unsafe_route"]))
    };
    let route = match &route["none"] {
        Value::Null => format!("{}{by}", show(&route["peer"])),
        reason => format!("none: {}", show(reason)),
    };
    let tunnel = match &answer["tunnel"] {
        Value::Null => "none".to_owned(),
        tunnel => format!("{} at {}", show(&tunnel["name"]), way(tunnel)),
    };
    let conntrack = match &firewall["conntrack"] {
        Value::Null => "no".to_owned(),
        known => format!(
            "yes, began {}, {}, idle for {} s",
            show(&known["began"]),
            if known["answered"] == true { "answered" } else { "not answered" },
            show(&known["idle_seconds"])
        ),
    };
    let rule = match &firewall["rule"] {
        Value::Null => "none".to_owned(),
        rule => format!("{} #{} {}", show(&rule["list"]), show(&rule["index"]), show(&rule["text"])),
    };
    let reason = answer["reason"].as_str().map(|reason| format!(": {reason}")).unwrap_or_default();
    let mut lines = vec![("direction", show(&answer["direction"]))];
    let capture = &answer["capture"];
    if !capture.is_null() {
        let becomes = &capture["becomes"];
        let to = match becomes.is_null() {
            true => String::new(),
            false => format!(": {} -> {}", show(&becomes["local"]), show(&becomes["remote"])),
        };
        lines.push(("capture", format!("{}{to}", show(&capture["found"]))));
    }
    if !answer["back"].is_null() {
        let back = &answer["back"];
        lines.push(("delivered as", format!("{} -> {}", show(&back["remote"]), show(&back["local"]))));
    }
    lines.extend([("route", route), ("tunnel", tunnel)]);
    if !firewall.is_null() {
        lines.extend([("addresses", show(&firewall["addresses"])), ("known flow", conntrack), ("rule", rule)]);
        let near = &firewall["nearest"];
        if !near.is_null() {
            let differs = list(&near["differs"]).replace(' ', ", ");
            let place = format!("{} #{} {}", show(&near["list"]), show(&near["index"]), show(&near["text"]));
            lines.push(("nearest", format!("{place}; differs in {differs}")));
        }
    }
    let kernel = &answer["kernel_route"];
    if kernel["to_overlay"] == false {
        let way = match kernel["device"].as_str() {
            Some(device) => format!("by {device}, not into the overlay"),
            None => show(&kernel["text"]),
        };
        lines.push(("kernel route", way));
    }
    lines.push(("outcome", format!("{}{reason}", show(&answer["outcome"]))));
    fields(&lines)
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn show(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn list(value: &Value) -> String {
    let all: Vec<_> = items(value).iter().map(show).collect();
    if all.is_empty() { "-".to_owned() } else { all.join(" ") }
}

fn expiry(seconds: i64) -> String {
    if seconds < 0 { format!("EXPIRED {} ago", span(-seconds)) } else { format!("{} left", span(seconds)) }
}

/// A number of bytes in its largest unit.
fn bytes(value: &Value) -> String {
    let Some(count) = value.as_u64() else { return show(value) };
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.into_iter().find(|(_, bits)| count >> bits > 0) {
        Some((unit, bits)) => format!("{:.1} {unit}", count as f64 / (1_u64 << bits) as f64),
        None => format!("{count} B"),
    }
}

/// A time span in its two largest units.
fn span(seconds: i64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, _, _) => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

fn fields(lines: &[(&str, String)]) -> String {
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    lines.iter().map(|(name, value)| format!("{:width$}{value}\n", format!("{name}:"))).collect()
}

fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut lines = vec![head.map(str::to_owned)];
    lines.extend(rows);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..N).map(width).collect();
    let line = |cells: &[String; N]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  "));
        padded.collect::<String>().trim_end().to_owned() + "\n"
    };
    lines.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn columns_line_up_and_names_of_peers_cannot_move_the_cursor() {
        let peer = json!({"name": "web\n10.0.0.1\u{1b}[2J", "addresses": ["10.42.0.7"], "endpoint": null, "relay": "10.42.0.1",
            "messages_sent": 1, "messages_received": 22, "bytes_sent": 900, "bytes_received": 3_221_225_472_u64,
            "certificate_version": 2});
        let answer = visible_values(&json!({"peers": [peer], "more": 0, "handshaking": []}));
        let text = readable(&Command::Peers, &answer, &[]);
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
        let text = paths(&tunnel);
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
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
        let text = relays(&status);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("1.2 ms") && lines[1].ends_with("chosen: its round trip is shorter"), "{text}");
        assert!(lines[2].ends_with("not chosen: it refuses to relay"), "{text}");
        assert!(lines[3].ends_with("no better than those that are") && lines[4].ends_with("not tried yet"), "{text}");
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
        let answer = json!({"direction": "inbound", "route": {"peer": "10.42.0.7", "unsafe_route": null,
            "other_gateways": []}, "tunnel": {"name": "web", "endpoint": "192.0.2.1:4242"},
            "firewall": {"addresses": "belong to the certificates", "conntrack": null, "rule": null},
            "outcome": "dropped", "reason": "no_rule"});
        let trace = Command::Trace { protocol: "tcp".to_owned(), ends: Vec::new() };
        let text = readable(&trace, &answer, &[]);
        assert!(text.contains("web at 192.0.2.1:4242") && text.contains("dropped: no_rule"), "{text}");
        assert!(trace.is_bad_news(&answer, &[]));
    }

    #[test]
    fn a_trace_tells_a_route_of_the_kernel_that_leads_elsewhere() {
        let answer = json!({"direction": "outbound", "route": {"peer": "10.42.0.7", "unsafe_route": null,
            "other_gateways": []}, "tunnel": null, "firewall": null, "outcome": "not sent", "reason": "kernel_route",
            "kernel_route": {"to_overlay": false, "device": "eth0"}});
        let trace = Command::Trace { protocol: "tcp".to_owned(), ends: Vec::new() };
        let text = readable(&trace, &answer, &[]);
        assert!(text.contains("by eth0, not into the overlay") && text.contains("not sent: kernel_route"), "{text}");
        assert!(trace.is_bad_news(&answer, &[]));
    }

    #[test]
    fn a_lighthouse_that_does_not_know_a_host_does_not_look_dead() {
        let query = Command::Query { peer: String::new() };
        let said = |connected: bool, alive: bool| {
            let lighthouse =
                json!({"lighthouse": "10.42.0.1", "answered": false, "alive": alive, "connected": connected});
            readable(&query, &json!({"peer": "10.42.9.9", "lighthouses": [lighthouse]}), &[])
        };
        assert!(said(true, true).contains("alive, and does not know it"));
        assert!(said(true, false).contains("no answer"));
        assert!(said(false, false).contains("no tunnel with it"));
    }
}

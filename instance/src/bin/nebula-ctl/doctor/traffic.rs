//! Explains dropped packets: which rule is nearest to allowing them, and what differs.

use serde_json::Value;

use super::{Finding, Severity, is_recent, list, text, texts};

/// Drops in the last minutes; if `peer` is given, only those of that peer.
pub(super) fn findings(facts: &Value, peer: Option<&Value>) -> Vec<Finding> {
    let of_peer =
        |drop: &&Value| peer.is_none_or(|peer| peer["peer"] == drop["peer"] || peer["peer"] == drop["remote"]);
    list(&facts["drops"]).iter().filter(|drop| is_recent(drop)).filter(of_peer).map(finding).collect()
}

/// What arrives here, a peer can send as it likes, and a rule is there to refuse it: only what this host itself sends
/// is an error.
fn finding(drop: &Value) -> Finding {
    let found = of_reason(drop);
    let severity = if drop["direction"] == "inbound" { Severity::Warning } else { found.severity };
    Finding { severity, ..found }
}

fn of_reason(drop: &Value) -> Finding {
    let inbound = drop["direction"] == "inbound";
    let (local, remote) = (text(&drop["local"]), text(&drop["remote"]));
    let about = match drop["peer_name"].as_str() {
        Some(name) => format!("{} with {name} ({remote})", service(drop)),
        None => format!("{} with {remote}", service(drop)),
    };
    let times = format!("{} sampled, {} s ago", text(&drop["times"]), text(&drop["seconds_ago"]));
    let way = if inbound { format!("from {remote} to {local}") } else { format!("from {local} to {remote}") };
    match drop["reason"].as_str().unwrap_or_default() {
        "no_rule" => {
            let list = if inbound { "firewall.inbound" } else { "firewall.outbound" };
            let cause = format!("no rule of {list} allows packets {way} ({times}){}", near(drop));
            let advice = format!(
                "If they should pass, add or widen a rule in {list} of this host, and run `nebula ctl reload`. If not, all is well."
            );
            Finding::error("firewall_drop", about, cause, &advice)
        }
        "remote_address" => Finding::error(
            "remote_address",
            about,
            format!("packets {way} are dropped ({times}): the peer's certificate does not have {remote}"),
            "For a network behind the peer, sign its certificate with `-unsafe-networks`.",
        ),
        "local_address" => Finding::error(
            "local_address",
            about,
            format!("packets {way} are dropped ({times}): this host's certificate does not have {local}"),
            "For a network behind this host, sign its certificate with `-unsafe-networks`. For its own traffic, see \
             which source address the route has.",
        ),
        _ => Finding::warning(
            "no_route",
            about,
            format!("packets {way} come into the device and have no route in the overlay ({times})"),
            "tun.unsafe_routes has no entry for that network, and it is not in the certificate's networks.",
        ),
    }
}

/// Describes the nearest rule and its conditions.
fn near(drop: &Value) -> String {
    let near = &drop["nearest"];
    if near.is_null() {
        return ", and there is no rule at all".to_owned();
    }
    let groups = texts(&drop["peer_groups"]);
    let groups = if groups.is_empty() { "no groups".to_owned() } else { format!("the groups {}", groups.join(", ")) };
    let differs = texts(&near["differs"]).into_iter().map(|aspect| match aspect.as_str() {
        "peer" => format!("the peer is {} with {groups}", text(&drop["peer_name"])),
        "port" => format!("the port is {}", text(&drop["port"])),
        "protocol" => format!("the protocol is {}", protocol(drop)),
        "ca" => "the peer's CA is another one".to_owned(),
        _ if text(&near["text"]).contains("local_cidr: ") => format!("its local_cidr does not have {}", text(&drop["local"])),
        _ => format!(
            "it is for this host's own addresses only, and {} is behind it: the rule needs a local_cidr with that address, or any",
            text(&drop["local"])
        ),
    });
    let differs: Vec<_> = differs.collect();
    format!("; nearest is #{} {}, but {}", text(&near["index"]), text(&near["text"]), differs.join(", and "))
}

fn service(drop: &Value) -> String {
    match drop["port"].as_u64() {
        Some(port) if port > 0 => format!("{} port {port}", protocol(drop)),
        _ => protocol(drop),
    }
}

fn protocol(drop: &Value) -> String {
    match drop["protocol"].as_u64() {
        Some(1) => "icmp".to_owned(),
        Some(6) => "tcp".to_owned(),
        Some(17) => "udp".to_owned(),
        Some(58) => "icmpv6".to_owned(),
        other => format!("protocol {}", other.unwrap_or(0)),
    }
}

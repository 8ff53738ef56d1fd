//! Turns what the node reports into JSON answers.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nebula_cert::{Certificate, UnixTime};
use nebula_core::FlowKey;
use nebula_core::config::Gateway;
use nebula_core::counters::Direction;
use nebula_core::firewall::{Cidr, NearMiss, Policy, PortRange, Protocol, Rule};
use nebula_core::forward::Capture;
use nebula_core::lighthouse::KnownEndpoints;
use nebula_core::{
    DropReason, FlowTrace, GatewayStatus, OfferedRelay, Outcome, PathStatus, RelayTrouble, TunnelStatus, Whereabouts,
};
use serde_json::{Value, json};

pub(super) fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Value {
    items.into_iter().map(|item| item.to_string()).collect()
}

fn text<T: ToString>(item: Option<T>) -> Value {
    item.map_or(Value::Null, |item| item.to_string().into())
}

pub(super) fn tunnel(tunnel: &TunnelStatus) -> Value {
    json!({
        "name": tunnel.name,
        "addresses": texts(&tunnel.peer),
        "endpoint": text(tunnel.endpoint),
        "relay": text(tunnel.relay),
        "mtu": tunnel.path_mtu,
        "paths": paths(tunnel),
        "path_reason": text(tunnel.path_reason),
        "primary": tunnel.primary,
        "initiator": tunnel.initiator,
        "certificate_version": tunnel.version.number(),
        "local_index": tunnel.local_index.0,
        "remote_index": tunnel.remote_index.0,
        "messages_sent": tunnel.message_counter.saturating_sub(1),
        "messages_received": tunnel.received_counter,
        "bytes_sent": tunnel.bytes_sent,
        "bytes_received": tunnel.bytes_received,
        "handshake_ms": tunnel.handshake.map(|took| took.as_secs_f64() * 1000.0),
    })
}

/// `flows` are those of routes with several gateways.
pub(super) fn gateway(status: &GatewayStatus, flows: &BTreeMap<(IpNet, IpAddr), usize>) -> Value {
    let Gateway { address, weight, priority, .. } = status.gateway;
    let network = status.network.trunc();
    json!({
        "network": network.to_string(),
        "gateway": address.to_string(),
        "priority": priority,
        "weight": weight,
        "state": status.state.name(),
        "state_seconds": status.lasts.map(|lasts| lasts.as_secs()),
        "flows": status.lasts.map(|_| flows.get(&(network, address)).copied().unwrap_or(0)),
    })
}

/// The paths to the peer, with why each is used or not.
fn paths(tunnel: &TunnelStatus) -> Value {
    let path = |path: &PathStatus| {
        json!({
            "endpoint": text(path.endpoint),
            "relay": text(path.relay),
            "round_trip_ms": path.round_trip.map(|time| time.as_secs_f64() * 1000.0),
            "loss_percent": path.loss,
            "in_use": path.in_use,
            "verdict": path.verdict.name(),
            "reason": if path.in_use { text(tunnel.path_reason) } else { path.verdict.to_string().into() },
        })
    };
    tunnel.paths.iter().map(path).collect()
}

/// The relays that lighthouses offered to this host.
pub(super) fn offered_relays(relays: &[OfferedRelay]) -> Value {
    let offered = |offered: &OfferedRelay| {
        json!({
            "relay": offered.relay.to_string(),
            "chosen": offered.is_chosen,
            "tried": offered.is_tried,
            "offered_by": offered.offered_by,
            "relays": offered.serves,
            "round_trip_ms": offered.round_trip.map(|time| time.as_secs_f64() * 1000.0),
            "loss_percent": offered.loss,
            "reason": text(offered.reason),
            "trouble": offered.trouble.map(RelayTrouble::name),
            "trouble_text": text(offered.trouble),
        })
    };
    relays.iter().map(offered).collect()
}

pub(super) fn certificate(certificate: &Certificate, now: UnixTime) -> Value {
    let mut document = certificate.to_json();
    document["secondsLeft"] = (certificate.not_after() - now).into();
    document
}

/// Who a host is. `is_own` says whether it is this one.
pub(super) fn identity(certificate: &Certificate, is_own: bool) -> Value {
    json!({
        "name": certificate.name(),
        "addresses": texts(certificate.networks().iter().map(IpNet::addr)),
        "groups": certificate.groups(),
        "issuer": text(certificate.issuer()),
        "fingerprint": certificate.fingerprint().to_string(),
        "not_after": certificate.not_after(),
        "own": is_own,
    })
}

fn told(endpoints: &[SocketAddr], relays: &[IpAddr]) -> Value {
    json!({ "endpoints": texts(endpoints), "relays": texts(relays) })
}

pub(super) fn whereabouts(peer: IpAddr, known: &Whereabouts) -> Value {
    let answers = known.lighthouses.iter().map(|lighthouse| match known.answers.get(lighthouse) {
        Some(KnownEndpoints { reported, relays, .. }) => {
            json!({"lighthouse": lighthouse.to_string(), "connected": true, "alive": true, "answered": true,
                "endpoints": texts(reported), "relays": texts(relays)})
        }
        // If a lighthouse did not answer about the peer but did answer a test, it is alive and does not know the peer.
        None => json!({"lighthouse": lighthouse.to_string(), "connected": known.connected.contains(lighthouse),
            "alive": known.heard.contains(lighthouse), "answered": false}),
    });
    json!({
        "peer": peer.to_string(),
        "endpoints": texts(&known.endpoints),
        "relays": texts(&known.relays),
        "lighthouses": answers.collect::<Value>(),
        "reported": known.reported.as_ref().map(|report| told(&report.reported, &report.relays)),
        "handshaking": known.pending,
    })
}

pub(super) fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::Inbound => "inbound",
        Direction::Outbound => "outbound",
    }
}

/// `policy` is the firewall policy in force.
pub(super) fn trace(trace: &FlowTrace, policy: &Policy) -> Value {
    let route = match &trace.route {
        Ok(route) => json!({
            "peer": route.peer.to_string(),
            "unsafe_route": text(route.subnet),
            "other_gateways": texts(&route.others),
        }),
        Err(reason) => json!({ "none": reason.name() }),
    };
    let firewall = trace.firewall.as_ref().map(|firewall| {
        let known = firewall.known.map(|known| {
            json!({"began": direction(known.direction), "answered": known.answered, "idle_seconds": known.idle.as_secs()})
        });
        json!({
            "addresses": firewall.addresses.err().map_or("belong to the certificates", |reason| reason.name()),
            "conntrack": known,
            "rule": firewall.rule.map(|index| json!({
                "list": format!("firewall.{}", direction(trace.direction)),
                "index": index,
                "text": trace.rule.as_ref().map(rule_text),
            })),
            "nearest": firewall.nearest.as_ref().and_then(|near| nearest(policy, trace.direction, near)),
        })
    });
    let (outcome, reason) = match trace.outcome {
        Outcome::Passes => ("passes", None),
        Outcome::WaitsForTunnel => ("waits for a tunnel", None),
        Outcome::Bypasses => ("leaves on the primary network", None),
        Outcome::ComesBack => ("comes back to this host", None),
        Outcome::WaitsForDirectory => ("waits for the cluster table", Some(DropReason::UnknownDestination.name())),
        Outcome::Dropped(reason) => ("dropped", Some(reason.name())),
    };
    let capture = trace.capture.map(|capture| match capture {
        Capture::Peer => json!({"found": "an enrolled pod"}),
        Capture::Translated(wire) => json!({"found": "a Service or a taken port", "becomes": ends(&wire)}),
        Capture::ToSelf => json!({"found": "a Service, for which this pod is the endpoint"}),
        Capture::Clear => json!({"found": "known not to be enrolled"}),
        Capture::Unknown => json!({"found": "nothing"}),
        Capture::Refused => json!({"found": "refused"}),
    });
    json!({
        "direction": direction(trace.direction),
        "capture": capture,
        "back": trace.back.as_ref().map(ends),
        "route": route,
        "tunnel": trace.tunnel.as_ref().map(tunnel),
        "firewall": firewall,
        "outcome": outcome,
        "reason": reason,
    })
}

/// The ends of a flow.
fn ends(flow: &FlowKey) -> Value {
    let end = |address, port| SocketAddr::new(address, port).to_string();
    json!({ "local": end(flow.local, flow.local_port), "remote": end(flow.remote, flow.remote_port) })
}

/// Describes the rule that came closest to allowing a flow, and the fields in which they differ.
pub(super) fn nearest(policy: &Policy, way: Direction, near: &NearMiss) -> Option<Value> {
    let rules: &[Rule] = match way {
        Direction::Inbound => &policy.inbound,
        Direction::Outbound => &policy.outbound,
    };
    let rule = rules.get(near.rule)?;
    Some(json!({
        "list": format!("firewall.{}", direction(way)),
        "index": near.rule,
        "text": rule_text(rule),
        "groups": rule.groups,
        "host": rule.host,
        "differs": near.differs.iter().map(|differs| differs.name()).collect::<Value>(),
    }))
}

/// Formats a rule as a YAML flow mapping.
pub(super) fn rule_text(rule: &Rule) -> String {
    let port = match rule.port {
        PortRange::Any => "any".to_owned(),
        PortRange::Fragment => "fragment".to_owned(),
        PortRange::Range(first, last) if first == last => first.to_string(),
        PortRange::Range(first, last) => format!("{first}-{last}"),
    };
    let protocol = match rule.protocol {
        Protocol::Any => "any",
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
        Protocol::Icmp => "icmp",
    };
    let cidr = |cidr: Cidr| match cidr {
        Cidr::Any => "any".to_owned(),
        Cidr::Prefix(prefix) => prefix.to_string(),
    };
    let groups = (!rule.groups.is_empty()).then(|| format!("[{}]", rule.groups.join(", ")));
    let fields = [
        ("port", Some(port)),
        ("proto", Some(protocol.to_owned())),
        ("host", rule.host.clone()),
        ("groups", groups),
        ("cidr", rule.cidr.map(cidr)),
        ("local_cidr", rule.local_cidr.map(cidr)),
        ("ca_name", rule.ca_name.clone()),
        ("ca_sha", rule.ca_sha.map(|sha| sha.to_string())),
    ];
    let fields = fields.into_iter().filter_map(|(name, value)| Some(format!("{name}: {}", value?)));
    format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_rule_says_is_written() {
        let rule = Rule {
            protocol: Protocol::Tcp,
            port: PortRange::Range(80, 443),
            groups: vec!["web".to_owned(), "prod".to_owned()],
            cidr: Some(Cidr::Prefix("10.0.0.0/8".parse().unwrap())),
            ..Rule::default()
        };
        assert_eq!(rule_text(&rule), "{port: 80-443, proto: tcp, groups: [web, prod], cidr: 10.0.0.0/8}");
        assert_eq!(rule_text(&Rule::any()), "{port: any, proto: any, host: any}");
    }
}

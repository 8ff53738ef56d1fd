//! Turns what the node reports into documents.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nebula_cert::{Certificate, UnixTime};
use nebula_core::FlowKey;
use nebula_core::counters::Direction;
use nebula_core::firewall::{Cidr, NearMiss, Policy, PortRange, Protocol, Rule};
use nebula_core::forward::Capture;
use nebula_core::lighthouse::KnownEndpoints;
use nebula_core::{
    DropReason, FlowTrace, GatewayStatus, OfferedRelay, Outcome, PathStatus, RelayTrouble, TunnelStatus, Whereabouts,
};

use crate::host::documents::{self, Captured, Conntrack, Ends, FirewallVerdict, NearestRule, NumberedRule, Route};

pub(super) fn texts<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

fn text<T: ToString>(item: Option<T>) -> Option<String> {
    item.map(|item| item.to_string())
}

pub(super) fn tunnel(tunnel: &TunnelStatus) -> documents::Tunnel {
    documents::Tunnel {
        name: tunnel.name.clone(),
        addresses: texts(&tunnel.peer),
        endpoint: text(tunnel.endpoint),
        relay: text(tunnel.relay),
        mtu: tunnel.path_mtu,
        paths: tunnel.paths.iter().map(|it| path(it, tunnel)).collect(),
        path_reason: text(tunnel.path_reason),
        primary: tunnel.primary,
        post_quantum: tunnel.post_quantum,
        initiator: tunnel.initiator,
        certificate_version: tunnel.version.number().into(),
        local_index: tunnel.local_index.0,
        remote_index: tunnel.remote_index.0,
        messages_sent: tunnel.message_counter.saturating_sub(1),
        messages_received: tunnel.received_counter,
        bytes_sent: tunnel.bytes_sent,
        bytes_received: tunnel.bytes_received,
        handshake_ms: tunnel.handshake.map(|took| took.as_secs_f64() * 1000.0),
    }
}

fn path(path: &PathStatus, tunnel: &TunnelStatus) -> documents::Path {
    documents::Path {
        endpoint: text(path.endpoint),
        relay: text(path.relay),
        round_trip_ms: path.round_trip.map(|time| time.as_secs_f64() * 1000.0),
        loss_percent: path.loss,
        in_use: path.in_use,
        verdict: path.verdict.name().to_owned(),
        reason: if path.in_use { text(tunnel.path_reason) } else { Some(path.verdict.to_string()) },
    }
}

/// `flows` are those of routes with several gateways.
pub(super) fn gateway(status: &GatewayStatus, flows: &BTreeMap<(IpNet, IpAddr), usize>) -> documents::Gateway {
    let gateway = &status.gateway;
    let network = status.network.trunc();
    documents::Gateway {
        network: network.to_string(),
        gateway: gateway.address.to_string(),
        priority: gateway.priority,
        weight: gateway.weight.get(),
        state: status.state.name().to_owned(),
        state_seconds: status.lasts.map(|lasts| lasts.as_secs()),
        flows: status.lasts.map(|_| flows.get(&(network, gateway.address)).copied().unwrap_or(0)),
    }
}

/// The relays that lighthouses offered to this host.
pub(super) fn offered_relays(relays: &[OfferedRelay]) -> Vec<documents::OfferedRelay> {
    let offered = |offered: &OfferedRelay| documents::OfferedRelay {
        relay: offered.relay.to_string(),
        chosen: offered.is_chosen,
        tried: offered.is_tried,
        offered_by: offered.offered_by,
        relays: offered.serves,
        round_trip_ms: offered.round_trip.map(|time| time.as_secs_f64() * 1000.0),
        loss_percent: offered.loss,
        reason: text(offered.reason),
        trouble: offered.trouble.map(RelayTrouble::name).map(str::to_owned),
        trouble_text: text(offered.trouble),
    };
    relays.iter().map(offered).collect()
}

pub(super) fn certificate(certificate: &Certificate, now: UnixTime) -> documents::Certificate {
    // The document is ours, with every field that is read.
    let shown = serde_json::from_value(certificate.to_json()).unwrap_or_default();
    documents::Certificate { seconds_left: certificate.not_after() - now, ..shown }
}

/// Who a host is. `is_own` says whether it is this one.
pub(super) fn identity(certificate: &Certificate, is_own: bool) -> documents::Identity {
    documents::Identity {
        name: certificate.name().to_owned(),
        addresses: texts(certificate.networks().iter().map(IpNet::addr)),
        groups: certificate.groups().to_vec(),
        issuer: text(certificate.issuer()),
        fingerprint: certificate.fingerprint().to_string(),
        not_after: certificate.not_after(),
        own: is_own,
    }
}

pub(super) fn known(peer: IpAddr, known: &Whereabouts) -> documents::Known {
    let answers = known.lighthouses.iter().map(|lighthouse| {
        let answer = known.answers.get(lighthouse);
        documents::LighthouseAnswer {
            lighthouse: lighthouse.to_string(),
            connected: answer.is_some() || known.connected.contains(lighthouse),
            alive: answer.is_some() || known.heard.contains(lighthouse),
            answered: answer.is_some(),
            endpoints: answer.map(|answer| texts(&answer.reported)),
            relays: answer.map(|answer| texts(&answer.relays)),
        }
    });
    let reported = |report: &KnownEndpoints| documents::Reported {
        endpoints: texts(&report.reported),
        relays: texts(&report.relays),
    };
    documents::Known {
        peer: peer.to_string(),
        endpoints: texts(&known.endpoints),
        relays: texts(&known.relays),
        lighthouses: answers.collect(),
        reported: known.reported.as_ref().map(reported),
        handshaking: known.pending,
    }
}

pub(super) fn direction(direction: Direction) -> &'static str {
    match direction {
        Direction::Inbound => "inbound",
        Direction::Outbound => "outbound",
    }
}

/// `policy` is the firewall policy in force.
pub(super) fn trace(trace: &FlowTrace, policy: &Policy) -> documents::Trace {
    let route = match &trace.route {
        Ok(route) => Route::To {
            peer: route.peer.to_string(),
            unsafe_route: text(route.subnet),
            other_gateways: texts(&route.others),
        },
        Err(reason) => Route::None { none: reason.name().to_owned() },
    };
    let firewall = trace.firewall.as_ref().map(|firewall| FirewallVerdict {
        addresses: firewall.addresses.err().map_or("belong to the certificates", |reason| reason.name()).to_owned(),
        conntrack: firewall.known.map(|known| Conntrack {
            began: direction(known.direction).to_owned(),
            answered: known.answered,
            idle_seconds: known.idle.as_secs(),
            ended: firewall.ended.map(|reason| reason.name().to_owned()),
        }),
        rule: firewall.rule.map(|index| NumberedRule {
            list: format!("firewall.{}", direction(trace.direction)),
            index,
            text: trace.rule.as_ref().map(rule_text),
        }),
        nearest: firewall.nearest.as_ref().and_then(|near| nearest(policy, trace.direction, near)),
        network_policy: firewall.network_policy.clone(),
    });
    let (outcome, reason) = match trace.outcome {
        Outcome::Passes => ("passes", None),
        Outcome::WaitsForTunnel => ("waits for a tunnel", None),
        Outcome::Bypasses => ("leaves on the primary network", None),
        Outcome::ComesBack => ("comes back to this host", None),
        Outcome::WaitsForDirectory => ("waits for the cluster table", Some(DropReason::UnknownDestination.name())),
        Outcome::Dropped(reason) => ("dropped", Some(reason.name())),
    };
    let capture = trace.capture.map(|capture| {
        let (found, becomes) = match capture {
            Capture::Peer => ("an enrolled pod", None),
            Capture::Translated(wire) => ("a Service or a taken port", Some(ends(&wire))),
            Capture::ToSelf => ("a Service, for which this pod is the endpoint", None),
            Capture::Clear => ("known not to be enrolled", None),
            Capture::Unknown => ("nothing", None),
            Capture::Refused => ("refused", None),
        };
        Captured { found: found.to_owned(), becomes }
    });
    documents::Trace {
        direction: direction(trace.direction).to_owned(),
        capture,
        back: trace.back.as_ref().map(ends),
        route,
        tunnel: trace.tunnel.as_ref().map(tunnel),
        firewall,
        outcome: outcome.to_owned(),
        reason: reason.map(str::to_owned),
        kernel_route: None,
    }
}

fn ends(flow: &FlowKey) -> Ends {
    let end = |address, port| SocketAddr::new(address, port).to_string();
    Ends { local: end(flow.local, flow.local_port), remote: end(flow.remote, flow.remote_port) }
}

/// Describes the rule that came closest to allowing a flow, and the fields in which they differ.
pub(super) fn nearest(policy: &Policy, way: Direction, near: &NearMiss) -> Option<NearestRule> {
    let rules: &[Rule] = match way {
        Direction::Inbound => &policy.inbound,
        Direction::Outbound => &policy.outbound,
    };
    let rule = rules.get(near.rule)?;
    Some(NearestRule {
        list: format!("firewall.{}", direction(way)),
        index: near.rule,
        text: rule_text(rule),
        groups: rule.groups.clone(),
        host: rule.host.clone(),
        differs: texts(near.differs.iter().map(|differs| differs.name())),
    })
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

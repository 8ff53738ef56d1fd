//! Records of flows as the document that other programs read: one form for hosts and pods.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_cert::Certificate;
use nebula_cni_contract::flow_records::{
    Amount, Filter, FlowEnd, FlowRecord, FlowRecords, MAX_RECORDS, Original, PolicyDecision,
};
use nebula_core::counters::Direction;
use nebula_core::firewall::{self, AskedRecords, FlowEvent, FlowPath};
use nebula_core::io::Handle;
use nebula_core::{DropReason, FlowKey, protocol};

/// What a program asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Only those that are told under a higher number, the oldest first. `None`: the newest, as they are now.
    pub(crate) after: Option<u64>,
    pub(crate) filter: Filter,
}

/// The records of a node; `pod` is the one that it serves.
pub(crate) fn answer(handle: &Handle, asked: Asked, pod: Option<&str>) -> FlowRecords {
    let (from, most) = match asked.after {
        Some(after) => (AskedRecords::After(after), MAX_RECORDS),
        // Filtered before they are cut.
        None => (AskedRecords::Newest, usize::MAX),
    };
    let read = handle.with_node(move |node, now| {
        (node.flow_records(now, from, most), node.own_certificate().clone(), node.records_flows())
    });
    let Some((read, own, is_on)) = read else { return FlowRecords::default() };
    let own = FlowEnd { pod: pod.map(str::to_owned), ..end(&own) };
    let records = read.records.iter().map(|it| record(it, &own)).filter(|record| asked.filter.matches(record));
    let mut records: Vec<_> = records.collect();
    let beyond = records.len().saturating_sub(MAX_RECORDS);
    records.drain(..beyond);
    FlowRecords { records, next: read.next, lost: read.lost, is_cut: read.is_cut || beyond > 0, is_on }
}

fn record(it: &firewall::FlowRecord, own: &FlowEnd) -> FlowRecord {
    let FlowKey { local, remote, local_port, remote_port, .. } = it.flow;
    let has_ports = [protocol::TCP, protocol::UDP, SCTP].contains(&it.flow.protocol);
    let port = |port: u16| (has_ports && port != 0).then_some(port);
    let local = FlowEnd { address: Some(local), port: port(local_port), ..own.clone() };
    let peer = it.peer.as_ref().map(|peer| end(peer)).unwrap_or_default();
    let remote = FlowEnd { address: Some(remote), port: port(remote_port), ..peer };
    let [sent, received] = [it.sent, it.received].map(|of| Amount { packets: of.packets, bytes: of.bytes });
    let (direction, [source, destination], [forward, reply]) = match it.direction {
        Direction::Outbound => ("outbound", [local, remote], [sent, received]),
        Direction::Inbound => ("inbound", [remote, local], [received, sent]),
    };
    let (event, end, reason) = match it.event {
        FlowEvent::Created => ("created", None, None),
        FlowEvent::Updated => ("updated", None, None),
        FlowEvent::Ended(end) => ("ended", Some(end.name()), reason_of(end)),
        FlowEvent::Refused(reason) => ("refused", None, Some(reason)),
    };
    let verdict = match (reason, it.is_in_audit) {
        (Some(_), _) => "refused",
        (None, true) => "audit",
        (None, false) => "allowed",
    };
    let decision = it.decision.as_deref();
    FlowRecord {
        number: it.number,
        id: it.id,
        event: event.to_owned(),
        end: end.map(str::to_owned),
        verdict: verdict.to_owned(),
        reason: reason.map(|reason| reason.name().to_owned()),
        direction: direction.to_owned(),
        protocol: it.flow.protocol,
        source,
        destination,
        original: it.original.as_ref().map(|original| ends(it.direction, original)),
        forward,
        reply,
        rule: decision.and_then(|decision| decision.rule),
        policy: decision.and_then(|decision| decision.policy.as_ref()).map(policy),
        path: it.path.map(|path| if path == FlowPath::Direct { "direct" } else { "relay" }.to_owned()),
        relay: match it.path {
            Some(FlowPath::Relay(relay)) => relay,
            _ => None,
        },
        post_quantum: it.path.map(|_| it.is_post_quantum),
        started_ms: millis(it.started),
        last_ms: millis(it.last),
    }
}

fn reason_of(end: firewall::End) -> Option<DropReason> {
    match end {
        firewall::End::Refused(reason) => Some(reason),
        _ => None,
    }
}

fn ends(direction: Direction, flow: &FlowKey) -> Original {
    let local = SocketAddr::new(flow.local, flow.local_port);
    let remote = SocketAddr::new(flow.remote, flow.remote_port);
    match direction {
        Direction::Outbound => Original { source: local, destination: remote },
        Direction::Inbound => Original { source: remote, destination: local },
    }
}

fn end(certificate: &Certificate) -> FlowEnd {
    FlowEnd {
        name: Some(certificate.name().to_owned()),
        groups: certificate.groups().to_vec(),
        fingerprint: Some(certificate.fingerprint().to_string()),
        ..FlowEnd::default()
    }
}

fn policy(decision: &firewall::PolicyDecision) -> PolicyDecision {
    PolicyDecision {
        reason: decision.reason.to_owned(),
        tier: decision.tier.map(str::to_owned),
        policy: decision.policy.as_deref().map(str::to_owned),
        rule: decision.rule,
        rule_name: decision.rule_name.as_deref().map(str::to_owned),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

const SCTP: u8 = 132;

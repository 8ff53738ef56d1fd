//! Records of flows: who spoke to whom, how much, by which way and rule; and who was refused.

use std::sync::Arc;
use std::time::Duration;

use nebula_core::counters::Direction;
use nebula_core::firewall::{
    AskedRecords, End, FlowEvent, FlowPath, FlowRecord, FlowRecords, NetworkPolicy, Occasion, OtherEnd, PolicyDecision,
    PolicyVerdict, PortRange, Protocol, Rule,
};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{Config, DropReason, FlowKey};

use crate::capture::{PORT, SECOND, cluster, pod, service, udp};
use crate::relay::{Relayed, relayed};

fn records(net: &mut SimNet, host: HostId) -> Vec<FlowRecord> {
    read(net, host, AskedRecords::Newest).records
}

fn read(net: &mut SimNet, host: HostId, asked: AskedRecords) -> FlowRecords {
    net.control(host, move |node, now| node.flow_records(now, asked, 1000))
}

fn on(config: &mut Config) {
    config.flow_records = 256;
}

/// The bytes of a UDP datagram in an IPv4 packet.
fn bytes(payload: &[u8]) -> u64 {
    28 + payload.len() as u64
}

#[test]
fn both_ends_record_a_flow_to_a_service_and_the_client_by_the_address_that_it_used() {
    let cluster = cluster(&[1, 2], &[2]);
    let mut net = SimNet::new(1);
    let hosts = [1, 2].map(|n| net.add(crate::capture::spec(&format!("pod-{n}"), n).config(on)));
    net.introduce(hosts[0], hosts[1]);
    net.set_directory(hosts[0], &cluster);
    let (client, server) = (pod(1, false), pod(2, false));
    for _ in 0..10 {
        let _verdict = net.send_packet(hosts[0], &udp(client, service(false), (PORT, 80), b"question"));
        net.run_for(SECOND / 2);
        let _verdict = net.send_packet(hosts[1], &udp(server, client, (8080, PORT), b"the answer"));
        net.run_for(SECOND / 2);
    }
    net.run_for(3 * SECOND);
    let wire = FlowKey {
        local: client,
        remote: server,
        local_port: PORT,
        remote_port: 8080,
        protocol: crate::packets::UDP,
        fragment: false,
    };
    let at_client = records(&mut net, hosts[0]);
    let [record] = &at_client[..] else { panic!("one flow: {at_client:?}") };
    assert_eq!((record.flow, record.direction), (wire, Direction::Outbound));
    assert_eq!(record.original, Some(FlowKey { remote: service(false), remote_port: 80, ..wire }));
    assert_eq!((record.sent.packets, record.sent.bytes), (10, 10 * bytes(b"question")));
    assert_eq!((record.received.packets, record.received.bytes), (10, 10 * bytes(b"the answer")));
    assert_eq!((record.path, record.peer.as_ref().unwrap().name()), (Some(FlowPath::Direct), "pod-2"));
    assert!(record.is_post_quantum);
    assert_eq!(record.decision.as_ref().unwrap().rule, Some(0));
    let lasted = record.last - record.started;
    assert!((9..11).contains(&lasted.as_secs()), "{lasted:?}");

    let at_server = records(&mut net, hosts[1]);
    let [record] = &at_server[..] else { panic!("one flow: {at_server:?}") };
    let seen = FlowKey { local: server, remote: client, local_port: 8080, remote_port: PORT, ..wire };
    assert_eq!((record.flow, record.original, record.direction), (seen, None, Direction::Inbound));
    assert_eq!((record.received.packets, record.sent.packets), (10, 10));
    assert_eq!((record.received.bytes, record.sent.bytes), (10 * bytes(b"question"), 10 * bytes(b"the answer")));
}

/// Refuses flows to one port, and in audit those to the next one.
#[derive(Debug)]
struct Ports(u16);

impl NetworkPolicy for Ports {
    fn version(&self) -> u64 {
        self.0.into()
    }

    fn judge(&self, direction: Direction, flow: &FlowKey, _: &OtherEnd<'_>, _: Occasion) -> PolicyVerdict {
        match if direction == Direction::Inbound { flow.local_port } else { flow.remote_port } {
            port if port == self.0 => PolicyVerdict::Refuse,
            port if port == self.0 + 1 => PolicyVerdict::AllowInAudit,
            _ => PolicyVerdict::Allow,
        }
    }

    fn reason(&self, _: Direction, _: &FlowKey, _: &OtherEnd<'_>) -> Option<String> {
        None
    }

    fn decision(&self, _: Direction, flow: &FlowKey, end: &OtherEnd<'_>) -> Option<PolicyDecision> {
        let policy = Some(format!("{}/{}", end.name, flow.local_port).into());
        Some(PolicyDecision { reason: "rule", policy, rule: Some(self.0), ..PolicyDecision::default() })
    }
}

#[test]
fn what_rules_and_policies_refuse_or_would_refuse_is_recorded_by_the_end_that_decides() {
    let mut net = SimNet::new(2);
    let port = |port| Rule { protocol: Protocol::Udp, port: PortRange::Range(port, port), ..Rule::any() };
    let b = net.add(HostSpec::new("b").config(move |config| {
        on(config);
        config.firewall.inbound = vec![port(53), Rule { port: PortRange::Range(80, 90), ..Rule::any() }];
        config.network_policy = Some(Arc::new(Ports(80)));
    }));
    let a = net.add(HostSpec::new("a").groups(&["web"]).knows(b).config(on));
    for n in 0..20 {
        for port in [22, 80, 81, 82] {
            let _verdict = net.send_udp(a, b, (5000 + n, port), b"x");
        }
        net.run_for(Duration::from_millis(10));
    }
    net.run_for(2 * SECOND);
    let at_b = records(&mut net, b);
    let to = |port: u16| -> Vec<_> { at_b.iter().filter(|record| record.flow.local_port == port).collect() };
    for (port, reason) in [(22, DropReason::NoRule), (80, DropReason::NetworkPolicy)] {
        let [record] = to(port)[..] else { panic!("one record: {at_b:?}") };
        assert_eq!((record.event, record.received.packets), (FlowEvent::Refused(reason), 20));
        assert_eq!((record.direction, record.flow.remote_port), (Direction::Inbound, 0));
        assert_eq!(record.peer.as_ref().unwrap().groups(), ["web"]);
    }
    assert_eq!(to(22)[0].decision.as_deref(), Some(&Default::default()), "no rule allows it");
    let decision = to(80)[0].decision.clone().expect("a policy decides");
    assert_eq!((decision.policy.as_ref().unwrap().policy.as_deref(), decision.rule), (Some("a/80"), Some(1)));
    assert_eq!((to(81).len(), to(82).len()), (20, 20), "each flow that passes has its own");
    assert!(to(81).iter().all(|record| record.is_in_audit && record.received.packets == 1));
    assert!(to(82).iter().all(|record| !record.is_in_audit && record.event == FlowEvent::Created));
    // The end that sent them decided otherwise.
    assert!(records(&mut net, a).iter().all(|record| record.event == FlowEvent::Created));
}

#[test]
fn a_relayed_flow_names_its_relay() {
    let Relayed { mut net, a, b, relay, .. } = relayed(3);
    net.control(a, |node, now| node.reconfigure(now, on));
    net.ping(a, b).until_delivered();
    net.run_for(3 * SECOND);
    let (through, at_b) = (net.overlay(relay), net.overlay(b));
    let records = records(&mut net, a);
    let record = records.iter().find(|record| record.flow.remote == at_b).expect("a record of the ping");
    assert_eq!((record.path, record.flow.protocol), (Some(FlowPath::Relay(Some(through))), 1));
}

#[test]
fn a_flow_that_was_idle_for_too_long_has_ended_and_without_the_setting_nothing_is_recorded() {
    let mut net = SimNet::new(4);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(on));
    let _verdict = net.send_udp(a, b, (5000, 53), b"question");
    net.run_for(SECOND);
    let first = read(&mut net, a, AskedRecords::After(0));
    assert_eq!(first.records.len(), 1);
    let number = Duration::from_micros(first.records[0].number);
    assert!(number.abs_diff(first.records[0].started) < 2 * SECOND, "both are of the wall clock");
    net.run_for(Duration::from_secs(600));
    let later = read(&mut net, a, AskedRecords::After(first.next));
    let told: Vec<_> = later.records.iter().map(|record| (record.event, record.id)).collect();
    assert_eq!(told, [(FlowEvent::Ended(End::Idle), first.records[0].id)]);
    assert_eq!(later.records[0].sent.bytes, bytes(b"question"));
    assert!(records(&mut net, b).is_empty());
    net.control(a, |node, now| node.reconfigure(now, |config| config.flow_records = 0));
    assert!(records(&mut net, a).is_empty());
}

//! Answers to refused packets, when a node is configured to give them.

use crate::packets;

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::firewall::{Action, PortRange, Protocol, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet};
use packets::{ACK, ICMP, ICMPV6, RST, SYN, TCP, checksum};

const NETWORKS: [[&str; 2]; 2] = [["10.42.0.1/16", "fd42::1/64"], ["10.42.0.2/16", "fd42::2/64"]];

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// `b` lets nothing in and answers with rejects; `a` sends without restrictions.
fn refusing(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let b = net.add(HostSpec::new("b").networks(&NETWORKS[1]).config(|config| {
        config.firewall.inbound = Vec::new();
        config.firewall.inbound_action = Action::Reject;
    }));
    let a = net.add(HostSpec::new("a").networks(&NETWORKS[0]).knows(b).config(|config| {
        // Only connection tracking lets in answers to what it sends.
        config.firewall.inbound = vec![Rule { protocol: Protocol::Tcp, port: PortRange::Range(1, 1), ..Rule::any() }];
    }));
    net.control(a, |node, now| node.connect(now, at("10.42.0.2")));
    net.run_for(Duration::from_secs(1));
    (net, a, b)
}

/// The packets that `a` receives after it sent `packet`.
fn answers(net: &mut SimNet, a: HostId, packet: &[u8]) -> Vec<Vec<u8>> {
    let before = net.packets(a).len();
    let _verdict = net.send_packet(a, packet);
    net.run_for(Duration::from_millis(200));
    net.packets(a)[before..].to_vec()
}

fn addresses(v6: bool) -> (IpAddr, IpAddr) {
    let texts = if v6 { ["fd42::1", "fd42::2"] } else { ["10.42.0.1", "10.42.0.2"] };
    (at(texts[0]), at(texts[1]))
}

fn assert_checksum(packet: &[u8]) {
    let (from, to, protocol, body) = packets::read(packet);
    let mut bytes = Vec::new();
    if protocol != ICMP {
        for address in [from, to] {
            match address {
                IpAddr::V4(v4) => bytes.extend(v4.octets()),
                IpAddr::V6(v6) => bytes.extend(v6.octets()),
            }
        }
        bytes.extend((body.len() as u32).to_be_bytes());
        bytes.extend([0, 0, 0, protocol]);
    }
    bytes.extend(body);
    assert_eq!(checksum(&bytes), 0, "{packet:02x?}");
    if from.is_ipv4() {
        assert_eq!(checksum(&packet[..20]), 0, "{packet:02x?}");
    }
}

#[test]
fn a_refused_connection_is_reset_at_once_through_the_tunnel() {
    let (mut net, a, b) = refusing(1);
    for v6 in [false, true] {
        let (from, to) = addresses(v6);
        let answers = answers(&mut net, a, &packets::tcp(from, to, (4000, 80), SYN));
        let [reset] = answers.as_slice() else { panic!("{answers:?}\n{}", net.diagram()) };
        let (source, destination, protocol, segment) = packets::read(reset);
        assert_eq!((source, destination, protocol), (to, from, TCP));
        assert_eq!(segment[..4], [0, 80, 0x0f, 0xa0]);
        assert_eq!(segment[4..12], [0, 0, 0, 0, 0, 0, 3, 233], "acknowledges the SYN");
        assert_eq!(segment[13], RST | ACK);
        assert_checksum(reset);
    }
    assert_eq!(net.counter(b, "rejected"), 2);
    assert_eq!(net.counter(b, "dropped_in_no_rule"), 2);
}

#[test]
fn other_refused_packets_are_answered_as_administratively_prohibited() {
    let (mut net, a, _) = refusing(2);
    let (from, to) = addresses(true);
    let sent = packets::udp(from, to, (5000, 53), &[7; 1100]);
    let received = answers(&mut net, a, &sent);
    let [error] = received.as_slice() else { panic!("{received:?}\n{}", net.diagram()) };
    let (_, _, protocol, body) = packets::read(error);
    assert_eq!((protocol, body[0], body[1]), (ICMPV6, 1, 1));
    assert_eq!(body[8..], sent[..1000]);
    assert_checksum(error);

    let (from, to) = addresses(false);
    let sent = packets::udp(from, to, (5000, 53), &[7; 100]);
    let received = answers(&mut net, a, &sent);
    let [error] = received.as_slice() else { panic!("{received:?}") };
    let (source, _, protocol, body) = packets::read(error);
    assert_eq!((source, protocol, body[0], body[1]), (to, ICMP, 3, 13));
    assert_eq!(body[8..], sent[..28]);
    assert_checksum(error);
}

#[test]
fn packets_that_must_not_be_answered_are_dropped_silently() {
    let (mut net, a, b) = refusing(3);
    let (from, to) = addresses(false);
    let (from6, to6) = addresses(true);
    let quoted = packets::udp(to, from, (1, 2), b"quoted");
    let fragment_header = [17, 0, 0, 0x40, 0, 0, 0, 9];
    let silent = [
        packets::tcp(from, to, (4000, 80), RST),
        packets::tcp(from, to, (4000, 80), RST | ACK),
        packets::icmp(from, to, 3, 3, [0; 4], &quoted),
        packets::icmp(from6, to6, 1, 4, [0; 4], &packets::udp(to6, from6, (1, 2), b"quoted")),
        packets::ip_fragment(from, to, 17, 2, &[1; 64]),
        packets::ip(from6, to6, 44, &[&fragment_header[..], &[1; 64]].concat()),
    ];
    for packet in &silent {
        assert_eq!(answers(&mut net, a, packet), Vec::<Vec<u8>>::new(), "answer to {packet:02x?}");
    }
    assert_eq!(net.counter(b, "dropped_in_no_rule"), silent.len() as u64);
    assert_eq!(net.counter(b, "rejected"), 0);
}

#[test]
fn by_default_refused_packets_are_not_answered() {
    let (mut net, a, b) = refusing(4);
    net.control(b, |node, now| {
        node.reconfigure(now, |config| config.firewall = nebula_core::firewall::Policy::default())
    });
    let (from, to) = addresses(false);
    assert!(answers(&mut net, a, &packets::tcp(from, to, (4000, 80), SYN)).is_empty());
    assert_eq!(net.counter(b, "dropped_in_no_rule"), 1);
}

#[test]
fn packets_refused_by_the_own_rules_are_answered_on_the_own_device() {
    let mut net = SimNet::new(5);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(|config| {
        config.firewall.outbound = Vec::new();
        config.firewall.outbound_action = Action::Reject;
    }));
    net.ping(b, a).is_answered_within(Duration::from_secs(1));
    net.control(a, |node, now| node.connect(now, at("10.42.0.1")));
    net.run_for(Duration::from_secs(1));
    let (from, to) = (net.overlay(a), net.overlay(b));
    let before = net.packets(b).len();
    let received = answers(&mut net, a, &packets::tcp(from, to, (4000, 80), SYN));
    let [reset] = received.as_slice() else { panic!("{received:?}\n{}", net.diagram()) };
    assert_eq!(packets::read(reset).3[13], RST | ACK);
    assert_checksum(reset);
    assert_eq!(net.packets(b).len(), before, "nothing left the node");
}

#[test]
fn a_destination_without_a_route_is_answered_only_if_that_is_asked_for() {
    for (action, expected) in [(Action::Drop, 0), (Action::Reject, 1)] {
        let mut net = SimNet::new(6);
        let a = net.add(HostSpec::new("a").config(move |config| config.firewall.outbound_action = action));
        let from = net.overlay(a);
        let received = answers(&mut net, a, &packets::tcp(from, at("172.31.0.1"), (4000, 80), SYN));
        assert_eq!(received.len(), expected);
        assert_eq!(net.counter(a, "dropped_out_no_route"), 1);
        let multicast = packets::udp(from, at("224.0.0.9"), (1, 2), b"to many");
        assert!(answers(&mut net, a, &multicast).is_empty());
    }
}

#[test]
fn two_nodes_that_reject_each_other_fall_silent() {
    let mut net = SimNet::new(7);
    let reject = |config: &mut nebula_core::Config| {
        config.firewall.inbound = Vec::new();
        config.firewall.inbound_action = Action::Reject;
    };
    let b = net.add(HostSpec::new("b").config(reject));
    let a = net.add(HostSpec::new("a").knows(b).config(reject));
    net.control(a, |node, now| node.connect(now, at("10.42.0.1")));
    net.run_for(Duration::from_secs(1));
    let before = net.flow().count();
    for protocol in [6, 17, 1, 47] {
        let body = packets::tcp_segment((4000, 80), SYN, (1, 0), b"");
        let packet = packets::ip(net.overlay(a), net.overlay(b), protocol, &body);
        let _verdict = net.send_packet(a, &packet);
        net.run_for(Duration::from_millis(100));
    }
    assert!(net.flow().count() - before <= 8, "each packet has at most one answer\n{}", net.diagram());
}

#[test]
fn a_packet_that_waited_for_a_tunnel_and_is_then_refused_is_answered_and_counted() {
    for (action, expected) in [(Action::Drop, 0), (Action::Reject, 2)] {
        let mut net = SimNet::new(8);
        let b = net.add(HostSpec::new("b"));
        let a = net.add(HostSpec::new("a").knows(b).config(move |config| {
            config.firewall.outbound = Vec::new();
            config.firewall.outbound_action = action;
        }));
        let (from, to) = (net.overlay(a), net.overlay(b));
        let _verdict = net.send_packet(a, &packets::tcp(from, to, (4000, 80), SYN));
        let received = answers(&mut net, a, &packets::udp(from, to, (5000, 53), b"waits, too"));
        assert_eq!(received.len(), expected, "{}", net.diagram());
        received.iter().for_each(|answer| assert_checksum(answer));
        let protocols: Vec<_> = received.iter().map(|answer| packets::read(answer).2).collect();
        assert_eq!(protocols, [TCP, ICMP][..expected]);
        assert_eq!(net.counter(a, "dropped_out_no_rule"), 2);
        assert!(net.packets(b).is_empty(), "nothing left the node");
    }
}

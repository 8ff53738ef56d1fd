//! Nodes with several overlay addresses, addresses in disguise, and packets to oneself or to everybody.

use crate::packets;

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::simulator::{HostId, HostSpec, SimNet};
use nebula_core::{DropReason, Verdict};

const A: [&str; 3] = ["10.42.0.1/16", "10.43.0.1/16", "fd42::1/64"];
const B: [&str; 3] = ["10.42.0.2/16", "10.43.0.2/16", "fd42::2/64"];

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn pair(seed: u64) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(seed);
    let b = net.add(HostSpec::new("b").networks(&B));
    let a = net.add(HostSpec::new("a").networks(&A).knows(b));
    (net, a, b)
}

#[test]
fn every_address_of_a_peer_is_reached_through_one_tunnel() {
    let (mut net, a, b) = pair(1);
    for (from, to) in [("10.42.0.1", "10.42.0.2"), ("10.43.0.1", "10.43.0.2"), ("fd42::1", "fd42::2")] {
        net.ping(a, b).between(from, to).until_delivered();
        net.ping(b, a).between(to, from).until_delivered();
    }
    assert_eq!(net.tunnels(a).len(), 1, "{}", net.diagram());
}

#[test]
fn addresses_of_different_networks_of_one_node_may_be_mixed() {
    let (mut net, a, b) = pair(2);
    net.ping(a, b).between("10.43.0.1", "10.42.0.2").until_delivered();
}

#[test]
fn an_ipv4_address_written_as_ipv6_is_not_that_ipv4_address() {
    let (mut net, a, b) = pair(3);
    net.ping(a, b).until_delivered();
    let packet = packets::udp(at("fd42::1"), at("::ffff:10.42.0.2"), (1, 2), b"mapped");
    assert_eq!(net.send_packet(a, &packet), Verdict::Drop(DropReason::NoRoute));
    let packet = packets::udp(at("::ffff:10.42.0.1"), at("fd42::2"), (1, 2), b"mapped");
    assert_eq!(net.send_packet(a, &packet), Verdict::Drop(DropReason::LocalAddress));
}

#[test]
fn a_node_does_not_send_to_itself_by_any_of_its_addresses() {
    let (mut net, a, _) = pair(4);
    for own in ["10.42.0.1", "10.43.0.1", "fd42::1"] {
        let packet = packets::udp(at(own), at(own), (1, 2), b"self");
        assert_eq!(net.send_packet(a, &packet), Verdict::Drop(DropReason::ToSelf));
    }
    assert_eq!(net.counter(a, "dropped_out_to_self"), 3);
}

#[test]
fn broadcast_and_multicast_are_dropped_as_such_only_if_configured() {
    for dropped in [false, true] {
        let mut net = SimNet::new(5);
        let a = net.add(HostSpec::new("a").networks(&A).config(move |config| {
            config.drop_local_broadcast = dropped;
            config.drop_multicast = dropped;
        }));
        for to in ["10.42.255.255", "10.43.255.255"] {
            let verdict = net.send_packet(a, &packets::udp(at("10.42.0.1"), at(to), (1, 2), b"all"));
            // Otherwise it is treated as a unicast address, and a handshake with nobody begins.
            assert_eq!(verdict, if dropped { Verdict::Drop(DropReason::Broadcast) } else { Verdict::Punt }, "{to}");
        }
        for (from, to) in [("10.42.0.1", "224.0.0.251"), ("fd42::1", "ff02::fb")] {
            let verdict = net.send_packet(a, &packets::udp(at(from), at(to), (1, 2), b"group"));
            let reason = if dropped { DropReason::Broadcast } else { DropReason::NoRoute };
            assert_eq!(verdict, Verdict::Drop(reason), "{to}");
        }
    }
}

#[test]
fn a_peer_may_not_use_an_address_of_its_certificate_outside_the_own_networks() {
    let mut net = SimNet::new(6);
    let b = net.add(HostSpec::new("b").networks(&["10.42.0.2/16", "10.99.0.2/16"]));
    let a = net.add(HostSpec::new("a").networks(&["10.42.0.7/16"]).knows(b));
    net.ping(a, b).until_delivered();
    let _verdict = net.send_packet(b, &packets::udp(at("10.99.0.2"), net.overlay(a), (1, 2), b"x"));
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.counter(a, "dropped_in_remote_address"), 1, "{}", net.diagram());
}

#[test]
fn a_network_has_room_for_more_hosts_than_a_byte_can_count() {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let home = net.add_nat(nebula_core::simulator::NatBehaviour::home());
    let mut hosts: Vec<_> =
        (0..300).map(|n| net.add(HostSpec::new(&format!("host-{n}")).lighthouse(lighthouse))).collect();
    hosts.push(net.add(HostSpec::new("at home").lighthouse(lighthouse).behind(home)));
    net.run_for(Duration::from_secs(1));
    for (from, to) in [(0, 254), (255, 256), (299, 1), (300, 298)] {
        net.ping(hosts[from], hosts[to]).until_delivered();
    }
    let mut endpoints: Vec<_> = hosts.iter().map(|host| (net.overlay(*host), net.underlay(*host))).collect();
    endpoints.sort();
    endpoints.dedup();
    assert_eq!(endpoints.len(), hosts.len());
}

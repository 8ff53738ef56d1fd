//! Somebody else lives where a peer was said to be.

use std::time::Duration;

use nebula_core::simulator::{HostSpec, SimNet};

#[test]
fn a_wrong_host_is_closed_and_the_next_endpoint_gets_the_waiting_packets() {
    let mut net = SimNet::new(1);
    let right = net.add(HostSpec::new("right"));
    let wrong = net.add(HostSpec::new("wrong"));
    let (peer, endpoints) = (net.overlay(right), vec![net.underlay(wrong), net.underlay(right)]);
    // Makes the right host answer later than the wrong one.
    net.cut(right, wrong);
    let a = net.add(HostSpec::new("a").config(move |config| {
        config.static_hosts.insert(peer, endpoints);
    }));
    net.cut(a, right);
    let _verdict = net.send_udp(a, right, (1, 2), b"for the right one");
    net.run_for(Duration::from_millis(300));
    net.heal(a, right);
    net.run_for(Duration::from_secs(6));
    assert_eq!(net.payloads(right, 2), [b"for the right one"], "{}", net.diagram());
    assert!(net.payloads(wrong, 2).is_empty());
    assert!(net.tunnels(wrong).is_empty(), "it was told to close\n{}", net.diagram());
    assert_eq!(net.endpoint_of(a, right), Some(net.underlay(right)));
}

#[test]
fn if_only_the_wrong_host_answers_the_handshake_ends() {
    let mut net = SimNet::new(2);
    let gone = net.add(HostSpec::new("gone").underlay("198.51.100.200:1"));
    let wrong = net.add(HostSpec::new("wrong").underlay("198.51.100.2:4242"));
    let (peer, endpoint) = (net.overlay(gone), net.underlay(wrong));
    let a = net.add(HostSpec::new("a").config(move |config| {
        config.static_hosts.insert(peer, vec![endpoint]);
    }));
    assert!(!net.ping(a, gone).is_answered_within(Duration::from_secs(30)));
    assert!(net.tunnels(a).is_empty());
    assert!(net.tunnels(wrong).is_empty());
    let to_wrong = net.flow().filter(|step| step.sender == "a" && step.datagram[0] == 0x10).count();
    assert_eq!(to_wrong, 1, "it is not asked again");
}

#[test]
fn a_node_makes_no_tunnel_with_itself() {
    let mut net = SimNet::new(3);
    let other = net.add(HostSpec::new("other").underlay("198.51.100.200:1"));
    let peer = net.overlay(other);
    let a = net.add(HostSpec::new("a").config(move |config| {
        config.static_hosts.insert(peer, vec!["198.51.100.2:4242".parse().unwrap()]);
    }));
    assert_eq!(net.underlay(a), "198.51.100.2:4242".parse().unwrap());
    assert!(!net.ping(a, other).is_answered_within(Duration::from_secs(10)));
    assert!(net.tunnels(a).is_empty());
}

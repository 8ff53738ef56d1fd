//! Two hosts that know each other's endpoints.

use std::time::Duration;

use nebula_core::Event;
use nebula_core::simulator::{HostSpec, SimNet};

#[test]
fn a_packet_to_a_known_endpoint_makes_a_tunnel_and_arrives() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(50), "two round trips of 10 ms, no retry: {took:?}");
    assert_eq!(net.tunnels_to(a, b).len(), 1);
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)));
    assert_eq!(net.endpoint_of(b, a), Some(net.underlay(a)));
    assert!(matches!(net.events(a), [Event::HandshakeSent { .. }, Event::TunnelUp { initiator: true, .. }]));
    assert!(matches!(net.events(b), [Event::TunnelUp { initiator: false, .. }]));
}

#[test]
fn only_the_initiator_needs_to_know_an_endpoint() {
    let mut net = SimNet::new(2);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b));
    net.ping(a, b).until_delivered();
    net.ping(b, a).until_delivered();
    assert_eq!(net.tunnels(b).len(), 1);
}

#[test]
fn packets_that_waited_arrive_once_and_in_order() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    for number in 0..50_u8 {
        let _verdict = net.send_udp(a, b, (1000, 2000), &[number]);
    }
    net.run_for(Duration::from_secs(1));
    let expected: Vec<_> = (0..50_u8).map(|number| vec![number]).collect();
    assert_eq!(net.payloads(b, 2000), expected);
}

#[test]
fn at_most_a_hundred_packets_wait_for_a_handshake() {
    let mut net = SimNet::new(4);
    let [a, b] = net.nodes(["a", "b"]);
    for number in 0..150_u8 {
        let _verdict = net.send_udp(a, b, (1000, 2000), &[number]);
    }
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.payloads(b, 2000).len(), 100);
    assert_eq!(net.counter(a, "dropped_out_pending_full"), 50);
}

#[test]
fn the_bytes_that_wait_are_bounded_over_all_peers() {
    let mut net = SimNet::new(7);
    let hosts = net.nodes(["a", "b", "c", "d", "e"]);
    for peer in &hosts[1..] {
        for _ in 0..100 {
            let _verdict = net.send_udp(hosts[0], *peer, (1, 2), &[0; 60_000]);
        }
    }
    let dropped = net.counter(hosts[0], "dropped_out_pending_full");
    let waiting = (400 - dropped) * 60_028;
    assert!((7 << 20..=8 << 20).contains(&waiting), "{waiting} bytes wait");
    net.run_for(Duration::from_secs(1));
    net.control(hosts[0], |node, now| node.close_all(now));
    net.cut(hosts[0], hosts[1]);
    let _verdict = net.send_udp(hosts[0], hosts[1], (1, 2), b"there is room again");
    assert_eq!(net.counter(hosts[0], "dropped_out_pending_full"), dropped);
}

#[test]
fn the_first_frame_of_each_direction_has_counter_three() {
    let mut net = SimNet::new(5);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let counters: Vec<_> = net.flow().map(|step| (step.sender.clone(), step.datagram[0], step.datagram[15])).collect();
    let (a, b) = ("a".to_owned(), "b".to_owned());
    assert_eq!(counters, [(a.clone(), 0x10, 1), (b.clone(), 0x10, 2), (a, 0x11, 3), (b, 0x11, 3)]);
}

#[test]
fn a_lost_second_message_is_sent_again_unchanged() {
    let mut net = SimNet::new(6);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    let [a, b] = net.nodes(["a", "b"]);
    let peer = net.overlay(b);
    net.control(a, |node, now| node.connect(now, peer));
    let first = net.flow().last().unwrap().clone();
    net.inject(first.from, first.to, &first.datagram);
    net.run_for(Duration::from_secs(1));
    let answers: Vec<_> = net.flow().filter(|step| step.sender == "b" && step.datagram[0] == 0x10).collect();
    assert_eq!(answers.len(), 2);
    assert_eq!(answers[0].datagram, answers[1].datagram);
    assert_eq!(net.tunnels(b).len(), 1);
}

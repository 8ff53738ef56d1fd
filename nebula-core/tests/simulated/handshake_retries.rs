//! A peer that does not answer.

use std::time::Duration;

use nebula_core::Event;
use nebula_core::simulator::SimNet;

#[test]
fn attempts_repeat_the_same_bytes_at_growing_distance_and_then_end() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.cut(a, b);
    let _verdict = net.send_udp(a, b, (1, 2), b"lost");
    net.run_for(Duration::from_secs(20));
    let attempts: Vec<_> = net.flow().map(|step| u64::try_from(step.at.as_millis()).unwrap()).collect();
    // The first attempt is made at once because the endpoint is known. It counts, but does not advance the timer.
    assert_eq!(attempts, [0, 100, 300, 600, 1000, 1500, 2100, 2800, 3600, 4500]);
    let first = net.flow().next().unwrap().datagram.clone();
    assert!(net.flow().all(|step| step.datagram == first));
    let peer = net.overlay(b);
    let end = Duration::from_millis(5500);
    let [Event::HandshakeSent { .. }, Event::HandshakeTimedOut { peer: named, after, endpoints, .. }] = net.events(a)
    else {
        panic!("{:?}", net.events(a));
    };
    assert_eq!((*named, *after, endpoints.as_slice()), (peer, end, &[net.underlay(b)][..]));
}

#[test]
fn a_new_packet_after_the_end_starts_over() {
    let mut net = SimNet::new(2);
    let [a, b] = net.nodes(["a", "b"]);
    net.cut(a, b);
    let _verdict = net.send_udp(a, b, (1, 2), b"lost");
    net.run_for(Duration::from_secs(20));
    net.heal(a, b);
    net.ping(a, b).until_delivered();
    assert_eq!(net.payloads(b, 2), Vec::<Vec<u8>>::new(), "what waited for the first handshake is gone");
    assert_eq!(net.counter(a, "dropped_out_no_endpoint"), 1, "and counted");
}

#[test]
fn new_static_endpoints_are_tried_at_once() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    net.move_to(b, "198.51.100.77:7777");
    let _verdict = net.send_udp(a, b, (1, 2), b"hello");
    net.run_for(Duration::from_millis(350));
    net.introduce(a, b);
    net.run_for(Duration::from_millis(50));
    assert_eq!(net.payloads(b, 2), [b"hello"]);
}

//! A peer whose underlay endpoint changes.

use std::time::Duration;

use nebula_core::Event;
use nebula_core::simulator::SimNet;

#[test]
fn a_tunnel_follows_a_peer_that_moves() {
    let mut net = SimNet::new(7);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.move_to(b, "198.51.100.99:999");
    net.ping(b, a).until_delivered();
    net.run_for(Duration::from_millis(20));
    assert_eq!(net.endpoint_of(a, b), Some("198.51.100.99:999".parse().unwrap()));
    assert_eq!(net.tunnels(a).len(), 1, "no new handshake was needed");
    assert!(net.events(a).iter().any(|event| matches!(event, Event::Roamed { .. })));
}

#[test]
fn a_tunnel_does_not_flap_back_to_where_it_just_left() {
    let mut net = SimNet::new(8);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let old = net.underlay(b).to_string();
    net.move_to(b, "198.51.100.99:999");
    net.ping(b, a).until_delivered();
    net.run_for(Duration::from_millis(20));
    net.move_to(b, &old);
    assert!(!net.ping(b, a).is_answered_within(Duration::from_millis(500)), "the answer goes to the newer endpoint");
    assert_eq!(net.endpoint_of(a, b), Some("198.51.100.99:999".parse().unwrap()));
    net.run_for(Duration::from_secs(2));
    net.ping(b, a).until_delivered();
    net.run_for(Duration::from_millis(20));
    assert_eq!(net.endpoint_of(a, b), Some(old.parse().unwrap()));
}

#[test]
fn a_stranger_who_copies_a_datagram_does_not_move_the_tunnel() {
    let mut net = SimNet::new(9);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let copied = net.flow().rfind(|step| step.sender == "b").unwrap().clone();
    net.inject("192.0.2.66:666".parse().unwrap(), copied.to, &copied.datagram);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)));
}

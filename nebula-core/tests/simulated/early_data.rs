//! Packets that a peer sends right behind its handshake answer may arrive before that answer is processed.

use std::time::Duration;

use nebula_core::simulator::{HostId, HostSpec, Link, SimNet};

const SECOND: Duration = Duration::from_secs(1);
const PORTS: (u16, u16) = (5000, 6000);
const SLOW: Link =
    Link { latency: Duration::from_millis(50), jitter: Duration::ZERO, loss: 0, duplicate: 0, mtu: None };

/// `a` calls `b`, whose answer is delayed on the link between `b` and `next`. `b` has three packets for `a`, so it
/// sends `a` a test request, which overtakes the answer.
fn overtake(net: &mut SimNet, [a, b, next]: [HostId; 3]) {
    let before = net.counter(a, "dropped_in_unknown_index");
    net.set_link_between(b, next, SLOW);
    let peer = net.overlay(b);
    net.control(a, |node, now| node.connect(now, peer));
    net.expect("b answers", 5 * SECOND, |net| net.table_sizes(b).half_open == 1);
    assert!(net.tunnels_to(a, b).is_empty());
    net.set_link_between(b, next, Link::default());
    for number in 0..3 {
        let _verdict = net.send_udp(b, a, PORTS, &[number]);
    }
    net.run_for(SLOW.latency / 2);
    assert!(net.tunnels_to(a, b).is_empty() && net.payloads(a, PORTS.1).is_empty(), "{}", net.diagram());
    net.run_for(SLOW.latency);
    assert_eq!(net.payloads(a, PORTS.1), [[0], [1], [2]], "{}", net.diagram());
    assert!(!net.tunnels_to(a, b).is_empty());
    assert_eq!(net.counter(a, "dropped_in_unknown_index"), before);
}

#[test]
fn data_that_overtakes_message_2_is_delivered_in_order_once_there_is_a_tunnel() {
    let mut net = SimNet::new(41);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b));
    overtake(&mut net, [a, b, a]);
}

#[test]
fn data_that_overtakes_message_2_through_a_relay_is_delivered_too() {
    let mut net = SimNet::new(42);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let relays = vec![net.overlay(relay)];
    let [a, b] = ["a", "b"].map(|name| {
        let relays = relays.clone();
        net.add(HostSpec::new(name).lighthouse(lighthouse).config(move |config| config.relay.relays = relays))
    });
    net.cut(a, b);
    net.run_for(SECOND);
    overtake(&mut net, [a, b, relay]);
}

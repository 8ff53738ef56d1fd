//! A node that leaves.

use std::time::Duration;

use nebula_core::simulator::SimNet;
use nebula_core::{Event, TunnelDownReason};

#[test]
fn a_node_that_stops_closes_its_tunnels_at_both_ends() {
    let mut net = SimNet::new(1);
    let [a, b, c] = net.nodes(["a", "b", "c"]);
    net.ping(a, b).until_delivered();
    net.ping(c, a).until_delivered();
    net.control(a, |node, now| node.close_all(now));
    assert!(net.tunnels(a).is_empty());
    net.run_for(Duration::from_secs(1));
    assert!(net.tunnels(b).is_empty());
    assert!(net.tunnels(c).is_empty());
    let closed = |event: &Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::ClosedByPeer, .. });
    assert!(net.events(b).iter().any(closed));
}

#[test]
fn a_close_message_without_a_valid_tag_closes_nothing() {
    let mut net = SimNet::new(2);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let mut forged = vec![0x15, 0, 0, 0];
    forged.extend(net.tunnels(a)[0].local_index.0.to_be_bytes());
    forged.extend(1000_u64.to_be_bytes());
    forged.extend([7; 16]);
    net.inject(net.underlay(b), net.underlay(a), &forged);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.tunnels(a).len(), 1);
    assert_eq!(net.counter(a, "dropped_in_bad_tag"), 1);
}

#[test]
fn closing_a_spare_tunnel_leaves_the_other_one() {
    let mut net = SimNet::new(15);
    let [a, b] = net.nodes(["a", "b"]);
    let _verdict = net.send_udp(a, b, (1, 2), b"from a");
    let _verdict = net.send_udp(b, a, (1, 2), b"from b");
    net.run_for(Duration::from_secs(1));
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (2, 2));
    let spare = net.tunnels(b).into_iter().find(|tunnel| !tunnel.primary).unwrap().local_index;
    // Has the same effect as an authenticated close message from `a`.
    let (from, kind) = (net.underlay(a).into(), nebula_core::MessageType::CloseTunnel);
    let close = nebula_core::Punt::Message { tunnel: spare, from, kind, plaintext: Vec::new() };
    net.control(b, |node, now| node.handle_punt(now, close));
    assert_eq!(net.tunnels(b).len(), 1);
    // The other side may have used the closed tunnel; it is told once that it is gone.
    assert!(net.ping(b, a).until_delivered() < Duration::from_secs(2));
}

//! A peer that lost its state.

use std::time::Duration;

use nebula_core::config::RecvErrorPolicy;
use nebula_core::simulator::{HostSpec, SimNet};
use nebula_core::{Event, TunnelDownReason, WallClock};

#[test]
fn one_recv_error_is_enough_to_start_over() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.restart(b);
    assert!(!net.ping(a, b).is_answered_within(Duration::from_millis(200)), "one packet is lost");
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(200)), "{}", net.diagram());
    let lost = |event: &&Event| matches!(event, Event::TunnelDown { reason: TunnelDownReason::RecvError, .. });
    assert_eq!(net.events(a).iter().filter(lost).count(), 1);
}

#[test]
fn without_recv_errors_dead_peer_detection_ends_the_tunnel() {
    let mut net = SimNet::new(2);
    let silent = |spec: HostSpec| spec.config(|config| config.send_recv_error = RecvErrorPolicy::Never);
    let b = net.add(silent(HostSpec::new("b")));
    let a = net.add(silent(HostSpec::new("a").knows(b)));
    net.ping(a, b).until_delivered();
    net.restart(b);
    let outage = net.ping(a, b).until_delivered();
    assert!((14..=21).contains(&outage.as_secs()), "a probe after 5 s, the end after 10 more: {outage:?}");
}

#[test]
fn a_recv_error_from_elsewhere_is_not_believed() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let mut forged = vec![0x12, 0, 0, 0];
    forged.extend(net.tunnels(a)[0].remote_index.0.to_be_bytes());
    forged.extend([0; 8]);
    net.inject("192.0.2.66:666".parse().unwrap(), net.underlay(a), &forged);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.tunnels(a).len(), 1);
    net.inject(net.underlay(b), net.underlay(a), &forged);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.tunnels(a).len(), 0, "from the peer's endpoint it is");
}

#[test]
fn recv_errors_can_be_refused_by_configuration() {
    let mut net = SimNet::new(4);
    let b = net.add(HostSpec::new("b"));
    let deaf = HostSpec::new("a").knows(b).config(|config| config.accept_recv_error = RecvErrorPolicy::Private);
    let a = net.add(deaf);
    net.ping(a, b).until_delivered();
    net.restart(b);
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(1)));
    assert_eq!(net.tunnels(a).len(), 1, "b has a public address");
}

#[test]
fn a_peer_that_restarts_again_and_again_leaves_at_most_five_tunnels() {
    let mut net = SimNet::new(5);
    let [a, b] = net.nodes(["a", "b"]);
    for _ in 0..8 {
        net.ping(a, b).until_delivered();
        net.restart(a);
    }
    assert_eq!(net.tunnels(b).len(), 5);
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(60));
    assert_eq!(net.tunnels(b).len(), 1, "the others aged out");
}

#[test]
fn both_ends_restart_at_once_and_the_first_packet_arrives() {
    let mut net = SimNet::new(6);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    net.restart(a);
    net.restart(b);
    assert!(net.ping(a, b).is_answered_within(Duration::from_millis(100)), "{}", net.diagram());
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (1, 1));
}

#[test]
fn a_peer_that_restarts_with_its_clock_behind_is_taken_back() {
    let mut net = SimNet::new(9);
    let [a, b] = net.nodes(["a", "b"]);
    net.run_for(Duration::from_secs(3600));
    net.ping(a, b).until_delivered();
    net.restart(a);
    net.control(a, |node, now| {
        let unix = Duration::from_secs(1_800_000_000);
        node.set_wall_clock(WallClock { at: now, unix });
    });
    // The first message looks old, so the responder probes the tunnel it has and learns that it is lost.
    assert!(net.ping(a, b).is_answered_within(Duration::from_secs(1)), "{}", net.diagram());
}

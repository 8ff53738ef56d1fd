//! When a host punches, and how it responds.

use std::time::Duration;

use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet};

/// A host behind a symmetric NAT, and one outside that a lighthouse tells it about.
fn symmetric(respond: bool, delay: Duration, respond_delay: Duration) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let nat = net.add_nat(NatBehaviour::symmetric());
    let inside = HostSpec::new("inside").behind(nat).lighthouse(lighthouse).config(move |config| {
        (config.punchy.respond, config.punchy.delay, config.punchy.respond_delay) = (respond, delay, respond_delay);
    });
    let inside = net.add(inside);
    let outside = net.add(HostSpec::new("outside").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    (net, inside, outside)
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_host_behind_a_symmetric_nat_that_does_not_respond_is_not_reached() {
    let (mut net, inside, outside) = symmetric(false, SECOND, 5 * SECOND);
    assert_eq!(net.ping(outside, inside).train(20, SECOND), 0);
    net.ping(inside, outside).until_delivered();
    assert!(net.ping(outside, inside).is_answered_within(SECOND), "once it spoke itself it is");
}

#[test]
fn punches_and_responses_use_the_configured_delays() {
    let (mut net, inside, outside) = symmetric(true, Duration::from_millis(300), Duration::from_millis(700));
    let asked = net.elapsed();
    net.ping(outside, inside).until_delivered();
    let after = |wanted: &dyn Fn(&[u8]) -> bool| {
        let step = net.flow().find(|step| step.sender == "inside" && step.at > asked && wanted(&step.datagram));
        step.map(|step| u64::try_from((step.at - asked).as_millis()).unwrap())
    };
    // The query and the punch notification take 5 ms each.
    assert_eq!(after(&|datagram| datagram == [0]), Some(310), "{}", net.diagram());
    // The host then queries the caller's endpoint in turn, which takes 10 ms.
    assert_eq!(after(&|datagram| datagram[0] == 0x10), Some(720), "{}", net.diagram());
}

#[test]
fn a_host_responds_with_a_test_to_a_peer_that_it_has_a_tunnel_with() {
    let (mut net, inside, outside) = symmetric(true, SECOND, SECOND);
    net.ping(inside, outside).until_delivered();
    let peer = net.overlay(inside);
    // The outside host has lost its state and calls in vain.
    net.restart(outside);
    net.control(outside, |node, now| node.connect(now, peer));
    net.run_for(Duration::from_millis(1500));
    let tests = net.flow().filter(|step| step.sender == "inside" && step.datagram[0] == 0x14).count();
    assert_eq!(tests, 1, "{}", net.diagram());
    let calls = |step: &&nebula_core::simulator::Step| {
        let is_first = step.datagram[0] == 0x10 && step.datagram[15] == 1;
        step.sender == "inside" && step.to == net.underlay(outside) && is_first
    };
    assert_eq!(net.flow().filter(calls).count(), 1, "the handshake of the beginning: {}", net.diagram());
}

#[test]
fn keepalive_punches_go_to_every_idle_peer_but_not_to_lighthouses() {
    let mut net = SimNet::new(3);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse).knows(b).config(|config| config.punchy.punch = true));
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(60));
    let punched = |net: &SimNet, receiver: &str| {
        net.flow().filter(|step| step.datagram == [1] && step.receiver.as_deref() == Some(receiver)).count()
    };
    assert!((10..=13).contains(&punched(&net, "b")), "one per check: {}", punched(&net, "b"));
    assert_eq!(punched(&net, "lighthouse"), 0);
}

#[test]
fn a_punch_is_not_answered() {
    let mut net = SimNet::new(4);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let before = net.flow().count();
    for punch in [&[0][..], &[1], &[]] {
        net.inject("192.0.2.66:666".parse().unwrap(), net.underlay(b), punch);
        net.run_for(SECOND);
    }
    assert_eq!(net.flow().count(), before + 3);
    assert_eq!(net.counter(b, "hole_punches_in"), 3);
}

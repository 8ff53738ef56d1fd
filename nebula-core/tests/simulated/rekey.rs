//! New certificates on live tunnels.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::Event;
use nebula_core::simulator::{HostSpec, SimNet};

#[test]
fn a_new_identity_is_taken_up_without_a_lost_ping() {
    let mut net = SimNet::new(1);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let old = net.tunnels(a)[0].local_index;
    let identity = net.renewed_identity(b, &[Version::V2]);
    net.control(b, |node, now| node.reconfigure(now, |config| config.identity = identity));
    assert_eq!(net.ping(a, b).train(40, Duration::from_millis(500)), 40, "{}", net.diagram());
    let tunnels = net.tunnels(a);
    assert_ne!(tunnels.iter().find(|tunnel| tunnel.primary).unwrap().local_index, old);
    net.run_for(Duration::from_secs(30));
    assert_eq!(net.tunnels(a).len(), 1, "the old tunnel aged out");
}

#[test]
fn both_sides_may_renew_at_once() {
    let mut net = SimNet::new(2);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    for host in [a, b] {
        let identity = net.renewed_identity(host, &[Version::V2]);
        net.control(host, |node, now| node.reconfigure(now, |config| config.identity = identity));
    }
    assert_eq!(net.ping(a, b).train(100, Duration::from_millis(500)), 100, "{}", net.diagram());
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (1, 1));
}

#[test]
fn a_node_that_renews_every_minute_keeps_few_tunnels() {
    let mut net = SimNet::new(3);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    for _ in 0..20 {
        let identity = net.renewed_identity(b, &[Version::V2]);
        net.control(b, |node, now| node.reconfigure(now, |config| config.identity = identity));
        assert_eq!(net.ping(a, b).train(60, Duration::from_secs(1)), 60);
        assert!(net.tunnels(a).len() <= 2 && net.tunnels(b).len() <= 2);
    }
}

#[test]
fn adding_a_version_to_both_sides_loses_nothing() {
    let mut net = SimNet::new(4);
    let spec = |name| HostSpec::new(name).versions(&[Version::V1]);
    let b = net.add(spec("b"));
    let a = net.add(spec("a").knows(b));
    net.ping(a, b).until_delivered();
    for host in [a, b] {
        let identity = net.renewed_identity(host, &[Version::V1, Version::V2]);
        net.control(host, |node, now| node.reconfigure(now, |config| config.identity = identity));
    }
    assert_eq!(net.ping(a, b).train(60, Duration::from_secs(1)), 60);
    assert_eq!((net.tunnels(a).len(), net.tunnels(b).len()), (1, 1));
    assert!(net.events(a).iter().filter(|event| matches!(event, Event::TunnelUp { .. })).count() > 1);
}

#[test]
fn a_tunnel_gets_a_successor_long_before_its_counters_run_out() {
    let mut net = SimNet::new(5);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let old = net.tunnels(a)[0].local_index;
    net.spend_counters(a, b, 1 << 34);
    assert_eq!(net.ping(a, b).train(40, Duration::from_millis(500)), 40, "{}", net.diagram());
    net.run_for(Duration::from_secs(30));
    let tunnels = net.tunnels(a);
    assert_eq!(tunnels.len(), 1, "the old tunnel aged out");
    assert_ne!(tunnels[0].local_index, old);
    assert!(tunnels[0].message_counter < 1000);
}

#[test]
fn a_tunnel_whose_counters_ran_out_sends_nothing_and_is_replaced() {
    let mut net = SimNet::new(6);
    let [a, b] = net.nodes(["a", "b"]);
    net.ping(a, b).until_delivered();
    let old = net.tunnels(a)[0].local_index;
    let left = nebula_core::internals::Session::REJECT_AFTER - net.tunnels(a)[0].message_counter;
    net.spend_counters(a, b, left);
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(1)), "no counter is used twice");
    assert_eq!(net.counter(a, "dropped_out_counter_exhausted"), 1);
    net.ping(a, b).until_delivered();
    assert_ne!(net.tunnels(a).iter().find(|tunnel| tunnel.primary).unwrap().local_index, old);
    assert!(net.events(a).iter().any(|event| {
        let reason = nebula_core::TunnelDownReason::CounterExhausted;
        matches!(event, Event::TunnelDown { reason: why, .. } if *why == reason)
    }));
}

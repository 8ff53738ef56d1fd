//! Hosts that find each other through a lighthouse.

use std::time::Duration;

use nebula_cert::Version;
use nebula_core::simulator::{HostId, HostSpec, NatBehaviour, SimNet};

fn with_lighthouse(seed: u64) -> (SimNet, HostId) {
    let mut net = SimNet::new(seed);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    (net, lighthouse)
}

#[test]
fn a_lighthouse_tells_where_a_peer_is() {
    let (mut net, lighthouse) = with_lighthouse(1);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_millis(100), "the reply triggers an attempt at once: {took:?}");
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "directly, not through the lighthouse");
}

#[test]
fn a_query_waits_for_the_tunnel_to_the_lighthouse() {
    let (mut net, lighthouse) = with_lighthouse(2);
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.ping(a, b).until_delivered();
}

#[test]
fn version_one_hosts_are_found_too() {
    let (mut net, lighthouse) = {
        let mut net = SimNet::new(3);
        let lighthouse = net.add(HostSpec::new("lighthouse").versions(&[Version::V1]).am_lighthouse());
        (net, lighthouse)
    };
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).versions(&[Version::V1]).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
}

#[test]
fn two_hosts_behind_home_routers_punch_through() {
    let (mut net, lighthouse) = with_lighthouse(4);
    let nats = [net.add_nat(NatBehaviour::home()), net.add_nat(NatBehaviour::home())];
    let a = net.add(HostSpec::new("a").behind(nats[0]).lighthouse(lighthouse));
    let b = net.add(HostSpec::new("b").behind(nats[1]).lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(a, b).until_delivered();
    assert!(took < Duration::from_secs(4), "{took:?}\n{}", net.diagram());
    assert_eq!(net.endpoint_of(a, b).unwrap().ip(), "203.0.113.2".parse::<std::net::IpAddr>().unwrap());
}

#[test]
fn a_host_with_a_symmetric_nat_is_reached_when_it_responds() {
    let (mut net, lighthouse) = with_lighthouse(5);
    let nat = net.add_nat(NatBehaviour::symmetric());
    let inside = HostSpec::new("inside").behind(nat).lighthouse(lighthouse);
    let inside = net.add(inside.config(|config| config.punchy.respond = true));
    let outside = net.add(HostSpec::new("outside").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    let took = net.ping(outside, inside).until_delivered();
    assert!(took > Duration::from_secs(4), "only the response after five seconds opens this NAT: {took:?}");
}

#[test]
fn two_hosts_behind_one_router_use_their_private_addresses() {
    let (mut net, lighthouse) = with_lighthouse(6);
    let nat = net.add_nat(NatBehaviour::home());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).behind(nat).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    assert_eq!(net.endpoint_of(a, b), Some(net.underlay(b)), "hairpinning is not needed");
}

#[test]
fn nobody_is_told_about_a_host_that_left() {
    let (mut net, lighthouse) = with_lighthouse(7);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.control(b, |node, now| node.close_all(now));
    net.run_for(Duration::from_millis(100));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(3)));
    assert!(
        net.flow()
            .all(|step| (step.sender != "a" && step.sender != "b") || step.receiver.as_deref() == Some("lighthouse"))
    );
}

#[test]
fn hosts_find_a_restarted_lighthouse_again_by_themselves() {
    let (mut net, lighthouse) = with_lighthouse(8);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.restart(lighthouse);
    net.run_for(Duration::from_secs(12));
    assert_eq!(net.tunnels(lighthouse).len(), 2, "{}", net.diagram());
    net.ping(a, b).until_delivered();
}

#[test]
fn a_host_that_moved_is_found_at_its_new_endpoint() {
    let (mut net, lighthouse) = with_lighthouse(9);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(Duration::from_secs(1));
    net.move_to(b, "198.51.100.99:999");
    net.run_for(Duration::from_secs(12));
    net.ping(a, b).until_delivered();
    assert_eq!(net.endpoint_of(a, b), Some("198.51.100.99:999".parse().unwrap()));
}

#[test]
fn replies_from_a_host_that_is_no_lighthouse_are_ignored() {
    let (mut net, lighthouse) = with_lighthouse(10);
    let b = net.add(HostSpec::new("b"));
    // To a, the impostor is an ordinary peer; it believes to be a lighthouse itself.
    let impostor = net.add(HostSpec::new("impostor").am_lighthouse());
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse).knows(impostor));
    net.ping(a, impostor).until_delivered();
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(10)));
    let to_impostor = net.flow().filter(|step| step.receiver.as_deref() == Some("impostor"));
    assert!(to_impostor.filter(|step| step.datagram[0] == 0x13).count() == 0, "it is not even asked");
}

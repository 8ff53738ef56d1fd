//! Underlay addresses that the configuration excludes.

use std::net::SocketAddr;
use std::time::Duration;

use nebula_core::Config;
use nebula_core::config::{AllowList, InterfaceRules, RemoteAllowList};
use nebula_core::simulator::{HostSpec, SimNet};

fn list(rules: &[(&str, bool)]) -> AllowList {
    let rules = rules.iter().map(|(prefix, allowed)| (prefix.parse().expect("a prefix"), *allowed));
    AllowList::new(rules).expect("rules with a default")
}

fn refuses(prefix: &'static str) -> impl FnOnce(&mut Config) {
    move |config| config.lighthouse.remote_allow = RemoteAllowList::new(list(&[(prefix, false)]), [])
}

fn refuses_peers(peers: &'static str, prefix: &'static str) -> impl FnOnce(&mut Config) {
    let range = (peers.parse().expect("a prefix"), list(&[(prefix, false)]));
    move |config| config.lighthouse.remote_allow = RemoteAllowList::new(AllowList::default(), [range])
}

#[test]
fn a_handshake_from_an_excluded_address_gets_no_answer() {
    let mut net = SimNet::new(1);
    let b = net.add(HostSpec::new("b").config(refuses("198.51.100.2/32")));
    let a = net.add(HostSpec::new("a").knows(b));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(6)));
    assert!(net.counter(b, "dropped_in_address_not_allowed") > 0);
    assert!(net.flow().all(|step| step.from != net.underlay(b)), "not a byte\n{}", net.diagram());
}

#[test]
fn a_peer_is_refused_at_an_address_that_only_others_may_have() {
    let mut net = SimNet::new(2);
    let b = net.add(HostSpec::new("b").config(refuses_peers("10.42.0.2/32", "198.51.100.0/24")));
    let [a, c] = ["a", "c"].map(|name| net.add(HostSpec::new(name).knows(b)));
    net.ping(c, b).until_delivered();
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(6)));
    assert!(net.tunnels_to(b, a).is_empty());
}

#[test]
fn a_configured_endpoint_that_is_excluded_is_never_tried() {
    let mut net = SimNet::new(3);
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(refuses("198.51.100.0/24")));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(6)));
    assert_eq!(net.flow().count(), 0, "{}", net.diagram());
}

#[test]
fn a_tunnel_does_not_follow_its_peer_to_an_excluded_address() {
    let mut net = SimNet::new(5);
    let b = net.add(HostSpec::new("b").config(refuses("192.0.2.0/24")));
    let a = net.add(HostSpec::new("a").knows(b));
    net.ping(a, b).until_delivered();
    let before = net.endpoint_of(b, a);
    net.move_to(a, "192.0.2.77:4242");
    net.ping(a, b).is_answered_within(Duration::from_secs(1));
    assert_eq!(net.endpoint_of(b, a), before);
    net.move_to(a, "203.0.113.77:4242");
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_millis(20));
    assert_eq!(net.endpoint_of(b, a), Some("203.0.113.77:4242".parse().unwrap()));
}

#[test]
fn endpoints_from_a_lighthouse_are_filtered_by_the_asker_and_by_the_punched() {
    let mut net = SimNet::new(6);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse).config(refuses("198.51.100.3/32")));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse).config(refuses("198.51.100.2/32")));
    net.run_for(Duration::from_secs(1));
    assert!(!net.ping(a, b).is_answered_within(Duration::from_secs(7)));
    let (at_a, at_b) = (net.underlay(a), net.underlay(b));
    let between = net.flow().filter(|step| [at_a, at_b].contains(&step.from) && [at_a, at_b].contains(&step.to));
    assert_eq!(between.count(), 0, "{}", net.diagram());
}

#[test]
fn a_lighthouse_stores_only_what_its_list_allows() {
    let mut net = SimNet::new(7);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse().config(refuses("192.0.2.0/24")));
    let hidden: SocketAddr = "192.0.2.9:1".parse().unwrap();
    let advertises = move |config: &mut Config| config.lighthouse.advertise = vec![hidden];
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse).config(advertises));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    assert!(net.flow().all(|step| step.to != hidden), "{}", net.diagram());
}

#[test]
fn a_host_does_not_advertise_interfaces_it_hides() {
    let mut net = SimNet::new(8);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let nat = net.add_nat(nebula_core::simulator::NatBehaviour::home());
    let hides = |config: &mut Config| {
        config.lighthouse.local_allow.interfaces = InterfaceRules::new(["eth.*"], false).unwrap();
    };
    let b = net.add(HostSpec::new("b").behind(nat).lighthouse(lighthouse).config(hides));
    let a = net.add(HostSpec::new("a").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(1));
    net.ping(a, b).until_delivered();
    let private = net.underlay(b);
    assert!(net.flow().all(|step| step.to != private), "only what the lighthouse saw is tried\n{}", net.diagram());
}

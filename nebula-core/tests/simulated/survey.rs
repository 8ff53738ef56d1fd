//! What a node shows its operator of its state, and how the operator overrides it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_core::RelayState;
use nebula_core::lighthouse::KnownEndpoints;
use nebula_core::lighthouse::{AllowList, RemoteAllowList};
use nebula_core::simulator::{HostSpec, SimNet};

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn every_source_of_a_peers_endpoints_is_named() {
    let mut net = SimNet::new(1);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.ping(a, b).until_delivered();
    let [at_a, at_b, at_lighthouse] = [a, b, lighthouse].map(|host| net.overlay(host));
    let (b_is, lighthouse_is) = (net.underlay(b), net.underlay(lighthouse));

    let of_b = net.control(a, |node, _| node.sources(at_b));
    assert!(of_b[&at_lighthouse].reported.contains(&b_is), "{of_b:?}");
    assert_eq!(of_b[&at_b].learnt, [b_is]);
    let of_lighthouse = net.control(a, |node, _| node.sources(at_lighthouse));
    assert_eq!(of_lighthouse[&at_a].reported, [lighthouse_is], "configured here");
    let reported = net.control(lighthouse, |node, _| node.sources(at_b));
    assert!(reported[&at_b].reported.contains(&b_is), "by itself: {reported:?}");

    let mut both = vec![at_b, at_lighthouse];
    both.sort();
    assert_eq!(net.control(a, |node, _| node.known_peers(9)), both);
    assert_eq!(net.control(a, |node, _| node.known_peers(1)), both[..1]);
    assert!(net.control(a, |node, _| node.sources(IpAddr::from([10, 42, 9, 9]))).is_empty());
}

#[test]
fn the_answer_to_an_operator_query_is_a_source_too() {
    let mut net = SimNet::new(2);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name).lighthouse(lighthouse)));
    net.run_for(SECOND);
    let (at_b, at_lighthouse) = (net.overlay(b), net.overlay(lighthouse));
    assert_eq!(net.control(a, |node, _| node.sources(at_b)).get(&at_lighthouse), None);
    net.control(a, |node, now| node.inquire(now, at_b));
    net.run_for(SECOND);
    let KnownEndpoints { learnt, reported, .. } = net.control(a, |node, _| node.sources(at_b))[&at_lighthouse].clone();
    assert!(learnt.is_empty() && reported.contains(&net.underlay(b)));
}

#[test]
fn a_handshake_with_an_unknown_peer_goes_to_the_given_endpoint() {
    let mut net = SimNet::new(3);
    let [a, b] = ["a", "b"].map(|name| net.add(HostSpec::new(name)));
    let (at_b, b_is) = (net.overlay(b), net.underlay(b));
    net.control(a, |node, now| node.connect(now, at_b));
    let pending = net.control(a, |node, _| node.pending_handshakes());
    assert_eq!((pending.len(), pending[0].peer, pending[0].endpoints.len()), (1, at_b, 0));
    net.control(a, |node, now| node.connect_at(now, at_b, b_is));
    assert_eq!(net.control(a, |node, _| node.pending_handshakes())[0].endpoints, [b_is]);
    net.run_for(SECOND);
    assert_eq!(net.tunnels_to(a, b).len(), 1);
    assert!(net.control(a, |node, _| node.pending_handshakes()).is_empty());
}

#[test]
fn a_redirected_tunnel_stays_until_the_peer_is_heard_elsewhere() {
    let mut net = SimNet::new(4);
    let nowhere = SocketAddr::from(([203, 0, 113, 250], 4242));
    let refused = SocketAddr::from(([192, 0, 2, 77], 4242));
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").knows(b).config(move |config| {
        let deny = AllowList::new([(ipnet::IpNet::from(refused.ip()), false)]).expect("a list");
        config.lighthouse.remote_allow = RemoteAllowList::new(deny, []);
    }));
    net.ping(a, b).until_delivered();
    let (at_b, b_is) = (net.overlay(b), net.underlay(b));
    assert!(!net.control(a, |node, now| node.redirect(now, at_b, refused)), "no peer may be there");
    assert!(!net.control(a, |node, now| node.redirect(now, IpAddr::from([10, 42, 9, 9]), nowhere)), "no tunnel");
    assert!(net.control(a, |node, now| node.redirect(now, at_b, nowhere)));
    assert_eq!(net.tunnels_to(a, b)[0].endpoint, Some(nowhere));
    net.ping(b, a).until_delivered();
    net.run_for(SECOND / 50);
    assert_eq!(net.tunnels_to(a, b)[0].endpoint, Some(b_is));
}

#[test]
fn every_hop_is_named_by_both_ends_and_by_the_relay() {
    let mut net = SimNet::new(5);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let relay = net.add(HostSpec::new("relay").lighthouse(lighthouse).config(|config| config.relay.am_relay = true));
    let at_relay = net.overlay(relay);
    let through = move |name| {
        HostSpec::new(name).lighthouse(lighthouse).config(move |config| config.relay.relays = vec![at_relay])
    };
    let [a, b] = ["a", "b"].map(|name| net.add(through(name)));
    net.cut(a, b);
    net.run_for(SECOND);
    assert!(net.control(a, |node, _| node.relays()).is_empty());
    net.ping(a, b).until_delivered();
    let (at_a, at_b) = (net.overlay(a), net.overlay(b));

    let hop = net.control(a, |node, _| node.relays())[0];
    assert_eq!((hop.neighbour, hop.far, hop.forwarding, hop.state), (at_relay, at_b, false, RelayState::Established));
    let mut passed = net.control(relay, |node, _| node.relays());
    passed.sort_by_key(|hop| hop.far);
    let ends: Vec<_> = passed.iter().map(|hop| (hop.neighbour, hop.far, hop.forwarding)).collect();
    let mut expected = vec![(at_b, at_a, true), (at_a, at_b, true)];
    expected.sort_by_key(|(_, far, _)| *far);
    assert_eq!(ends, expected);
    let on_relay = passed.iter().find(|hop| hop.neighbour == at_a).expect("the hop to a");
    assert_eq!(on_relay.remote_index.map(|index| index.0), Some(hop.local_index.0));
}

//! Hosts behind address translators: which pairs connect directly, and what happens to mappings.

use std::net::IpAddr;
use std::time::Duration;

use nebula_core::config::{AllowList, LocalAllowList};
use nebula_core::simulator::{Dependence, HostId, HostSpec, NatBehaviour, NatId, SimNet};

use Dependence::{AddressAndPortDependent, AddressDependent, EndpointIndependent};

const KINDS: [Dependence; 3] = [EndpointIndependent, AddressDependent, AddressAndPortDependent];

/// Whether hole punching can connect two hosts behind different NATs.
fn can_connect(a: NatBehaviour, b: NatBehaviour) -> bool {
    // A host whose NAT uses a mapping per remote endpoint is not reachable where the lighthouse saw it.
    let hides = |nat: NatBehaviour| nat.mapping != EndpointIndependent;
    match (hides(a), hides(b)) {
        (false, false) => true,
        (true, false) => b.filtering != AddressAndPortDependent,
        (false, true) => a.filtering != AddressAndPortDependent,
        // One NAT has to let in datagrams on the port that was opened for the lighthouse only.
        (true, true) => [(a, b), (b, a)]
            .into_iter()
            .any(|(open, other)| open.filtering == EndpointIndependent && other.filtering != AddressAndPortDependent),
    }
}

#[test]
fn a_pair_of_nats_is_punched_unless_one_changes_the_port_that_the_other_filters_by() {
    let kinds = KINDS.into_iter().flat_map(|mapping| KINDS.map(|filtering| (mapping, filtering)));
    let kinds: Vec<_> =
        kinds.map(|(mapping, filtering)| NatBehaviour { mapping, filtering, ..NatBehaviour::home() }).collect();
    for (n, &one) in kinds.iter().enumerate() {
        for &other in &kinds {
            let mut net = SimNet::new(u64::try_from(n).unwrap());
            let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
            let [a, b] = [("a", one), ("b", other)].map(|(name, kind)| {
                let nat = net.add_nat(kind);
                let spec = HostSpec::new(name).behind(nat).lighthouse(lighthouse);
                net.add(spec.config(|config| config.punchy.respond = true))
            });
            net.run_for(Duration::from_secs(1));
            let answered = net.ping(a, b).train(12, Duration::from_secs(1)) > 0;
            assert_eq!(answered, can_connect(one, other), "{one:?}\n{other:?}\n{}", net.diagram());
        }
    }
}

#[test]
fn a_host_behind_any_nat_talks_with_a_public_one_whoever_begins() {
    for mapping in KINDS {
        for filtering in KINDS {
            for inside_begins in [true, false] {
                let mut net = SimNet::new(2);
                let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
                let nat = net.add_nat(NatBehaviour { mapping, filtering, ..NatBehaviour::home() });
                let inside = HostSpec::new("inside").behind(nat).lighthouse(lighthouse);
                let inside = net.add(inside.config(|config| config.punchy.respond = true));
                let outside = net.add(HostSpec::new("outside").lighthouse(lighthouse));
                net.run_for(Duration::from_secs(1));
                let (from, to) = if inside_begins { (inside, outside) } else { (outside, inside) };
                net.ping(from, to).until_delivered();
                assert_eq!(net.tunnels_to(outside, inside).len(), 1, "one tunnel for both directions");
            }
        }
    }
}

/// Two hosts behind one NAT that tell nobody their private addresses.
fn behind_one(hairpinning: bool) -> (SimNet, HostId, HostId) {
    let mut net = SimNet::new(3);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let nat = net.add_nat(NatBehaviour { hairpinning, ..NatBehaviour::home() });
    let [a, b] = ["a", "b"].map(|name| {
        net.add(HostSpec::new(name).behind(nat).lighthouse(lighthouse).config(|config| {
            let private = AllowList::new([("192.168.0.0/16".parse().expect("a prefix"), false)]).expect("one rule");
            config.lighthouse.local_allow = LocalAllowList { addresses: private, ..LocalAllowList::default() };
        }))
    });
    net.run_for(Duration::from_secs(1));
    (net, a, b)
}

#[test]
fn hosts_that_hide_their_private_addresses_meet_at_the_public_ones_of_a_nat_that_hairpins() {
    let (mut net, a, b) = behind_one(true);
    net.ping(a, b).until_delivered();
    assert_eq!(net.endpoint_of(a, b).unwrap().ip(), "203.0.113.1".parse::<IpAddr>().unwrap());
}

#[test]
fn without_hairpinning_hosts_that_hide_their_private_addresses_do_not_meet() {
    let (mut net, a, b) = behind_one(false);
    assert_eq!(net.ping(a, b).train(12, Duration::from_secs(1)), 0, "{}", net.diagram());
}

/// A host behind a home router with a tunnel to a public server, which does not know where the host is.
fn with_server(punch: bool) -> (SimNet, NatId, HostId, HostId) {
    let mut net = SimNet::new(4);
    let nat = net.add_nat(NatBehaviour::home());
    let server = net.add(HostSpec::new("server"));
    let inside = HostSpec::new("inside").behind(nat).knows(server).config(move |config| config.punchy.punch = punch);
    let inside = net.add(inside);
    net.ping(inside, server).until_delivered();
    (net, nat, inside, server)
}

#[test]
fn a_tunnel_follows_its_peer_to_a_new_mapping() {
    let (mut net, nat, inside, server) = with_server(true);
    let old = net.endpoint_of(server, inside).unwrap();
    net.rebind(nat);
    assert!(!net.ping(server, inside).is_answered_within(Duration::from_secs(1)), "the server cannot know yet");
    assert!(net.ping(inside, server).is_answered_within(Duration::from_secs(1)));
    net.run_for(Duration::from_millis(20));
    assert_ne!(net.endpoint_of(server, inside), Some(old));
    assert!(net.ping(server, inside).is_answered_within(Duration::from_secs(1)));
    assert_eq!(net.tunnels(server).len(), 1, "without a new handshake");
}

#[test]
fn after_a_mapping_expired_the_inside_must_send_first() {
    let (mut net, _, inside, server) = with_server(false);
    net.run_for(Duration::from_secs(120));
    assert!(!net.ping(server, inside).is_answered_within(Duration::from_secs(1)));
    assert!(net.ping(inside, server).is_answered_within(Duration::from_secs(1)));
    assert!(net.ping(server, inside).is_answered_within(Duration::from_secs(1)), "{}", net.diagram());
}

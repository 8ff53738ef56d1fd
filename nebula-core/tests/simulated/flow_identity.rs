//! Flows belong to the peer they were allowed for, and depend on the rights in its certificate.

use crate::packets;

use std::net::IpAddr;
use std::time::Duration;

use nebula_cert::{Identity, Version};
use nebula_core::config::{Gateway, SubnetRoute};
use nebula_core::firewall::{Policy, PortRange, Protocol, Rule};
use nebula_core::simulator::{HostId, HostSpec, SimNet, Subject};

const SECOND: Duration = Duration::from_secs(1);
const PEER: &str = "10.42.0.2";
const BEHIND: &str = "192.168.0.0/16";

fn at(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn udp(port: u16) -> Rule {
    Rule { protocol: Protocol::Udp, port: PortRange::Range(port, port), ..Rule::default() }
}

/// A server at 10.42.0.1 that lets members of `db` send to port 53 and starts no flows itself.
fn server(net: &mut SimNet) -> HostId {
    let rule = Rule { groups: vec!["db".to_owned()], ..udp(53) };
    net.add(HostSpec::new("server").config(move |config| {
        config.firewall = Policy { inbound: vec![rule], ..Policy::default() };
    }))
}

/// A host with the overlay address 10.42.0.2 that lets everything pass.
fn peer(net: &mut SimNet, name: &str, groups: &[&str], server: HostId) -> HostId {
    net.add(HostSpec::new(name).networks(&["10.42.0.2/16"]).groups(groups).knows(server))
}

/// Another certificate for `host`, with a new key.
fn certificate(net: &SimNet, host: HostId, name: &str, groups: &[&str]) -> Identity {
    net.authority().identity(&Subject {
        name: name.to_owned(),
        networks: net.identity(host).primary().networks().to_vec(),
        unsafe_networks: net.identity(host).primary().unsafe_networks().to_vec(),
        groups: groups.iter().map(|&group| group.to_owned()).collect(),
        versions: vec![Version::V2],
        not_after: 2_000_000_000,
    })
}

/// Sends one packet of the flow from 10.42.0.2 port 5000 to port 53; returns whether it arrives.
fn asks(net: &mut SimNet, client: HostId, server: HostId) -> bool {
    let before = net.payloads(server, 53).len();
    let _verdict = net.send_udp(client, server, (5000, 53), b"query");
    net.run_for(SECOND / 4);
    net.payloads(server, 53).len() > before
}

/// Sends one packet of the same flow in the other direction; returns whether it arrives.
fn answers(net: &mut SimNet, server: HostId, client: HostId) -> bool {
    let before = net.payloads(client, 5000).len();
    let _verdict = net.send_udp(server, client, (53, 5000), b"secret");
    net.run_for(SECOND / 4);
    net.payloads(client, 5000).len() > before
}

#[test]
fn another_peer_with_the_same_address_gets_nothing_of_a_flow_and_gets_nothing_through() {
    for (name, farewell) in [("thief", true), ("thief", false), ("db", true), ("db", false)] {
        let mut net = SimNet::new(1);
        let server = server(&mut net);
        let db = peer(&mut net, "db", &["db"], server);
        assert!(asks(&mut net, db, server) && answers(&mut net, server, db));
        if farewell {
            net.stop(db)
        } else {
            net.kill(db)
        }
        net.run_for(SECOND / 2);
        let thief = peer(&mut net, name, &[], server);
        for port in 4990..5010 {
            let _verdict = net.send_udp(thief, server, (port, 53), b"spray");
            net.run_for(SECOND / 10);
        }
        assert_eq!(net.payloads(server, 53), [b"query"], "{name} {farewell}\n{}", net.diagram());
        assert!(!answers(&mut net, server, thief), "{name} {farewell}\n{}", net.diagram());
    }
}

#[test]
fn a_rotation_that_takes_a_group_away_ends_what_the_group_allowed() {
    let mut net = SimNet::new(2);
    let server = server(&mut net);
    let db = peer(&mut net, "db", &["db"], server);
    assert!(asks(&mut net, db, server) && answers(&mut net, server, db));
    let less = certificate(&net, db, "db", &["web"]);
    net.control(db, |node, now| node.reconfigure(now, |config| config.identity = less));
    // Until the traffic check, the old tunnel is used with the old certificate.
    for _ in 0..40 {
        asks(&mut net, db, server);
    }
    for _ in 0..20 {
        assert!(!asks(&mut net, db, server), "{}", net.diagram());
        assert!(!answers(&mut net, server, db), "{}", net.diagram());
    }
    let more = certificate(&net, db, "db", &["web", "db"]);
    net.control(db, |node, now| node.reconfigure(now, |config| config.identity = more));
    net.run_for(10 * SECOND);
    assert!(asks(&mut net, db, server) && answers(&mut net, server, db));
}

#[test]
fn a_rotation_of_the_same_identity_loses_no_packet_of_any_flow() {
    let mut net = SimNet::new(3);
    let outbound = || Policy { outbound: vec![Rule::any()], ..Policy::default() };
    let b = net.add(HostSpec::new("b"));
    let a = net.add(HostSpec::new("a").groups(&["x"]).knows(b).config(move |config| config.firewall = outbound()));
    net.ping(a, b).until_delivered();
    let (mut there, mut back) = (0, 0);
    for round in 0..120_u32 {
        if round % 40 == 10 {
            for host in [a, b] {
                let identity = net.renewed_identity(host, &[Version::V2]);
                net.control(host, |node, now| node.reconfigure(now, |config| config.identity = identity));
            }
        }
        let _verdict = net.send_udp(a, b, (5000, 53), b"query");
        net.run_for(SECOND / 8);
        let _verdict = net.send_udp(b, a, (53, 5000), b"answer");
        net.run_for(SECOND / 8);
        (there, back) = (there + 1, back + 1);
        let arrived = (net.payloads(b, 53).len(), net.payloads(a, 5000).len());
        assert_eq!(arrived, (there, back), "round {round}\n{}", net.diagram());
    }
}

#[test]
fn what_another_peer_sends_in_a_flow_that_began_here_is_judged_as_its_own_beginning() {
    let mut net = SimNet::new(4);
    let policy = || Policy { outbound: vec![Rule::any()], inbound: vec![udp(22)], ..Policy::default() };
    let client = net.add(HostSpec::new("client").config(move |config| config.firewall = policy()));
    let old = peer(&mut net, "old", &[], client);
    net.ping(old, client).is_answered_within(SECOND);
    // The same flow as in the other tests, but started at the other end.
    assert!(answers(&mut net, client, old) && asks(&mut net, old, client));
    net.stop(old);
    let new = peer(&mut net, "new", &[], client);
    assert!(!asks(&mut net, new, client), "{}", net.diagram());
    let ssh = net.payloads(client, 22).len();
    let _verdict = net.send_udp(new, client, (5000, 22), b"by a rule");
    net.run_for(SECOND);
    assert_eq!(net.payloads(client, 22).len(), ssh + 1);
    // It must not get an error about a packet of the old flow through either.
    let quoted = packets::udp(net.overlay(client), at(PEER), (53, 5000), b"secret");
    let error = packets::icmp(at(PEER), net.overlay(client), 3, 3, [0; 4], &quoted);
    let before = net.packets(client).len();
    let _verdict = net.send_packet(new, &error);
    net.run_for(SECOND);
    assert_eq!(net.packets(client).len(), before);
    // A packet from this node starts a new flow with the new peer, if its rules allow that.
    assert!(answers(&mut net, client, new) && asks(&mut net, new, client));
}

fn gateway(name: &str) -> HostSpec {
    HostSpec::new(name).unsafe_networks(&[BEHIND]).config(|config| config.firewall.default_local_cidr_any = true)
}

/// A client that may only start flows, with a route through these gateways.
fn client(net: &mut SimNet, gateways: &'static [&'static str], knows: &[HostId]) -> HostId {
    let gateways = gateways.iter().map(|address| Gateway::new(at(address))).collect();
    let route = SubnetRoute::new(BEHIND.parse().expect("a network"), gateways);
    let spec = HostSpec::new("client").config(move |config| {
        config.subnets = vec![route];
        config.firewall = Policy { outbound: vec![Rule::any()], ..Policy::default() };
    });
    net.add(knows.iter().fold(spec, |spec, host| spec.knows(*host)))
}

/// Sends a packet from behind `gateway` in the flow that the client started; returns whether it arrives.
fn from_behind(net: &mut SimNet, gateway: HostId, client: HostId) -> bool {
    let before = net.payloads(client, 5000).len();
    let packet = packets::udp(at("192.168.7.9"), net.overlay(client), (53, 5000), b"answer");
    let _verdict = net.send_packet(gateway, &packet);
    net.run_for(SECOND / 4);
    net.payloads(client, 5000).len() > before
}

fn begin(net: &mut SimNet, client: HostId) {
    let packet = packets::udp(net.overlay(client), at("192.168.7.9"), (5000, 53), b"query");
    let _verdict = net.send_packet(client, &packet);
    net.run_for(SECOND / 4);
}

#[test]
fn a_flow_through_a_gateway_belongs_to_that_gateway() {
    let mut net = SimNet::new(5);
    let g = net.add(gateway("g"));
    let rogue = net.add(gateway("rogue"));
    let c = client(&mut net, &["10.42.0.1"], &[g, rogue]);
    for host in [g, rogue] {
        let peer = net.overlay(host);
        net.control(c, |node, now| node.connect(now, peer));
    }
    net.run_for(SECOND);
    begin(&mut net, c);
    assert!(from_behind(&mut net, g, c), "{}", net.diagram());
    assert!(!from_behind(&mut net, rogue, c), "it may speak for the network, but not in this flow");
    net.stop(g);
    let heir = net.add(gateway("heir").networks(&["10.42.0.1/16"]).knows(c));
    assert!(!from_behind(&mut net, heir, c), "{}", net.diagram());
    begin(&mut net, c);
    assert!(from_behind(&mut net, heir, c), "a flow of its own");
}

#[test]
fn packets_may_come_back_through_another_gateway_of_the_same_route() {
    let mut net = SimNet::new(6);
    let [g1, g2, other] = ["g1", "g2", "other"].map(|name| net.add(gateway(name)));
    let c = client(&mut net, &["10.42.0.1", "10.42.0.2"], &[g1, g2, other]);
    for host in [g1, g2, other] {
        let peer = net.overlay(host);
        net.control(c, |node, now| node.connect(now, peer));
    }
    net.run_for(SECOND);
    begin(&mut net, c);
    assert!(from_behind(&mut net, g1, c) && from_behind(&mut net, g2, c), "{}", net.diagram());
    assert!(!from_behind(&mut net, other, c), "which is none of it");
}

//! The flat form of a program says the same as the program, and its intervals are in order.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_policy::compile::{Subject, closed};
use nebula_cni_policy::flat::{Flat, Peers, Ports, ServicePort};
use nebula_cni_policy::model::{self, Block, Direction, NetworkPolicy, PortMatch, Protocol, Rule};
use nebula_cni_policy::program::{Peer, Program, Who};

use super::{LOCAL, NODE, PODS, World, cases, seed};

/// Some pods are known, the others are in ranges of pods or outside of them.
fn peers(world: &mut World) -> Peers {
    let mut peers = Peers::default();
    for pod in &world.pods {
        let who = match world.draw.number(4) {
            0 => continue,
            1 => Who::Outside,
            _ => Who::Pod(pod.identity),
        };
        peers.known.extend(pod.addresses.iter().map(|address| (*address, who)));
    }
    if world.draw.one_in(2) {
        peers.ranges = ["10.0.0.0/29", "fd00::/125"].map(|range| range.parse().unwrap()).to_vec();
        peers.exclude = vec!["10.0.0.6/31".parse().unwrap()];
    }
    peers
}

fn who(peers: &Peers, address: IpAddr) -> Peer {
    let is_in = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
    let is_of_pod = is_in(&peers.ranges) && !is_in(&peers.exclude);
    let other = if is_of_pod { Who::Unnumbered } else { Who::Outside };
    Peer { who: peers.known.get(&address).copied().unwrap_or(other), address: Some(address) }
}

fn are_in_order(flat: &Flat) {
    assert!(flat.addresses.windows(2).all(|two| two[0].last < two[1].first), "{flat:?}");
    assert!(flat.addresses.iter().all(|one| one.first <= one.last && one.class < flat.classes.len()));
    for ports in &flat.classes {
        assert!(!ports.is_empty() && ports.iter().all(|one| one.first <= one.last), "{flat:?}");
        assert!(ports.windows(2).all(|two| two[0].last + 1 < two[1].first), "{flat:?}");
    }
}

#[test]
fn the_flat_form_of_a_program_gives_the_same_verdicts() {
    let (cases, mut seed) = (cases() / 2, seed());
    let (mut done, mut allowed) = (0, 0);
    let mut whos = BTreeMap::<String, usize>::new();
    while done < cases {
        println!("POLICY_SEED={seed}");
        let mut world = World::new(seed);
        for _ in 0..20 {
            (0..4).for_each(|_| world.change());
            world.compile_all();
            let peers = peers(&mut world);
            for (n, direction) in (0..LOCAL).flat_map(|n| Direction::ALL.map(|direction| (n, direction))) {
                let bytes = world.programs[&(n, direction)].clone();
                let program = Program::read(&bytes).unwrap();
                let flat = Flat::of(&program, &peers).unwrap();
                are_in_order(&flat);
                // Of ingress, the node is an address as any other.
                let node = if direction == Direction::Egress { world.subject(n).node } else { Vec::new() };
                let subject = Subject { node, ..world.subject(n) };
                let program = world.cluster.compile(&subject, direction).bytes;
                let program = Program::read(&program).unwrap();
                for _ in 0..15 {
                    let address = match world.draw.number(4) {
                        0 => world.draw.of(&NODE).parse().unwrap(),
                        1 => world.draw.of(&world.pods[world.draw.clone().number(PODS)].addresses),
                        _ => world.draw.address().to_canonical(),
                    };
                    let (protocol, port) = world.draw.service();
                    let peer = who(&peers, address);
                    let verdict = program.judge(&peer, protocol, port).is_allowed();
                    assert_eq!(flat.allows(address, protocol, port), verdict, "{peer:?} {protocol} {port} {flat:?}");
                    done += 1;
                    allowed += usize::from(verdict);
                    let kind = format!("{:?}", peer.who).chars().take_while(|c| *c != '(').collect();
                    *whos.entry(kind).or_default() += 1;
                }
            }
        }
        seed += 1;
    }
    assert!(allowed > done / 5 && allowed < done * 9 / 10, "{allowed} of {done}");
    assert!(whos.len() == 3 && whos.values().all(|times| *times > done / 20), "{whos:?}");
}

fn service(port: u16, endpoints: &[&str]) -> ServicePort {
    let endpoints = endpoints.iter().map(|address| (address.parse().unwrap(), 8080)).collect();
    ServicePort { address: "10.96.0.1".parse().unwrap(), protocol: 6, port, endpoints }
}

#[test]
fn a_service_is_allowed_if_each_of_its_endpoints_is_and_nodes_are_but_for_their_ports() {
    let mut world = World::new(1);
    let policy = NetworkPolicy {
        types: vec![Direction::Egress],
        egress: vec![Rule {
            peers: vec![model::Peer::Block(Block { range: "10.0.0.0/30".parse().unwrap(), except: Vec::new() })],
            ports: vec![PortMatch::port(Protocol::Tcp, 8080)],
        }],
        ..NetworkPolicy::new(world.pods[0].profile.namespace(), "p")
    };
    world.cluster.set_policy(&policy);
    world.compile(0, Direction::Egress);
    let program = world.programs[&(0, Direction::Egress)].clone();
    let peers = Peers {
        ranges: vec!["10.96.0.0/12".parse().unwrap()],
        services: vec![
            service(80, &["10.0.0.1", "10.0.0.2"]),
            service(81, &["10.0.0.1", "10.0.0.4"]),
            service(82, &[]),
        ],
        node_ports: Some((30_000, 32_767)),
        ..Peers::default()
    };
    let flat = Flat::of(&Program::read(&program).unwrap(), &peers).unwrap();
    are_in_order(&flat);
    let allows = |address: &str, port| flat.allows(address.parse().unwrap(), 6, port);
    assert_eq!([80, 81, 82, 8080].map(|port| allows("10.96.0.1", port)), [true, false, false, false]);
    assert!(allows("10.0.0.1", 8080) && !allows("10.0.0.1", 80));
    let ports = [29_999, 30_000, 32_767, 32_768];
    assert_eq!(ports.map(|port| allows("10.0.0.8", port)), [true, false, false, true]);
    assert!(NODE.iter().all(|node| flat.allows(node.parse().unwrap(), 1, 0)));

    // Nothing is selected: Services are addresses as any other.
    let free = world.programs[&(0, Direction::Ingress)].clone();
    let flat = Flat::of(&Program::read(&free).unwrap(), &Peers::default()).unwrap();
    let everything = vec![Ports { first: 0, last: (1 << 24) - 1 }];
    assert_eq!((flat.addresses.len(), flat.classes), (3, vec![everything]));

    // A closed pod reaches the Service of the DNS.
    let subject = Subject { node: Vec::new(), ..world.subject(0) };
    let shut = closed(&subject, Direction::Egress, &["10.96.0.1".parse().unwrap()]);
    let peers = Peers { services: vec![service(53, &["10.0.0.1"]), service(80, &[])], ..peers };
    let flat = Flat::of(&Program::read(&shut).unwrap(), &peers).unwrap();
    let dns = "10.96.0.1".parse().unwrap();
    assert!(flat.allows(dns, 6, 53) && !flat.allows(dns, 6, 80) && !flat.allows("10.0.0.1".parse().unwrap(), 6, 53));
}

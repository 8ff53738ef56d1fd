//! Network policies on what a captured pod exchanges in clear, with pods that have no certificate: by the rules of the
//! real plugin on real links. The test compiles policies and has the node agent's own code write the sets.

use std::net::{IpAddr, SocketAddr};
use std::thread;
use std::time::Duration;

use nebula_agent::table::clear_policies::{ClearPolicies, NodeSets};
use nebula_cni_plugin::link::capture_rules;
use nebula_cni_plugin::link::clear_policy::{self, Judged};
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::flat::{Peers, ServicePort};
use nebula_cni_policy::model::{
    Block, Direction, Labels, NetworkPolicy, Peer, PodSelector, PortMatch, Profile, Protocol, Rule, Selector,
};
use nebula_cni_policy::program::Who;
use serde_json::json;

use super::town::{FAMILIES, Family, OTHER_PLAIN, PLAIN, Pod, Primary, SOON, Town, WEB};
use super::traffic::{self, PORT};
use super::wiretap::PUBLIC;
use crate::world;

/// Writes these policies into the sets of `web`, as an agent that has just started does.
fn write(town: &Town, policies: Vec<NetworkPolicy>) {
    let mut cluster = Cluster::new();
    let [web, plain, other] = [WEB, PLAIN, OTHER_PLAIN].map(|pod| {
        let labels = Labels::from([("app".into(), pod.name.into())]);
        let profile = Profile::new("shop", Labels::new(), labels, Vec::new()).expect("it is small");
        cluster.identify(profile).expect("they are few")
    });
    for policy in policies {
        assert_eq!(cluster.set_policy(&policy), []);
    }
    let addresses = FAMILIES.map(|family| WEB.address(family)).to_vec();
    let gateways = ["10.42.1.1", "fd00:42:0:1::1"].map(|address| address.parse().expect("an address"));
    let subject = Subject { identity: web, addresses: addresses.clone(), node: gateways.to_vec() };
    let programs = vec![(addresses[0], Direction::ALL.map(|direction| cluster.compile(&subject, direction).bytes))];
    let known = FAMILIES.iter().flat_map(|family| {
        [(PLAIN, plain), (OTHER_PLAIN, other)].map(|(pod, identity)| (pod.address(*family), Who::Pod(identity)))
    });
    let services = FAMILIES.iter().flat_map(|family| {
        [6, 17].map(|protocol| {
            let (at, endpoints) = (family.public_service(), vec![(OTHER_PLAIN.address(*family), PORT)]);
            ServicePort { address: at.ip(), protocol, port: at.port(), endpoints }
        })
    });
    let ranges = ["10.42.0.0/16", "fd00:42::/48", "10.96.0.0/24", "fd00:96::/112"];
    let peers = Peers {
        known: known.collect(),
        ranges: ranges.map(|range| range.parse().expect("a range")).to_vec(),
        services: services.collect(),
        ..Peers::default()
    };
    on_node(town, move || {
        let mut agent = ClearPolicies::<NodeSets>::default();
        assert!(agent.are_outdated(), "it has written nothing yet");
        let judged = agent.judged();
        agent.replace(&judged, &programs, peers);
        assert!(agent.judged().iter().any(|pod| pod.addresses.contains(&programs[0].0)), "there are sets");
    });
}

/// Does something in the network namespace of the node of `web`.
fn on_node<T: Send + 'static>(town: &Town, act: impl FnOnce() -> T + Send + 'static) -> T {
    let namespace = town.world().namespace_of(&town.node(WEB).name);
    let visit = thread::spawn(move || {
        world::enter(&namespace);
        act()
    });
    visit.join().expect("the visit ends")
}

fn judged(town: &Town) -> Vec<Judged> {
    on_node(town, || clear_policy::judged().expect("the kernel lists them"))
}

/// How many packets network policies have refused on the link of some pod.
fn refused(town: &Town) -> u64 {
    let all = on_node(town, || capture_rules::refused().expect("the kernel counts them"));
    all.iter().filter(|(_, reason, _)| reason.ends_with("(network policy)")).map(|(.., packets)| packets).sum()
}

/// `web` in one direction: nothing but what the rules allow.
fn isolate(direction: Direction, rules: Vec<Rule>) -> NetworkPolicy {
    let (ingress, egress) = match direction {
        Direction::Ingress => (rules, Vec::new()),
        Direction::Egress => (Vec::new(), rules),
    };
    let subject = Selector::labels([("app", "web")]);
    let name = format!("{direction:?}");
    NetworkPolicy { subject, types: vec![direction], ingress, egress, ..NetworkPolicy::new("shop", name) }
}

fn pod(pod: Pod, ports: Vec<PortMatch>) -> Rule {
    let pods = Selector::labels([("app", pod.name)]);
    Rule { peers: vec![Peer::Pods(PodSelector { pods, ..PodSelector::namespace("shop") })], ports }
}

/// All pods by their addresses, but for one.
fn all_but(pod: Pod, ports: &[PortMatch]) -> Rule {
    let block = |family: Family| {
        let range = if family == Family::V4 { "10.42.0.0/16" } else { "fd00:42::/48" };
        Peer::Block(Block { range: range.parse().expect("a range"), except: vec![pod.address(family).into()] })
    };
    Rule { peers: FAMILIES.map(block).to_vec(), ports: ports.to_vec() }
}

/// Whether a question is answered by TCP, UDP and ICMP. What should be answered gets the time of a busy machine.
fn answers(town: &Town, from: &str, target: SocketAddr, expected: [bool; 3]) -> [bool; 3] {
    let namespace = || town.world().namespace_of(from);
    let address = target.ip().to_string();
    let attempts = if expected[0] { 5 } else { 1 };
    let exchange = if expected[1] { traffic::exchange } else { traffic::exchange_once };
    let patience = if expected[2] { "5" } else { "1" };
    // What is refused is waited for: all at the same time.
    thread::scope(|scope| {
        let converse = move || (0..attempts).any(|_| traffic::converse(namespace(), PUBLIC, target).is_ok());
        let tcp = scope.spawn(converse);
        let udp = scope.spawn(|| exchange(namespace(), PUBLIC, target).is_ok());
        let ping = ["ping", "-n", "-q", "-c", "1", "-W", patience, &address];
        let echo = scope.spawn(move || town.world().exec(from, &ping).status.success());
        [tcp, udp, echo].map(|asked| asked.join().expect("it ends"))
    })
}

const ALL: [bool; 3] = [true; 3];
const NOTHING: [bool; 3] = [false; 3];
const TCP: [bool; 3] = [true, false, false];
const UDP: [bool; 3] = [false, true, false];

/// What `web` answers and is answered, by its node and by pods without a certificate, in both families.
fn expect(town: &Town, what: &str, from: [(Pod, [bool; 3]); 2], to: [(Pod, [bool; 3]); 2]) {
    thread::scope(|scope| {
        for family in FAMILIES {
            let inwards = from.map(|(pod, expected)| (pod.name, "web", WEB.at(family), expected));
            let outwards = to.map(|(pod, expected)| ("web", pod.name, pod.at(family), expected));
            let probe = ("n1", "web, as the kubelet does", WEB.at(family), ALL);
            for (asker, asked, target, expected) in inwards.into_iter().chain(outwards).chain([probe]) {
                scope.spawn(move || {
                    let found = answers(town, asker, target, expected);
                    assert_eq!(found, expected, "{what}: {asker} -> {asked}, {family:?}");
                });
            }
        }
    });
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn packets_in_clear_of_captured_pods_are_judged_by_network_policies_in_both_directions() {
    for primary in [Primary::Bridge, Primary::Links] {
        let mut town = Town::new(primary, |entry| {
            entry["capture"]["clear"] = "allow".into();
            entry["capture"]["policy"] = json!({"clear": "enforce"});
        });
        // The tunnels of all pods are open, so it is the links that refuse.
        town.enforce(&[]);
        let closed = [(PLAIN, NOTHING), (OTHER_PLAIN, NOTHING)];
        expect(&town, "before the first write", closed, closed);
        assert!(refused(&town) > 0);
        if primary == Primary::Bridge {
            town.world().ping("web", "10.42.1.1", SOON);
        }

        write(&town, vec![]);
        let open = [(PLAIN, ALL), (OTHER_PLAIN, ALL)];
        expect(&town, "nothing selects web", open, open);

        // A flow that goes on is judged by every packet of its client, although the pod may answer whomever it likes.
        let namespace = town.world().namespace_of(PLAIN.name);
        let lasting = traffic::connected(namespace, WEB.at(Family::V4)).expect("a socket");
        lasting.set_read_timeout(Some(Duration::from_millis(500))).expect("a time-out");
        let is_answered = || lasting.send(PUBLIC).and_then(|_| lasting.recv(&mut [0; 256])).is_ok();
        assert!((0..10).any(|_| is_answered()), "nothing selects web");
        write(&town, vec![isolate(Direction::Ingress, Vec::new())]);
        assert!(!is_answered() && !is_answered(), "a flow that is no longer allowed");

        let port = |protocol| PortMatch::Ports { protocol, first: PORT, last: PORT };
        let ingress = isolate(Direction::Ingress, vec![pod(PLAIN, vec![port(Protocol::Tcp)])]);
        let to_other = vec![all_but(PLAIN, &[port(Protocol::Tcp)]), pod(OTHER_PLAIN, vec![port(Protocol::Udp)])];
        let egress = isolate(Direction::Egress, to_other);
        write(&town, vec![ingress.clone(), egress]);
        let from = [(PLAIN, TCP), (OTHER_PLAIN, NOTHING)];
        expect(&town, "by labels and by addresses", from, [(PLAIN, NOTHING), (OTHER_PLAIN, [true, true, false])]);
        for family in FAMILIES {
            let by_service = answers(&town, "web", family.public_service(), [true, true, false]);
            assert_eq!(by_service[..2], [true, true], "by the endpoint behind it, {family:?}");
        }
        spoof(&town, primary);

        // What a client asks is answered, although the pod may open nothing.
        let closed_egress = || isolate(Direction::Egress, Vec::new());
        write(&town, vec![isolate(Direction::Ingress, vec![pod(PLAIN, Vec::new())]), closed_egress()]);
        expect(&town, "answers", [(PLAIN, ALL), (OTHER_PLAIN, NOTHING)], closed);
        let service = answers(&town, "web", Family::V4.public_service(), NOTHING);
        assert_eq!(service[..2], [false, false], "by the endpoint behind it");

        // Nobody writes from here on, and a repair of the plugin changes nothing.
        let udp = isolate(Direction::Egress, vec![pod(OTHER_PLAIN, vec![port(Protocol::Udp)])]);
        write(&town, vec![ingress, udp]);
        let sets = judged(&town);
        town.restart_instances();
        town.node(WEB).chain_ok(town.world(), "check", "web");
        assert_eq!(judged(&town), sets);
        expect(&town, "without an agent", from, [(PLAIN, NOTHING), (OTHER_PLAIN, UDP)]);
        town.world().run("n1", &["nft", "list", "table", "netdev", "nebula-cni-capture"]);

        // Without one of the rules CHECK fails; DEL leaves nothing.
        let attachment =
            &sets.iter().find(|pod| pod.addresses.contains(&WEB.address(Family::V4))).expect("web").attachment;
        let chain = format!("ingress-{attachment}");
        town.world().run("n1", &["nft", "flush", "chain", "netdev", "nebula-cni-capture", &chain]);
        let output = town.node(WEB).chain(town.world(), "check", "web");
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success() && said.contains(&chain), "{said}");
        town.node(WEB).chain_ok(town.world(), "del", "web");
        let left = judged(&town);
        let web: IpAddr = WEB.address(Family::V4);
        assert!(left.len() == 1 && !left[0].addresses.contains(&web), "api is left: {left:?}");
    }
}

/// Another pod pretends to be the one that is allowed, and gets no answer.
fn spoof(town: &Town, primary: Primary) {
    if primary != Primary::Bridge {
        return;
    }
    let (web, plain) = (WEB.address(Family::V4).to_string(), PLAIN.address(Family::V4).to_string());
    let host = OTHER_PLAIN.name;
    town.world().run(host, &["ip", "addr", "add", &format!("{plain}/32"), "dev", "eth0"]);
    let way = ["ip", "route", "add", &web, "via", "10.42.2.1", "dev", "eth0", "src", &plain];
    town.world().run(host, &way);
    assert_eq!(answers(town, host, WEB.at(Family::V4), NOTHING), NOTHING, "a spoofed address");
    town.world().run(host, &["ip", "route", "del", &web]);
    town.world().run(host, &["ip", "addr", "del", &format!("{plain}/32"), "dev", "eth0"]);
}

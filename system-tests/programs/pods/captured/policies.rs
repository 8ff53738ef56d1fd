//! Network policies of captured pods, judged by who the peer's certificate says it is, at both ends. The test compiles
//! them and writes them into the cluster table, as the node agent does.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use nebula_cni_contract::cluster_table::Builder;
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::model::{
    Direction, Labels, Namespaces, NetworkPolicy, Peer, PodSelector, PortMatch, Profile, Protocol, Rule, Selector,
};

use super::town::{API, CAPTURED, DB, FAMILIES, Family, Pod, Primary, SOON, Town, WEB};
use super::traffic::{self, PORT};
use super::wiretap::SECRET;
use super::{GRE, packet};

/// Adds the labels and the programs of all captured pods, of both nodes.
pub(super) fn add_programs(builder: &mut Builder, policies: &[NetworkPolicy]) {
    let mut cluster = Cluster::new();
    let mut identify = |pod: &Pod| {
        let labels = Labels::from([("app".into(), pod.name.into())]);
        let profile = Profile::new("shop", Labels::new(), labels, Vec::new()).expect("it is small");
        cluster.identify(profile).expect("they are few")
    };
    let identities = CAPTURED.each_ref().map(&mut identify);
    for policy in policies {
        assert_eq!(cluster.set_policy(policy), []);
    }
    for (pod, identity) in CAPTURED.iter().zip(identities) {
        let addresses = FAMILIES.map(|family| pod.address(family)).to_vec();
        addresses.iter().for_each(|address| builder.identity(*address, Some(identity.number())));
        let subject = Subject { identity, addresses: addresses.clone(), node: Vec::new() };
        builder.programs(addresses[0], Direction::ALL.map(|direction| cluster.compile(&subject, direction).bytes));
    }
}

/// For one pod, in one direction: nothing but what `rule` allows.
fn isolate(pod: Pod, direction: Direction, rule: Option<Rule>) -> NetworkPolicy {
    let rules: Vec<Rule> = rule.into_iter().collect();
    let (ingress, egress) = match direction {
        Direction::Ingress => (rules, Vec::new()),
        Direction::Egress => (Vec::new(), rules),
    };
    let subject = Selector::labels([("app", pod.name)]);
    NetworkPolicy { subject, types: vec![direction], ingress, egress, ..NetworkPolicy::new("shop", "test") }
}

/// This pod and this port, by TCP.
fn only(pod: Pod) -> Rule {
    let pods = Selector::labels([("app", pod.name)]);
    let selector = PodSelector { namespaces: Namespaces::Named("shop".into()), pods };
    let port = PortMatch::Ports { protocol: Protocol::Tcp, first: PORT, last: PORT };
    Rule { peers: vec![Peer::Pods(selector)], ports: vec![port] }
}

/// Pairs of pods between which a TCP connection can be opened.
fn open_ways(town: &Town) -> BTreeSet<(&'static str, &'static str)> {
    let ways = CAPTURED.iter().flat_map(|from| CAPTURED.iter().map(move |to| (from, to)));
    let ways: Vec<_> =
        ways.filter(|(from, to)| from != to).flat_map(|way| FAMILIES.map(|family| (way, family))).collect();
    let open: Vec<_> = thread::scope(|scope| {
        let tries: Vec<_> = ways
            .iter()
            .map(|((from, to), family)| scope.spawn(|| town.try_converse(from.name, to.at(*family)).is_ok()))
            .collect();
        tries.into_iter().map(|tried| tried.join().expect("no panic")).collect()
    });
    let mut found: [BTreeSet<_>; 2] = Default::default();
    for (((from, to), family), is_open) in ways.iter().zip(open) {
        if is_open {
            found[usize::from(*family == Family::V6)].insert((from.name, to.name));
        }
    }
    let [v4, v6] = found;
    assert_eq!(v4, v6, "both families");
    v4
}

fn all_but(closed: &[(&'static str, &'static str)]) -> BTreeSet<(&'static str, &'static str)> {
    let names = CAPTURED.map(|pod| pod.name);
    let all = names.into_iter().flat_map(|from| names.map(|to| (from, to))).filter(|(from, to)| from != to);
    all.filter(|way| !closed.contains(way)).collect()
}

/// How many packets the instance of a pod has refused for a policy.
fn refused(town: &Town, pod: Pod) -> [u64; 2] {
    let status = town.node(pod).status(pod.name);
    ["in", "out"].map(|way| status["counters"][format!("dropped_{way}_network_policy")].as_u64().expect("a counter"))
}

/// How often the test's policy gave this verdict in one direction, as the instance of a pod counts.
fn verdicts(town: &Town, pod: Pod, direction: &str, verdict: &str) -> u64 {
    let status = town.node(pod).status(pod.name);
    let rows = status["policy_verdicts"].as_array().into_iter().flatten();
    let of_policy = rows.filter(|row| row["policy"] == "shop/test" && row["tier"] == "NetworkPolicy");
    of_policy.filter(|row| row["direction"] == direction).filter_map(|row| row[verdict].as_u64()).sum()
}

/// What the instance of a pod says in a sample of its status about flows with `peer` that a policy refuses.
fn sampled(town: &Town, pod: Pod, sample: &str, peer: Pod) -> Vec<String> {
    let certificate = |pod: Pod| town.node(pod).status(pod.name)["certificate"]["name"].clone();
    let (status, own, other) = (town.node(pod).status(pod.name), certificate(pod), certificate(peer));
    let packets = status["trouble"][sample].as_array().into_iter().flatten();
    let with_peer = packets.filter(|packet| packet["policy"]["own"] == own && packet["policy"]["peer"] == other);
    with_peer.filter_map(|packet| packet["policy"]["reason"].as_str().map(str::to_owned)).collect()
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn policies_are_enforced_at_both_ends_by_the_peer_s_certificate() {
    let mut town = Town::new(Primary::Links, |entry| entry["capture"]["policy"] = true.into());
    let wires = town.wiretaps();
    let at_db: SocketAddr = DB.at(Family::V4);
    assert_eq!(open_ways(&town), BTreeSet::new(), "closed until the agent has compiled their policies");

    let status = town.node(WEB).status("web");
    assert!(status["table"]["closed"].as_str().is_some_and(|why| why.contains("not compiled")), "{status}");

    town.enforce(&[]);
    assert!(town.node(WEB).status("web")["table"]["closed"].is_null());
    for pod in CAPTURED {
        town.converse(SECRET, "web", if pod == WEB { at_db } else { pod.at(Family::V4) });
    }
    assert_eq!(open_ways(&town), all_but(&[]), "no policy selects anybody");
    let mut opened = town.open("web", at_db);
    opened.ask(SECRET).and_then(|()| opened.answer()).expect("an answer");

    // Ingress, by peer and port.
    let [db, api] = [DB, API].map(|pod| refused(&town, pod));
    town.enforce(&[isolate(DB, Direction::Ingress, Some(only(WEB)))]);
    assert_eq!(open_ways(&town), all_but(&[("api", "db")]));
    let namespace = |pod: Pod| town.world().namespace_of(pod.name);
    assert!(traffic::exchange_once(namespace(WEB), SECRET, at_db).is_err(), "UDP is not in the rule");
    assert!(traffic::exchange_once(namespace(API), SECRET, at_db).is_err());
    assert!(traffic::exchange(namespace(WEB), SECRET, API.at(Family::V4)).is_ok());
    assert!(refused(&town, DB)[0] > db[0] && refused(&town, API)[1] == api[1], "the destination refuses");
    opened.ask(SECRET).and_then(|()| opened.answer()).expect("the connection is allowed, too");
    // The instance says how often, whose flow, and by which policy.
    let counted = ["allowed", "denied", "would_deny"].map(|verdict| verdicts(&town, DB, "ingress", verdict));
    assert!(counted[0] >= 2 && counted[1] >= 2 && counted[2] == 0, "allowed, denied, would deny: {counted:?}");
    let why = "ingress denied: shop/test isolates the pod, and no NetworkPolicy allows the flow";
    let found = sampled(&town, DB, "dropped", API);
    assert!(found.iter().any(|reason| reason == why), "{found:?}");
    assert_eq!(sampled(&town, DB, "audited", API), Vec::<String>::new());

    // In audit the same policy refuses nothing, and the instance says what it would refuse.
    let before = verdicts(&town, DB, "ingress", "denied");
    let audited = NetworkPolicy { is_audited: true, ..isolate(DB, Direction::Ingress, Some(only(WEB))) };
    town.enforce(&[audited]);
    assert_eq!(open_ways(&town), all_but(&[]), "a policy in audit refuses nothing");
    let counted = ["denied", "would_deny"].map(|verdict| verdicts(&town, DB, "ingress", verdict));
    assert!(counted[0] == before && counted[1] >= 2, "denied, would deny: {counted:?}");
    let found = sampled(&town, DB, "audited", API);
    assert!(found.iter().any(|reason| *reason == format!("in audit, {why}")), "{found:?}");
    assert_eq!(sampled(&town, DB, "audited", WEB), Vec::<String>::new(), "web is in the rule");

    // The address of a peer that is allowed does not help one that is not.
    let everything = Rule { ports: Vec::new(), ..only(WEB) };
    town.enforce(&[isolate(DB, Direction::Ingress, Some(everything))]);
    let datagram = |from: Pod| packet(GRE, from.address(Family::V4), DB.address(Family::V4), SECRET);
    assert!(town.pass_on(WEB, (DB, Family::V4), datagram(WEB)).ends_with(SECRET));
    let [api, db] = [API, DB].map(|pod| town.world().namespace_of(pod.name));
    assert_eq!(traffic::pass_on(api, db, datagram(WEB), DB.address(Family::V4)), None, "from the address of web");

    // By the Service, it is the endpoint that counts.
    let service = Family::V4.service();
    town.enforce_for(&[isolate(DB, Direction::Ingress, Some(only(API)))], &[DB]);
    assert_eq!(town.converse(SECRET, "api", service).0, "db");
    assert!(town.try_converse("web", service).is_err());
    // A connection that no policy allows any more ends, although it exists.
    opened.ask(SECRET).expect("it is sent");
    assert!(opened.is_silent(Duration::from_secs(2)), "a connection goes on that is not allowed");

    // Egress is refused at its source.
    let web = refused(&town, WEB);
    town.enforce(&[isolate(WEB, Direction::Egress, Some(only(API)))]);
    assert_eq!(open_ways(&town), all_but(&[("web", "db")]));
    assert!(refused(&town, WEB)[1] > web[1] && verdicts(&town, WEB, "egress", "denied") > 0);
    let found = sampled(&town, WEB, "dropped", DB);
    assert!(found.iter().any(|reason| reason.starts_with("egress denied: shop/test ")), "{found:?}");

    // An instance that starts again enforces what is in the table, before its first packet.
    assert!(town.kill_instance(WEB), "it ran");
    town.restart_instances();
    let began = Instant::now();
    while town.try_converse("web", API.at(Family::V4)).is_err() {
        assert!(began.elapsed() < SOON, "the instance does not come back");
    }
    assert!(town.try_converse("web", at_db).is_err());
    // So does another program that takes over, which counts on.
    let counted = verdicts(&town, WEB, "egress", "denied");
    assert!(counted > 0 && town.upgrade(WEB).status().expect("the plugin").success());
    assert!(verdicts(&town, WEB, "egress", "denied") >= counted, "the verdicts of the old program are lost");
    assert!(town.try_converse("web", at_db).is_err());
    assert!(verdicts(&town, WEB, "egress", "denied") > counted);
    // And one that reloads its settings, by the table that it has.
    town.tell(WEB, &serde_json::json!({"tun": {"mtu": 1300}}));
    let link = town.world().run("web", &["ip", "link", "show", "nebula0"]);
    assert!(link.contains("mtu 1300"), "{link}");
    assert!(town.try_converse("web", at_db).is_err());
    assert_eq!(town.converse(SECRET, "web", API.at(Family::V4)).0, "api");
    wires.heard_nothing_in_clear();
}

//! What is beyond a bound allows nothing.

use nebula_cni_policy::compile::{Cluster, PolicyKey, Subject, TooMany, closed};
use nebula_cni_policy::model::{
    Block, ClusterNetworkPolicy, ClusterTier, Direction, Labels, MAX_CLUSTER_POLICIES, MAX_EXCEPTIONS, MAX_ITEMS,
    MAX_PEERS, MAX_POLICIES_OF_NAMESPACE, MAX_PORTS, MAX_RULES, MAX_SELECTORS_OF_NAMESPACE, Namespaces, NetworkPolicy,
    Peer, PodSelector, PortMatch, Problem, Profile, Protocol, Rule, Selector,
};
use nebula_cni_policy::program::{self, Identity, Program, Reason, Who};
use serde_json::{Value, json};

use crate::town::Town;

fn rule_problem() -> Vec<Problem> {
    vec![Problem::Rule { direction: Direction::Ingress, rule: 0 }]
}

/// A cluster with one pod of namespace `shop`, and whether a flow to it passes.
fn cluster() -> (Cluster, Identity) {
    let mut cluster = Cluster::new();
    let identity = cluster.identify(Profile::new("shop", Labels::new(), Labels::new(), vec![]).unwrap()).unwrap();
    cluster.watch(identity);
    (cluster, identity)
}

fn subject(identity: Identity) -> Subject {
    let addresses = vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()];
    Subject { identity, addresses, node: vec!["10.1.0.1".parse().unwrap()] }
}

fn passes(cluster: &Cluster, identity: Identity, from: &str, port: u16) -> bool {
    let compiled = cluster.compile(&subject(identity), Direction::Ingress);
    let peer = program::Peer::outside(from.parse().unwrap());
    Program::read(&compiled.bytes).unwrap().judge(&peer, 6, port).is_allowed()
}

fn block(text: &str) -> Peer {
    Peer::Block(Block { range: text.parse().unwrap(), except: vec![] })
}

#[test]
fn rules_peers_ports_and_exceptions_are_bounded() {
    let (mut cluster, identity) = cluster();
    let policy = |ingress| NetworkPolicy { ingress, ..NetworkPolicy::new("shop", "policy") };
    let none = || Rule { peers: vec![block("198.51.100.1/32")], ports: vec![] };
    let mut rules = vec![none(); MAX_RULES];
    rules[MAX_RULES - 1] = Rule { peers: vec![block("192.0.2.1/32")], ports: vec![] };
    assert_eq!(cluster.set_policy(&policy(rules.clone())), []);
    assert!(passes(&cluster, identity, "192.0.2.1", 1));
    rules.insert(0, none());
    let problem = Problem::TooManyRules { direction: Direction::Ingress, limit: MAX_RULES };
    assert_eq!(cluster.set_policy(&policy(rules)), [problem]);
    assert!(!passes(&cluster, identity, "192.0.2.1", 1));

    let mut peers = vec![block("198.51.100.1/32"); MAX_PEERS];
    peers.push(block("192.0.2.1/32"));
    assert_eq!(cluster.set_policy(&policy(vec![Rule { peers: peers.clone(), ports: vec![] }])), rule_problem());
    assert!(passes(&cluster, identity, "198.51.100.1", 1) && !passes(&cluster, identity, "192.0.2.1", 1));
    peers.remove(0);
    assert_eq!(cluster.set_policy(&policy(vec![Rule { peers, ports: vec![] }])), []);
    assert!(passes(&cluster, identity, "192.0.2.1", 1));

    let mut ports = vec![PortMatch::port(Protocol::Tcp, 1); MAX_PORTS];
    ports.push(PortMatch::port(Protocol::Tcp, 2));
    assert_eq!(cluster.set_policy(&policy(vec![Rule { peers: vec![], ports }])), rule_problem());
    assert!(passes(&cluster, identity, "192.0.2.1", 1) && !passes(&cluster, identity, "192.0.2.1", 2));

    let range = "192.0.2.0/24".parse().unwrap();
    let mut except = vec!["198.51.100.0/24".parse().unwrap(); MAX_EXCEPTIONS];
    let with =
        |except: &Vec<_>| Rule { peers: vec![Peer::Block(Block { range, except: except.clone() })], ports: vec![] };
    assert_eq!(cluster.set_policy(&policy(vec![with(&except)])), []);
    assert!(passes(&cluster, identity, "192.0.2.1", 1));
    except.push(range);
    assert_eq!(cluster.set_policy(&policy(vec![with(&except)])), rule_problem());
    assert!(!passes(&cluster, identity, "192.0.2.1", 1));
}

#[test]
fn more_rules_of_a_cluster_policy_deny_everything() {
    let mut town = Town::new();
    let rule = json!({"action": "Accept", "from": [{"namespaces": {"matchLabels": {"team": "x"}}}]});
    let spec =
        |rules: Vec<Value>| json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}, "ingress": rules});
    assert_eq!(town.cluster_policy(spec(vec![rule.clone(); MAX_ITEMS])), []);
    town.check(&["web.pay -> web.shop TCP/1"], &[]);
    let problem = Problem::TooManyRules { direction: Direction::Ingress, limit: MAX_ITEMS };
    assert_eq!(town.cluster_policy(spec(vec![rule; MAX_ITEMS + 1])), [problem]);
    town.check(&[], &["web.pay -> web.shop TCP/1", "192.0.2.1 -> web.shop ICMP"]);
}

#[test]
fn a_rule_of_a_cluster_policy_with_too_many_parts_cannot_be_read() {
    let few = |items: usize| {
        let peers = vec![json!({"namespaces": {"matchLabels": {"team": "x"}}}); items];
        let networks = vec!["192.0.2.0/24"; items];
        let protocols = vec![json!({"tcp": {"destinationPort": {"number": 1}}}); items];
        [
            json!({"action": "Deny", "to": peers}),
            json!({"action": "Deny", "to": [{"networks": networks}]}),
            json!({"action": "Deny", "to": [{"networks": ["192.0.2.0/24"]}], "protocols": protocols}),
        ]
    };
    for (items, is_read) in [(MAX_ITEMS, true), (MAX_ITEMS + 1, false)] {
        for rule in few(items) {
            let mut town = Town::new();
            let problems = town.cluster_policy(
                json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}, "egress": [rule]}),
            );
            assert_eq!(problems.is_empty(), is_read, "{rule}");
            assert_eq!(town.judge("web.shop -> web.pay TCP/1").is_allowed(), is_read, "{rule}");
        }
    }
}

#[test]
fn further_policies_of_a_namespace_isolate_it() {
    let (mut cluster, identity) = cluster();
    let policy = |n: usize| NetworkPolicy {
        subject: Selector::labels([("app", "none")]),
        ..NetworkPolicy::new("shop", format!("policy-{n}"))
    };
    (0..MAX_POLICIES_OF_NAMESPACE).for_each(|n| assert_eq!(cluster.set_policy(&policy(n)), []));
    assert!(passes(&cluster, identity, "192.0.2.1", 1));
    assert_eq!(cluster.set_policy(&policy(0)), [], "it replaces one");
    let further = policy(MAX_POLICIES_OF_NAMESPACE);
    assert_eq!(cluster.set_policy(&further), [Problem::TooManyPolicies]);
    assert!(!passes(&cluster, identity, "192.0.2.1", 1));
    assert_eq!(cluster.set_policy(&NetworkPolicy::new("pay", "policy")), [], "other namespaces have their own");
    cluster.remove_policy(&PolicyKey::NetworkPolicy { namespace: "shop".into(), name: further.name });
    assert!(passes(&cluster, identity, "192.0.2.1", 1));
}

#[test]
fn selectors_of_peers_of_a_namespace_are_bounded() {
    let (mut cluster, _) = cluster();
    let policy = |name: &str, from: usize, to: usize| {
        let peers = (from..to).map(|n| {
            let pods = Selector::labels([("n", n.to_string().as_str())]);
            Peer::Pods(PodSelector { namespaces: Namespaces::Matching(Selector::everything()), pods })
        });
        let ingress = vec![Rule { peers: peers.collect(), ports: vec![] }];
        NetworkPolicy { ingress, ..NetworkPolicy::new("shop", name) }
    };
    assert_eq!(cluster.set_policy(&policy("a", 0, MAX_SELECTORS_OF_NAMESPACE)), []);
    assert_eq!(cluster.set_policy(&policy("a", 1, MAX_SELECTORS_OF_NAMESPACE + 1)), [], "it replaces itself");
    assert_eq!(cluster.set_policy(&policy("b", 0, 1)), rule_problem());
    assert_eq!(cluster.set_policy(&policy("a", 0, 1)), []);
    assert_eq!(cluster.set_policy(&policy("b", 0, 1)), []);
}

#[test]
fn cluster_policies_are_bounded() {
    let (mut cluster, _) = cluster();
    let policy = |n: usize| ClusterNetworkPolicy {
        name: format!("policy-{n}"),
        is_audited: false,
        tier: ClusterTier::Baseline,
        priority: 1,
        subject: PodSelector::namespace("none"),
        ingress: vec![],
        egress: vec![],
    };
    (0..MAX_CLUSTER_POLICIES).for_each(|n| assert_eq!(cluster.set_cluster_policy(&policy(n)), Ok(vec![])));
    assert_eq!(cluster.set_cluster_policy(&policy(MAX_CLUSTER_POLICIES)), Err(TooMany));
    assert_eq!(cluster.set_cluster_policy(&policy(0)), Ok(vec![]));
}

#[test]
fn a_pod_with_more_rules_than_a_program_holds_is_closed() {
    let (mut cluster, identity) = cluster();
    let rules = vec![Rule::default(); MAX_RULES];
    for n in 0..=program::MAX_ROWS as usize / MAX_RULES {
        assert!(passes(&cluster, identity, "192.0.2.1", 1));
        let ingress = rules.clone();
        cluster.set_policy(&NetworkPolicy { ingress, ..NetworkPolicy::new("shop", n.to_string()) });
    }
    let compiled = cluster.compile(&subject(identity), Direction::Ingress);
    assert!(compiled.is_closed);
    let program = Program::read(&compiled.bytes).unwrap();
    let judge = |from: &str| program.judge(&program::Peer::outside(from.parse().unwrap()), 6, 1).enforced.reason;
    assert_eq!((judge("192.0.2.1"), judge("10.1.0.1")), (Reason::Closed, Reason::OwnNode));
}

#[test]
fn a_closed_pod_reaches_its_node_itself_and_resolvers_only() {
    let identity = Identity::new(7).unwrap();
    let resolvers = ["10.96.0.10", "fd00::53"].map(|address| address.parse().unwrap());
    let judge = |direction, resolvers: &[_], who: Who, address: &str, protocol, port| {
        let bytes = closed(&subject(identity), direction, resolvers);
        let peer = program::Peer { who, address: Some(address.parse().unwrap()) };
        Program::read(&bytes).unwrap().judge(&peer, protocol, port).is_allowed()
    };
    let pod = Who::Pod(Identity::new(9).unwrap());
    for who in [Who::Outside, pod, Who::Unnumbered] {
        for protocol in [6, 17] {
            assert!(judge(Direction::Egress, &resolvers, who, "10.96.0.10", protocol, 53));
            assert!(judge(Direction::Egress, &resolvers, who, "fd00::53", protocol, 53));
            assert!(!judge(Direction::Egress, &resolvers, who, "10.96.0.10", protocol, 54));
            assert!(!judge(Direction::Egress, &resolvers, who, "10.96.0.11", protocol, 53));
            assert!(!judge(Direction::Ingress, &resolvers, who, "10.96.0.10", protocol, 53));
            assert!(!judge(Direction::Egress, &[], who, "10.96.0.10", protocol, 53));
        }
    }
    for direction in Direction::ALL {
        assert!(judge(direction, &[], Who::Outside, "10.1.0.1", 6, 10250));
        assert!(judge(direction, &[], Who::Pod(identity), "10.0.0.1", 6, 80));
        assert!(!judge(direction, &[], pod, "10.1.0.1", 6, 80));
    }
}

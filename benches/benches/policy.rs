//! Policies of a large cluster: the verdict about a new flow, the program of one pod, and what a change costs a node.
//!
//! 10,000 pods of 100 namespaces, 20 applications in each, a label of its own for each fifth pod; 1,000 policies: nine
//! NetworkPolicies for each namespace, which select different applications, and 100 ClusterNetworkPolicies. The node
//! has 110 of the pods, one after another, so of few namespaces. Beside it the worst for one pod: all 1,000 policies
//! select it.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_benches::{NO_GO, Step, heap, note};
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::model::{
    Action, Block, ClusterNetworkPolicy, ClusterPeer, ClusterRule, ClusterTier, Direction, Labels, NamedPort,
    Namespaces, NetworkPolicy, Peer, PodSelector, PortMatch, Profile, Protocol, Rule, Selector,
};
use nebula_cni_policy::program::{Identity, Layout, Peer as Other, Program};

const PODS: u32 = 10_000;
const NAMESPACES: u32 = 100;
const POLICIES_OF_NAMESPACE: u32 = 9;
const CLUSTER_POLICIES: u32 = 100;
const PODS_OF_NODE: u32 = 110;

fn address(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 244, 0, 0).to_bits() + n).into()
}

fn labels(pairs: &[(&str, String)]) -> Labels {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect()
}

fn profile(n: u32, version: u32) -> Profile {
    let namespace = n % NAMESPACES;
    let app = n / NAMESPACES % 20;
    let mut of_pod =
        labels(&[("app", format!("app-{app}")), ("tier", (app % 3).to_string()), ("version", version.to_string())]);
    if n.is_multiple_of(5) {
        of_pod.insert("pod".into(), n.to_string());
    }
    let name = format!("namespace-{namespace}");
    let of_namespace = labels(&[("kubernetes.io/metadata.name", name.clone()), ("team", (namespace % 10).to_string())]);
    let port = NamedPort { name: "http".into(), protocol: Protocol::Tcp, port: 8080 + app as u16 % 4 };
    Profile::new(name, of_namespace, of_pod, vec![port]).expect("a small profile")
}

fn select(key: &str, value: &str) -> Selector {
    Selector::labels([(key, value)])
}

fn in_namespaces(namespaces: Selector, pods: Selector) -> PodSelector {
    PodSelector { namespaces: Namespaces::Matching(namespaces), pods }
}

/// One with rules of each kind in both directions.
fn policy(namespace: u32, n: u32, subject: Selector) -> NetworkPolicy {
    let name = format!("namespace-{namespace}");
    let own =
        Peer::Pods(PodSelector { pods: select("app", &format!("app-{}", n % 20)), ..PodSelector::namespace(&name) });
    let team = Peer::Pods(in_namespaces(select("team", &(n % 10).to_string()), select("tier", "1")));
    let range = format!("198.51.{}.0/24", n % 256).parse().expect("a prefix");
    let block = Peer::Block(Block { range, except: vec![] });
    let http = PortMatch::Name { protocol: Some(Protocol::Tcp), name: "http".into() };
    let ports = vec![PortMatch::port(Protocol::Tcp, 1000 + n as u16), PortMatch::port(Protocol::Udp, 53)];
    NetworkPolicy {
        subject,
        types: Direction::ALL.to_vec(),
        ingress: vec![
            Rule { peers: vec![own.clone(), team.clone()], ports: vec![http.clone()] },
            Rule { peers: vec![block.clone()], ports: ports.clone() },
        ],
        egress: vec![Rule { peers: vec![own, team], ports: vec![http] }, Rule { peers: vec![block], ports }],
        ..NetworkPolicy::new(name, format!("policy-{n}"))
    }
}

fn cluster_policy(n: u32, subject: PodSelector) -> ClusterNetworkPolicy {
    let pods = ClusterPeer::Pods(in_namespaces(
        select("team", &(n % 10).to_string()),
        select("app", &format!("app-{}", n % 20)),
    ));
    let protocols = vec![PortMatch::port(Protocol::Tcp, 2000 + n as u16)];
    let rule = |peers| ClusterRule { name: String::new(), action: Action::Deny, peers, protocols: protocols.clone() };
    ClusterNetworkPolicy {
        name: format!("policy-{n}"),
        is_audited: n.is_multiple_of(10),
        tier: if n.is_multiple_of(2) { ClusterTier::Admin } else { ClusterTier::Baseline },
        priority: (n % 1000) as u16,
        subject,
        ingress: vec![rule(vec![pods.clone()])],
        egress: vec![rule(vec![pods, ClusterPeer::Networks(vec!["203.0.113.0/24".parse().expect("a prefix")])])],
    }
}

struct Node {
    cluster: Cluster,
    identities: Vec<Identity>,
}

impl Node {
    fn new() -> Self {
        let mut cluster = Cluster::new();
        let identities = (0..PODS).map(|n| cluster.identify(profile(n, 1)).expect("a number")).collect();
        for n in 0..CLUSTER_POLICIES {
            let subject = in_namespaces(select("team", &(n % 10).to_string()), Selector::everything());
            cluster.set_cluster_policy(&cluster_policy(n, subject)).expect("room for it");
        }
        let mut node = Self { cluster, identities };
        (0..PODS_OF_NODE).for_each(|n| node.cluster.watch(node.identities[n as usize]));
        node
    }

    fn typical() -> Self {
        let mut node = Self::new();
        for namespace in 0..NAMESPACES {
            for n in 0..POLICIES_OF_NAMESPACE {
                // One for all pods, the others for an application each.
                let subject = if n == 0 { Selector::everything() } else { select("app", &format!("app-{n}")) };
                node.cluster.set_policy(&policy(namespace, n, subject));
            }
        }
        node
    }

    /// All policies select the first pod.
    fn worst() -> Self {
        let mut node = Self::new();
        for n in 0..CLUSTER_POLICIES {
            let all = in_namespaces(Selector::everything(), Selector::everything());
            node.cluster.set_cluster_policy(&cluster_policy(n, all)).expect("room for it");
        }
        for n in 0..NAMESPACES * POLICIES_OF_NAMESPACE {
            node.cluster.set_policy(&policy(0, n, Selector::everything()));
        }
        node
    }

    fn program(&self, n: u32, direction: Direction) -> Vec<u8> {
        let identity = self.identities[n as usize];
        let subject = Subject { identity, addresses: vec![address(n)], node: vec![Ipv4Addr::new(10, 1, 0, 1).into()] };
        let compiled = self.cluster.compile(&subject, direction);
        assert!(!compiled.is_closed);
        compiled.bytes
    }

    fn programs(&self) -> Vec<Vec<u8>> {
        (0..PODS_OF_NODE).flat_map(|n| Direction::ALL.map(|direction| self.program(n, direction))).collect()
    }

    /// Gives a pod other labels, and compiles the programs that this concerns; returns their number.
    fn relabel(&mut self, n: u32, version: u32) -> usize {
        let identity = self.cluster.identify(profile(n, version)).expect("a number");
        let old = std::mem::replace(&mut self.identities[n as usize], identity);
        self.cluster.release(old);
        let epoch = self.cluster.advance();
        self.cluster.recycle(epoch);
        let changed = self.cluster.take_changed();
        let local = 0..PODS_OF_NODE;
        let of = local.flat_map(|n| Direction::ALL.map(|direction| (n, direction)));
        let concerned = of.filter(|(n, direction)| changed.contains(&(self.identities[*n as usize], *direction)));
        concerned.fold(0, |count, (n, direction)| {
            black_box(self.program(n, direction));
            count + 1
        })
    }
}

fn policies(c: &mut Criterion) {
    let mut group = c.benchmark_group("policy");
    let before = heap::live();
    let mut typical = Node::typical();
    note("policies, 1,000 for 10,000 pods, heap of the compiler", None, Some((heap::live() - before) as f64), NO_GO);
    let worst = Node::worst();
    let programs = typical.programs();
    let total: usize = programs.iter().map(Vec::len).sum();
    note("policies, programs of a node with 110 pods, bytes", None, Some(total as f64), NO_GO);
    let largest = worst.program(0, Direction::Egress);
    note("policies, program of a pod with 1,000 policies, bytes", None, Some(largest.len() as f64), NO_GO);

    // A stride that no prefetcher guesses.
    let mut n = 0_u32;
    let mut next = || {
        n = n.wrapping_add(0x9e37_79b1);
        n >> 8
    };
    for (name, node, direction) in [
        ("typical, ingress", &typical, Direction::Ingress),
        ("typical, egress", &typical, Direction::Egress),
        ("1,000 select the pod", &worst, Direction::Egress),
    ] {
        let bytes = node.program(0, direction);
        let layout = Layout::read(&bytes).expect("a program");
        Step::new(format!("policies, new flow, {name}"), NO_GO).repeat(&mut group, &format!("flow, {name}"), || {
            let n = next();
            let other = Other::pod(node.identities[(n % PODS) as usize], Some(address(n % PODS)));
            layout.program(&bytes).judge(&other, 6, 8080 + (n >> 20) as u16 % 4)
        });
        Step::new(format!("policies, new flow outside, {name}"), NO_GO).repeat(
            &mut group,
            &format!("outside, {name}"),
            || {
                let other = Other::outside(Ipv4Addr::from_bits(0xc633_0000 | next() & 0xffff).into());
                layout.program(&bytes).judge(&other, 17, 53)
            },
        );
    }
    Step::new("policies, open a program", NO_GO)
        .repeat(&mut group, "open", || Program::read(black_box(&largest)).is_ok());
    Step::new("policies, compile a pod", NO_GO)
        .repeat(&mut group, "compile a pod", || typical.program(1, Direction::Egress));
    Step::new("policies, compile a pod that 1,000 select", NO_GO)
        .repeat(&mut group, "compile the worst pod", || worst.program(0, Direction::Egress));
    Step::new("policies, compile a node with 110 pods", NO_GO)
        .repeat(&mut group, "compile a node", || typical.programs());
    let (mut version, mut most) = (1, 0);
    let _ = typical.cluster.take_changed();
    Step::new("policies, a pod's labels change, node with 110 pods", NO_GO).repeat(&mut group, "relabel", || {
        version += 1;
        let changed = typical.relabel(next() % PODS, version);
        most = changed.max(most);
    });
    note("policies, programs that one change concerns, at most", None, Some(most as f64), NO_GO);
    group.finish();
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = policies);
criterion_main!(benches);

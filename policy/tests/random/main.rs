//! Programs that are kept up to date change by change judge random flows as a slow evaluator of the policies does.
//!
//! `POLICY_CASES` sets the number of flows, `POLICY_SEED` repeats a run.
#![allow(clippy::unwrap_used, reason = "in the helpers of tests too, a panic is the report")]

mod draw;
mod flat;
mod reference;

use std::collections::BTreeMap;
use std::net::IpAddr;

use draw::{Draw, NAMESPACES};
use nebula_cni_policy::compile::{Cluster, PolicyKey, Subject};
use nebula_cni_policy::model::{Direction, Labels, Profile};
use nebula_cni_policy::program::{Decision, Identity, Peer, Program, Reason};
use reference::{Flow, Rules, Why};

fn cases() -> usize {
    std::env::var("POLICY_CASES").ok().map_or(50_000, |cases| cases.parse().expect("a number of cases"))
}

fn seed() -> u64 {
    std::env::var("POLICY_SEED").ok().map_or(1, |seed| seed.parse().expect("a seed"))
}

struct Pod {
    profile: Profile,
    identity: Identity,
    addresses: Vec<IpAddr>,
}

/// A cluster and what was told to it.
struct World {
    draw: Draw,
    cluster: Cluster,
    rules: Rules,
    namespaces: BTreeMap<&'static str, Labels>,
    pods: Vec<Pod>,
    nodes: BTreeMap<String, (Labels, Vec<IpAddr>)>,
    programs: BTreeMap<(usize, Direction), Vec<u8>>,
    /// How often each kind of decision was made, and how often audit differed.
    seen: BTreeMap<String, usize>,
}

/// Pods with programs; the others are on other nodes.
const LOCAL: usize = 5;
const PODS: usize = 10;
const NODE: [&str; 2] = ["10.0.0.8", "fd00::8"];

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            draw: Draw(seed),
            cluster: Cluster::new(),
            rules: Rules::default(),
            namespaces: NAMESPACES.iter().map(|name| (*name, Labels::new())).collect(),
            pods: Vec::new(),
            nodes: BTreeMap::new(),
            programs: BTreeMap::new(),
            seen: BTreeMap::new(),
        };
        for n in 0..PODS {
            let profile = world.profile();
            let identity = world.cluster.identify(profile.clone()).unwrap();
            // Some have addresses in the ranges of policies, and some do not.
            let addresses = vec![IpAddr::from([10, 0, 0, n as u8]), format!("fd00::{n}").parse().unwrap()];
            world.pods.push(Pod { profile, identity, addresses });
            if n < LOCAL {
                world.cluster.watch(identity);
            }
        }
        world.compile_all();
        world
    }

    fn profile(&mut self) -> Profile {
        let namespace = self.draw.of(&NAMESPACES);
        let labels = self.namespaces[namespace].clone();
        self.draw.profile(namespace, &labels)
    }

    /// Gives a pod another profile: a deleted one is replaced by another one, or one is relabelled.
    fn give(&mut self, n: usize, profile: Profile) {
        let identity = self.cluster.identify(profile.clone()).unwrap();
        let old = std::mem::replace(&mut self.pods[n].identity, identity);
        self.pods[n].profile = profile;
        if n < LOCAL {
            self.cluster.watch(identity);
            self.cluster.unwatch(old);
            Direction::ALL.into_iter().for_each(|direction| self.compile(n, direction));
        }
        self.cluster.release(old);
    }

    fn change(&mut self) {
        match self.draw.number(12) {
            0..3 => {
                let policy = self.draw.policy();
                self.rules.policies.retain(|old| (&old.namespace, &old.name) != (&policy.namespace, &policy.name));
                self.cluster.set_policy(&policy);
                self.rules.policies.push(policy);
            }
            3..6 => {
                let policy = self.draw.cluster_policy();
                self.rules.cluster.retain(|old| old.name != policy.name);
                self.cluster.set_cluster_policy(&policy).unwrap();
                self.rules.cluster.push(policy);
            }
            6 => {
                let Some(place) = self.rules.policies.len().checked_sub(1) else { return };
                let place = self.draw.number(place + 1);
                let policy = self.rules.policies.remove(place);
                self.cluster
                    .remove_policy(&PolicyKey::NetworkPolicy { namespace: policy.namespace, name: policy.name });
            }
            7 => {
                let Some(place) = self.rules.cluster.len().checked_sub(1) else { return };
                let place = self.draw.number(place + 1);
                let name = self.rules.cluster.remove(place).name;
                self.cluster.remove_policy(&PolicyKey::ClusterNetworkPolicy { name });
            }
            8 => {
                let name = self.draw.of(&NAMESPACES);
                self.namespaces.insert(name, self.draw.labels());
                for n in 0..PODS {
                    let old = self.pods[n].profile.clone();
                    if old.namespace() == name {
                        let labels = self.namespaces[name].clone();
                        let profile = Profile::new(name, labels, old.labels(), old.ports().to_vec()).unwrap();
                        self.give(n, profile);
                    }
                }
            }
            9 => {
                let name = format!("node-{}", self.draw.number(3));
                let node = (self.draw.labels(), vec![self.draw.address().to_canonical()]);
                let node = (!self.draw.one_in(3)).then_some(node);
                self.cluster.set_node(&name, node.clone());
                match node {
                    Some(node) => drop(self.nodes.insert(name, node)),
                    None => drop(self.nodes.remove(&name)),
                }
                self.rules.nodes = self.nodes.values().cloned().collect();
            }
            _ => {
                let (n, profile) = (self.draw.number(PODS), self.profile());
                self.give(n, profile);
            }
        }
        if self.draw.one_in(2) {
            let epoch = self.cluster.advance();
            self.cluster.recycle(epoch);
        }
    }

    /// Compiles the programs that changes concern, and no others.
    fn update(&mut self) {
        for (identity, direction) in self.cluster.take_changed() {
            for n in 0..LOCAL {
                if self.pods[n].identity == identity {
                    self.compile(n, direction);
                }
            }
        }
    }

    fn subject(&self, n: usize) -> Subject {
        let pod = &self.pods[n];
        let node = NODE.map(|address| address.parse().unwrap()).to_vec();
        Subject { identity: pod.identity, addresses: pod.addresses.clone(), node }
    }

    fn compile(&mut self, n: usize, direction: Direction) {
        let compiled = self.cluster.compile(&self.subject(n), direction);
        assert!(!compiled.is_closed);
        self.programs.insert((n, direction), compiled.bytes);
    }

    fn compile_all(&mut self) {
        for n in 0..LOCAL {
            Direction::ALL.into_iter().for_each(|direction| self.compile(n, direction));
        }
    }

    /// Compares the verdicts about one random flow.
    fn check(&mut self) {
        let (n, direction) = (self.draw.number(LOCAL), self.draw.of(&Direction::ALL));
        let (protocol, port) = self.draw.service();
        let other = (!self.draw.one_in(3)).then(|| self.draw.number(PODS));
        let address = match other {
            Some(other) => self.draw.of(&self.pods[other].addresses),
            None => self.draw.address(),
        };
        let peer = match other {
            Some(other) => Peer::pod(self.pods[other].identity, Some(address)),
            None => Peer::outside(address),
        };
        let node = NODE.map(|address| address.parse().unwrap());
        let groups = self.draw.groups();
        let flow = Flow {
            pod: &self.pods[n].profile,
            own: &self.pods[n].addresses,
            node: &node,
            direction,
            peer: other.map(|other| &self.pods[other].profile),
            is_itself: other == Some(n),
            address,
            protocol,
            port,
            groups: groups.clone(),
        };
        let program = Program::read(&self.programs[&(n, direction)]).unwrap();
        let verdict = program.judge_carrying(&peer, &groups, protocol, port);
        let told = |decision: Decision| (decision.is_allowed, why(&program, decision.reason));
        let (enforced, all) = (self.rules.enforced().judge(&flow), self.rules.judge(&flow));
        assert_eq!(told(verdict.enforced), enforced, "{flow:?}\n{:#?}", self.rules.enforced());
        match verdict.audited {
            Some(audited) => assert_eq!(told(audited), all, "with audit: {flow:?}\n{:#?}", self.rules),
            None => assert_eq!(enforced, all, "no audited policy selects the pod: {flow:?}\n{:#?}", self.rules),
        }
        let would = verdict.would_deny().is_some();
        assert_eq!(would, enforced.0 && !all.0, "what audit reports is what would be denied");
        let kind = match enforced.1 {
            Why::Rule(tier, ..) => format!("{tier:?} {}", if enforced.0 { "allows" } else { "denies" }),
            Why::Isolated(_) => "Isolated".to_owned(),
            other => format!("{other:?}"),
        };
        let families = format!("IPv{}", if address.to_canonical().is_ipv4() { 4 } else { 6 });
        for seen in [kind, families, format!("{direction:?}"), format!("would deny: {would}")] {
            *self.seen.entry(seen).or_default() += 1;
        }
    }
}

fn why(program: &Program<'_>, reason: Reason) -> Why {
    let name = |policy| program.policy(policy).expect("a policy of the program").name.to_owned();
    match reason {
        Reason::Itself => Why::Itself,
        Reason::OwnNode => Why::OwnNode,
        Reason::NoPolicy => Why::NoPolicy,
        Reason::Rule { tier, policy, rule } => Why::Rule(tier, name(policy), rule.into()),
        Reason::Isolated { policy } => Why::Isolated(name(policy)),
        Reason::Unnumbered | Reason::Closed | Reason::Malformed => panic!("{reason:?}"),
    }
}

#[test]
fn programs_judge_as_the_reference_after_each_change() {
    let (cases, mut seed) = (cases(), seed());
    let (mut done, mut seen) = (0, BTreeMap::<String, usize>::new());
    while done < cases {
        println!("POLICY_SEED={seed}");
        let mut world = World::new(seed);
        for _ in 0..80 {
            world.change();
            world.update();
            for _ in 0..25 {
                world.check();
            }
            done += 25;
        }
        world.seen.into_iter().for_each(|(kind, times)| *seen.entry(kind).or_default() += times);
        seed += 1;
    }
    println!("{done} cases: {seen:#?}");
    // Not a test of little: each kind of decision is among them.
    assert_eq!(seen.len(), 15, "{seen:?}");
    assert!(seen.values().all(|times| *times >= done / 200), "{seen:?}");
}

/// Policies for audit beside the same ones that are enforced, and beside none: two other clusters.
#[test]
fn audit_says_what_a_cluster_without_the_annotation_does() {
    let (cases, mut seed) = (cases(), seed());
    let (mut done, mut would_deny, mut would_allow) = (0, 0, 0);
    while done < cases {
        println!("POLICY_SEED={seed}");
        let mut world = World::new(seed);
        (0..40).for_each(|_| world.change());
        world.compile_all();
        let beside = world.programs.clone();
        for policy in world.rules.policies.iter_mut() {
            policy.is_audited = false;
            world.cluster.set_policy(policy);
        }
        for policy in world.rules.cluster.iter_mut() {
            policy.is_audited = false;
            world.cluster.set_cluster_policy(policy).unwrap();
        }
        world.compile_all();
        for (key, bytes) in &beside {
            let (beside, all) = (Program::read(bytes).unwrap(), Program::read(&world.programs[key]).unwrap());
            for _ in 0..40 {
                let (protocol, port) = world.draw.service();
                let other = world.draw.number(PODS);
                let peer = match world.draw.one_in(3) {
                    true => Peer::outside(world.draw.address()),
                    false => Peer::pod(world.pods[other].identity, Some(world.draw.of(&world.pods[other].addresses))),
                };
                let (beside, all) = (beside.judge(&peer, protocol, port), all.judge(&peer, protocol, port));
                let audited = beside.audited.unwrap_or(beside.enforced);
                assert_eq!(audited.is_allowed, all.is_allowed(), "{key:?} {peer:?} {protocol} {port}");
                assert_eq!(beside.would_deny().is_some(), beside.is_allowed() && !all.is_allowed());
                would_deny += usize::from(beside.would_deny().is_some());
                would_allow += usize::from(beside.would_allow().is_some());
                done += 1;
            }
        }
        seed += 1;
    }
    assert!(would_deny > done / 200 && would_allow > done / 200, "{would_deny} and {would_allow} of {done}");
}

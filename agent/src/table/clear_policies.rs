//! What network policies say of packets in clear, in the sets that the rules on captured pods' links look up. The
//! kernel keeps what was written last, so nothing opens when the agent or the API server is away.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::BuildHasher;
use std::io;
use std::net::IpAddr;

use nebula_cni_contract::netlink::nftables::{self, Interval};
use nebula_cni_plugin::link::clear_policy::{self, Allowed, Judged};
use nebula_cni_policy::flat::{Flat, Peers, Ports, ServicePort};
use nebula_cni_policy::program::{Program, Who};

use super::endpoints::Slice;
use super::facts::Facts;
use super::judgement::Judgement;

/// Keeps the sets of the node's captured pods as their programs say.
#[derive(Debug, Default)]
pub struct ClearPolicies<S = NodeSets> {
    sets: S,
    /// What was written last, by the pod's attachment.
    written: HashMap<String, Written>,
    /// Pods that had no programs at the last write; those come with a change.
    without_programs: HashSet<(u64, u64)>,
    /// What to compare by: contents are long, and those who write policies cannot make two of them look the same.
    hasher: RandomState,
    /// Pods that are closed in clear because their policies are too much.
    too_much: usize,
    /// What the kernel listed last, and its generation then. A list has six sets or more of every captured pod, and is
    /// asked for every second, also where no pod is judged in clear.
    listed: Option<(u32, Vec<Judged>)>,
    /// Whom the pods met at the last write; `None` without a pod that is judged.
    peers: Option<Peers>,
}

#[derive(Debug, PartialEq, Eq)]
struct Written {
    id: (u64, u64),
    /// Of programs and peers, and of what follows from them.
    inputs: u64,
    contents: u64,
    is_too_much: bool,
}

/// The sets of captured pods.
pub trait Sets: Send {
    /// The pods that have some.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn judged(&self) -> io::Result<Vec<Judged>>;

    /// A number that is another one after each change of any rule or set of the node.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn generation(&self) -> io::Result<u32>;

    /// Replaces those of an attachment; returns whether it has any.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing has changed then.
    fn replace(&self, attachment: &str, allowed: &Allowed) -> io::Result<bool>;
}

/// The sets in the kernel of this node.
#[derive(Debug, Default)]
pub struct NodeSets;

impl Sets for NodeSets {
    fn judged(&self) -> io::Result<Vec<Judged>> {
        clear_policy::judged()
    }

    fn generation(&self) -> io::Result<u32> {
        nftables::generation()
    }

    fn replace(&self, attachment: &str, allowed: &Allowed) -> io::Result<bool> {
        clear_policy::replace(attachment, allowed)
    }
}

/// The programs of a pod, by one of its addresses, for ingress and egress.
type Programs = (IpAddr, [Vec<u8>; 2]);

impl<S: Sets> ClearPolicies<S> {
    /// The pods whose packets in clear are judged.
    #[must_use]
    pub fn judged(&mut self) -> Vec<Judged> {
        // Asked first: what changes while the sets are listed is seen the next time.
        let generation = self.sets.generation().ok();
        if let Some((_, judged)) = self.listed.as_ref().filter(|(at, _)| Some(*at) == generation) {
            return judged.clone();
        }
        self.listed = None;
        match self.sets.judged() {
            Ok(judged) => {
                self.listed = generation.map(|generation| (generation, judged.clone()));
                judged
            }
            Err(error) => {
                tracing::debug!(%error, "cannot list the sets of captured pods");
                Vec::new()
            }
        }
    }

    /// Whether some pod waits for its first write.
    #[must_use]
    pub fn are_outdated(&mut self) -> bool {
        let judged = self.judged();
        let is_written = |pod: &Judged| self.written.get(&pod.attachment).is_some_and(|written| written.id == pod.id);
        !judged.iter().all(|pod| is_written(pod) || self.without_programs.contains(&pod.id))
    }

    /// Pods that are closed in clear because their policies are too much.
    #[must_use]
    pub const fn too_much(&self) -> usize {
        self.too_much
    }

    /// Makes the sets of these pods say what the programs say of `peers`. A pod without programs keeps what it has. A
    /// failure is tried again with the next change or look.
    pub fn replace(&mut self, judged: &[Judged], programs: &[Programs], peers: Peers) {
        self.write(judged, programs, &peers);
        self.peers = (!judged.is_empty()).then_some(peers);
    }

    /// Does the same with the peers of the last time; returns whether they are known.
    pub fn replace_programs(&mut self, judged: &[Judged], programs: &[Programs]) -> bool {
        let Some(peers) = self.peers.take() else { return judged.is_empty() };
        self.write(judged, programs, &peers);
        self.peers = Some(peers);
        true
    }

    fn write(&mut self, judged: &[Judged], programs: &[Programs], peers: &Peers) {
        let names: BTreeSet<&str> = judged.iter().map(|pod| pod.attachment.as_str()).collect();
        self.written.retain(|attachment, _| names.contains(attachment.as_str()));
        self.without_programs.clear();
        let by_address: HashMap<IpAddr, &[Vec<u8>; 2]> =
            programs.iter().map(|(address, programs)| (*address, programs)).collect();
        let of_peers = self.hasher.hash_one(peers);
        for pod in judged {
            let Some(programs) = pod.addresses.iter().find_map(|address| by_address.get(address)) else {
                self.without_programs.insert(pod.id);
                continue;
            };
            let inputs = self.hasher.hash_one((of_peers, programs));
            let before = self.written.get(&pod.attachment).filter(|written| written.id == pod.id);
            if before.is_some_and(|written| written.inputs == inputs) {
                continue;
            }
            let allowed = allowed(programs, peers);
            let is_too_much = allowed.is_none();
            let allowed = allowed.unwrap_or_default();
            let contents = self.hasher.hash_one(&allowed);
            let is_same = before.is_some_and(|written| written.contents == contents);
            let is_there = if is_same { Ok(true) } else { self.sets.replace(&pod.attachment, &allowed) };
            match is_there {
                Ok(true) => {
                    let written = Written { id: pod.id, inputs, contents, is_too_much };
                    self.written.insert(pod.attachment.clone(), written);
                }
                // Its pod has left.
                Ok(false) => drop(self.written.remove(&pod.attachment)),
                Err(error) => {
                    tracing::warn!(%error, "cannot tell the kernel what network policies say of packets in clear");
                    self.written.remove(&pod.attachment);
                }
            }
        }
        self.too_much = self.written.values().filter(|written| written.is_too_much).count();
    }
}

/// What a pod may exchange with these; `None` if that is too much.
fn allowed(programs: &[Vec<u8>; 2], peers: &Peers) -> Option<Allowed> {
    let flat = |bytes: &Vec<u8>| intervals(&Flat::of(&Program::read(bytes).ok()?, peers).ok()?);
    let [ingress, egress] = programs.each_ref().map(flat);
    Some(Allowed { ingress: ingress?, egress: egress? })
}

/// Each interval of addresses with what its class allows; `None` if they are too many.
fn intervals(flat: &Flat) -> Option<Vec<Interval>> {
    let classes: Vec<Vec<_>> = flat.classes.iter().map(|ports| ports.iter().flat_map(parts).collect()).collect();
    let mut all = Vec::new();
    for addresses in &flat.addresses {
        let parts = classes.get(addresses.class)?;
        let addresses = (addresses.first, addresses.last);
        all.extend(parts.iter().map(|&(protocols, ports)| Interval { addresses, protocols, ports }));
        if all.len() > MAX_INTERVALS {
            return None;
        }
    }
    Some(all)
}

/// Protocols with ports: the end of the first protocol, whole protocols, and the beginning of the last one.
fn parts(all: &Ports) -> Vec<((u8, u8), (u16, u16))> {
    let split = |key: u32| ((key >> 16) as u8, key as u16);
    let ((mut first, start), (mut last, end)) = (split(all.first), split(all.last));
    if first == last {
        return vec![((first, last), (start, end))];
    }
    let mut parts = Vec::new();
    if start > 0 {
        parts.push(((first, first), (start, u16::MAX)));
        first += 1;
    }
    let has_end = end < u16::MAX;
    if has_end {
        parts.push(((last, last), (0, end)));
        last -= 1;
    }
    if first <= last {
        parts.push(((first, last), (0, u16::MAX)));
    }
    parts
}

impl Facts {
    /// Whom captured pods meet in clear.
    pub(super) fn peers_in_clear(&self, judgement: &Judgement) -> Peers {
        let Some(policies) = &self.settings.policies else { return Peers::default() };
        // Nobody else is reached in clear.
        let is_clear = |address: &IpAddr| judgement.clear.contains(address);
        let nodes = judgement.nodes.iter().map(|node| (*node, Who::Outside));
        let all = judgement.policy.bystanders.iter().copied().chain(nodes);
        Peers {
            known: all.filter(|(address, _)| is_clear(address)).collect(),
            ranges: [&self.settings.pod_ranges[..], &policies.services].concat(),
            exclude: self.settings.exclude.clone(),
            services: self.services_in_clear(judgement),
            node_ports: policies.node_ports,
        }
    }

    /// Ports of Services with those endpoints that captured pods reach in clear.
    fn services_in_clear(&self, judgement: &Judgement) -> Vec<ServicePort> {
        let is_enrolled =
            |address: &IpAddr| judgement.enrolled.binary_search_by_key(address, |(enrolled, _)| *enrolled).is_ok();
        let mut slices: HashMap<&str, Vec<&Slice>> = HashMap::new();
        for slice in self.slices.iter().flat_map(|(_, slices)| slices) {
            slices.entry(&slice.service).or_default().push(slice);
        }
        let mut all = Vec::new();
        for (name, service) in self.services.iter() {
            let slices = slices.get(&**name).map(Vec::as_slice).unwrap_or_default();
            for (address, port) in service.ports_of_clusters() {
                let own = slices.iter().filter(|slice| slice.is_ipv4 == address.is_ipv4());
                let endpoints = own.filter_map(|slice| Some((slice, port.target(&slice.ports)?)));
                let endpoints = endpoints.flat_map(|(slice, target)| {
                    let addresses = slice.endpoints.iter().map(|endpoint| endpoint.address);
                    addresses.filter(|address| !is_enrolled(address)).map(move |address| (address, target))
                });
                let mut endpoints: Vec<(IpAddr, u16)> = endpoints.collect();
                endpoints.sort_unstable();
                endpoints.dedup();
                all.push(ServicePort { address, protocol: port.protocol, port: port.port, endpoints });
            }
        }
        all.sort_unstable();
        all
    }
}

/// Intervals of one pod in one direction: bounds how long one write keeps the kernel busy.
const MAX_INTERVALS: usize = 4096;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use nebula_cni_contract::cluster_table::EndpointState;
    use nebula_cni_policy::compile::{Cluster, Subject, closed};
    use nebula_cni_policy::model::{Direction, Labels, NetworkPolicy, Profile};

    use super::*;
    use crate::policy::Records;
    use crate::table::endpoints::{Endpoint, Port};
    use crate::table::facts::PolicySettings;
    use crate::table::kept::Keep as _;
    use crate::table::services::Service;

    /// A kernel, with what was written.
    #[derive(Default)]
    struct Kernel {
        pods: RefCell<Vec<Judged>>,
        refuses: RefCell<bool>,
        written: RefCell<Vec<(String, Allowed)>>,
        /// Changes so far.
        generation: RefCell<u32>,
        /// How often it listed the pods.
        lists: RefCell<u32>,
    }

    impl Kernel {
        /// Other pods from now on; each change has its number, as in the kernel.
        fn has(&self, pods: Vec<Judged>) {
            self.pods.replace(pods);
            *self.generation.borrow_mut() += 1;
        }
    }

    impl Sets for Kernel {
        fn judged(&self) -> io::Result<Vec<Judged>> {
            *self.lists.borrow_mut() += 1;
            Ok(self.pods.borrow().clone())
        }

        fn generation(&self) -> io::Result<u32> {
            Ok(*self.generation.borrow())
        }

        fn replace(&self, attachment: &str, allowed: &Allowed) -> io::Result<bool> {
            if *self.refuses.borrow() {
                return Err(io::Error::other("no"));
            }
            *self.generation.borrow_mut() += 1;
            self.written.borrow_mut().push((attachment.to_owned(), allowed.clone()));
            Ok(self.pods.borrow().iter().any(|pod| pod.attachment == attachment))
        }
    }

    fn at(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    fn pod(attachment: &str, last: u8, handle: u64) -> Judged {
        Judged { attachment: attachment.into(), addresses: vec![at(last)], id: (1, handle) }
    }

    /// Programs of a pod that nothing selects, or that is isolated.
    fn programs(last: u8, is_isolated: bool) -> Programs {
        let mut cluster = Cluster::new();
        let identity = cluster.identify(Profile::new("a", Labels::new(), Labels::new(), vec![]).unwrap()).unwrap();
        if is_isolated {
            cluster.set_policy(&NetworkPolicy { types: Direction::ALL.to_vec(), ..NetworkPolicy::new("a", "deny") });
        }
        let subject = Subject { identity, addresses: vec![at(last)], node: vec![at(1)] };
        (at(last), Direction::ALL.map(|direction| cluster.compile(&subject, direction).bytes))
    }

    #[test]
    fn each_pod_is_written_once_and_again_when_something_is_different() {
        let mut policies = ClearPolicies::<Kernel>::default();
        assert!(!policies.are_outdated(), "there is no captured pod");
        policies.sets.has(vec![pod("a", 7, 1), pod("b", 8, 2)]);
        assert!(policies.are_outdated());
        let (judged, peers) = (policies.judged(), Peers::default());
        let write = |policies: &mut ClearPolicies<Kernel>, programs: &[Programs], peers: &Peers| {
            let judged = policies.judged();
            policies.replace(&judged, programs, peers.clone());
            let written = policies.sets.written.take();
            written.into_iter().map(|(attachment, _)| attachment).collect::<Vec<_>>()
        };
        assert_eq!(write(&mut policies, &[programs(7, false)], &peers), ["a"]);
        assert!(!policies.are_outdated(), "nothing is known of the other one, which stays as it is");
        let both = [programs(7, false), programs(8, true)];
        assert_eq!(write(&mut policies, &both, &peers), ["b"]);
        assert!(!policies.are_outdated());
        assert!(write(&mut policies, &both, &peers).is_empty());
        let more = Peers { known: [(at(9), Who::Unnumbered)].into(), ..Peers::default() };
        assert_eq!(write(&mut policies, &both, &more).len(), 0, "an address that makes no difference");
        let mixed = [programs(7, true), programs(8, true)];
        assert_eq!(write(&mut policies, &mixed, &more), ["a"]);

        // A failure, and sets that somebody has made again.
        policies.sets.refuses.replace(true);
        policies.replace(&judged, &both, more.clone());
        assert!(policies.are_outdated());
        policies.sets.refuses.replace(false);
        assert_eq!(write(&mut policies, &both, &more), ["a"]);
        policies.sets.has(vec![pod("a", 7, 3), pod("b", 8, 2)]);
        assert!(policies.are_outdated());
        assert_eq!(write(&mut policies, &both, &more), ["a"]);
        policies.sets.has(vec![pod("b", 8, 2)]);
        assert!(!policies.are_outdated());
        assert!(write(&mut policies, &[], &more).is_empty(), "without programs nothing is written");
    }

    #[test]
    fn the_kernel_lists_its_sets_only_after_a_change() {
        let mut policies = ClearPolicies::<Kernel>::default();
        for _ in 0..100 {
            assert!(!policies.are_outdated(), "there is no captured pod");
        }
        assert_eq!(*policies.sets.lists.borrow(), 1);
        policies.sets.has(vec![pod("a", 7, 1)]);
        for _ in 0..100 {
            assert!(policies.are_outdated());
        }
        assert_eq!(*policies.sets.lists.borrow(), 2);
        let judged = policies.judged();
        policies.replace(&judged, &[programs(7, false)], Peers::default());
        for _ in 0..100 {
            assert!(!policies.are_outdated());
        }
        assert_eq!(*policies.sets.lists.borrow(), 3, "its own write is a change, too");
    }

    #[test]
    fn peers_are_whom_captured_pods_reach_in_clear_and_services_have_the_endpoints_among_these() {
        let mut facts = Facts::default();
        let range = |text: &str| text.parse().unwrap();
        facts.settings.pod_ranges = vec![range("10.0.0.0/24")];
        facts.settings.policies =
            Some(PolicySettings { services: vec![range("10.96.0.0/16")], ..PolicySettings::default() });
        let service = IpAddr::from([10, 96, 0, 1]);
        facts.services.put("shop/web".into(), Some(Service::new(service, 80)));
        let endpoint = |last| Endpoint { address: at(last), state: EndpointState::Ready, node: None };
        let ports = Box::new([Port { name: "".into(), port: 8080, protocol: 6 }]);
        let endpoints = [2, 3].map(endpoint).into();
        let slice = Slice { service: "shop/web".into(), is_ipv4: true, ports, endpoints };
        facts.slices.put("shop/web-1".into(), Some(vec![slice]));
        let policy =
            Records { bystanders: [3, 4].map(|last| (at(last), Who::Unnumbered)).to_vec(), ..Records::default() };
        let (nodes, clear) = ([at(1)].into(), [at(1), at(3)].into());
        let judgement = Judgement { enrolled: vec![(at(2), 1)], nodes, clear, policy, ..Judgement::default() };
        let peers = facts.peers_in_clear(&judgement);
        assert_eq!(peers.known, [(at(1), Who::Outside), (at(3), Who::Unnumbered)].into(), "the last one is withheld");
        assert_eq!(peers.ranges, [range("10.0.0.0/24"), range("10.96.0.0/16")]);
        let expected = ServicePort { address: service, protocol: 6, port: 80, endpoints: vec![(at(3), 8080)] };
        assert_eq!(peers.services, [expected]);
    }

    #[test]
    fn an_isolated_pod_reaches_its_node_and_what_cannot_be_read_allows_nothing() {
        let (_, isolated) = programs(7, true);
        let found = allowed(&isolated, &Peers::default()).unwrap();
        let ends = |all: &[Interval]| all.iter().map(|one| one.addresses).collect::<Vec<_>>();
        assert_eq!(ends(&found.egress), [1, 7].map(|last| (at(last), at(last))), "its node and itself");
        assert_eq!(ends(&found.ingress), [(at(7), at(7))], "the node has its sockets");
        let (_, free) = programs(7, false);
        let found = allowed(&free, &Peers::default()).unwrap();
        let all = found.ingress.iter().all(|one| one.protocols == (0, u8::MAX) && one.ports == (0, u16::MAX));
        assert!(all && found.ingress.len() == 3, "IPv4, and IPv6 around the addresses that are mapped into it");
        assert_eq!(allowed(&[vec![1], vec![2]], &Peers::default()), None);
    }

    #[test]
    fn a_pod_that_is_closed_altogether_reaches_the_dns_only_on_its_port() {
        let identity = nebula_cni_policy::program::Identity::new(7).unwrap();
        let subject = Subject { identity, addresses: vec![at(7)], node: vec![] };
        let programs = Direction::ALL.map(|direction| closed(&subject, direction, &[at(53)]));
        let found = allowed(&programs, &Peers::default()).unwrap();
        let dns = found.egress.iter().filter(|one| one.addresses.0 == at(53));
        let dns: Vec<_> = dns.map(|one| (one.protocols, one.ports)).collect();
        assert_eq!(dns, [((6, 6), (53, 53)), ((17, 17), (53, 53))]);
    }

    #[test]
    fn ports_of_several_protocols_are_cut_at_these_and_too_many_are_too_much() {
        let key = |protocol: u32, port: u32| protocol << 16 | port;
        let cut = |first, last| parts(&Ports { first, last });
        let all = (0, u16::MAX);
        assert_eq!(cut(key(6, 80), key(6, 90)), [((6, 6), (80, 90))]);
        assert_eq!(cut(0, 0xff_ffff), [((0, 255), all)]);
        assert_eq!(cut(key(6, 80), key(8, 5)), [((6, 6), (80, u16::MAX)), ((8, 8), (0, 5)), ((7, 7), all)]);
        assert_eq!(cut(key(6, 80), key(7, 5)), [((6, 6), (80, u16::MAX)), ((7, 7), (0, 5))]);
        assert_eq!(cut(key(6, 0), key(7, 0xffff)), [((6, 7), all)]);
        let one = nebula_cni_policy::flat::Addresses { first: at(1), last: at(1), class: 0 };
        let many = |count| Flat { addresses: vec![one; count], classes: vec![vec![Ports { first: 0, last: 0 }]] };
        assert_eq!(intervals(&many(MAX_INTERVALS)).map(|all| all.len()), Some(MAX_INTERVALS));
        assert_eq!(intervals(&many(MAX_INTERVALS + 1)), None);
    }
}

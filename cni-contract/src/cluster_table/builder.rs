//! Builds the bytes of a table from facts about the cluster, in any order.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::time::Duration;

use ipnet::IpNet;

use super::file::{File, Programs, number, record};
use super::format::SectionKind;
use super::hash_table::{HashTable, bucket};
use super::key_of;
use super::table::{End, KIND_ADDRESS, KIND_PORT, KIND_UNKNOWN, NO_POD, service_key};
use crate::hash::mix;

/// Facts about the cluster, of which [`Builder::finish`] makes a table. Of contradicting facts the one that keeps
/// packets in the tunnel wins; of two about the same pod or the same port of a Service the later one.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    pods: Vec<(u128, u64)>,
    clear: Vec<u128>,
    clear_ranges: Vec<(u128, u128)>,
    sealed_ranges: Vec<(u128, u128)>,
    pod_ranges: Vec<(u128, u128)>,
    nodes: Vec<u128>,
    ends: Vec<(u128, End)>,
    identities: Vec<(u128, u32)>,
    programs: Programs,
    /// Ports of Services, each with its parts.
    services: Vec<(Offered, Range<usize>)>,
    /// Lists of endpoints and the port that each leads to, 0 for the endpoints' own.
    parts: Vec<(u32, u16)>,
    lists: Vec<Range<usize>>,
    endpoints: Vec<ServiceEndpoint>,
}

/// A port of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServicePort {
    /// A ClusterIP, or another address that is translated in the same way.
    pub address: IpAddr,
    /// The Service's port.
    pub port: u16,
    /// IP protocol: 6 for TCP, 17 for UDP, 132 for SCTP.
    pub protocol: u8,
    /// Time of session affinity by client address; `None` without it. Whole seconds.
    pub affinity: Option<Duration>,
    /// Whether only endpoints of this node may be chosen (`internalTrafficPolicy: Local`).
    pub this_node_only: bool,
}

/// A port at an address of a Service.
#[derive(Debug, Clone, Copy)]
struct Offered {
    port: ServicePort,
    /// Whether the primary network may lead there through other nodes.
    is_outer: bool,
}

/// An endpoint of a port of a Service, enrolled or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServiceEndpoint {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Whether it takes new flows.
    pub state: EndpointState,
    /// Whether it is on the node for which the table is.
    pub is_on_this_node: bool,
}

/// A port of a Service that has endpoints to choose from which are not enrolled, beside others. The primary network's
/// own choice would be among all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixed {
    /// The port.
    pub port: ServicePort,
    /// Those that are known not to be enrolled, or some of them.
    pub endpoints: Vec<SocketAddr>,
}

/// Endpoints that ports of a Service have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointList(u32);

/// Whether an endpoint takes new flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndpointState {
    /// It does (`ready`).
    Ready,
    /// It serves the flows it has (`serving` and `terminating`). It takes new ones where no endpoint is ready, as with
    /// kube-proxy.
    Terminating,
    /// It does not.
    NotReady,
}

impl Builder {
    /// Of a cluster of which nothing is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// `address` is that of an enrolled pod. `incarnation` is not 0, and another one for each pod that has had the
    /// address.
    pub fn pod(&mut self, address: IpAddr, incarnation: u64) {
        self.pods.push((key_of(address), incarnation));
    }

    /// The tunnel of the enrolled pod with this address probably ends there.
    pub fn end(&mut self, address: IpAddr, end: End) {
        self.ends.push((key_of(address), end));
    }

    /// The enrolled pod with this address has the set of labels with this number, which is neither 0 nor the largest;
    /// `None`: it is no pod.
    pub fn identity(&mut self, address: IpAddr, number: Option<u32>) {
        self.identities.push((key_of(address), number.unwrap_or(NO_POD)));
    }

    /// The programs of a pod of this node, for ingress and egress.
    pub fn programs(&mut self, address: IpAddr, programs: [Vec<u8>; 2]) {
        self.programs.insert(key_of(address), programs);
    }

    /// `address` is known not to be enrolled.
    pub fn clear(&mut self, address: IpAddr) {
        self.clear.push(key_of(address));
    }

    /// Nothing in `prefix` is enrolled, but for the pods and sealed prefixes in it.
    pub fn clear_prefix(&mut self, prefix: IpNet) {
        self.clear_ranges.extend(ranges_of(prefix));
    }

    /// Everything in `prefix` is in the mesh without being an enrolled pod: machines outside the cluster with
    /// certificates of their own. Pods known not to be enrolled are excepted.
    pub fn sealed_prefix(&mut self, prefix: IpNet) {
        self.sealed_ranges.extend(ranges_of(prefix));
    }

    /// Pods have their addresses from `prefix`: an endpoint there of which nothing else is known may be a pod that
    /// will be enrolled, and so is not chosen. Endpoints elsewhere are known not to be enrolled.
    pub fn pod_prefix(&mut self, prefix: IpNet) {
        self.pod_ranges.extend(ranges_of(prefix));
    }

    /// A port of a Service with all its endpoints, whatever their state and node.
    pub fn service(&mut self, port: ServicePort, endpoints: impl IntoIterator<Item = ServiceEndpoint>) {
        let list = self.endpoints(endpoints);
        self.service_port(port, [(list, 0)]);
    }

    /// Endpoints for [`Builder::service_port`].
    pub fn endpoints(&mut self, endpoints: impl IntoIterator<Item = ServiceEndpoint>) -> EndpointList {
        let first = self.endpoints.len();
        self.endpoints.extend(endpoints);
        self.lists.push(first..self.endpoints.len());
        EndpointList(number(self.lists.len() - 1))
    }

    /// A port of a Service with its endpoints: lists, and the port to which it leads in each, 0 for the endpoints'
    /// own. In the table, ports that have the same lists and one port each take no more room than one of them.
    pub fn service_port(&mut self, port: ServicePort, parts: impl IntoIterator<Item = (EndpointList, u16)>) {
        self.offer(Offered { port, is_outer: false }, parts);
    }

    /// Like [`Builder::service_port`], for an address to which the cluster is spoken to from outside, such as that of
    /// a load balancer. Somebody else may choose the endpoint of what is sent there on the primary network, so
    /// nothing is if there is an enrolled one.
    pub fn outer_port(&mut self, port: ServicePort, parts: impl IntoIterator<Item = (EndpointList, u16)>) {
        self.offer(Offered { port, is_outer: true }, parts);
    }

    /// The same for a port of all nodes (node port). Of the address only the family counts.
    pub fn node_port(&mut self, port: ServicePort, parts: impl IntoIterator<Item = (EndpointList, u16)>) {
        let address = match port.address {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        self.outer_port(ServicePort { address, ..port }, parts);
    }

    /// An address of a node, at which [`Builder::node_port`]s are open.
    pub fn node(&mut self, address: IpAddr) {
        self.nodes.push(key_of(address));
    }

    fn offer(&mut self, offered: Offered, parts: impl IntoIterator<Item = (EndpointList, u16)>) {
        let first = self.parts.len();
        self.parts.extend(parts.into_iter().map(|(EndpointList(list), port)| (list, port)));
        self.services.push((offered, first..self.parts.len()));
    }

    /// The bytes of the table. `version` rises with every table that the node's instances are to use.
    #[must_use]
    pub fn finish(self, version: u64) -> Vec<u8> {
        self.finish_with_mixed(version).0
    }

    /// The bytes of the table, and at most 1,024 ports of Services only some of whose endpoints are enrolled, in order.
    #[must_use]
    pub fn finish_with_mixed(self, version: u64) -> (Vec<u8>, Vec<Mixed>) {
        let seed = mix(version);
        let with_key = |(address, value)| ((address, 0), value);
        let pods = HashTable::new(seed, self.pods.iter().copied().map(with_key).collect());
        let clear = HashTable::new(seed, self.clear.iter().map(|address| ((*address, 0), ())).collect());
        let own = self.services.iter().filter(|(offered, _)| !offered.is_outer);
        let mut addresses: Vec<_> = own.map(|(offered, _)| key_of(offered.port.address)).collect();
        addresses.dedup();
        let addresses = addresses.into_iter().map(|address| (service_key(address, 0, 0), None));
        let ports = self.services.iter().map(|(offered, parts)| {
            let port = &offered.port;
            (service_key(key_of(port.address), port.port, port.protocol), Some((offered, parts.clone())))
        });
        let services = HashTable::new(seed, addresses.chain(ports).collect());

        let standings = Standings {
            pods: &pods,
            clear: self.clear.iter().copied().collect(),
            clear_ranges: disjoint(self.clear_ranges.clone()),
            sealed_ranges: disjoint(self.sealed_ranges.clone()),
            pod_ranges: disjoint(self.pod_ranges.clone()),
        };
        let mut listing = Listing {
            listed: Vec::new(),
            shared: HashMap::new(),
            clear: Vec::new(),
            mixed: BTreeMap::new(),
            facts: &self,
            standings,
        };
        let service_records: Vec<_> = services
            .entries
            .iter()
            .map(|((address, _), service)| {
                let Some((offered, parts)) = service else {
                    return record(&[&address.to_be_bytes(), &[0, 0, 0, KIND_ADDRESS], &[0; 24]]);
                };
                let Choice { first, chosen, all, clear, target, is_unknown, .. } =
                    listing.choice(offered, parts.clone());
                let port = &offered.port;
                let affinity = port.affinity.map_or(0, |time| u32::try_from(time.as_secs()).unwrap_or(u32::MAX));
                let counts = [first, chosen, all, affinity, clear].map(u32::to_le_bytes);
                let kind = if is_unknown { KIND_UNKNOWN } else { KIND_PORT };
                let name = [port.port.to_le_bytes(), [port.protocol, kind]];
                let target = [target, 0].map(u16::to_le_bytes);
                record(&[&address.to_be_bytes(), name.as_flattened(), counts.as_flattened(), target.as_flattened()])
            })
            .collect();
        let mixed = listing.mixed();
        let listed = listing.listed;

        let mut file = File::new(version, seed);
        file.section(SectionKind::PodBuckets, pods.starts.iter().map(|start| start.to_le_bytes()));
        let pod = |((address, _), incarnation): &(_, u64)| {
            record(&[&u128::to_be_bytes(*address), &incarnation.to_le_bytes()])
        };
        file.section::<24>(SectionKind::Pods, pods.entries.iter().map(pod));
        file.section(SectionKind::ClearBuckets, clear.starts.iter().map(|start| start.to_le_bytes()));
        file.section(SectionKind::Clear, clear.entries.iter().map(|((address, _), ())| address.to_be_bytes()));
        for (kind, ranges) in
            [(SectionKind::ClearRanges, &self.clear_ranges), (SectionKind::SealedRanges, &self.sealed_ranges)]
        {
            let ranges = disjoint(ranges.clone());
            file.section::<32>(kind, ranges.iter().map(|(a, b)| record(&[&a.to_be_bytes(), &b.to_be_bytes()])));
        }
        file.section(SectionKind::ServiceBuckets, services.starts.iter().map(|start| start.to_le_bytes()));
        file.section::<44>(SectionKind::Services, service_records.into_iter());
        let endpoint =
            |Listed { pod, port, tag }: Listed| record(&[&pod.to_le_bytes(), &port.to_le_bytes(), &tag.to_le_bytes()]);
        file.section::<8>(SectionKind::Endpoints, listed.into_iter().map(endpoint));
        let nodes: BTreeSet<u128> = self.nodes.iter().copied().collect();
        let nodes: Vec<u128> = nodes.into_iter().collect();
        file.section::<16>(SectionKind::Nodes, nodes.iter().map(|address| address.to_be_bytes()));
        let of_pods = self.ends.iter().filter_map(|(address, end)| Some((pods.position((*address, 0))?, end)));
        let ends: BTreeMap<u32, &End> = of_pods.collect();
        let end = |(pod, end): (&u32, &&End)| {
            let ports = [end.port, end.other.unwrap_or_default()].map(u16::to_le_bytes);
            record(&[&pod.to_le_bytes(), ports.as_flattened(), &key_of(end.node).to_be_bytes()])
        };
        file.section::<24>(SectionKind::Ends, ends.iter().map(end));
        let of_pods = self.identities.iter().filter_map(|(address, n)| Some((pods.position((*address, 0))?, *n)));
        let identities: BTreeMap<u32, u32> = of_pods.collect();
        let identity = |(pod, number): (&u32, &u32)| record(&[&pod.to_le_bytes(), &number.to_le_bytes()]);
        file.section::<8>(SectionKind::Identities, identities.iter().map(identity));
        file.programs(&self.programs);
        (file.finish(), mixed)
    }
}

/// What the record of a service says of its endpoints.
#[derive(Debug, Clone, Copy)]
struct Choice {
    /// Index of the first enrolled one in the list.
    first: u32,
    /// Number of enrolled ones to choose from, and of all that serve the flows they have.
    chosen: u32,
    all: u32,
    /// Number of those to choose from that are not enrolled.
    clear: u32,
    /// Where they are listed, if there are others beside them.
    mixed: Option<u32>,
    /// Their port; 0 if they have ports of their own.
    target: u16,
    /// It has endpoints to choose from, but of none of them is known whether it is enrolled.
    is_unknown: bool,
}

/// An enrolled endpoint as the table lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Listed {
    /// Index of the pod.
    pod: u32,
    port: u16,
    tag: u16,
}

/// What is known of the address of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// An enrolled pod, by its index.
    Enrolled(u32),
    /// Known not to be one.
    Clear,
    Unknown,
}

/// Answers what is known of addresses.
struct Standings<'a> {
    pods: &'a HashTable<u64>,
    clear: BTreeSet<u128>,
    clear_ranges: Vec<(u128, u128)>,
    sealed_ranges: Vec<(u128, u128)>,
    pod_ranges: Vec<(u128, u128)>,
}

impl Standings<'_> {
    fn of(&self, address: IpAddr) -> Standing {
        let key = key_of(address);
        if let Some(pod) = self.pods.position((key, 0)) {
            return Standing::Enrolled(pod);
        }
        // In the order in which a table is asked.
        let is_clear = self.clear.contains(&key)
            || !is_in(&self.sealed_ranges, key) && (is_in(&self.clear_ranges, key) || !is_in(&self.pod_ranges, key));
        if is_clear { Standing::Clear } else { Standing::Unknown }
    }
}

fn is_in(disjoint: &[(u128, u128)], key: u128) -> bool {
    let after = disjoint.partition_point(|(first, _)| *first <= key);
    after.checked_sub(1).and_then(|at| disjoint.get(at)).is_some_and(|(_, last)| key <= *last)
}

/// The endpoints of all services, as the table lists them.
struct Listing<'a> {
    listed: Vec<Listed>,
    /// Of lists whose endpoints all have the port that the service names.
    shared: HashMap<(Vec<u32>, bool), Choice>,
    /// Endpoints that are not enrolled, of services that have others beside them.
    clear: Vec<Vec<(IpAddr, u16)>>,
    /// Those services, by address, port and protocol, with the port of their endpoints.
    mixed: BTreeMap<(IpAddr, u16, u8), (ServicePort, u32, u16)>,
    facts: &'a Builder,
    standings: Standings<'a>,
}

impl Listing<'_> {
    /// Lists the endpoints of a service, unless another one of its ports has the same.
    fn choice(&mut self, offered: &Offered, parts: Range<usize>) -> Choice {
        let Offered { port, is_outer } = offered;
        let parts = self.facts.parts.get(parts).unwrap_or_default();
        let lists: Vec<u32> = parts.iter().map(|(list, _)| *list).collect();
        let target = match parts {
            [(_, port), others @ ..] if others.iter().all(|(_, other)| other == port) => *port,
            _ => 0,
        };
        let key = (lists, port.this_node_only);
        let known = self.shared.get(&key).filter(|_| target > 0).copied();
        let choice = known.unwrap_or_else(|| self.list(port, parts, target));
        if target > 0 && known.is_none() {
            self.shared.insert(key, choice);
        }
        if *is_outer {
            let clear = if choice.chosen > 0 { 0 } else { choice.clear };
            return Choice { target, clear, ..choice };
        }
        if let Some(list) = choice.mixed {
            self.mixed.insert((port.address, port.port, port.protocol), (*port, list, target));
            // The same ones of every table.
            if self.mixed.len() > MAX_MIXED {
                self.mixed.pop_last();
            }
        }
        Choice { target, ..choice }
    }

    fn mixed(&self) -> Vec<Mixed> {
        let endpoints = |list: u32, target: u16| {
            let list = self.clear.get(list as usize).map(Vec::as_slice).unwrap_or_default();
            let port = |own: u16| if target == 0 { own } else { target };
            list.iter().take(MAX_OF_MIXED).map(|(address, own)| SocketAddr::new(*address, port(*own))).collect()
        };
        self.mixed
            .values()
            .map(|(port, list, target)| Mixed { port: *port, endpoints: endpoints(*list, *target) })
            .collect()
    }

    /// Sorts the endpoints of a service. `target` is the port of all of them, or 0.
    fn list(&mut self, port: &ServicePort, parts: &[(u32, u16)], target: u16) -> Choice {
        // To choose from, and those that only serve the flows they have.
        let mut enrolled: [Vec<Listed>; 2] = Default::default();
        let mut clear: [Vec<(IpAddr, u16)>; 2] = Default::default();
        let mut unknown = [false; 2];
        for (list, of_part) in parts {
            let list = self.facts.lists.get(*list as usize).cloned().unwrap_or_default();
            for endpoint in self.facts.endpoints.get(list).unwrap_or_default() {
                let group = match endpoint.state {
                    EndpointState::Ready => 0,
                    EndpointState::Terminating => 1,
                    EndpointState::NotReady => continue,
                };
                if port.this_node_only && !endpoint.is_on_this_node {
                    continue;
                }
                let own = if *of_part == 0 { endpoint.port } else { *of_part };
                match self.standings.of(endpoint.address) {
                    Standing::Enrolled(pod) => {
                        let port = if target == 0 { own } else { 0 };
                        enrolled[group].push(Listed { pod, port, tag: 0 });
                    }
                    Standing::Clear => clear[group].push((endpoint.address, own)),
                    Standing::Unknown => unknown[group] = true,
                }
            }
        }
        let [mut chosen, mut serving] = enrolled;
        let [mut of_clear, serving_clear] = clear;
        let mut has_others = !chosen.is_empty() || unknown[0];
        if chosen.is_empty() && of_clear.is_empty() {
            (chosen, of_clear) = (std::mem::take(&mut serving), serving_clear);
            has_others = !chosen.is_empty() || unknown.contains(&true);
        }
        for group in [&mut chosen, &mut serving] {
            group.sort_unstable();
            group.dedup();
            give_tags(group, self.standings.pods);
        }
        of_clear.sort_unstable();
        of_clear.dedup();
        let (first, count, clear) = (number(self.listed.len()), number(chosen.len()), number(of_clear.len()));
        let is_mixed = has_others && !of_clear.is_empty();
        let mixed = is_mixed.then_some(number(self.clear.len()));
        self.clear.extend(is_mixed.then_some(of_clear));
        self.listed.append(&mut chosen);
        self.listed.append(&mut serving);
        Choice {
            first,
            chosen: count,
            all: number(self.listed.len()) - first,
            clear,
            mixed,
            target,
            is_unknown: unknown.contains(&true) && count == 0 && clear == 0,
        }
    }
}

/// Gives each endpoint of a group another tag than the others, in an order that does not depend on this table.
fn give_tags(group: &mut [Listed], pods: &HashTable<u64>) {
    // The rest of the numbers is for endpoints whose hash another one has.
    const HASHES: u32 = 1 << 15;
    let address = |listed: &Listed| pods.entries.get(listed.pod as usize).map_or(0, |((address, _), _)| *address);
    let hash = |listed: &Listed| bucket(0, (address(listed), 0), HASHES);
    let mut order: Vec<_> =
        (0..).zip(&*group).map(|(at, listed)| (hash(listed), address(listed), listed.port, at)).collect();
    order.sort_unstable();
    let mut least = 1;
    for (hash, _, _, at) in order {
        let tag = least.max(hash + 1);
        least = tag.saturating_add(1);
        if let Some(listed) = group.get_mut::<usize>(at) {
            listed.tag = u16::try_from(tag).unwrap_or(u16::MAX);
        }
    }
}

const MAX_MIXED: usize = 1_024;
/// Each of them gets a part of the flows.
const MAX_OF_MIXED: usize = 64;

/// First and last addresses. An IPv6 prefix that contains the mapped IPv4 addresses does not mean those.
fn ranges_of(prefix: IpNet) -> Vec<(u128, u128)> {
    let (first, last) = (key_of(prefix.network()), key_of(prefix.broadcast()));
    let (mapped, after) = (key_of(Ipv4Addr::UNSPECIFIED.into()), key_of(Ipv4Addr::BROADCAST.into()) + 1);
    match prefix {
        IpNet::V6(_) if first < mapped && last >= after => vec![(first, mapped - 1), (after, last)],
        IpNet::V6(_) | IpNet::V4(_) => vec![(first, last)],
    }
}

/// The same addresses in order and without overlaps.
fn disjoint(mut ranges: Vec<(u128, u128)>) -> Vec<(u128, u128)> {
    ranges.sort_unstable();
    let mut merged: Vec<(u128, u128)> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    merged
}

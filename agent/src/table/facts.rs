//! What is known of the cluster, kept small: addresses, ports and states, and no objects of the API server.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use nebula_cni_plugin::cluster_table::Builder;
use nebula_cni_plugin::link::service_choice::Choice;

use super::endpoints::Slice;
use super::judgement::Judgement;
use super::kept::{self, Kept};
use super::nodes::NodeFacts;
use super::services::{Service, Taken};
use super::shown::Shown;

/// Namespace and name of an object, as `NAMESPACE/NAME`.
pub type Name = Box<str>;

/// All that the table is made of. Each input replaces its part, one object at a time or as a whole; each
/// change returns whether the table changes with it.
#[derive(Debug, Default)]
pub struct Facts {
    pub(super) services: Kept<Service>,
    /// By EndpointSlice, or by Endpoints on old servers.
    pub(super) slices: Kept<Vec<Slice>>,
    pub(super) members: HashMap<PodId, Member>,
    /// What the API server shows of pods.
    pub(super) pods: HashMap<PodId, Shown>,
    pub(super) nodes: HashMap<Name, NodeFacts>,
    pub(super) settings: Settings,
    heard: [bool; Input::ALL.len()],
    /// Number of changes that call for another table.
    pub(super) changes: u64,
}

/// What the operator says of addresses.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// Where pods have their addresses.
    pub pod_ranges: Vec<IpNet>,
    /// What captured pods reach on the primary network.
    pub exclude: Vec<IpNet>,
    /// Where load balancers have addresses, among others.
    pub load_balancers: Vec<IpNet>,
    /// Whether the ranges that the API server shows for nodes are those of their pods.
    pub node_ranges: bool,
    /// UDP ports of instances; `None`: they are not at the addresses of their nodes.
    pub ports: Option<(u16, u16)>,
}

/// The first 16 bytes of the SHA-256 of a pod's UID.
pub type PodId = u128;

/// Addresses of a pod, at most one of each family.
pub type Addresses = [Option<IpAddr>; 2];

/// A holder of a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Addresses of its certificate.
    pub addresses: Addresses,
    /// Another number for each pod.
    pub incarnation: u64,
    /// Where its instance begins to look for a free port: [`nebula_cni_plugin::launch::port_number`] of its UID.
    pub port_number: u32,
    /// It is a host that enrolled with a token, and no pod.
    pub is_host: bool,
}

/// A part of the facts that a watch keeps.
pub(super) trait Keep: Default + PartialEq {
    type Key;
    type Value;

    /// Puts `value` under `key`, or removes what is there; returns whether that changed anything.
    fn put(&mut self, key: Self::Key, value: Option<Self::Value>) -> bool;
}

impl<K: Hash + Eq, V: PartialEq> Keep for HashMap<K, V> {
    type Key = K;
    type Value = V;

    fn put(&mut self, key: K, value: Option<V>) -> bool {
        match value {
            None => self.remove(&key).is_some(),
            Some(value) if self.get(&key) == Some(&value) => false,
            Some(value) => {
                self.insert(key, value);
                true
            }
        }
    }
}

/// Where facts come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The CA's directory.
    Directory,
    /// Services.
    Services,
    /// EndpointSlices or Endpoints.
    Endpoints,
    /// Nodes.
    Nodes,
    /// Pods of the cluster.
    Pods,
}

impl Input {
    /// All inputs.
    pub const ALL: [Self; 5] = [Self::Directory, Self::Services, Self::Endpoints, Self::Nodes, Self::Pods];

    /// What it is called in messages and as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Directory => "directory",
            Self::Services => "services",
            Self::Endpoints => "endpoints",
            Self::Nodes => "nodes",
            Self::Pods => "pods",
        }
    }
}

impl Facts {
    /// Notes that an input has said all it knew; returns whether that is the first time.
    pub fn is_heard(&mut self, input: Input) -> bool {
        !std::mem::replace(&mut self.heard[input as usize], true)
    }

    /// Inputs that have said nothing yet. A table made without one of them would call enrolled pods unknown, or worse.
    #[must_use]
    pub fn missing(&self) -> Vec<Input> {
        Input::ALL.into_iter().filter(|input| !self.heard[*input as usize]).collect()
    }

    /// The table for the node with this name, and what the node itself chooses for Services of which only some
    /// endpoints are enrolled.
    #[must_use]
    pub fn table(&self, judgement: &Judgement, node: &str, version: u64) -> (Vec<u8>, Vec<Choice>) {
        let mut builder = Builder::new();
        judgement.enrolled.iter().for_each(|(address, incarnation)| builder.pod(*address, *incarnation));
        judgement.ends.iter().for_each(|(address, end)| builder.end(*address, *end));
        judgement.clear.iter().for_each(|address| builder.clear(*address));
        self.settings.pod_ranges.iter().for_each(|range| builder.pod_prefix(*range));
        let outside = self.settings.exclude.iter().chain(&self.settings.load_balancers);
        outside.for_each(|range| builder.clear_prefix(*range));
        judgement.nodes.iter().for_each(|address| builder.node(*address));
        let mut slices: HashMap<&str, Vec<&Slice>> = HashMap::with_capacity(self.services.count());
        for slice in self.slices.iter().flat_map(|(_, slices)| slices) {
            slices.entry(&slice.service).or_default().push(slice);
        }
        // Of two Services with one address the older one counts.
        let mut services: Vec<(&Name, &Service)> = self.services.iter().collect();
        services.sort_unstable_by_key(|(name, service)| (service.created, *name));
        // No load balancer has the address of a node, a pod or a Service: those who may write its status are not asked.
        let clusters = services.iter().flat_map(|(_, service)| service.addresses());
        let pods = judgement.enrolled.iter().map(|(address, _)| address).chain(&judgement.clear);
        let reserved = clusters.chain(pods).chain(&judgement.nodes).copied().collect();
        let (mut taken, mut left) = (Taken { reserved, ..Taken::default() }, HashMap::new());
        for (name, service) in services {
            let slices = slices.get(&**name).map(Vec::as_slice).unwrap_or_default();
            let left = left.entry(kept::namespace(name)).or_insert(RECORDS_OF_NAMESPACE);
            service.add_to(&mut builder, slices, node, &mut taken, left);
        }
        let (bytes, mixed) = builder.finish_with_mixed(version);
        let choice = |mixed: nebula_cni_plugin::cluster_table::Mixed| Choice {
            service: SocketAddr::new(mixed.port.address, mixed.port.port),
            protocol: mixed.port.protocol,
            by_client: mixed.port.affinity.is_some(),
            endpoints: mixed.endpoints,
        };
        (bytes, mixed.into_iter().map(choice).collect())
    }

    /// Namespaces that have more Services or endpoints than are kept.
    #[must_use]
    pub fn crowded(&self) -> BTreeSet<&str> {
        self.services.crowded().iter().chain(self.slices.crowded()).map(|name| &**name).collect()
    }

    /// Numbers of entries by kind, for the metrics.
    #[must_use]
    pub fn counts(&self, judgement: &Judgement) -> [(&'static str, usize); 8] {
        let endpoints = self.slices.iter().flat_map(|(_, slices)| slices).map(|slice| slice.endpoints.len()).sum();
        [
            ("enrolled", self.members.len()),
            ("unconfirmed", judgement.unconfirmed),
            ("withheld", judgement.withheld),
            ("clear_pods", self.pods.values().filter(|pod| pod.is_left_out).count()),
            ("node_addresses", self.nodes.values().map(|node| node.reported.len() + 2 * node.ranges.len()).sum()),
            ("services", self.services.count()),
            ("endpoints", endpoints),
            ("crowded_namespaces", self.crowded().len()),
        ]
    }
}

/// When the API server made an object, in seconds since 1970; 0 if it does not say.
pub(super) fn created(metadata: &ObjectMeta) -> i64 {
    metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second())
}

/// The first address of each family.
pub(super) fn addresses(all: impl IntoIterator<Item = IpAddr>) -> Addresses {
    let mut addresses = [None; 2];
    for address in all {
        addresses[usize::from(address.is_ipv6())].get_or_insert(address);
    }
    addresses
}

/// The first address of a prefix after its network address: what bridges and tunnel devices of a node usually have.
pub(super) fn first_host(prefix: IpNet) -> Option<IpAddr> {
    prefix.hosts().find(|address| *address != prefix.network())
}

/// So many records of the table the Services of one namespace may take. A port takes one and, if it leads to
/// different ports of its endpoints, one for each of them.
const RECORDS_OF_NAMESPACE: usize = 250_000;

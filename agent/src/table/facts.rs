//! What is known of the cluster, kept small: addresses, ports and states, and no objects of the API server.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_plugin::cluster_table::Builder;

use super::endpoints::Slice;
use super::services::Service;

/// Namespace and name of an object, as `NAMESPACE/NAME`.
pub type Name = Box<str>;

/// All that the table is made of. Each input replaces its part, one object at a time or as a whole; each
/// change returns whether the table changes with it.
#[derive(Debug, Default)]
pub struct Facts {
    pub(super) services: HashMap<Name, Service>,
    /// By EndpointSlice, or by Endpoints on old servers.
    pub(super) slices: HashMap<Name, Vec<Slice>>,
    pub(super) members: HashMap<PodId, Member>,
    /// Pods that the rules of enrolment leave out.
    pub(super) outside: HashMap<PodId, Addresses>,
    pub(super) nodes: HashMap<Box<str>, BTreeSet<IpAddr>>,
    /// Where pods have their addresses.
    pub(super) pod_ranges: Vec<IpNet>,
    heard: [bool; Input::ALL.len()],
    /// Number of changes that call for another table.
    pub(super) changes: u64,
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

    /// The table for the node with this name.
    #[must_use]
    pub fn table(&self, node: &str, version: u64) -> Vec<u8> {
        let mut builder = Builder::new();
        for member in self.members.values() {
            member.addresses.iter().flatten().for_each(|address| builder.pod(*address, member.incarnation));
        }
        for address in self.clear() {
            builder.clear(address);
        }
        self.pod_ranges.iter().for_each(|range| builder.pod_prefix(*range));
        let mut slices: HashMap<&str, Vec<&Slice>> = HashMap::with_capacity(self.services.len());
        for slice in self.slices.values().flatten() {
            slices.entry(&slice.service).or_default().push(slice);
        }
        for (name, service) in &self.services {
            service.add_to(&mut builder, slices.get(&**name).map(Vec::as_slice).unwrap_or_default(), node);
        }
        builder.finish(version)
    }

    /// Addresses that are known not to be enrolled: those of nodes, and of pods that the rules leave out.
    #[must_use]
    pub fn clear(&self) -> BTreeSet<IpAddr> {
        let enrolled: HashSet<&IpAddr> =
            self.members.values().flat_map(|member| member.addresses.iter().flatten()).collect();
        let pods = self.outside.iter().filter(|(id, _)| !self.members.contains_key(id));
        let pods = pods.flat_map(|(_, addresses)| addresses.iter().flatten());
        let all = pods.chain(self.nodes.values().flatten());
        all.filter(|address| !enrolled.contains(address)).copied().collect()
    }

    /// Numbers of entries by kind, for the metrics.
    #[must_use]
    pub fn counts(&self) -> [(&'static str, usize); 5] {
        let endpoints = self.slices.values().flatten().map(|slice| slice.endpoints.len()).sum();
        [
            ("enrolled", self.members.len()),
            ("clear_pods", self.outside.len()),
            ("node_addresses", self.nodes.values().map(BTreeSet::len).sum()),
            ("services", self.services.len()),
            ("endpoints", endpoints),
        ]
    }
}

/// Puts `value` under `key`, or removes what is there; returns whether that changed anything.
pub(super) fn put<K: std::hash::Hash + Eq, V: PartialEq>(map: &mut HashMap<K, V>, key: K, value: Option<V>) -> bool {
    match value {
        None => map.remove(&key).is_some(),
        Some(value) if map.get(&key) == Some(&value) => false,
        Some(value) => {
            map.insert(key, value);
            true
        }
    }
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

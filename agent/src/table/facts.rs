//! What is known of the cluster, kept small: addresses, ports and states, and no objects of the API server.

use std::collections::BTreeSet;

use ipnet::IpNet;

use super::endpoints::Slice;
use super::kept::{Kept, Name};
use super::member::{Member, PodId};
use super::nodes::NodeFacts;
use super::pods::Pods;
use super::seeded::Map;
use super::services::Service;
use crate::policy::said::Said;

/// All that the table is made of. Each input replaces its part, one object at a time or as a whole; each
/// change returns whether the table changes with it.
#[derive(Debug, Default)]
pub struct Facts {
    pub(super) services: Kept<Service>,
    /// By EndpointSlice, or by Endpoints on old servers.
    pub(super) slices: Kept<Vec<Slice>>,
    pub(super) members: Map<PodId, Member>,
    /// What the API server shows of pods.
    pub(super) pods: Pods,
    pub(super) nodes: Map<Name, NodeFacts>,
    /// What counts for policies only.
    pub(crate) said: Said,
    pub(crate) settings: Settings,
    heard: [bool; Input::ALL.len() + Input::OF_POLICIES.len()],
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
    /// `None`: network policies are not enforced.
    pub policies: Option<PolicySettings>,
}

/// What the operator says of network policies.
#[derive(Debug, Clone, Default)]
pub struct PolicySettings {
    /// `NAMESPACE/NAME` of the Service of the cluster's DNS.
    pub dns: String,
    /// Cluster IPs of Services.
    pub services: Vec<IpNet>,
    /// First and last of the ports that Services have on all nodes.
    pub node_ports: Option<(u16, u16)>,
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
    /// Labels of namespaces, for policies.
    Namespaces,
    /// NetworkPolicies.
    Policies,
    /// ClusterNetworkPolicies.
    ClusterPolicies,
}

impl Input {
    /// The inputs without which there is no table.
    pub const ALL: [Self; 5] = [Self::Directory, Self::Services, Self::Endpoints, Self::Nodes, Self::Pods];
    /// The inputs of policies besides.
    pub const OF_POLICIES: [Self; 3] = [Self::Namespaces, Self::Policies, Self::ClusterPolicies];

    /// What it is called in messages and as a label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Directory => "directory",
            Self::Services => "services",
            Self::Endpoints => "endpoints",
            Self::Nodes => "nodes",
            Self::Pods => "pods",
            Self::Namespaces => "namespaces",
            Self::Policies => "policies",
            Self::ClusterPolicies => "cluster_policies",
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

    /// Inputs of policies that have not been listed completely yet.
    #[must_use]
    pub fn missing_for_policies(&self) -> Vec<&'static str> {
        let missing = Input::OF_POLICIES.into_iter().filter(|input| !self.heard[*input as usize]);
        missing.map(Input::name).collect()
    }

    /// Namespaces that have more Services or endpoints than are kept.
    #[must_use]
    pub fn crowded(&self) -> BTreeSet<&str> {
        self.services.crowded().iter().chain(self.slices.crowded()).map(|name| &**name).collect()
    }
}

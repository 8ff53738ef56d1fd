//! What is known of a pod when it is decided what it gets.

use std::{collections::BTreeMap, net::IpAddr};

use nebula_cert::issuance;

use crate::{
    cluster::{Cluster, Pod},
    names::is_name,
    policy::kubernetes::KubernetesPolicy,
    refusal::Refusal,
};

/// A pod that somebody has vouched for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Pod UID.
    pub uid: String,
    /// Primary address.
    pub address: IpAddr,
    /// The node it runs on: its name in Kubernetes, or else from where its proof came.
    pub(crate) node: Option<String>,
    /// Whether it is this node that vouches for it.
    pub(crate) is_vouched_by_node: bool,
    /// What the API server adds; none without Kubernetes.
    pub(crate) confirmed: Option<Confirmed>,
}

/// What the API server says of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Confirmed {
    pub(crate) service_account: String,
    pub(crate) node: String,
    pub(crate) labels: BTreeMap<String, String>,
    /// Addresses that its node has reported; none before the first report.
    pub(crate) addresses: Vec<IpAddr>,
}

impl PodFacts {
    /// A pod as its node describes it.
    #[must_use]
    pub fn described(pod: &issuance::Pod) -> Self {
        Self {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
            address: pod.address.to_canonical(),
            node: None,
            is_vouched_by_node: false,
            confirmed: None,
        }
    }

    /// The checks that every proof by Kubernetes shares: the pod runs, in a network of its own, at an address of its
    /// node.
    pub(crate) fn checked(
        pod: &issuance::Pod,
        found: Pod,
        cluster: &dyn Cluster,
        settings: &KubernetesPolicy,
    ) -> Result<Self, Refusal> {
        let facts = Self::described(pod);
        if found.is_over() {
            return Err(Refusal::PodOver(facts.shown()));
        }
        if found.spec.host_network {
            return Err(Refusal::HostNetwork(facts.shown()));
        }
        if settings.node_ranges && is_name(&found.spec.node_name) {
            let ranges = cluster.node_ranges(&found.spec.node_name)?;
            // A node of two families has a range of each; where one is not known, addresses of it are not judged.
            let mut family = ranges.iter().filter(|range| range.addr().is_ipv4() == facts.address.is_ipv4()).peekable();
            if family.peek().is_some() && !family.any(|range| range.contains(&facts.address)) {
                return Err(Refusal::OutsideNodeRanges { address: facts.address, node: found.spec.node_name });
            }
        }
        let addresses = found.addresses();
        let confirmed = Confirmed {
            service_account: found.spec.service_account_name,
            node: found.spec.node_name,
            labels: found.metadata.labels,
            addresses,
        };
        Ok(Self { node: Some(confirmed.node.clone()), confirmed: Some(confirmed), ..facts })
    }

    /// Refuses an address that is not the pod's. A pod that is renumbered is known by its overlay address instead.
    pub(crate) fn check_address(&self, overlay: &[ipnet::IpNet]) -> Result<(), Refusal> {
        let Some(confirmed) = &self.confirmed else { return Ok(()) };
        let is_own =
            |address: &IpAddr| *address == self.address || overlay.iter().any(|network| network.addr() == *address);
        if confirmed.addresses.is_empty() || confirmed.addresses.iter().any(is_own) {
            Ok(())
        } else {
            Err(Refusal::AddressMismatch { address: self.address, pod: self.shown() })
        }
    }

    /// `namespace/name`.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

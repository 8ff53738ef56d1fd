//! What is known about a pod when the service decides what it gets.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf};

use nebula_cert::issuance;

use crate::{
    cluster::{Cluster, Pod, Sandbox},
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
    /// Address of the other family, if there is one.
    pub other_address: Option<IpAddr>,
    /// The node it runs on: its name in Kubernetes, or else the address its proof came from.
    pub(crate) node: Option<String>,
    /// Whether that node vouches for it.
    pub(crate) is_vouched_by_node: bool,
    /// What the API server reports; `None` without Kubernetes.
    pub(crate) confirmed: Option<Confirmed>,
}

/// The primary addresses of a pod that count for its certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodAddresses {
    /// The first one.
    pub first: IpAddr,
    /// The one of the other family.
    pub other: Option<IpAddr>,
}

/// What the API server says about a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Confirmed {
    pub(crate) service_account: String,
    pub(crate) node: String,
    pub(crate) labels: BTreeMap<String, String>,
    /// Addresses that its node has reported; empty before the first report.
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether those addresses are of a sandbox that is gone.
    pub(crate) sandbox: Sandbox,
    /// Whether it has its name from a StatefulSet, whose next pod of that name it will be.
    pub(crate) is_of_stateful_set: bool,
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
            other_address: pod.other_address.map(|other| other.to_canonical()),
            node: None,
            is_vouched_by_node: false,
            confirmed: None,
        }
    }

    /// The checks shared by all proofs with Kubernetes: the pod runs, has a network of its own, and has an address of
    /// its node.
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
            for address in [Some(facts.address), facts.other_address].into_iter().flatten() {
                // A dual-stack node has a range per family; if one is not known, addresses of that family are not
                // checked.
                let mut family = ranges.iter().filter(|range| range.addr().is_ipv4() == address.is_ipv4()).peekable();
                if family.peek().is_some() && !family.any(|range| range.contains(&address)) {
                    return Err(Refusal::OutsideNodeRanges { address, node: found.spec.node_name });
                }
            }
        }
        let (addresses, sandbox) = (found.addresses(), found.sandbox());
        let is_of_stateful_set = found.metadata.ordinal().is_some();
        let confirmed = Confirmed {
            service_account: found.spec.service_account_name,
            node: found.spec.node_name,
            labels: found.metadata.labels,
            addresses,
            sandbox,
            is_of_stateful_set,
        };
        Ok(Self { node: Some(confirmed.node.clone()), confirmed: Some(confirmed), ..facts })
    }

    /// Refuses an address that is not the pod's. The API server may know a renumbered pod by its overlay address
    /// instead.
    pub(crate) fn check_address(&self, overlay: &[ipnet::IpNet]) -> Result<(), Refusal> {
        let Some(confirmed) = &self.confirmed else { return Ok(()) };
        let is_own =
            |address: &IpAddr| *address == self.address || overlay.iter().any(|network| network.addr() == *address);
        let is_next_sandbox = self.is_of_next_sandbox(confirmed);
        if confirmed.addresses.is_empty() || is_next_sandbox || confirmed.addresses.iter().any(is_own) {
            Ok(())
        } else {
            Err(Refusal::AddressMismatch { address: self.address, pod: self.shown() })
        }
    }

    /// Whether the node vouches for the next sandbox of a pod whose last one ended. Its word is enough: the API server
    /// learns of the new address only after the network is set up. So it is where the API server is not told of
    /// sandboxes, for another address than the reported one: a runtime sets up a pod's network again only after it tore
    /// down the last sandbox. A thief of the agent's token gains no more than for a pod whose address is not reported
    /// yet: addresses that nobody else has.
    fn is_of_next_sandbox(&self, confirmed: &Confirmed) -> bool {
        self.is_vouched_by_node
            && match confirmed.sandbox {
                Sandbox::Ready => false,
                Sandbox::Gone => true,
                Sandbox::NotTold => !confirmed.addresses.contains(&self.address),
            }
    }

    /// The address of the other family, unless the API server shows the pod's addresses without it: a cluster of one
    /// family does not report what its network gives to pods besides. As with the first address, the word of the pod's
    /// node is enough where the API server cannot know it yet.
    pub(crate) fn confirmed_other_address(&self) -> Option<IpAddr> {
        self.other_address.filter(|other| {
            self.confirmed.as_ref().is_none_or(|confirmed| {
                confirmed.addresses.is_empty()
                    || self.is_of_next_sandbox(confirmed)
                    || confirmed.addresses.contains(other)
            })
        })
    }

    /// The name for which its address is kept, if it has one.
    pub(crate) fn kept_name(&self) -> Option<String> {
        self.confirmed.as_ref().is_some_and(|confirmed| confirmed.is_of_stateful_set).then(|| self.shown())
    }

    /// The pod as `namespace/name`.
    #[must_use]
    pub fn shown(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Whether this is a valid name of a namespace.
pub(crate) fn is_namespace(text: &str) -> bool {
    text.len() <= 63 && is_label(text)
}

/// Whether this is a valid name of a pod, a node or a service account.
pub(crate) fn is_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_label)
}

/// A DNS label in the sense of RFC 1123, lower case only; its length is bounded by the caller.
fn is_label(text: &str) -> bool {
    let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(is_alphanumeric)
        && bytes.last().is_some_and(is_alphanumeric)
        && bytes.iter().all(|byte| is_alphanumeric(byte) || *byte == b'-')
}

/// How to verify claims about pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesPolicy {
    /// Service account of the node agent, as `namespace/name`.
    pub(crate) node_account: String,
    /// Audience that tokens must be issued for.
    pub(crate) audience: String,
    /// Credentials for the API server; `None` uses those that every pod gets.
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Whether a pod's address must be in the ranges of its node, where the node has any.
    pub(crate) node_ranges: bool,
    /// Namespace and name of the ConfigMap that tells a cluster whom to trust.
    pub(crate) trust_config_map: Option<(String, String)>,
    /// Whether people revoke certificates with tokens of Kubernetes and rights of RBAC.
    pub(crate) revocation: bool,
}

impl KubernetesPolicy {
    /// Namespace and name of the node agent's service account.
    pub(crate) fn node_account(&self) -> (&str, &str) {
        self.node_account.split_once('/').unwrap_or_default()
    }
}

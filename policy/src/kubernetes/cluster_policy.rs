//! ClusterNetworkPolicy of `policy.networking.k8s.io/v1alpha2`. Its definition is installed by the user, so its types
//! are ours. Fields that this release does not know are skipped; what has no known field is unreadable.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector, ObjectMeta};
use k8s_openapi::{ClusterResourceScope, Metadata, Resource};
use serde::{Deserialize, Serialize};

use super::{Unreadable, is_audited, range, selector};
use crate::model::{
    self, Action, ClusterPeer, ClusterRule, ClusterTier, MAX_ITEMS, Namespaces, PodSelector, PortMatch, Selector,
};

/// A ClusterNetworkPolicy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterNetworkPolicy {
    /// Name and annotations.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What it says.
    #[serde(default)]
    pub spec: ClusterNetworkPolicySpec,
    /// What implementations say of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<ClusterNetworkPolicyStatus>,
}

impl Resource for ClusterNetworkPolicy {
    type Scope = ClusterResourceScope;

    const API_VERSION: &'static str = "policy.networking.k8s.io/v1alpha2";
    const GROUP: &'static str = "policy.networking.k8s.io";
    const KIND: &'static str = "ClusterNetworkPolicy";
    const URL_PATH_SEGMENT: &'static str = "clusternetworkpolicies";
    const VERSION: &'static str = "v1alpha2";
}

impl Metadata for ClusterNetworkPolicy {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// What a ClusterNetworkPolicy says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterNetworkPolicySpec {
    /// `Admin` or `Baseline`.
    #[serde(default)]
    pub tier: String,
    /// 0 to 1000; lower ones come first.
    #[serde(default)]
    pub priority: i32,
    /// Pods that it applies to.
    #[serde(default)]
    pub subject: Subject,
    /// Rules for flows to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ingress: Option<Vec<ClusterNetworkPolicyRule>>,
    /// Rules for flows from them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<ClusterNetworkPolicyRule>>,
}

/// Conditions of a ClusterNetworkPolicy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterNetworkPolicyStatus {
    /// One of each type.
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// Pods that a policy applies to: one of the fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Subject {
    /// All pods of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    /// Pods of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<NamespacedPod>,
}

/// Pods by the labels of their namespaces and their own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamespacedPod {
    /// Namespaces; an empty selector for all.
    #[serde(default)]
    pub namespace_selector: LabelSelector,
    /// Pods; an empty selector for all.
    #[serde(default)]
    pub pod_selector: LabelSelector,
}

/// A rule of either direction.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterNetworkPolicyRule {
    /// A name for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// `Accept`, `Deny` or `Pass`.
    #[serde(default)]
    pub action: String,
    /// Ingress: the other ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<Vec<Peer>>,
    /// Egress: the other ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<Vec<Peer>>,
    /// Protocols and ports; missing for everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protocols: Option<Vec<Protocol>>,
}

/// The other end of flows: one of the fields. Only those of `to` may have the last three.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Peer {
    /// All pods of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<LabelSelector>,
    /// Pods of namespaces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pods: Option<NamespacedPod>,
    /// Nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<LabelSelector>,
    /// Ranges of addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub networks: Option<Vec<String>>,
    /// Names, with `*.` for all below one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain_names: Option<Vec<String>>,
}

/// A protocol and its destination ports: one of the fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Protocol {
    /// TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp: Option<DestinationPort>,
    /// UDP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp: Option<DestinationPort>,
    /// SCTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sctp: Option<DestinationPort>,
    /// The name of a port of the destination pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_named_port: Option<String>,
}

/// What a rule says of a protocol.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DestinationPort {
    /// Destination ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination_port: Option<PortOrRange>,
}

/// One of the fields.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PortOrRange {
    /// One port.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub number: Option<i32>,
    /// Several ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub range: Option<PortRange>,
}

/// Ports from the first to the last one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PortRange {
    /// The first one.
    #[serde(default)]
    pub start: i32,
    /// The last one.
    #[serde(default)]
    pub end: i32,
}

impl TryFrom<&ClusterNetworkPolicy> for model::ClusterNetworkPolicy {
    type Error = Unreadable;

    fn try_from(policy: &ClusterNetworkPolicy) -> Result<Self, Unreadable> {
        let spec = &policy.spec;
        let tier = match spec.tier.as_str() {
            "Admin" => ClusterTier::Admin,
            "Baseline" => ClusterTier::Baseline,
            _ => return Err(Unreadable("tier")),
        };
        let priority = u16::try_from(spec.priority).ok().filter(|priority| *priority <= MAX_PRIORITY);
        let subject = match (&spec.subject.namespaces, &spec.subject.pods) {
            (Some(namespaces), None) => of_namespaces(namespaces),
            (None, Some(pods)) => of_pods(pods),
            (None, None) | (Some(_), Some(_)) => return Err(Unreadable("subject")),
        };
        // One more than is used, so that the compiler sees that there are too many.
        let ingress = spec.ingress.iter().flatten().take(MAX_ITEMS + 1);
        let egress = spec.egress.iter().flatten().take(MAX_ITEMS + 1);
        Ok(Self {
            name: policy.metadata.name.clone().ok_or(Unreadable("name"))?,
            is_audited: is_audited(&policy.metadata),
            tier,
            priority: priority.ok_or(Unreadable("priority"))?,
            subject,
            ingress: ingress.map(|item| rule(item, &item.from)).collect(),
            egress: egress.map(|item| rule(item, &item.to)).collect(),
        })
    }
}

fn of_namespaces(namespaces: &LabelSelector) -> PodSelector {
    PodSelector { namespaces: Namespaces::Matching(selector(namespaces)), pods: Selector::everything() }
}

fn of_pods(pods: &NamespacedPod) -> PodSelector {
    let namespaces = Namespaces::Matching(selector(&pods.namespace_selector));
    PodSelector { namespaces, pods: selector(&pods.pod_selector) }
}

fn rule(rule: &ClusterNetworkPolicyRule, peers: &Option<Vec<Peer>>) -> ClusterRule {
    let action = match rule.action.as_str() {
        "Accept" => Action::Accept,
        "Deny" => Action::Deny,
        "Pass" => Action::Pass,
        _ => Action::Unreadable,
    };
    let protocols = match rule.protocols.as_deref() {
        // The API wants at least one; whatever none means, it is not everything.
        Some([]) => vec![PortMatch::Unreadable],
        protocols => protocols.unwrap_or_default().iter().take(MAX_ITEMS + 1).map(protocol).collect(),
    };
    ClusterRule {
        name: rule.name.clone().unwrap_or_default(),
        action,
        peers: peers.iter().flatten().take(MAX_ITEMS + 1).map(peer).collect(),
        protocols,
    }
}

fn peer(peer: &Peer) -> ClusterPeer {
    match (&peer.namespaces, &peer.pods, &peer.nodes, &peer.networks, &peer.domain_names) {
        (Some(namespaces), None, None, None, None) => ClusterPeer::Pods(of_namespaces(namespaces)),
        (None, Some(pods), None, None, None) => ClusterPeer::Pods(of_pods(pods)),
        (None, None, Some(nodes), None, None) => ClusterPeer::Nodes(selector(nodes)),
        (None, None, None, Some(networks), None) => {
            let ranges = networks.iter().take(MAX_ITEMS + 1).map(|text| range(text));
            ranges.collect::<Option<_>>().map_or(ClusterPeer::Unreadable, ClusterPeer::Networks)
        }
        (None, None, None, None, Some(names)) => {
            ClusterPeer::DomainNames(names.iter().take(MAX_ITEMS + 1).cloned().collect())
        }
        _ => ClusterPeer::Unreadable,
    }
}

fn protocol(item: &Protocol) -> PortMatch {
    let ports = |protocol, ports: &DestinationPort| {
        let (first, last) = match ports.destination_port.as_ref()? {
            PortOrRange { number: Some(number), range: None } => (*number, *number),
            PortOrRange { number: None, range: Some(range) } => (range.start, range.end),
            PortOrRange { number: None, range: None } | PortOrRange { number: Some(_), range: Some(_) } => return None,
        };
        let port = |number| u16::try_from(number).ok().filter(|port| *port > 0);
        Some(PortMatch::Ports { protocol, first: port(first)?, last: port(last)? })
    };
    let read = match (&item.tcp, &item.udp, &item.sctp, &item.destination_named_port) {
        (Some(tcp), None, None, None) => ports(model::Protocol::Tcp, tcp),
        (None, Some(udp), None, None) => ports(model::Protocol::Udp, udp),
        (None, None, Some(sctp), None) => ports(model::Protocol::Sctp, sctp),
        (None, None, None, Some(name)) if !name.is_empty() => {
            Some(PortMatch::Name { protocol: None, name: name.clone() })
        }
        _ => None,
    };
    read.unwrap_or(PortMatch::Unreadable)
}

/// The last priority of the API.
const MAX_PRIORITY: u16 = 1000;

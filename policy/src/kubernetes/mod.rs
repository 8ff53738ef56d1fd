//! Policies as the API server sends them, and what they are in our [model](crate::model).
//!
//! Conversions never fail because of something that a rule says: they mark it as unreadable, and the compiler closes
//! what depends on it. They fail if it is not known to which pods or at which place a policy applies ([`Unreadable`]).

mod cluster_policy;
mod network_policy;

use std::collections::BTreeMap;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};

pub use cluster_policy::{
    ClusterNetworkPolicy, ClusterNetworkPolicyRule, ClusterNetworkPolicySpec, ClusterNetworkPolicyStatus,
    DestinationPort, NamespacedPod, Peer, PortOrRange, PortRange, Protocol, Subject,
};

use crate::model::{MAX_GROUPS, Requirement, Selector};

/// Annotation of a policy that is evaluated for audit only, if its value is `true`.
pub const AUDIT: &str = "nebula-cni/audit";

/// Annotation of a NetworkPolicy: groups, separated by commas. Peers that are no pods and carry one of them in their
/// certificates are allowed by each of its rules for ingress that names peers, at the rule's ports.
pub const ALLOW_GROUPS: &str = "nebula-cni/allow-groups";

/// A policy cannot be placed: it is not known which pods it selects, or when it is evaluated. The last version that
/// could be read stays in force, and the policy's status says so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the policy cannot be read: its {0} is missing or of a newer version of the API")]
pub struct Unreadable(pub &'static str);

fn is_audited(metadata: &ObjectMeta) -> bool {
    metadata.annotations.as_ref().and_then(|annotations| annotations.get(AUDIT)).is_some_and(|value| value == "true")
}

/// The groups that a policy allows; `None` if it names none.
fn groups(metadata: &ObjectMeta) -> Option<Arc<[String]>> {
    let text = metadata.annotations.as_ref()?.get(ALLOW_GROUPS)?;
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    // One more than is used, so that the compiler sees that there are too many.
    let names: Arc<[String]> = names.take(MAX_GROUPS + 1).map(str::to_owned).collect();
    (!names.is_empty()).then_some(names)
}

/// A selector; with an operator that is unknown, or with anything else that is invalid, an invalid one.
#[must_use]
pub fn selector(selector: &LabelSelector) -> Selector {
    let labels: Option<&BTreeMap<String, String>> = selector.match_labels.as_ref();
    let equal = labels.into_iter().flatten();
    let equal = equal.map(|(key, value)| Some(Requirement::In(key.clone(), vec![value.clone()])));
    let expressions = selector.match_expressions.iter().flatten().map(|expression| {
        let (key, values) = (expression.key.clone(), expression.values.clone().unwrap_or_default());
        match expression.operator.as_str() {
            "In" => Some(Requirement::In(key, values)),
            "NotIn" => Some(Requirement::NotIn(key, values)),
            "Exists" if values.is_empty() => Some(Requirement::Exists(key)),
            "DoesNotExist" if values.is_empty() => Some(Requirement::DoesNotExist(key)),
            _ => None,
        }
    });
    Selector::new(equal.chain(expressions))
}

/// A range of addresses. Bits after the prefix are ignored, as the API server does with policies of old releases.
fn range(text: &str) -> Option<IpNet> {
    text.parse().ok()
}

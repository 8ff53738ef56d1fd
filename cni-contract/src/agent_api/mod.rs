//! What an agent answers over its API and kubectl's plugin asks for: names, documents, and how people see them.
//!
//! A reader skips fields that it does not know. What a document lacks, because a program of another release wrote it,
//! reads as absent, empty or false.

mod findings;
mod flows;
mod node;
mod placed;
mod pods;
mod policies;
mod refused;
#[cfg(test)]
mod tests;
mod upgrade;
mod why;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use findings::{Finding, Findings, Severity};
pub use flows::{FlowLine, FlowsState, MAX_LINE};
pub use node::{ExpiringCertificate, NodeStatus, PartState, PodCounts, TrustedCa, parts_table};
pub use placed::AgentPod;
pub use pods::{PodState, PodStates, largest_unit};
pub use policies::{PolicySeen, PolicyTested};
pub use refused::{Lacking, Refused};
pub use upgrade::{FailedUpgrade, UpgradePause, UpgradeState};
pub use why::WhyFacts;

/// The document with every text in it changed, keys as well: tables print texts as they are.
///
/// # Errors
/// Returns an error if the changed document is none of its type.
pub fn change_texts<T: Serialize + DeserializeOwned>(
    document: &T,
    change: &mut dyn FnMut(&str) -> String,
) -> serde_json::Result<T> {
    serde_json::from_value(changed(serde_json::to_value(document)?, change))
}

fn changed(value: Value, change: &mut dyn FnMut(&str) -> String) -> Value {
    match value {
        Value::String(text) => Value::String(change(&text)),
        Value::Array(items) => items.into_iter().map(|item| changed(item, change)).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(key, value)| (change(&key), changed(value, change))).collect()
        }
        other => other,
    }
}

/// The version of the API, which begins each path.
pub const VERSION: &str = "v1";
/// Paths begin with it and the name of a node: `/v1/nodes/NODE/status`. Whichever agent is asked forwards to that
/// node's.
const NODES: &str = "/v1/nodes/";
/// Path of [`NodeStatus`].
pub const STATUS_PATH: &str = "/v1/status";
/// Path of [`PodStates`]; `namespace=NAME` limits it.
pub const PODS_PATH: &str = "/v1/pods";
/// Path of lines, each a [`FlowLine`]; the conditions of a [`Filter`](crate::flow_records::Filter) limit them.
pub const FLOWS_PATH: &str = "/v1/flows";
/// Path of [`UpgradeState`].
pub const UPGRADE_PATH: &str = "/v1/upgrade";
/// A POST to this path pauses upgrades.
pub const PAUSE_PATH: &str = "/v1/upgrade/pause";
/// A POST to this path resumes upgrades.
pub const RESUME_PATH: &str = "/v1/upgrade/resume";
/// Path of [`Findings`]; `namespace=NAME` limits it to the pods of that namespace, `pod=NAME` to one of them.
pub const DOCTOR_PATH: &str = "/v1/doctor";
/// Path of [`WhyFacts`]; `from` and `to` are the ends of the flow, as on the command line.
pub const WHY_PATH: &str = "/v1/why";
/// Path of [`PolicyTested`]; `from` and `to` are the ends of the flow, as on the command line.
pub const POLICY_TEST_PATH: &str = "/v1/policy/test";
/// Path of [`PolicySeen`]; `namespace=NAME` is that of the pods.
pub const POLICY_SEEN_PATH: &str = "/v1/policy/seen";
/// Name of the port in the agent's pod, and of that of the Service.
pub const PORT_NAME: &str = "api";
/// The Service in front of all agents. RBAC limits who may use its proxy by this name and that of the port.
pub const SERVICE: &str = "nebula-cni-agent-api";
/// Selects the pods of agents, as a parameter in a URL.
pub const SELECTOR: &str = "labelSelector=app.kubernetes.io%2Fname%3Dnebula-cni-agent";
/// Marks what an agent forwards to another one, which does not forward it further.
pub const FORWARDED_HEADER: &str = "x-nebula-forwarded";
/// Whom a token must be for.
pub const AUDIENCE: &str = "nebula-cni-agent";
/// Carries the token: the API server drops `Authorization` where it forwards a request.
pub const TOKEN_HEADER: &str = "x-nebula-token";
/// API group of what RBAC allows. No API server has resources in it.
pub const GROUP: &str = "nebula-cni";

/// The path, such as [`STATUS_PATH`], at the agent of a node.
#[must_use]
pub fn on_node(node: &str, path: &str) -> String {
    format!("{NODES}{node}{}", path.strip_prefix("/v1").unwrap_or(path))
}

/// The node whose agent a path is for, and the path there.
#[must_use]
pub fn of_node(path: &str) -> Option<(&str, String)> {
    let (node, rest) = path.strip_prefix(NODES)?.split_once('/')?;
    Some((node, format!("/{VERSION}/{rest}")))
}

/// Whether a name may be part of a path.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    (1..=253).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with('.')
}

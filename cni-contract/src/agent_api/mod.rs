//! What an agent answers over its API and kubectl's plugin asks for: names, documents, and how people see them.
//!
//! A reader skips fields that it does not know. What a document lacks, because a program of another release wrote it,
//! reads as absent, empty or false.

mod findings;
mod flows;
mod node;
mod pods;
mod refused;
#[cfg(test)]
mod tests;
mod upgrade;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

pub use findings::{Finding, Findings, Severity};
pub use flows::{FlowLine, FlowsState, MAX_LINE};
pub use node::{ExpiringCertificate, NodeStatus, PartState, PodCounts, parts_table};
pub use pods::{PodState, PodStates, largest_unit};
pub use refused::{Lacking, Refused};
pub use upgrade::{FailedUpgrade, UpgradePause, UpgradeState};

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
/// Name of the port in the agent's pod.
pub const PORT_NAME: &str = "api";
/// Whom a token must be for.
pub const AUDIENCE: &str = "nebula-cni-agent";
/// Carries the token: the API server drops `Authorization` where it forwards a request.
pub const TOKEN_HEADER: &str = "x-nebula-token";
/// API group of what RBAC allows. No API server has resources in it.
pub const GROUP: &str = "nebula-cni";

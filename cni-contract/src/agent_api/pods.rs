//! How the pods of a node stand.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::instance_status::Status;

/// An answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodStates {
    /// In the order of their names.
    pub pods: Vec<PodState>,
}

/// A pod with a tunnel, or one that should have one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodState {
    /// Name of its node, where there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// NAMESPACE/NAME.
    pub pod: String,
    /// Name of the pod's network.
    pub network: String,
    /// The status document of its instance; `null` if that does not answer.
    pub status: Value,
    /// Why the instance does not answer.
    pub problem: Option<String>,
    /// Whether it is enrolled and runs without a tunnel.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_unprotected: bool,
}

impl PodState {
    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        self.pod.split_once('/').map(|(namespace, _)| namespace)
    }

    /// Whether its instance answers and carries the packets of the pod.
    #[must_use]
    pub fn is_well(&self) -> bool {
        self.problem.is_none() && matches!(self.status["state"].as_str(), Some("running" | "provisional"))
    }

    /// One line for each pod, below a head, with their nodes if they have one. All texts are printed as they are.
    #[must_use]
    pub fn table(pods: &[Self], now: i64) -> String {
        let width = |text: fn(&Self) -> &str, head: &str| {
            let widest = pods.iter().map(|pod| text(pod).chars().count()).max().unwrap_or_default();
            widest.max(head.len())
        };
        let widest = width(|pod| &pod.pod, "POD");
        let has_nodes = pods.iter().any(|pod| pod.node.is_some());
        let widest_node = width(|pod| pod.node.as_deref().unwrap_or_default(), "NODE");
        let of_node = |node: &str| if has_nodes { format!("{node:widest_node$}  ") } else { String::new() };
        let (head, nothing) = (of_node("NODE"), of_node(""));
        let mut text =
            format!("{head}{:widest$}  {:<11}  {:<11}  {:>7}  OVERLAY\n", "POD", "STATE", "CERTIFICATE", "TUNNELS");
        for pod in pods {
            let node = of_node(pod.node.as_deref().unwrap_or_default());
            let Ok(status) = serde_json::from_value::<Status>(pod.status.clone()) else {
                let problem = pod.problem.as_deref().unwrap_or("what it says is no status");
                let state = if pod.is_unprotected { "UNPROTECTED" } else { "no answer" };
                let _ = writeln!(text, "{node}{:widest$}  {state:<11}  {problem}", pod.pod);
                continue;
            };
            let certificate = match status.certificate {
                Some(certificate) if certificate.not_after <= now => "expired".to_owned(),
                Some(certificate) => format!("for {}", largest_unit(certificate.not_after - now)),
                None => "none".to_owned(),
            };
            let (state, tunnels, overlay) = (status.state.word(), status.tunnels.len(), status.overlay.join(" "));
            let _ =
                writeln!(text, "{node}{:widest$}  {state:<11}  {certificate:<11}  {tunnels:>7}  {overlay}", pod.pod);
            let without_policies = status.table.and_then(|table| table.closed);
            for problem in [status.closed, without_policies, status.last_error].into_iter().flatten() {
                let _ = writeln!(text, "{nothing}{:widest$}  -> {problem}", "");
            }
        }
        text
    }
}

/// A time as its largest unit.
#[must_use]
pub fn largest_unit(seconds: i64) -> String {
    const UNITS: [(i64, &str); 3] = [(86_400, "d"), (3600, "h"), (60, "min")];
    let largest = UNITS.iter().find(|(unit, _)| seconds >= 2 * unit);
    largest.map_or_else(|| format!("{seconds} s"), |(unit, name)| format!("{} {name}", seconds / unit))
}

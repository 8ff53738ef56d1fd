//! How the policy trusts Kubernetes: whose tokens vouch for pods, and which API server confirms them.

use std::path::PathBuf;

/// Whom to believe about pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubernetesPolicy {
    /// Service account of the node agent, as `namespace/name`.
    pub(crate) node_account: String,
    /// Audience for which tokens must be made.
    pub(crate) audience: String,
    /// Credentials for the API server; none takes those every pod gets.
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Whether a pod's address must be in the ranges of its node, where the node has any.
    pub(crate) node_ranges: bool,
}

impl KubernetesPolicy {
    /// Namespace and name of the node agent's service account.
    pub(crate) fn node_account(&self) -> (&str, &str) {
        self.node_account.split_once('/').unwrap_or_default()
    }
}

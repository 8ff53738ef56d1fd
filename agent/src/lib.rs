//! The node agent: prepares a Kubernetes node for the plugin, proves that the runtime uses it, and keeps every enrolled
//! pod of the node protected (`nebula-cni-agent`, a DaemonSet).

pub mod cluster;
pub mod config;
pub mod host_root;
pub mod metrics;
pub mod on_host;
pub mod process;
pub mod readiness;
pub mod reconcile;
pub mod released;
pub mod runtime;

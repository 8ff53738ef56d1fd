//! The node agent: prepares a Kubernetes node for the plugin, proves that the runtime uses it, and keeps every enrolled
//! pod of the node protected (`nebula-cni-agent`, a DaemonSet).

pub mod ca;
pub mod chain;
pub mod cluster;
mod cni_cache;
pub mod config;
pub mod credentials;
pub mod durable;
pub mod host_root;
pub mod listener;
pub mod metrics;
pub mod node_credential;
pub mod on_host;
pub mod places;
pub mod pod_status;
pub mod process;
pub mod programs;
pub mod readiness;
pub mod reconcile;
pub mod released;
pub mod retirement;
pub mod run;
pub mod runtime;
pub mod self_test;
pub mod status;
pub mod table;
pub mod underlay;
pub mod uninstall;
pub mod watch;

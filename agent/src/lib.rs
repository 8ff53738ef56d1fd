//! The node agent: prepares a Kubernetes node for the plugin, proves that the runtime uses it, and keeps every enrolled
//! pod of the node protected (`nebula-cni-agent`, a DaemonSet).

pub mod api;
pub mod ca;
mod chain;
pub mod cluster;
mod cni_cache;
pub mod config;
pub mod credentials;
mod doctor;
mod durable;
pub mod flows;
pub mod host_root;
mod listener;
mod metrics;
mod network;
pub mod node;
pub mod node_credential;
pub mod on_host;
pub mod places;
pub mod pod_status;
pub mod policy;
pub mod process;
mod programs;
pub mod readiness;
pub mod reconcile;
mod released;
mod retirement;
pub mod rollout;
pub mod run;
pub mod runtime;
mod self_test;
pub mod status;
pub mod table;
mod underlay;
pub mod uninstall;
mod watch;
pub mod why;

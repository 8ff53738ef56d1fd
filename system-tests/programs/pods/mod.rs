//! Pods of one or two nodes: plugin, instance, init container and what they may and cost, under real runtimes.

mod ca_access;
mod capture_instance;
mod capture_speed;
mod captured;
mod chains;
mod changed_settings;
mod chaos;
mod control_groups;
mod emptied_state;
mod identities;
mod init_container;
mod isolation;
mod killed;
mod kube_labels;
mod lifecycle;
mod load;
mod memory;
mod network_speed;
mod primary;
pub(crate) mod runtime;
mod sidecar;
mod supervised;
mod upgrade;
mod walls;

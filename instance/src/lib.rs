//! The host side of Nebula: the `nebula` daemon and one pod's tunnel, around `nebula-core`.

pub mod admin;
pub mod ca_client;
pub mod config_file;
pub mod daemon;
mod dns;
pub mod enrol;
mod errno;
mod events;
mod expiry;
mod firewall_hash;
pub mod go_flags;
pub mod life_cycle;
pub mod log;
mod metrics;
pub mod names;
pub mod netns;
pub mod notify;
pub mod overlay_link;
pub mod pod_tunnel;
pub mod reload;
mod report;
mod rtnetlink;
pub mod signals;
mod subnets;
mod system_routes;
mod until_stopped;

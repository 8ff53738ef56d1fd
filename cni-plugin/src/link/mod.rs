//! A pod's own interface as seen from the node: the node's end of it, and the rules and routes there.

mod attached;
pub mod capture;
pub mod capture_guard;
pub mod capture_rules;
pub mod clear;
pub mod clear_policy;
pub mod guard;
pub mod host_route;
mod ip;
pub mod masquerade;
pub mod own_source;
pub mod pod_link;
pub mod service_choice;
mod tcx;
pub mod veth;

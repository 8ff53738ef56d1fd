//! The node agent beside a real containerd, and beside a CA that refuses it.

mod cost;
mod flow_costs;
mod large_cluster;
mod node_credential;
mod orders;
mod prepared;
mod repair;
mod rollout;
mod units;

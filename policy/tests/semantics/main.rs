//! What each line of the API says, as policies that the API server sends and flows that are judged.
#![allow(clippy::unwrap_used, reason = "in the helpers of tests too, a panic is the report")]

mod audit;
mod bounds;
mod cluster_policy;
mod dependents;
mod groups;
mod network_policy;
mod town;

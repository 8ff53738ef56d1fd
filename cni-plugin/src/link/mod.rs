//! A pod's own interface as the node sees it: its other end, the rules and the routes there.

pub mod guard;
pub mod host_route;
pub mod pod_link;

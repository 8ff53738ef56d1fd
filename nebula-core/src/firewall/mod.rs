//! Packet filter: rules that match the peer's certificate, and the flows already allowed.

mod check;
mod conntrack;
mod filter;
mod flow_cache;
mod flow_entry;
mod flow_table;
mod index;
mod nearest;
mod rules;
mod shares;
#[cfg(test)]
mod tests;

pub use check::Explanation;
pub(crate) use check::Firewall;
pub use conntrack::KnownFlow;
pub(crate) use conntrack::{Conntrack, HandedOverFlow};
pub(crate) use filter::{Filter, Peer};
pub(crate) use flow_cache::FlowCache;
pub use nearest::{Difference, NearMiss};
pub use rules::{Action, Cidr, Policy, PortRange, Protocol, Rule};

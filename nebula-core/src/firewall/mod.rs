//! Packet filter: rules that match the peer's certificate, policies of the network, and the flows already allowed.

mod check;
mod conntrack;
mod filter;
mod flow_cache;
mod flow_entry;
mod flow_table;
mod index;
mod nearest;
mod network_policy;
mod records;
mod rules;
mod shares;
#[cfg(test)]
mod tests;

pub use check::Explanation;
pub(crate) use check::{About, Firewall};
pub use conntrack::KnownFlow;
pub(crate) use conntrack::{Conntrack, HandedOverFlow};
use filter::Admitted;
pub(crate) use filter::{Filter, Peer};
pub(crate) use flow_cache::{Claim, FlowCache, Passed, Place};
pub use nearest::{Difference, NearMiss};
pub use network_policy::{NetworkPolicy, Occasion, OtherEnd, PolicyVerdict};
pub(crate) use records::Completion;
pub use records::{Amount, AskedRecords, Decision, End, FlowEvent, FlowPath, FlowRecord, FlowRecords, PolicyDecision};
pub use rules::{Action, Cidr, Policy, PortRange, Protocol, Rule};

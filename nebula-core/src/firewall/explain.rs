//! Says what the firewall makes of a flow, without being a packet of it: nothing is remembered or renewed.

use std::time::{Duration, Instant};

use super::{Firewall, Peer, Policy};
use crate::counters::Direction;
use crate::drop_reason::DropReason;
use crate::wire::ip::FlowKey;

/// What the firewall makes of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Whether the peer's certificate and the own one cover the addresses.
    pub addresses: Result<(), DropReason>,
    /// The flow, if it is remembered and its rule still stands.
    pub known: Option<KnownFlow>,
    /// First rule of the direction that allows it, by its place in the policy.
    pub rule: Option<usize>,
}

/// A flow that connection tracking remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownFlow {
    /// In which it began.
    pub direction: Direction,
    /// Packets went both ways.
    pub answered: bool,
    /// Since its last packet.
    pub idle: Duration,
}

impl Explanation {
    /// Whether a packet of the flow passes.
    ///
    /// # Errors
    /// Why not.
    pub fn verdict(&self) -> Result<(), DropReason> {
        self.addresses?;
        if self.known.is_some() || self.rule.is_some() { Ok(()) } else { Err(DropReason::NoRule) }
    }
}

impl Firewall<'_> {
    /// Explains a flow with this peer. `policy` is what the filter was made of.
    pub(crate) fn explain(
        &self,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
        policy: &Policy,
    ) -> Explanation {
        Explanation {
            addresses: self.filter.check_addresses(flow, peer),
            known: self.known(self.conntrack.millis(now), flow, peer),
            rule: self.filter.rule_that_allows(policy, direction, flow, peer),
        }
    }
}

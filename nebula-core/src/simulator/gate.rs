//! A firewall on its own, to measure what one decision costs.

use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;

use crate::counters::Direction;
use crate::firewall::{Conntrack, Filter, Firewall, FlowCache, Policy};
use crate::index::LocalIndex;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;
use crate::{DropReason, Forwarder};

/// Rules, known flows, and what one lane keeps at hand.
#[derive(Debug)]
pub struct Gate {
    filter: Filter,
    conntrack: Conntrack,
    cache: FlowCache,
    tunnel: Arc<Tunnel>,
}

impl Gate {
    /// Between a host with these networks and the peer of one of its tunnels; `None` if it has no such tunnel.
    #[must_use]
    pub fn new(
        policy: &Policy,
        own: &[IpNet],
        forwarder: &Forwarder,
        tunnel: LocalIndex,
        now: Instant,
    ) -> Option<Self> {
        Some(Self {
            filter: Filter::new(policy, own, &[], 1),
            conntrack: Conntrack::new(now, 7, policy.max_flows),
            cache: FlowCache::default(),
            tunnel: forwarder.tunnels().by_index(tunnel)?,
        })
    }

    /// Decides about one packet.
    ///
    /// # Errors
    /// Why it is dropped.
    pub fn check(&mut self, now: Instant, direction: Direction, flow: &FlowKey) -> Result<(), DropReason> {
        let firewall = Firewall { filter: &self.filter, conntrack: &self.conntrack };
        firewall.check(&mut self.cache, now, direction, flow, &self.tunnel, |_| None)
    }
}

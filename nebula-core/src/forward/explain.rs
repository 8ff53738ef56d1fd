//! Explains how a flow would be routed and filtered, without sending a packet.

use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;

use super::{Forwarder, outbound};
use crate::DropReason;
use crate::counters::Direction;
use crate::firewall::{Explanation, Firewall, Peer, Policy};
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// The route of packets to the remote end of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The peer that receives them.
    pub peer: IpAddr,
    /// The subnet route they take; `None` if the destination is an overlay address.
    pub subnet: Option<IpNet>,
    /// Fallback gateways for while the peer is unreachable, in order of preference.
    pub others: Vec<IpAddr>,
}

impl Forwarder {
    /// The route of packets to the remote end of a flow.
    ///
    /// # Errors
    /// Returns the reason why such a packet would be dropped.
    pub(crate) fn explain_route(&self, flow: &FlowKey) -> Result<Route, DropReason> {
        let snapshot = self.snapshot.load();
        let hop = outbound::route(&snapshot, flow)?;
        let subnet = if snapshot.routes.is_overlay(flow.remote) { None } else { snapshot.routes.subnet(flow.remote) };
        Ok(Route { peer: hop.peer, subnet, others: hop.others().collect() })
    }

    /// Explains the firewall's verdict on a flow through `tunnel`; `policy` is the one in force.
    pub(crate) fn explain_firewall(
        &self,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        tunnel: &Tunnel,
        policy: &Policy,
    ) -> Explanation {
        let snapshot = self.snapshot.load();
        let firewall = Firewall { filter: &snapshot.filter, conntrack: &self.conntrack };
        let peer = Peer::new(tunnel, snapshot.routes.shared(flow, tunnel));
        firewall.explain(now, direction, flow, peer, policy)
    }
}

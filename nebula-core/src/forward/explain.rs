//! Says which way a flow would take, without being a packet of it.

use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;

use super::{Forwarder, outbound};
use crate::DropReason;
use crate::counters::Direction;
use crate::firewall::{Explanation, Firewall, Peer, Policy};
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// Where packets to the remote end of a flow go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The peer that gets them.
    pub peer: IpAddr,
    /// The subnet route they take; `None`: the peer has the address itself.
    pub subnet: Option<IpNet>,
    /// Gateways that take its place while it is not reachable, in this order.
    pub others: Vec<IpAddr>,
}

impl Forwarder {
    /// Where packets to the remote end of a flow go.
    ///
    /// # Errors
    /// Why nowhere.
    pub(crate) fn explain_route(&self, flow: &FlowKey) -> Result<Route, DropReason> {
        let snapshot = self.snapshot.load();
        let hop = outbound::route(&snapshot, flow)?;
        let subnet = if snapshot.routes.is_overlay(flow.remote) { None } else { snapshot.routes.subnet(flow.remote) };
        Ok(Route { peer: hop.peer, subnet, others: hop.others().collect() })
    }

    /// What the firewall makes of a flow through `tunnel`; `policy` is the one in force.
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

//! Explains how a flow would be routed and filtered, without sending a packet.

use std::net::IpAddr;
use std::time::Instant;

use ipnet::IpNet;

use super::Forwarder;
use super::reject::is_for_many;
use crate::DropReason;
use crate::capture::{Course, NoCourse};
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

/// What capture does with a flow of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capture {
    /// The destination is an enrolled pod; the flow goes on as it is.
    Peer,
    /// The flow goes on with these addresses and ports: to the endpoint of a Service that it has or would get, or to
    /// an enrolled pod from another port.
    Translated(FlowKey),
    /// The endpoint that it has or would get is this node itself.
    ToSelf,
    /// It leaves on the primary network: the destination is known not to be enrolled.
    Clear,
    /// Nothing is known about the destination: packets wait for a moment and are then dropped.
    Unknown,
    /// It is answered like a closed port: a Service without an endpoint to choose, or a destination that policy
    /// excludes.
    Refused,
}

impl Forwarder {
    /// What capture does with a flow of this node; `None` if this node captures nothing.
    pub(crate) fn explain_capture(&self, now: Instant, flow: &FlowKey) -> Option<Capture> {
        let snapshot = self.snapshot.load();
        let directory = &snapshot.capture.as_ref().filter(|_| !is_for_many(flow.remote))?.directory;
        Some(match self.translations.preview(&**directory, flow, now) {
            Ok(Course::Direct) => Capture::Peer,
            Ok(Course::Translated(translation)) => Capture::Translated(translation.wire),
            Ok(Course::ToSelf(_) | Course::BackToSelf(_)) => Capture::ToSelf,
            Ok(Course::Bypass) => Capture::Clear,
            Err(NoCourse::Unknown) => Capture::Unknown,
            Err(NoCourse::Refused | NoCourse::EndpointGone | NoCourse::Full) => Capture::Refused,
        })
    }

    /// The flow as this node's programs see it, if packets of an inbound flow are translated back.
    pub(crate) fn explain_back(&self, flow: &FlowKey) -> Option<FlowKey> {
        self.snapshot.load().capture.as_ref()?;
        self.translations.of_wire(flow).map(|translation| translation.original)
    }

    /// The route of packets to the remote end of a flow.
    ///
    /// # Errors
    /// Returns the reason why such a packet would be dropped.
    pub(crate) fn explain_route(&self, flow: &FlowKey) -> Result<Route, DropReason> {
        let snapshot = self.snapshot.load();
        let hop = snapshot.next_hop(flow, false)?;
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

    /// Why the policies of the network refuse a flow through `tunnel`, or would if those in audit were enforced.
    pub(crate) fn explain_policies(&self, direction: Direction, flow: &FlowKey, tunnel: &Tunnel) -> Option<String> {
        let snapshot = self.snapshot.load();
        let peer = Peer::new(tunnel, snapshot.routes.shared(flow, tunnel));
        snapshot.filter.policy_reason(direction, flow, peer)
    }
}

//! Says what would become of a packet: its route, its tunnel, and what the firewall makes of it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::{Node, TunnelStatus};
use crate::DropReason;
use crate::counters::Direction;
use crate::firewall::{Explanation, Rule};
use crate::forward::Route;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// What would become of a packet.
#[derive(Debug, Clone)]
pub struct FlowTrace {
    /// Which way the packet goes.
    pub direction: Direction,
    /// Where packets to the remote end go. For an inbound packet that is the way of its answer.
    pub route: Result<Route, DropReason>,
    /// The tunnel that carries it.
    pub tunnel: Option<TunnelStatus>,
    /// What the firewall makes of it. It looks at the peer's certificate, so without a tunnel there is nothing to say.
    pub firewall: Option<Explanation>,
    /// The rule that the explanation names.
    pub rule: Option<Rule>,
    /// What becomes of it.
    pub outcome: Outcome,
}

/// What becomes of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It arrives.
    Passes,
    /// It waits for a handshake with the peer; the firewall sees it afterwards.
    WaitsForTunnel,
    /// It is dropped.
    Dropped(DropReason),
}

impl Node {
    /// What would become of a packet of `flow` that goes in `direction`. Nothing is sent, and nothing is remembered.
    #[must_use]
    pub fn trace(&self, now: Instant, direction: Direction, flow: &FlowKey) -> FlowTrace {
        let route = self.forwarder.explain_route(flow);
        let tunnel = self.carrier_of(direction, flow, route.as_ref().ok());
        let firewall = tunnel
            .as_ref()
            .map(|tunnel| self.forwarder.explain_firewall(now, direction, flow, tunnel, &self.config.firewall));
        let outcome = match (&route, &firewall) {
            (Err(reason), _) if direction == Direction::Outbound => Outcome::Dropped(*reason),
            (_, Some(firewall)) => firewall.verdict().map_or_else(Outcome::Dropped, |()| Outcome::Passes),
            (_, None) => Outcome::WaitsForTunnel,
        };
        let rules = match direction {
            Direction::Inbound => &self.config.firewall.inbound,
            Direction::Outbound => &self.config.firewall.outbound,
        };
        let rule = firewall.as_ref().and_then(|firewall| rules.get(firewall.rule?)).cloned();
        let live = tunnel.and_then(|tunnel| self.tunnels.get(tunnel.local_index));
        FlowTrace { direction, route, tunnel: live.map(|live| self.status(live)), firewall, rule, outcome }
    }

    /// The tunnel of the route's peer or of another of its gateways; of an inbound packet without a route that of whoever
    /// may send it.
    fn carrier_of(&self, direction: Direction, flow: &FlowKey, route: Option<&Route>) -> Option<Arc<Tunnel>> {
        let by_route = route.and_then(|route| {
            let mut ways = std::iter::once(&route.peer).chain(&route.others);
            ways.find_map(|peer| self.forwarder.tunnels().by_address(*peer))
        });
        by_route.or_else(|| {
            let senders = self.tunnels.iter().map(|live| &live.tunnel).filter(|tunnel| may_send(tunnel, flow.remote));
            senders.filter(|_| direction == Direction::Inbound).min_by_key(|tunnel| tunnel.local_index).map(Arc::clone)
        })
    }
}

fn may_send(tunnel: &Tunnel, source: IpAddr) -> bool {
    let unsafe_networks = tunnel.peer.unsafe_networks();
    tunnel.peer_addresses.contains(&source) || unsafe_networks.iter().any(|network| network.contains(&source))
}

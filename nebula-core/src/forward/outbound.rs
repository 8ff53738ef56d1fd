//! The egress path: turns overlay (super-)packets into underlay datagrams, stage by stage.

use std::net::IpAddr;
use std::time::Instant;

use super::forwarder::Snapshot;
use super::reject::{self, MAX_ANSWERS};
use super::route::NextHop;
use super::seal::seal;
use super::segment::Cut;
use super::{Forwarder, Lane, Offload};
use crate::counters::{Counter, Direction};
use crate::firewall::Firewall;
use crate::tunnel::{Lookup, TunnelTable};
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet};
use crate::{DropReason, PacketOwned, Punt, Verdict};

impl Forwarder {
    /// Turns an overlay (super-)packet into sealed datagrams in `lane`.
    ///
    /// `packet` is only read. After [`Verdict::Transmit`] the lane's runs hold the datagrams (appended to those of
    /// earlier calls); after [`Verdict::Punt`] the lane's punts hold a copy of the packet; a drop is already counted.
    /// Deliveries are answers to refused packets and must be written back to the device.
    pub fn outbound(&self, lane: &mut Lane, now: Instant, packet: &mut [u8], offload: Offload) -> Verdict {
        outbound(self, lane, now, packet, offload)
    }
}

/// Why a packet cannot be sealed now.
enum Stop {
    Drop(DropReason),
    NoTunnel(IpAddr),
}

impl From<DropReason> for Stop {
    fn from(reason: DropReason) -> Self {
        Self::Drop(reason)
    }
}

fn outbound(forwarder: &Forwarder, lane: &mut Lane, now: Instant, packet: &[u8], offload: Offload) -> Verdict {
    let snapshot = forwarder.snapshot.load();
    let reason = match forward(forwarder, &snapshot, lane, now, packet, offload) {
        Ok(()) => return Verdict::Transmit,
        Err(Stop::NoTunnel(peer)) => {
            let packet = PacketOwned { bytes: packet.to_vec(), offload };
            if lane.punt(Punt::NoTunnel { peer, packet }) {
                lane.counters.add(Counter::NoTunnel, 1);
                return Verdict::Punt;
            }
            DropReason::PuntQueueFull
        }
        Err(Stop::Drop(reason)) => {
            if snapshot.filter.rejects(Direction::Outbound) {
                answer(lane, packet, reason);
            }
            reason
        }
    };
    lane.counters.drop_one(Direction::Outbound, reason);
    if lane.may_sample(now) {
        let flow = || Packet::outbound(packet).ok().map(|packet| packet.flow);
        lane.sample(now, (Direction::Outbound, reason), None, flow);
    }
    Verdict::Drop(reason)
}

fn forward(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    lane: &mut Lane,
    now: Instant,
    packet: &[u8],
    offload: Offload,
) -> Result<(), Stop> {
    let parsed = Packet::outbound(packet)?;
    let cut = Cut::new(packet, &parsed, offload)?;
    let hop = route(snapshot, &parsed.flow)?;
    let mut lookup = lane.last_tunnel.look_up(&forwarder.tunnels, hop.peer);
    if lookup.tunnel().is_none() {
        lookup = find_other(&forwarder.tunnels, lane, now, &hop);
    }
    let tunnel = lookup.tunnel().ok_or(Stop::NoTunnel(hop.peer))?;
    let firewall = Firewall { filter: &snapshot.filter, conntrack: &forwarder.conntrack };
    let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
    if icmp::is_error(packet, &parsed) {
        let quoted = icmp::quoted_inbound(packet, &parsed);
        firewall.check_error(now, Direction::Outbound, &parsed.flow, quoted.as_ref(), tunnel, route)?;
    } else {
        firewall.check(&mut lane.flows, now, Direction::Outbound, &parsed.flow, tunnel, route)?;
    }
    // A tunnel without a path to the peer counts as no tunnel.
    let carrier = forwarder.carrier(tunnel).ok_or(Stop::NoTunnel(hop.peer))?;
    seal(lane, tunnel, &cut, &carrier)?;
    tunnel.mark_sent();
    Ok(())
}

pub(super) fn route<'a>(snapshot: &'a Snapshot, flow: &FlowKey) -> Result<NextHop<'a>, DropReason> {
    let destination = flow.remote;
    if snapshot.drop_local_broadcast && snapshot.routes.is_broadcast(destination) {
        return Err(DropReason::Broadcast);
    }
    if snapshot.routes.is_own(destination) {
        return Err(DropReason::ToSelf);
    }
    if snapshot.drop_multicast && destination.is_multicast() {
        return Err(DropReason::Broadcast);
    }
    snapshot.routes.next_hop(flow).ok_or(DropReason::NoRoute)
}

/// Finds another gateway that has a tunnel, in the order of the configuration. Requests connections to the chosen
/// gateway and to those found without a tunnel, so that flows return to their own gateway.
#[cold]
fn find_other(tunnels: &TunnelTable, lane: &mut Lane, now: Instant, hop: &NextHop<'_>) -> Lookup {
    for other in hop.others() {
        let lookup = lane.last_tunnel.look_up(tunnels, other);
        // If no gateway has a tunnel, the punted packet itself requests the chosen one.
        let missing = if lookup.tunnel().is_some() { hop.peer } else { other };
        if lane.connects.admits(missing, now) {
            lane.punt(Punt::Connect { peer: missing });
        }
        if lookup.tunnel().is_some() {
            return lookup;
        }
    }
    Lookup::nothing()
}

/// Answers the sender of a refused packet, through the device.
#[cold]
fn answer(lane: &mut Lane, packet: &[u8], reason: DropReason) {
    let tells = matches!(
        reason,
        DropReason::NoRule | DropReason::NoRoute | DropReason::RemoteAddress | DropReason::LocalAddress
    );
    if !tells || lane.deliveries.len() >= MAX_ANSWERS {
        return;
    }
    if let Some(answer) = Packet::outbound(packet).ok().and_then(|parsed| reject::answer(packet, &parsed)) {
        lane.deliver_built(&answer);
        lane.counters.add(Counter::Rejected, 1);
    }
}

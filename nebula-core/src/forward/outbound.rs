//! The egress path: turns overlay (super-)packets into underlay datagrams, stage by stage.

use std::net::IpAddr;
use std::time::Instant;

use super::captured;
use super::fit;
use super::forwarder::Snapshot;
use super::reject::{self, MAX_ANSWERS, Meaning};
use super::rewrite::{rewrite, rewrite_quoted};
use super::route::{NextHop, Other};
use super::seal::seal;
use super::segment::Plan;
use super::{Forwarder, Lane, Offload};
use crate::capture::Translation;
use crate::counters::{Counter, Direction};
use crate::firewall::Firewall;
use crate::tunnel::Lookup;
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet};
use crate::{DropReason, PacketOwned, Punt, Verdict};

impl Forwarder {
    /// Turns an overlay (super-)packet into sealed datagrams in `lane`.
    ///
    /// After [`Verdict::Transmit`] the lane's runs hold the datagrams (appended to those of earlier calls); after
    /// [`Verdict::Punt`] the lane's punts hold a copy of the packet; after [`Verdict::Bypass`] the caller has to send the
    /// packet, which is unchanged, on the primary network; a drop is already counted. Deliveries are answers to refused
    /// packets, and packets of this node to itself, and must be written back to the device. Under capture `packet` may be
    /// changed, and is of no use after any other verdict.
    pub fn outbound(&self, lane: &mut Lane, now: Instant, packet: &mut [u8], offload: Offload) -> Verdict {
        outbound(self, lane, now, packet, offload)
    }
}

/// Why a packet cannot be sealed now.
pub(super) enum Stop {
    Drop(DropReason),
    NoTunnel(IpAddr),
    /// Nothing is known about the destination.
    Unknown,
    /// It waits for something else; a punt is in the lane.
    Punted,
}

impl From<DropReason> for Stop {
    fn from(reason: DropReason) -> Self {
        Self::Drop(reason)
    }
}

/// The form in which a packet goes into the tunnel.
pub(super) enum Form {
    AsItIs,
    Translated(Translation),
    /// An ICMP error about a packet of a translated flow.
    Error(Translation),
}

fn outbound(forwarder: &Forwarder, lane: &mut Lane, now: Instant, packet: &mut [u8], offload: Offload) -> Verdict {
    let snapshot = forwarder.snapshot.load();
    let reason = match forward(forwarder, &snapshot, lane, now, packet, offload) {
        Ok(verdict) => return verdict,
        Err(Stop::NoTunnel(peer)) => {
            let packet = PacketOwned { bytes: packet.to_vec(), offload };
            if lane.punt(Punt::NoTunnel { peer, packet }) {
                lane.counters.add(Counter::NoTunnel, 1);
                return Verdict::Punt;
            }
            DropReason::PuntQueueFull
        }
        Err(Stop::Unknown) => match captured::hold(forwarder, lane, packet, offload) {
            Ok(()) => return Verdict::Punt,
            Err(reason) => reason,
        },
        Err(Stop::Punted) => return Verdict::Punt,
        Err(Stop::Drop(reason)) => {
            // Under capture, a destination answers like a closed port, whatever the firewall does.
            let is_closed = matches!(reason, DropReason::Refused | DropReason::EndpointGone);
            if is_closed || snapshot.filter.rejects(Direction::Outbound) {
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
    packet: &mut [u8],
    offload: Offload,
) -> Result<Verdict, Stop> {
    let parsed = Packet::outbound(packet)?;
    let plan = Plan::new(packet, &parsed, offload)?;
    match &snapshot.capture {
        None => carry(forwarder, snapshot, lane, now, packet, (&parsed, offload, plan), (&Form::AsItIs, None)),
        Some(current) => captured::forward(forwarder, snapshot, current, lane, now, packet, (&parsed, offload, plan)),
    }
}

/// Routes, filters and seals a packet in this form. Its bytes change only once nothing stops it any more. With the hash
/// of its flow in the cache of courses, notes there that the next packets need neither be routed nor filtered.
#[inline(always)]
pub(super) fn carry(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    lane: &mut Lane,
    now: Instant,
    packet: &mut [u8],
    (parsed, offload, plan): (&Packet, Offload, Plan),
    (form, course): (&Form, Option<u64>),
) -> Result<Verdict, Stop> {
    let about;
    let flow = match form {
        Form::AsItIs => &parsed.flow,
        Form::Translated(translation) => &translation.wire,
        Form::Error(translation) => {
            about = FlowKey { remote: translation.wire.remote, ..parsed.flow };
            &about
        }
    };
    let hop = route(snapshot, flow, true)?;
    let mut lookup = lane.last_tunnel.look_up(&forwarder.tunnels, hop.peer);
    if lookup.tunnel().is_none() {
        lookup = find_other(forwarder, snapshot, lane, now, (flow, &hop));
    }
    let tunnel = lookup.tunnel().ok_or(Stop::NoTunnel(hop.peer))?;
    let firewall = Firewall { filter: &snapshot.filter, conntrack: &forwarder.conntrack };
    let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
    if let Form::Error(translation) = form {
        firewall.check_error(now, Direction::Outbound, flow, Some(&translation.wire), tunnel, route)?;
    } else if icmp::is_error(packet, parsed) {
        let quoted = icmp::quoted_inbound(packet, parsed);
        firewall.check_error(now, Direction::Outbound, flow, quoted.as_ref(), tunnel, route)?;
    } else if let Some(hash) = course.filter(|_| hop.is_final()) {
        let until = firewall.check_for_a_while(
            &mut lane.flows,
            (now, forwarder.conntrack.hash(flow)),
            Direction::Outbound,
            flow,
            tunnel,
            route,
        )?;
        lane.outbound_courses.note_pass(hash, &parsed.flow, snapshot.pass(tunnel), until);
    } else {
        firewall.check(&mut lane.flows, now, Direction::Outbound, flow, tunnel, route)?;
    }
    // A tunnel without a path to the peer counts as no tunnel.
    let carrier = match tunnel.path_limit.is_open() {
        true => forwarder.carrier(tunnel).ok_or(Stop::NoTunnel(hop.peer))?,
        false => fit::find_carrier(forwarder, lane, tunnel, packet, (parsed, offload, &plan), hop.peer)?,
    };
    match form {
        Form::AsItIs => {}
        Form::Translated(translation) => rewrite(packet, parsed, offload, &translation.out())?,
        Form::Error(translation) => rewrite_quoted(packet, parsed, translation, true)?,
    }
    seal(lane, tunnel, &plan.of(packet), &carrier)?;
    tunnel.mark_sent();
    Ok(Verdict::Transmit)
}

/// `keeps`: see [`Routes::next_hop`](super::route::Routes::next_hop).
pub(super) fn route<'a>(snapshot: &'a Snapshot, flow: &FlowKey, keeps: bool) -> Result<NextHop<'a>, DropReason> {
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
    snapshot.routes.next_hop(flow, keeps).ok_or(DropReason::NoRoute)
}

/// Finds another gateway that has a tunnel, in the order of the configuration; the flow stays there. Requests
/// connections to the chosen gateway and to those found without a tunnel.
#[cold]
fn find_other(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    lane: &mut Lane,
    now: Instant,
    (flow, hop): (&FlowKey, &NextHop<'_>),
) -> Lookup {
    for Other { address, may_carry, keeps } in hop.fallbacks() {
        let lookup = lane.last_tunnel.look_up(&forwarder.tunnels, address);
        let is_there = lookup.tunnel().is_some();
        if is_there && !may_carry {
            continue;
        }
        // If no gateway has a tunnel, the punted packet itself requests the chosen one.
        let missing = if is_there { hop.peer } else { address };
        if lane.connects.admits(missing, now) {
            lane.punt(Punt::Connect { peer: missing });
        }
        if is_there {
            if keeps {
                snapshot.routes.pins().set(flow, address);
            }
            return lookup;
        }
    }
    Lookup::nothing()
}

/// Answers the sender of a refused packet, through the device.
#[cold]
fn answer(lane: &mut Lane, packet: &[u8], reason: DropReason) {
    let meaning = match reason {
        DropReason::NoRule | DropReason::NoRoute | DropReason::RemoteAddress | DropReason::LocalAddress => {
            Meaning::Prohibited
        }
        DropReason::Refused | DropReason::EndpointGone => Meaning::PortClosed,
        _ => return,
    };
    if lane.deliveries.len() >= MAX_ANSWERS {
        return;
    }
    if let Some(answer) = Packet::outbound(packet).ok().and_then(|parsed| reject::answer(packet, &parsed, meaning)) {
        lane.deliver_built(&answer);
        lane.counters.add(Counter::Rejected, 1);
    }
}

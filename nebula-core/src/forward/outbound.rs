//! Overlay (super-)packet to underlay datagrams, stage by stage (egress path).

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::lane::MAX_RUN;
use super::reject::{self, MAX_ANSWERS};
use super::relayed::Carrier;
use super::route::NextHop;
use super::segment::Cut;
use super::{Forwarder, Lane, Offload, Run, Snapshot};
use crate::counters::{Counter, Direction};
use crate::firewall::Firewall;
use crate::tunnel::{Lookup, Tunnel, TunnelTable};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet};
use crate::{DropReason, PacketOwned, Punt, Verdict};

/// What keeps a packet from being sealed now.
enum Stop {
    Drop(DropReason),
    NoTunnel(IpAddr),
}

impl From<DropReason> for Stop {
    fn from(reason: DropReason) -> Self {
        Self::Drop(reason)
    }
}

pub(super) fn outbound(
    forwarder: &Forwarder,
    lane: &mut Lane,
    now: Instant,
    packet: &[u8],
    offload: Offload,
) -> Verdict {
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
    // Without a way to the peer its tunnel is worth as much as none.
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

/// Another gateway with a tunnel, in the order of the configuration. Those without one are asked for, as the chosen one is,
/// so that flows return to their own gateway.
#[cold]
fn find_other(tunnels: &TunnelTable, lane: &mut Lane, now: Instant, hop: &NextHop<'_>) -> Lookup {
    for other in hop.others() {
        let lookup = lane.last_tunnel.look_up(tunnels, other);
        // Without any tunnel the packet itself asks for the chosen gateway.
        let missing = if lookup.tunnel().is_some() { hop.peer } else { other };
        if lane.wanted.ask(missing, now) {
            lane.punt(Punt::Connect { peer: missing });
        }
        if lookup.tunnel().is_some() {
            return lookup;
        }
    }
    Lookup::nothing()
}

/// Tells the sender of a refused packet, through the device.
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

/// Cuts and seals straight into the arena: `[header][packet][tag]` after one another, each in a frame of the relay if there
/// is one.
pub(super) fn seal(lane: &mut Lane, tunnel: &Tunnel, cut: &Cut<'_>, carrier: &Carrier) -> Result<(), DropReason> {
    let count = cut.count();
    let first = tunnel.session.reserve(count as u64).ok_or(DropReason::CounterExhausted)?;
    let frames = carrier.frames(count as u64)?;
    let (before, after) = if frames.is_some() { (HEADER_LEN, TAG_LEN) } else { (0, 0) };
    let bytes = cut.total_len();
    lane.make_room(bytes + count * (before + HEADER_LEN + TAG_LEN + after));
    for index in 0..count {
        let counter = first + index as u64;
        let header = Header { kind: MessageType::Data, index: tunnel.remote_index.0, counter }.to_bytes();
        let inner = cut.len(index);
        let (start, end) = (lane.used, lane.used + before + HEADER_LEN + inner + TAG_LEN + after);
        let datagram = &mut lane.arena[start..end];
        let (head, rest) = datagram[before..].split_at_mut(HEADER_LEN);
        let (body, tail) = rest.split_at_mut(inner);
        let tail = &mut tail[..TAG_LEN];
        head.copy_from_slice(&header);
        cut.write(index, body);
        tail.copy_from_slice(&tunnel.session.send_key.seal(counter, &header, body));
        if let Some(frames) = &frames {
            frames.close(index as u64, datagram);
        }
        lane.used = end;
        add_to_runs(&mut lane.runs, lane.max_segments, carrier.to, start, end);
    }
    lane.counters.add(Counter::PacketsOut, count as u64);
    lane.counters.add(Counter::BytesOut, bytes as u64);
    Ok(())
}

/// Extends the last run if the datagram can be part of the same GSO send.
pub(super) fn add_to_runs(runs: &mut Vec<Run>, max_segments: usize, to: SocketAddr, start: usize, end: usize) {
    if let Some(run) = runs.last_mut() {
        let len = run.range.len();
        // A shorter datagram ends a run: it is only a whole number of segments long while all have the same size.
        let joins = run.to == to
            && run.range.end == start
            && len % run.segment_size == 0
            && end - start <= run.segment_size
            && len / run.segment_size < max_segments
            && end - run.range.start <= MAX_RUN;
        if joins {
            run.range.end = end;
            return;
        }
    }
    runs.push(Run { to, range: start..end, segment_size: end - start });
}

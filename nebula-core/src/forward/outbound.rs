//! Overlay (super-)packet to underlay datagrams, stage by stage (egress path).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use super::lane::{MAX_RUN, TunnelHint};
use super::segment::Cut;
use super::{Forwarder, Lane, Offload, Run, Snapshot};
use crate::counters::{Counter, Direction};
use crate::firewall::Firewall;
use crate::tunnel::{Tunnel, TunnelTable};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::wire::ip::Packet;
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
    let reason = match forward(forwarder, lane, now, packet, offload) {
        Ok(()) => return Verdict::Transmit,
        Err(Stop::NoTunnel(peer)) => {
            let packet = PacketOwned { bytes: packet.to_vec(), offload };
            if lane.punt(Punt::NoTunnel { peer, packet }) {
                lane.counters.add(Counter::NoTunnel, 1);
                return Verdict::Punt;
            }
            DropReason::PuntQueueFull
        }
        Err(Stop::Drop(reason)) => reason,
    };
    lane.counters.drop_one(Direction::Outbound, reason);
    Verdict::Drop(reason)
}

fn forward(forwarder: &Forwarder, lane: &mut Lane, now: Instant, packet: &[u8], offload: Offload) -> Result<(), Stop> {
    let snapshot = forwarder.snapshot.load();
    let parsed = Packet::outbound(packet)?;
    let cut = Cut::new(packet, &parsed, offload)?;
    let peer = route(&snapshot, parsed.flow.remote)?;
    let tunnel = find_tunnel(&forwarder.tunnels, lane, peer).ok_or(Stop::NoTunnel(peer))?;
    let firewall = Firewall { filter: &snapshot.filter, conntrack: &forwarder.conntrack };
    firewall.check(&mut lane.flows, now, Direction::Outbound, &parsed.flow, &tunnel)?;
    let to = tunnel.endpoint().ok_or(DropReason::NoEndpoint)?;
    seal(lane, &tunnel, &cut, to)?;
    tunnel.mark_sent();
    Ok(())
}

fn route(snapshot: &Snapshot, destination: IpAddr) -> Result<IpAddr, DropReason> {
    if snapshot.drop_local_broadcast && snapshot.routes.is_broadcast(destination) {
        return Err(DropReason::Broadcast);
    }
    if snapshot.routes.is_own(destination) {
        return Err(DropReason::ToSelf);
    }
    if snapshot.drop_multicast && destination.is_multicast() {
        return Err(DropReason::Broadcast);
    }
    snapshot.routes.peer(destination).ok_or(DropReason::NoRoute)
}

fn find_tunnel(tunnels: &TunnelTable, lane: &mut Lane, peer: IpAddr) -> Option<Arc<Tunnel>> {
    // Read before the look-up: a change during it makes the hint stale, never wrong.
    let version = tunnels.version();
    if let Some(hint) = lane.last_tunnel.filter(|hint| hint.version == version && hint.peer == peer) {
        return tunnels.by_index(hint.index);
    }
    let tunnel = tunnels.by_address(peer)?;
    lane.last_tunnel = Some(TunnelHint { version, peer, index: tunnel.local_index });
    Some(tunnel)
}

/// Cuts and seals straight into the arena: `[header][packet][tag]` after one another.
fn seal(lane: &mut Lane, tunnel: &Tunnel, cut: &Cut<'_>, to: SocketAddr) -> Result<(), DropReason> {
    let count = cut.count();
    let first = tunnel.session.reserve(count as u64).ok_or(DropReason::CounterExhausted)?;
    let bytes = cut.total_len();
    lane.make_room(bytes + count * (HEADER_LEN + TAG_LEN));
    for index in 0..count {
        let counter = first + index as u64;
        let header = Header { kind: MessageType::Data, index: tunnel.remote_index.0, counter }.to_bytes();
        let inner = cut.len(index);
        let (start, end) = (lane.used, lane.used + HEADER_LEN + inner + TAG_LEN);
        let (head, rest) = lane.arena[start..end].split_at_mut(HEADER_LEN);
        let (body, tail) = rest.split_at_mut(inner);
        head.copy_from_slice(&header);
        cut.write(index, body);
        tail.copy_from_slice(&tunnel.session.send_key.seal(counter, &header, body));
        lane.used = end;
        add_to_runs(&mut lane.runs, lane.max_segments, to, start, end);
    }
    lane.counters.add(Counter::PacketsOut, count as u64);
    lane.counters.add(Counter::BytesOut, bytes as u64);
    Ok(())
}

/// Extends the last run if the datagram can be part of the same GSO send.
fn add_to_runs(runs: &mut Vec<Run>, max_segments: usize, to: SocketAddr, start: usize, end: usize) {
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

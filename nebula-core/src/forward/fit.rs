//! Whether a packet fits into the path to its peer, and what its sender is told if it does not (packet too big).

use super::mss;
use super::reject::{self, MAX_ANSWERS};
use super::segment::Plan;
use super::{Lane, Offload};
use crate::counters::Counter;
use crate::tunnel::Tunnel;
use crate::wire::ip::Packet;
use crate::{DropReason, Punt};

/// Examines a packet for a tunnel whose path is not known to carry everything. Has the path examined if nobody has done
/// that, lowers the segment size of a new connection, and answers a packet that is too large.
///
/// # Errors
/// Returns [`DropReason::TooBig`] if the packet must not be sent. One that may be fragmented on the way is sent all the
/// same: its sender is told, and until it listens, the underlay may do what the overlay does not.
#[cold]
#[inline(never)]
pub(super) fn examine(
    lane: &mut Lane,
    tunnel: &Tunnel,
    packet: &mut [u8],
    (parsed, offload, plan): (&Packet, Offload, &Plan),
) -> Result<(), DropReason> {
    if tunnel.path_limit.claim() {
        if !lane.punt(Punt::PathUnexamined { tunnel: tunnel.local_index }) {
            tunnel.path_limit.forget();
        }
        return Ok(());
    }
    let Some(limit) = tunnel.path_limit.get() else { return Ok(()) };
    if mss::clamp(packet, parsed, offload, limit) {
        lane.counters.add(Counter::SegmentSizeLowered, 1);
    }
    let longest = plan.longest(packet.len());
    if longest <= limit.into() {
        return Ok(());
    }
    if lane.deliveries.len() < MAX_ANSWERS
        && let Some(answer) = reject::too_big(packet, parsed, limit)
    {
        lane.deliver_built(&answer);
        lane.counters.add(Counter::TooBigAnswered, 1);
    }
    if may_be_fragmented(packet, longest) { Ok(()) } else { Err(DropReason::TooBig) }
}

/// Lowers the segment size that a peer announces in a new connection.
#[cold]
#[inline(never)]
pub(super) fn clamp_inbound(lane: &Lane, tunnel: &Tunnel, packet: &mut [u8], parsed: &Packet) {
    if let Some(limit) = tunnel.path_limit.get()
        && mss::clamp(packet, parsed, Offload::default(), limit)
    {
        lane.counters.add(Counter::SegmentSizeLowered, 1);
    }
}

/// Whether a packet that is too long may be fragmented, or its sender cannot send less.
fn may_be_fragmented(packet: &[u8], longest: usize) -> bool {
    match packet.first().map(|first| first >> 4) {
        Some(4) => packet.get(6).is_some_and(|flags| flags & DONT_FRAGMENT == 0),
        _ => longest <= reject::MIN_MTU_V6.into(),
    }
}

const DONT_FRAGMENT: u8 = 0x40;

//! Whether a packet fits into the path to its peer, and what its sender is told if it does not (packet too big).

use std::net::IpAddr;

use super::egress::{Egress, Outgoing, Stop};
use super::mss;
use super::reject::{self, MAX_ANSWERS};
use super::{Carrier, Lane, Offload};
use crate::counters::Counter;
use crate::tunnel::{PathState, Tunnel};
use crate::wire::header::{HEADER_LEN, TAG_LEN};
use crate::wire::ip::Packet;
use crate::{DropReason, PacketOwned, Punt};

impl Egress<'_> {
    /// The path of a packet to `peer`, for a tunnel whose path is not open: it may not carry the packet, or it may be
    /// another one soon. See [`Egress::examine`].
    ///
    /// # Errors
    /// Also returns [`Stop::NoTunnel`] if there is no path, or none that this packet may take.
    #[cold]
    #[inline(never)]
    pub(super) fn find_carrier(
        &mut self,
        packet: &mut Outgoing<'_>,
        tunnel: &Tunnel,
        peer: IpAddr,
    ) -> Result<Carrier, Stop> {
        if self.forwarder.carrier(tunnel).is_none() && !tunnel.is_on_trial() {
            return Err(Stop::NoTunnel(peer));
        }
        self.examine(packet, tunnel)?;
        let bytes = packet.plan.count() * (packet.plan.longest(packet.bytes.len()) + HEADER_LEN + TAG_LEN);
        self.forwarder.carrier_for(tunnel, bytes).ok_or(Stop::NoTunnel(peer))
    }

    /// Examines a packet for a tunnel whose path is not known to carry everything. Has the path examined if nobody
    /// has done that, lowers the segment size of a new connection, and answers a packet that is too large.
    ///
    /// # Errors
    /// Returns [`DropReason::TooBig`] if the packet must not be sent. One that may be fragmented on the way is sent
    /// all the same: its sender is told, and until it listens, the underlay may do what the overlay does not. Returns
    /// [`Stop::Punted`] if the packet has to wait until the path was examined.
    fn examine(&mut self, packet: &mut Outgoing<'_>, tunnel: &Tunnel) -> Result<(), Stop> {
        let limit = match tunnel.path_limit.state() {
            PathState::Limited(limit) => limit,
            PathState::Open | PathState::Joined(_) => return Ok(()),
            PathState::Unexamined | PathState::UnderExamination => return self.have_examined(packet, tunnel),
        };
        if mss::clamp(packet.bytes, packet.parsed, packet.offload, limit) {
            self.lane.counters.add(Counter::SegmentSizeLowered, 1);
        }
        let longest = packet.plan.longest(packet.bytes.len());
        if longest <= limit.into() {
            return Ok(());
        }
        if self.lane.deliveries.len() < MAX_ANSWERS
            && let Some(answer) = reject::too_big(packet.bytes, packet.parsed, limit)
        {
            self.lane.deliver_built(&answer);
            self.lane.counters.add(Counter::TooBigAnswered, 1);
        }
        if may_be_fragmented(packet.bytes, longest) { Ok(()) } else { Err(DropReason::TooBig.into()) }
    }

    /// Asks the control plane to examine the path, if nobody did. Meanwhile the opening of a TCP connection waits:
    /// what it announces holds for good, and a peer that examines nothing would send what never arrives. Everything
    /// else passes.
    fn have_examined(&mut self, packet: &Outgoing<'_>, tunnel: &Tunnel) -> Result<(), Stop> {
        let is_first = tunnel.path_limit.claim();
        let opens = mss::announced(packet.bytes, packet.parsed).is_some();
        if !is_first && !opens {
            return Ok(());
        }
        let waits = opens.then(|| PacketOwned { bytes: packet.bytes.to_vec(), offload: packet.offload });
        let is_punted = self.lane.punt(Punt::PathUnexamined { tunnel: tunnel.local_index, waits });
        if is_first && !is_punted {
            tunnel.path_limit.forget();
        }
        match (is_punted, opens) {
            (true, true) => Err(Stop::Punted),
            (false, true) => Err(DropReason::PuntQueueFull.into()),
            (_, false) => Ok(()),
        }
    }
}

/// Lowers the segment size that a peer announces in a new connection.
#[cold]
#[inline(never)]
pub(super) fn clamp_inbound(lane: &Lane, tunnel: &Tunnel, packet: &mut [u8], parsed: &Packet) {
    if let PathState::Limited(limit) = tunnel.path_limit.state()
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

//! The egress path: turns overlay (super-)packets into underlay datagrams, stage by stage.

use std::time::Instant;

use super::egress::{Egress, Form, Outgoing, Stop};
use super::reject::{self, MAX_ANSWERS, Meaning};
use super::segment::Plan;
use super::{Forwarder, Lane, Offload};
use crate::counters::{Counter, Direction};
use crate::firewall::{About, Amount};
use crate::wire::ip::Packet;
use crate::{DropReason, PacketOwned, Punt, Verdict};

impl Forwarder {
    /// Turns an overlay (super-)packet into sealed datagrams in `lane`.
    ///
    /// After [`Verdict::Transmit`] the lane's runs hold the datagrams (appended to those of earlier calls); after
    /// [`Verdict::Punt`] the lane's punts hold a copy of the packet; after [`Verdict::Bypass`] the caller has to send
    /// the packet, which is unchanged, on the primary network; a drop is already counted. Deliveries are answers to
    /// refused packets, and packets of this node to itself, and must be written back to the device. Under capture
    /// `packet` may be changed, and is of no use after any other verdict.
    pub fn outbound(&self, lane: &mut Lane, now: Instant, packet: &mut [u8], offload: Offload) -> Verdict {
        let snapshot = self.snapshot.load();
        let mut stage = Egress { forwarder: self, snapshot: &snapshot, now, lane };
        match stage.send(packet, offload) {
            Ok(verdict) => verdict,
            Err(stop) => stage.stop(packet, offload, stop),
        }
    }
}

impl Egress<'_> {
    fn send(&mut self, bytes: &mut [u8], offload: Offload) -> Result<Verdict, Stop> {
        let parsed = Packet::outbound(bytes)?;
        let plan = Plan::new(bytes, &parsed, offload)?;
        let mut packet = Outgoing { bytes, parsed: &parsed, offload, plan };
        match &self.snapshot.capture {
            None => self.carry(&mut packet, &Form::AsItIs, None),
            Some(current) => self.send_captured(&mut packet, current),
        }
    }

    /// Punts, answers or drops a packet that cannot be sealed now.
    fn stop(&mut self, packet: &[u8], offload: Offload, stop: Stop) -> Verdict {
        let reason = match stop {
            Stop::NoTunnel(peer) => {
                let packet = PacketOwned { bytes: packet.to_vec(), offload };
                if self.lane.punt(Punt::NoTunnel { peer, packet }) {
                    self.lane.counters.add(Counter::NoTunnel, 1);
                    return Verdict::Punt;
                }
                DropReason::PuntQueueFull
            }
            Stop::Unknown => match self.hold(packet, offload) {
                Ok(()) => return Verdict::Punt,
                Err(reason) => reason,
            },
            Stop::Punted => return Verdict::Punt,
            Stop::Drop(reason) => {
                // Under capture, a destination answers like a closed port, whatever the firewall does.
                let is_closed = matches!(reason, DropReason::Refused | DropReason::EndpointGone);
                if is_closed || self.snapshot.filter.rejects(Direction::Outbound) {
                    self.answer(packet, reason);
                }
                reason
            }
        };
        if matches!(reason, DropReason::NoRoute | DropReason::Refused | DropReason::EndpointGone) {
            self.note_nowhere(packet, reason);
        }
        self.lane.counters.drop_one(Direction::Outbound, reason);
        if self.lane.may_sample(self.now) {
            let flow = || Packet::outbound(packet).ok().map(|packet| packet.flow);
            self.lane.sample(self.now, (Direction::Outbound, reason), None, flow);
        }
        Verdict::Drop(reason)
    }

    /// Counts a packet without a peer that would get it, for the record.
    #[cold]
    fn note_nowhere(&self, packet: &[u8], reason: DropReason) {
        if let Ok(parsed) = Packet::outbound(packet) {
            let about = About { direction: Direction::Outbound, flow: &parsed.flow, original: None };
            let amount = Amount { packets: 1, bytes: packet.len() as u64 };
            self.firewall().note_refused(self.now, about, None, (reason, amount));
        }
    }

    /// Hands a packet to an unknown destination to the control plane, which waits for a newer directory.
    #[cold]
    fn hold(&mut self, packet: &[u8], offload: Offload) -> Result<(), DropReason> {
        if self.forwarder.is_hold_full() {
            return Err(DropReason::HoldFull);
        }
        let packet = PacketOwned { bytes: packet.to_vec(), offload };
        if self.lane.punt(Punt::Unknown { packet }) { Ok(()) } else { Err(DropReason::PuntQueueFull) }
    }

    /// Answers the sender of a refused packet, through the device.
    #[cold]
    fn answer(&mut self, packet: &[u8], reason: DropReason) {
        let meaning = match reason {
            DropReason::NoRule
            | DropReason::NetworkPolicy
            | DropReason::NoRoute
            | DropReason::RemoteAddress
            | DropReason::LocalAddress => Meaning::Prohibited,
            DropReason::Refused | DropReason::EndpointGone => Meaning::PortClosed,
            _ => return,
        };
        if self.lane.deliveries.len() >= MAX_ANSWERS {
            return;
        }
        if let Some(answer) = Packet::outbound(packet).ok().and_then(|parsed| reject::answer(packet, &parsed, meaning))
        {
            self.lane.deliver_built(&answer);
            self.lane.counters.add(Counter::Rejected, 1);
        }
    }
}

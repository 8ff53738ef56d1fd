//! What the stages of the outbound path share: the packet on its way, and the way into a tunnel.

use std::net::IpAddr;
use std::time::Instant;

use super::forwarder::Snapshot;
use super::rewrite::{rewrite, rewrite_quoted};
use super::route::{NextHop, Other};
use super::seal::seal;
use super::segment::Plan;
use super::{Forwarder, Lane, Offload};
use crate::capture::{NoCourse, Translation};
use crate::counters::Direction;
use crate::firewall::{About, Amount, Firewall, Place};
use crate::tunnel::{Lookup, Tunnel};
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet};
use crate::{DropReason, Punt, Verdict};

/// State that the stages of one packet share.
pub(super) struct Egress<'a> {
    pub(super) forwarder: &'a Forwarder,
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Instant,
    pub(super) lane: &'a mut Lane,
}

/// A (super-)packet on its way out. Its bytes change only once nothing stops it any more.
pub(super) struct Outgoing<'a> {
    pub(super) bytes: &'a mut [u8],
    pub(super) parsed: &'a Packet,
    pub(super) offload: Offload,
    pub(super) plan: Plan,
}

/// The form in which a packet goes into the tunnel.
pub(super) enum Form {
    AsItIs,
    Translated(Translation),
    /// An ICMP error about a packet of a translated flow, and the flow of the error itself in the tunnel.
    Error(Translation, FlowKey),
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

impl From<NoCourse> for Stop {
    fn from(reason: NoCourse) -> Self {
        match reason {
            NoCourse::Unknown => Self::Unknown,
            NoCourse::Refused => DropReason::Refused.into(),
            NoCourse::EndpointGone => DropReason::EndpointGone.into(),
            NoCourse::Full => DropReason::ConntrackFull.into(),
        }
    }
}

impl Form {
    /// The flow of a packet in this form, as firewall and peer see it.
    #[inline(always)]
    fn flow<'a>(&'a self, parsed: &'a Packet) -> &'a FlowKey {
        match self {
            Self::AsItIs => &parsed.flow,
            Self::Translated(translation) => &translation.wire,
            Self::Error(_, flow) => flow,
        }
    }
}

/// The tunnel that a packet takes, and its flow there.
struct Passage<'a> {
    flow: &'a FlowKey,
    tunnel: &'a Tunnel,
    /// The hash of its flow in the lane's cache of courses, if the next packets need not be asked again.
    course: Option<u64>,
}

impl<'a> Egress<'a> {
    /// Routes, filters and seals a packet in this form. With the hash of its flow in the cache of courses, notes
    /// there that the next packets need neither be routed nor filtered.
    #[inline(always)]
    pub(super) fn carry(
        &mut self,
        packet: &mut Outgoing<'_>,
        form: &Form,
        course: Option<u64>,
    ) -> Result<Verdict, Stop> {
        let flow = form.flow(packet.parsed);
        let hop = self.snapshot.next_hop(flow, true)?;
        let mut lookup = self.lane.last_tunnel.look_up(&self.forwarder.tunnels, hop.peer);
        if lookup.tunnel().is_none() {
            lookup = self.find_other(flow, &hop);
        }
        let tunnel = lookup.tunnel().ok_or(Stop::NoTunnel(hop.peer))?;
        let passage = Passage { flow, tunnel, course: course.filter(|_| hop.is_final()) };
        let place = self.admit(packet, form, &passage).inspect_err(|reason| {
            if !matches!(form, Form::Error(..)) {
                self.note_refused(packet, tunnel, flow, *reason);
            }
        })?;
        // A tunnel without a path to the peer counts as no tunnel.
        let carrier = match tunnel.path_limit.is_open() {
            true => self.forwarder.carrier(tunnel).ok_or(Stop::NoTunnel(hop.peer))?,
            false => self.find_carrier(packet, tunnel, hop.peer)?,
        };
        match form {
            Form::AsItIs => {}
            Form::Translated(translation) => {
                rewrite(packet.bytes, packet.parsed, packet.offload, &translation.out())?;
            }
            Form::Error(translation, _) => rewrite_quoted(packet.bytes, packet.parsed, translation, true)?,
        }
        let cut = packet.plan.with_larger(packet.bytes, || tunnel.path_limit.joined());
        seal(self.lane, tunnel, &cut, &carrier, place)?;
        tunnel.mark_sent();
        Ok(Verdict::Transmit)
    }

    /// Asks the firewall whether a packet in this form may pass. Returns where it is counted.
    #[inline(always)]
    fn admit(&mut self, packet: &Outgoing<'_>, form: &Form, passage: &Passage<'_>) -> Result<Place, DropReason> {
        let Passage { flow, tunnel, course } = *passage;
        let (snapshot, now, firewall) = (self.snapshot, self.now, self.firewall());
        let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
        if let Form::Error(translation, _) = form {
            let quoted = Some(&translation.wire);
            firewall.check_error(now, Direction::Outbound, flow, quoted, tunnel, route)?;
            return Ok(Place::NONE);
        }
        if icmp::is_error(packet.bytes, packet.parsed) {
            let quoted = icmp::quoted_inbound(packet.bytes, packet.parsed);
            firewall.check_error(now, Direction::Outbound, flow, quoted.as_ref(), tunnel, route)?;
            return Ok(Place::NONE);
        }
        let Some(course) = course else {
            return firewall.check(&mut self.lane.flows, now, Direction::Outbound, flow, tunnel, route);
        };
        let at = (now, self.forwarder.conntrack.hash(flow));
        let original = &packet.parsed.flow;
        let about = About { direction: Direction::Outbound, flow, original: Some(original) };
        let (until, place) = firewall.check_for_a_while(&mut self.lane.flows, at, about, tunnel, route)?;
        let pass = (snapshot.pass(tunnel), self.lane.flows.claim(place));
        self.lane.outbound_courses.note_pass(course, original, pass, until);
        Ok(place)
    }

    /// Counts a packet that is refused, for the record.
    #[cold]
    #[inline(never)]
    fn note_refused(&self, packet: &Outgoing<'_>, tunnel: &Tunnel, flow: &FlowKey, reason: DropReason) {
        let about = About { direction: Direction::Outbound, flow, original: Some(&packet.parsed.flow) };
        let cut = packet.plan.of(packet.bytes);
        let amount = Amount { packets: cut.count() as u64, bytes: cut.total_len() as u64 };
        self.firewall().note_refused(self.now, about, Some(tunnel), (reason, amount));
    }

    #[inline]
    pub(super) fn firewall(&self) -> Firewall<'a> {
        Firewall { filter: &self.snapshot.filter, conntrack: &self.forwarder.conntrack }
    }

    /// Finds another gateway that has a tunnel, in the order of the configuration; the flow stays there. Requests
    /// connections to the chosen gateway and to those found without a tunnel.
    #[cold]
    fn find_other(&mut self, flow: &FlowKey, hop: &NextHop<'_>) -> Lookup {
        for Other { address, may_carry, keeps } in hop.fallbacks() {
            let lookup = self.lane.last_tunnel.look_up(&self.forwarder.tunnels, address);
            let is_there = lookup.tunnel().is_some();
            if is_there && !may_carry {
                continue;
            }
            // If no gateway has a tunnel, the punted packet itself requests the chosen one.
            let missing = if is_there { hop.peer } else { address };
            if self.lane.connects.admits(missing, self.now) {
                self.lane.punt(Punt::Connect { peer: missing });
            }
            if is_there {
                if keeps {
                    self.snapshot.routes.pins().set(flow, address);
                }
                return lookup;
            }
        }
        Lookup::nothing()
    }
}

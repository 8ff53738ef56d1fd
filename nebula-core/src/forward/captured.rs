//! The stages of the outbound path that exist only under capture: the course of each packet of the pod.

use super::egress::{Egress, Form, Outgoing, Stop};
use super::layout::Layout;
use super::reject::is_for_many;
use super::rewrite::rewrite;
use super::seal::seal;
use crate::capture::{Course, Current, First, Found, Identity, NoCourse, Outcome, Target, Translation, tcp};
use crate::counters::Counter;
use crate::firewall::Peer;
use crate::tunnel::Tunnel;
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet, protocol};
use crate::{DropReason, Verdict};

impl<'a> Egress<'a> {
    /// Sends a packet of the pod on its course. Not inlined, so that packets without capture do not pay for it.
    #[inline(never)]
    pub(super) fn send_captured(&mut self, packet: &mut Outgoing<'_>, current: &'a Current) -> Result<Verdict, Stop> {
        let (forwarder, snapshot, flow) = (self.forwarder, self.snapshot, &packet.parsed.flow);
        let hash = forwarder.conntrack.hash(flow);
        if is_usual(packet.bytes, packet.parsed)
            && let Some(known) = self.lane.outbound_courses.get(hash, flow, self.now, |_| current.version)
            && let Some((pass, claim)) = known.pass
            && let Some((peer, translation)) = match &known.course {
                Course::Translated(translation) => Some((translation.wire.remote, Some(translation))),
                Course::Direct => Some((flow.remote, None)),
                Course::ToSelf(_) | Course::BackToSelf(_) | Course::Bypass => None,
            }
        {
            let lookup = self.lane.last_tunnel.look_up(&forwarder.tunnels, peer);
            // A path that has to be looked at is left to `carry`.
            let passes = |tunnel: &&Tunnel| tunnel.path_limit.is_open() && snapshot.pass(tunnel) == pass;
            if let Some(tunnel) = lookup.tunnel().filter(passes)
                && self.lane.flows.has(&claim)
                && let Some(carrier) = forwarder.carrier(tunnel)
            {
                if let Some(translation) = translation {
                    rewrite(packet.bytes, packet.parsed, packet.offload, &translation.out())?;
                }
                let cut = packet.plan.with_larger(packet.bytes, || tunnel.path_limit.joined());
                seal(self.lane, tunnel, &cut, &carrier, claim.place)?;
                tunnel.mark_sent();
                return Ok(Verdict::Transmit);
            }
        }
        Captured { stage: self, current, hash }.send(packet)
    }
}

/// What becomes of a packet.
enum Fate {
    Tunnel(Form),
    Aside(Aside),
}

/// A way past the tunnels.
enum Aside {
    Bypass,
    ToSelf(Translation),
    BackToSelf(Translation),
}

impl From<Course> for Fate {
    #[inline(always)]
    fn from(course: Course) -> Self {
        match course {
            Course::Direct => Self::Tunnel(Form::AsItIs),
            Course::Translated(translation) => Self::Tunnel(Form::Translated(translation)),
            Course::Bypass => Self::Aside(Aside::Bypass),
            Course::ToSelf(translation) => Self::Aside(Aside::ToSelf(translation)),
            Course::BackToSelf(translation) => Self::Aside(Aside::BackToSelf(translation)),
        }
    }
}

/// The stages of a packet whose course is not in the lane's cache, or has to be checked again.
struct Captured<'s, 'a> {
    stage: &'s mut Egress<'a>,
    current: &'a Current,
    /// Of the packet's flow.
    hash: u64,
}

impl Captured<'_, '_> {
    /// Looks up or checks the course of the packet's flow, then sends the packet on it.
    #[inline(never)]
    fn send(mut self, packet: &mut Outgoing<'_>) -> Result<Verdict, Stop> {
        let (courses, version) = (&self.stage.lane.outbound_courses, self.current.version);
        let known = courses.get(self.hash, &packet.parsed.flow, self.stage.now, |_| version).map(|known| known.course);
        let known = known.filter(|_| is_usual(packet.bytes, packet.parsed));
        let fate = match known {
            Some(course @ (Course::Translated(_) | Course::Direct)) => course.into(),
            known => self.fate(packet, known)?,
        };
        match fate {
            Fate::Tunnel(form) => self.stage.carry(packet, &form, Some(self.hash)),
            Fate::Aside(aside) => self.stage.step_aside(packet, &aside),
        }
    }

    /// The fate of a packet that a lane cannot send without the shared tables, or not into a tunnel.
    #[inline(never)]
    fn fate(&mut self, packet: &Outgoing<'_>, known: Option<Course>) -> Result<Fate, Stop> {
        // The directory speaks of hosts. Kernels send to groups on every device.
        if is_for_many(packet.parsed.flow.remote) {
            return Ok(Fate::Tunnel(Form::AsItIs));
        }
        if let Some(form) = self.form_of_error(packet) {
            return Ok(Fate::Tunnel(form));
        }
        let course = match known {
            _ if packet.parsed.flow.fragment => self.course_of_later_fragment(packet)?,
            Some(course) => course,
            None => self.new_course(packet)?,
        };
        self.note_first_fragment(packet, Ok(course));
        Ok(course.into())
    }

    /// An ICMP error about a packet of a translated flow is translated, too.
    #[inline(always)]
    fn form_of_error(&self, packet: &Outgoing<'_>) -> Option<Form> {
        if !icmp::is_error(packet.bytes, packet.parsed) {
            return None;
        }
        // An error about a packet to or from a pod is addressed to that pod, which is no business of capture.
        let quoted = icmp::quoted_inbound(packet.bytes, packet.parsed)?;
        let translation = self.stage.forwarder.translations.of_original(&quoted)?;
        let flow = FlowKey { remote: translation.wire.remote, ..packet.parsed.flow };
        (!translation.is_own).then_some(Form::Error(translation, flow))
    }

    /// Gives the packet's flow a course, or finds the one that it has in the shared tables.
    #[inline(always)]
    fn new_course(&mut self, packet: &Outgoing<'_>) -> Result<Course, Stop> {
        let Egress { forwarder, snapshot, now, .. } = *self.stage;
        let (parsed, firewall) = (packet.parsed, self.stage.firewall());
        let flags = if parsed.flow.protocol == protocol::TCP { tcp_flags(packet.bytes, parsed) } else { 0 };
        let opens = flags & (tcp::SYN | tcp::ACK) == tcp::SYN;
        let mut is_tracked = |wire: &FlowKey| {
            let lookup = self.stage.lane.last_tunnel.look_up(&forwarder.tunnels, wire.remote);
            let peer = |tunnel| Peer::new(tunnel, snapshot.routes.shared(wire, tunnel));
            lookup.tunnel().is_some_and(|tunnel| firewall.tracks(now, wire, peer(tunnel)))
        };
        let first = First { flow: &parsed.flow, opens, led_to: None, now };
        let (course, is_new) = match forwarder.translations.course(self.current, first, &mut is_tracked) {
            // The other end opened the flow by a tunnel that is for its address. A pod may speak before the cluster
            // shows it.
            Err(NoCourse::Unknown) if is_tracked(&parsed.flow) => {
                forwarder.translations.seal(&[parsed.flow], now);
                (Course::Direct, false)
            }
            Ok(course) => course,
            Err(reason) => {
                self.note_first_fragment(packet, Err(reason));
                return Err(reason.into());
            }
        };
        let lane = &mut *self.stage.lane;
        if is_new {
            lane.counters.add(Counter::TranslatedFlows, 1);
        }
        // What follows on the beginning of a connection in a tunnel has to be noted there.
        if !(opens && course == Course::Direct) {
            lane.outbound_courses.insert(self.hash, &parsed.flow, now, (self.current.version, course));
        }
        if flags & (tcp::FIN | tcp::RST) != 0 {
            match course {
                Course::Translated(translation) | Course::ToSelf(translation) | Course::BackToSelf(translation) => {
                    forwarder.translations.note(&translation.original, flags);
                }
                Course::Direct => forwarder.translations.end_sealed(&parsed.flow, now),
                Course::Bypass => {}
            }
        }
        Ok(course)
    }

    /// Remembers what becomes of a packet in fragments.
    #[inline(always)]
    fn note_first_fragment(&self, packet: &Outgoing<'_>, outcome: Outcome) {
        if !packet.parsed.flow.fragment
            && let Some(identity) = Identity::of(packet.bytes, packet.parsed, true)
        {
            self.stage.forwarder.translations.fragments.note(identity, outcome, self.stage.now);
        }
    }

    fn course_of_later_fragment(&self, packet: &Outgoing<'_>) -> Result<Course, Stop> {
        let fragments = &self.stage.forwarder.translations.fragments;
        let identity = Identity::of(packet.bytes, packet.parsed, true);
        let known = identity.and_then(|identity| fragments.course(&identity, self.stage.now));
        let found = self.current.directory.find(&Target::from(&packet.parsed.flow));
        // The address may have become that of an enrolled pod since the first fragment left.
        let may_bypass = !matches!(found, Found::Peer { .. } | Found::Unknown);
        match (known, found) {
            (Some(Ok(course)), _) if may_bypass || course != Course::Bypass => Ok(course),
            (_, Found::Peer { .. }) => Ok(Course::Direct),
            (_, Found::Unknown) => Err(Stop::Unknown),
            // Without the first fragment nobody knows the port, nor whether the flow was in a tunnel.
            (_, Found::Clear | Found::Service(_) | Found::Refused) => Err(DropReason::FragmentWithoutFirst.into()),
        }
    }
}

impl Egress<'_> {
    /// Lets a packet out of the overlay: to the primary network, or back to the device.
    fn step_aside(&mut self, packet: &mut Outgoing<'_>, aside: &Aside) -> Result<Verdict, Stop> {
        let Outgoing { bytes, parsed, offload, plan } = packet;
        let change = match aside {
            Aside::Bypass => {
                self.lane.counters.add(Counter::Bypassed, plan.count() as u64);
                return Ok(Verdict::Bypass);
            }
            Aside::ToSelf(translation) => translation.out(),
            Aside::BackToSelf(translation) => translation.back(),
        };
        rewrite(bytes, parsed, *offload, &change)?;
        let layout = offload.segment.and_then(|_| Layout::of(bytes, parsed));
        self.lane.deliver_whole(bytes, *offload, layout.map_or(0, |layout| layout.header as u16));
        self.lane.counters.add(Counter::LoopedBack, plan.count() as u64);
        Ok(Verdict::Deliver)
    }
}

/// Whether a packet changes no state of its flow: no SYN, FIN or RST, no fragment, no ICMP error.
#[inline]
pub(super) fn is_usual(packet: &[u8], parsed: &Packet) -> bool {
    match parsed.flow.protocol {
        _ if parsed.fragmented => false,
        protocol::TCP => tcp_flags(packet, parsed) & (tcp::SYN | tcp::FIN | tcp::RST) == 0,
        protocol::ICMP | protocol::ICMPV6 => !icmp::is_error(packet, parsed),
        _ => true,
    }
}

/// 0 if they are not in this packet.
#[inline]
pub(super) fn tcp_flags(packet: &[u8], parsed: &Packet) -> u8 {
    packet.get(parsed.transport_offset + 13).copied().unwrap_or_default()
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;

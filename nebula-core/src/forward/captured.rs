//! The stages of both paths that exist only under capture: the course of each packet of the pod, and the way back of
//! the answers.

use std::time::Instant;

use super::forwarder::Snapshot;
use super::layout::Layout;
use super::outbound::{Form, Stop, carry};
use super::reject::is_for_many;
use super::rewrite::{rewrite, rewrite_quoted};
use super::seal::seal;
use super::segment::Plan;
use super::{Forwarder, Lane, Offload};
use crate::capture::{Course, Current, First, Found, Identity, NoCourse, Outcome, Target, Translation, tcp};
use crate::counters::{Counter, Direction};
use crate::firewall::{Firewall, Peer};
use crate::tunnel::Tunnel;
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet, protocol};
use crate::{DropReason, PacketOwned, Punt, Verdict};

/// Sends a packet of the pod on its course. Not inlined, so that packets without capture do not pay for it.
#[inline(never)]
pub(super) fn forward(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    current: &Current,
    lane: &mut Lane,
    now: Instant,
    packet: &mut [u8],
    (parsed, offload, plan): (&Packet, Offload, Plan),
) -> Result<Verdict, Stop> {
    let hash = forwarder.conntrack.hash(&parsed.flow);
    if is_usual(packet, parsed)
        && let Some(known) = lane.outbound_courses.get(hash, &parsed.flow, now, |_| current.version)
        && let Some(pass) = known.pass
        && let Some((peer, translation)) = match &known.course {
            Course::Translated(translation) => Some((translation.wire.remote, Some(translation))),
            Course::Direct => Some((parsed.flow.remote, None)),
            Course::ToSelf(_) | Course::BackToSelf(_) | Course::Bypass => None,
        }
    {
        let lookup = lane.last_tunnel.look_up(&forwarder.tunnels, peer);
        // A path that has to be looked at is left to `carry`.
        let passes = |tunnel: &&Tunnel| tunnel.path_limit.is_open() && snapshot.pass(tunnel) == pass;
        if let Some(tunnel) = lookup.tunnel().filter(passes)
            && let Some(carrier) = forwarder.carrier(tunnel)
        {
            if let Some(translation) = translation {
                rewrite(packet, parsed, offload, &translation.out())?;
            }
            seal(lane, tunnel, &plan.of(packet), &carrier)?;
            tunnel.mark_sent();
            return Ok(Verdict::Transmit);
        }
    }
    forward_anew(forwarder, snapshot, current, lane, now, packet, (parsed, offload, plan, hash))
}

/// Sends a packet on a course that it has to be given, or has to be asked again whether it may take.
#[inline(never)]
fn forward_anew(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    current: &Current,
    lane: &mut Lane,
    now: Instant,
    packet: &mut [u8],
    (parsed, offload, plan, hash): (&Packet, Offload, Plan, u64),
) -> Result<Verdict, Stop> {
    let known = lane.outbound_courses.get(hash, &parsed.flow, now, |_| current.version).map(|known| known.course);
    let known = known.filter(|_| is_usual(packet, parsed));
    let form = match known {
        Some(Course::Translated(translation)) => Form::Translated(translation),
        Some(Course::Direct) => Form::AsItIs,
        known => match unusual(forwarder, snapshot, current, lane, now, packet, (hash, parsed, known))? {
            Ok(form) => form,
            Err(aside) => return step_aside(lane, packet, (parsed, offload, plan), aside),
        },
    };
    carry(forwarder, snapshot, lane, now, packet, (parsed, offload, plan), (&form, Some(hash)))
}

/// A packet that does not go into a tunnel.
enum Aside {
    Bypass,
    ToSelf(Translation),
    BackToSelf(Translation),
}

/// Whether a packet says nothing but that its flow goes on.
#[inline]
fn is_usual(packet: &[u8], parsed: &Packet) -> bool {
    match parsed.flow.protocol {
        _ if parsed.fragmented => false,
        protocol::TCP => tcp_flags(packet, parsed) & (tcp::SYN | tcp::FIN | tcp::RST) == 0,
        protocol::ICMP | protocol::ICMPV6 => !icmp::is_error(packet, parsed),
        _ => true,
    }
}

/// 0 if they are not in this packet.
#[inline]
fn tcp_flags(packet: &[u8], parsed: &Packet) -> u8 {
    packet.get(parsed.transport_offset + 13).copied().unwrap_or_default()
}

/// The course of a packet that a lane cannot send without the shared tables, or not into a tunnel.
#[inline(never)]
fn unusual(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    current: &Current,
    lane: &mut Lane,
    now: Instant,
    packet: &[u8],
    (hash, parsed, known): (u64, &Packet, Option<Course>),
) -> Result<Result<Form, Aside>, Stop> {
    // The directory speaks of hosts. Kernels send to groups on every device.
    if is_for_many(parsed.flow.remote) {
        return Ok(Ok(Form::AsItIs));
    }
    if icmp::is_error(packet, parsed) {
        // An error about a packet to or from a pod is addressed to that pod, which is no business of capture.
        let quoted = icmp::quoted_inbound(packet, parsed);
        let about = quoted.and_then(|quoted| forwarder.translations.of_original(&quoted));
        if let Some(translation) = about.filter(|translation| !translation.is_own) {
            return Ok(Ok(Form::Error(translation)));
        }
    }
    let course = if parsed.flow.fragment {
        of_later_fragment(forwarder, current, now, packet, parsed)?
    } else if let Some(course) = known {
        course
    } else {
        let flags = if parsed.flow.protocol == protocol::TCP { tcp_flags(packet, parsed) } else { 0 };
        let opens = flags & (tcp::SYN | tcp::ACK) == tcp::SYN;
        let mut is_tracked = |wire: &FlowKey| {
            let lookup = lane.last_tunnel.look_up(&forwarder.tunnels, wire.remote);
            let firewall = Firewall { filter: &snapshot.filter, conntrack: &forwarder.conntrack };
            let peer = |tunnel| Peer::new(tunnel, snapshot.routes.shared(wire, tunnel));
            lookup.tunnel().is_some_and(|tunnel| firewall.tracks(now, wire, peer(tunnel)))
        };
        let first = First { flow: &parsed.flow, opens, led_to: None, now };
        let (course, is_new) = match forwarder.translations.course(current, first, &mut is_tracked) {
            // The other end opened the flow by a tunnel that is for its address. A pod may speak before the cluster shows it.
            Err(NoCourse::Unknown) if is_tracked(&parsed.flow) => {
                forwarder.translations.seal(&[parsed.flow], now);
                (Course::Direct, false)
            }
            Ok(course) => course,
            Err(reason) => {
                note_first_fragment(forwarder, now, packet, (parsed, Err(reason)));
                return Err(stop(reason));
            }
        };
        if is_new {
            lane.counters.add(Counter::TranslatedFlows, 1);
        }
        // What follows on the beginning of a connection in a tunnel has to be noted there.
        if !(opens && course == Course::Direct) {
            lane.outbound_courses.insert(hash, &parsed.flow, now, (current.version, course));
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
        course
    };
    note_first_fragment(forwarder, now, packet, (parsed, Ok(course)));
    Ok(match course {
        Course::Direct => Ok(Form::AsItIs),
        Course::Translated(translation) => Ok(Form::Translated(translation)),
        Course::Bypass => Err(Aside::Bypass),
        Course::ToSelf(translation) => Err(Aside::ToSelf(translation)),
        Course::BackToSelf(translation) => Err(Aside::BackToSelf(translation)),
    })
}

/// Remembers what becomes of a packet in fragments.
fn note_first_fragment(forwarder: &Forwarder, now: Instant, packet: &[u8], (parsed, outcome): (&Packet, Outcome)) {
    if !parsed.flow.fragment
        && let Some(identity) = Identity::of(packet, parsed, true)
    {
        forwarder.translations.fragments.note(identity, outcome, now);
    }
}

fn of_later_fragment(
    forwarder: &Forwarder,
    current: &Current,
    now: Instant,
    packet: &[u8],
    parsed: &Packet,
) -> Result<Course, Stop> {
    let identity = Identity::of(packet, parsed, true);
    let known = identity.and_then(|identity| forwarder.translations.fragments.course(&identity, now));
    let found = current.directory.find(&Target::from(&parsed.flow));
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

fn stop(reason: NoCourse) -> Stop {
    match reason {
        NoCourse::Unknown => Stop::Unknown,
        NoCourse::Refused => DropReason::Refused.into(),
        NoCourse::EndpointGone => DropReason::EndpointGone.into(),
        NoCourse::Full => DropReason::ConntrackFull.into(),
    }
}

/// Lets a packet out of the overlay: to the primary network, or back to the device.
fn step_aside(
    lane: &mut Lane,
    packet: &mut [u8],
    (parsed, offload, plan): (&Packet, Offload, Plan),
    aside: Aside,
) -> Result<Verdict, Stop> {
    let change = match &aside {
        Aside::Bypass => {
            lane.counters.add(Counter::Bypassed, plan.count() as u64);
            return Ok(Verdict::Bypass);
        }
        Aside::ToSelf(translation) => translation.out(),
        Aside::BackToSelf(translation) => translation.back(),
    };
    rewrite(packet, parsed, offload, &change)?;
    let header_len = offload.segment.and_then(|_| Layout::of(packet, parsed)).map_or(0, |layout| layout.header as u16);
    lane.deliver_whole(packet, offload, header_len);
    lane.counters.add(Counter::LoopedBack, plan.count() as u64);
    Ok(Verdict::Deliver)
}

/// Hands a packet to an unknown destination to the control plane, which waits for a newer directory.
#[cold]
pub(super) fn hold(forwarder: &Forwarder, lane: &mut Lane, packet: &[u8], offload: Offload) -> Result<(), DropReason> {
    if forwarder.is_hold_full() {
        return Err(DropReason::HoldFull);
    }
    let packet = PacketOwned { bytes: packet.to_vec(), offload };
    if lane.punt(Punt::Unknown { packet }) { Ok(()) } else { Err(DropReason::PuntQueueFull) }
}

/// Whether the packets of an inbound flow may pass, and how they are translated back.
#[inline(never)]
pub(super) fn admit(
    forwarder: &Forwarder,
    snapshot: &Snapshot,
    current: &Current,
    lane: &mut Lane,
    now: Instant,
    (flow, tunnel): (&FlowKey, &Tunnel),
) -> (Result<(), DropReason>, Option<Translation>) {
    // Read before the lookup: a flow that is added during it makes the answer stale, never wrong.
    let added = forwarder.translations.added();
    let hash = forwarder.conntrack.hash(flow);
    let stamp = |back: &Option<Translation>| if back.is_some() { current.version } else { added };
    let known = lane.inbound_courses.get(hash, flow, now, stamp);
    if let Some(known) = known.filter(|known| known.pass == Some(snapshot.pass(tunnel))) {
        return (Ok(()), known.course);
    }
    let known = known.map(|known| known.course);
    let firewall = Firewall { filter: &snapshot.filter, conntrack: &forwarder.conntrack };
    let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
    let mut check =
        |direction| firewall.check_for_a_while(&mut lane.flows, (now, hash), direction, flow, tunnel, route);
    let mut verdict = check(Direction::Inbound);
    if verdict == Err(DropReason::NoRule) && added > 0 && forwarder.translations.is_resumed(current, flow, now) {
        verdict = check(Direction::Outbound);
    }
    match verdict {
        Err(reason) => (Err(reason), None),
        Ok(_) if added == 0 || flow.fragment => (Ok(()), None),
        Ok(until) => {
            let back = known.unwrap_or_else(|| {
                let back = forwarder.translations.back(current, flow, now);
                lane.inbound_courses.insert(hash, flow, now, (stamp(&back), back));
                back
            });
            lane.inbound_courses.note_pass(hash, flow, snapshot.pass(tunnel), until);
            (Ok(()), back)
        }
    }
}

/// Translates a packet back. Also learns from fragments, and translates those without ports.
#[inline(never)]
pub(super) fn translate_back(
    forwarder: &Forwarder,
    now: Instant,
    bytes: &mut [u8],
    packet: &Packet,
    back: Option<&Translation>,
) -> Result<(), DropReason> {
    let Some(translation) = back else { return translate_fragment_back(forwarder, now, bytes, packet) };
    if !is_usual(bytes, packet) {
        note_unusual(forwarder, now, bytes, packet, translation);
    }
    rewrite(bytes, packet, Offload::default(), &translation.back())
}

/// Learns from a first fragment, and from the end of a connection.
#[cold]
fn note_unusual(forwarder: &Forwarder, now: Instant, bytes: &[u8], packet: &Packet, translation: &Translation) {
    if let Some(identity) = Identity::of(bytes, packet, false) {
        forwarder.translations.fragments.note(identity, Ok(Course::Translated(*translation)), now);
    }
    if packet.flow.protocol == protocol::TCP {
        let flags = tcp_flags(bytes, packet) & (tcp::FIN | tcp::RST);
        if flags != 0 {
            forwarder.translations.note(&translation.original, flags);
        }
    }
}

/// A later fragment follows its first, or is delivered as it is.
#[cold]
fn translate_fragment_back(
    forwarder: &Forwarder,
    now: Instant,
    bytes: &mut [u8],
    packet: &Packet,
) -> Result<(), DropReason> {
    let Some(identity) = Identity::of(bytes, packet, false).filter(|_| packet.flow.fragment) else { return Ok(()) };
    match forwarder.translations.fragments.course(&identity, now) {
        Some(Ok(Course::Translated(translation))) => rewrite(bytes, packet, Offload::default(), &translation.back()),
        _ => Ok(()),
    }
}

/// Translates an ICMP error about a packet of `quoted` back, if that is a translated flow.
pub(super) fn translate_error_back(
    forwarder: &Forwarder,
    bytes: &mut [u8],
    packet: &Packet,
    quoted: &FlowKey,
) -> Result<(), DropReason> {
    match forwarder.translations.of_wire(quoted).filter(|translation| !translation.is_own) {
        Some(translation) => rewrite_quoted(bytes, packet, &translation, false),
        None => Ok(()),
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "captured_tests.rs"]
mod tests;

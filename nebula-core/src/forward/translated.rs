//! The stages of the inbound path that exist only under capture: the way back of the answers to translated packets.

use super::Offload;
use super::captured::{is_usual, tcp_flags};
use super::ingress::Ingress;
use super::rewrite::{rewrite, rewrite_quoted};
use crate::DropReason;
use crate::capture::{Course, Current, Identity, Translation, tcp};
use crate::counters::Direction;
use crate::firewall::{About, Firewall, Place};
use crate::tunnel::Tunnel;
use crate::wire::ip::{FlowKey, Packet, protocol};

impl Ingress<'_> {
    /// Whether the packets of a flow may pass, where they are counted, and how they are translated back.
    #[inline(never)]
    pub(super) fn admit_captured(
        &mut self,
        current: &Current,
        flow: &FlowKey,
        tunnel: &Tunnel,
    ) -> (Result<Place, DropReason>, Option<Translation>) {
        let (forwarder, snapshot, now) = (self.forwarder, self.snapshot, self.now);
        let lane = &mut *self.lane;
        // Read before the lookup: a flow that is added during it makes the answer stale, never wrong.
        let added = forwarder.translations.added();
        let hash = forwarder.conntrack.hash(flow);
        let stamp = |back: &Option<Translation>| if back.is_some() { current.version } else { added };
        let known = lane.inbound_courses.get(hash, flow, now, stamp);
        if let Some(known) = known
            && let Some((pass, claim)) = known.pass
            && pass == snapshot.pass(tunnel)
            && lane.flows.has(&claim)
        {
            return (Ok(claim.place), known.course);
        }
        let known = known.map(|known| known.course);
        let firewall = Firewall { filter: &snapshot.filter, conntrack: &forwarder.conntrack };
        let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
        let mut check = |direction| {
            let about = About { direction, flow, original: None };
            firewall.check_for_a_while(&mut lane.flows, (now, hash), about, tunnel, route)
        };
        let mut verdict = check(Direction::Inbound);
        let is_refused = verdict.is_err_and(DropReason::is_refused_flow);
        if is_refused && added > 0 && forwarder.translations.is_resumed(current, flow, now) {
            verdict = check(Direction::Outbound);
        }
        match verdict {
            Err(reason) => (Err(reason), None),
            Ok((_, place)) if added == 0 || flow.fragment => (Ok(place), None),
            Ok((until, place)) => {
                let back = known.unwrap_or_else(|| {
                    let back = forwarder.translations.back(current, flow, now);
                    lane.inbound_courses.insert(hash, flow, now, (stamp(&back), back));
                    back
                });
                let pass = (snapshot.pass(tunnel), lane.flows.claim(place));
                lane.inbound_courses.note_pass(hash, flow, pass, until);
                (Ok(place), back)
            }
        }
    }

    /// Translates a packet back. Also learns from fragments, and translates those without ports.
    #[inline(never)]
    pub(super) fn translate_back(
        &self,
        bytes: &mut [u8],
        packet: &Packet,
        back: Option<&Translation>,
    ) -> Result<(), DropReason> {
        let Some(translation) = back else { return self.translate_fragment_back(bytes, packet) };
        if !is_usual(bytes, packet) {
            self.note_unusual(bytes, packet, translation);
        }
        rewrite(bytes, packet, Offload::default(), &translation.back())
    }

    /// Learns from a first fragment, and from the end of a connection.
    #[cold]
    fn note_unusual(&self, bytes: &[u8], packet: &Packet, translation: &Translation) {
        let translations = &self.forwarder.translations;
        if let Some(identity) = Identity::of(bytes, packet, false) {
            translations.fragments.note(identity, Ok(Course::Translated(*translation)), self.now);
        }
        if packet.flow.protocol == protocol::TCP {
            let flags = tcp_flags(bytes, packet) & (tcp::FIN | tcp::RST);
            if flags != 0 {
                translations.note(&translation.original, flags);
            }
        }
    }

    /// A later fragment follows its first, or is delivered as it is.
    #[cold]
    fn translate_fragment_back(&self, bytes: &mut [u8], packet: &Packet) -> Result<(), DropReason> {
        let Some(identity) = Identity::of(bytes, packet, false).filter(|_| packet.flow.fragment) else { return Ok(()) };
        match self.forwarder.translations.fragments.course(&identity, self.now) {
            Some(Ok(Course::Translated(translation))) => {
                rewrite(bytes, packet, Offload::default(), &translation.back())
            }
            _ => Ok(()),
        }
    }

    /// Translates an ICMP error about a packet of `quoted` back, if that is a translated flow.
    pub(super) fn translate_error_back(
        &self,
        bytes: &mut [u8],
        packet: &Packet,
        quoted: &FlowKey,
    ) -> Result<(), DropReason> {
        match self.forwarder.translations.of_wire(quoted).filter(|translation| !translation.is_own) {
            Some(translation) => rewrite_quoted(bytes, packet, &translation, false),
            None => Ok(()),
        }
    }
}

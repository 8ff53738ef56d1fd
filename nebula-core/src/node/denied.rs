//! Overlay packets that lanes dropped, and flows that policies in audit would refuse: for the record, and for who
//! follows denied flows.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::Node;
use crate::counters::Direction;
use crate::diagnosis::{DeniedFlow, Party, PolicyRefusal};
use crate::forward::Capture;
use crate::index::LocalIndex;
use crate::wire::ip::FlowKey;
use crate::{DropReason, Event};

impl Node {
    /// A packet was dropped; it came through this tunnel. Lanes report each kind of packet once a second.
    pub(super) fn handle_dropped(
        &mut self,
        now: Instant,
        (direction, reason): (Direction, DropReason),
        flow: FlowKey,
        tunnel: Option<LocalIndex>,
    ) {
        let peer = tunnel.and_then(|index| self.tunnels.get(index)?.tunnel.peer_addresses.first().copied());
        let policy = match reason {
            DropReason::NetworkPolicy => self.policy_refusal(now, direction, &flow, tunnel),
            _ => None,
        };
        self.journal.dropped(now, (direction, reason), flow, peer, policy);
        if tracing::event_enabled!(tracing::Level::DEBUG) {
            let denied = self.denied(now, (direction, reason), flow, peer);
            self.outbox.event(Event::FlowDenied(Box::new(denied)));
        }
    }

    /// A flow passed through this tunnel that policies in audit would refuse.
    pub(super) fn handle_audited(&mut self, now: Instant, direction: Direction, flow: FlowKey, tunnel: LocalIndex) {
        let peer = self.tunnels.get(tunnel).and_then(|live| live.tunnel.peer_addresses.first().copied());
        let policy = self.policy_refusal(now, direction, &flow, Some(tunnel));
        self.journal.audited(now, direction, flow, peer, policy);
    }

    /// What refuses a flow, and whose it is. `None` if its peer is gone, or the policies have changed since.
    fn policy_refusal(
        &self,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        tunnel: Option<LocalIndex>,
    ) -> Option<PolicyRefusal> {
        // A dropped packet of this node has the addresses that its sender used.
        let capture = tunnel.is_none().then(|| self.forwarder.explain_capture(now, flow)).flatten();
        let flow = match &capture {
            Some(Capture::Translated(wire)) => wire,
            _ => flow,
        };
        let live = tunnel.and_then(|index| self.tunnels.get(index)).map(|live| Arc::clone(&live.tunnel));
        let tunnel =
            live.or_else(|| self.carrier_of(direction, flow, self.forwarder.explain_route(flow).ok().as_ref()))?;
        let reason = self.forwarder.explain_policies(direction, flow, &tunnel)?;
        Some(PolicyRefusal::new(self.own_certificate().name(), tunnel.peer.name(), &reason))
    }

    fn denied(
        &self,
        now: Instant,
        (direction, reason): (Direction, DropReason),
        flow: FlowKey,
        peer: Option<IpAddr>,
    ) -> DeniedFlow {
        let trace = self.trace(now, direction, &flow);
        // What this node sends is reported without a tunnel.
        let peer = peer.or_else(|| trace.tunnel.as_ref()?.peer.first().copied());
        let tunnel = peer.and_then(|peer| self.forwarder.tunnels().by_address(peer));
        let is_no_rule = reason == DropReason::NoRule;
        DeniedFlow {
            direction,
            flow,
            reason,
            own: Party::from(self.own_certificate()),
            peer: tunnel.map(|tunnel| Party::from(&**tunnel.peer)),
            nearest: trace.firewall.and_then(|firewall| firewall.nearest).filter(|_| is_no_rule),
        }
    }
}

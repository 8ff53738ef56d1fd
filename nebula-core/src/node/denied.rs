//! Overlay packets that lanes dropped: for the record, and for who follows denied flows.

use std::net::IpAddr;
use std::time::Instant;

use super::Node;
use crate::counters::Direction;
use crate::diagnosis::{DeniedFlow, Party};
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
        self.journal.dropped(now, (direction, reason), flow, peer);
        if tracing::event_enabled!(tracing::Level::DEBUG) {
            let denied = self.denied(now, (direction, reason), flow, peer);
            self.outbox.event(Event::FlowDenied(Box::new(denied)));
        }
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
            peer: tunnel.map(|tunnel| Party::from(&*tunnel.peer)),
            nearest: trace.firewall.and_then(|firewall| firewall.nearest).filter(|_| is_no_rule),
        }
    }
}

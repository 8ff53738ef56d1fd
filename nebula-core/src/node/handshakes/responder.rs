//! Answers the first messages of peers that call.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::refusals::{objection, refusal, refusal_of};
use crate::handshake::{Error, respond, sha256};
use crate::index::LocalIndex;
use crate::node::Node;
use crate::node::confirmation::KnownCallers;
use crate::wire::header::{HEADER_LEN, MessageType};
use crate::{DropReason, Origin};

impl Node {
    pub(super) fn handle_first_message(&mut self, now: Instant, from: Origin, datagram: &[u8]) {
        if let Origin::Direct(at) = from
            && !self.config.lighthouse.remote_allow.allows_somebody(at.ip())
        {
            self.outbox.count_drop(DropReason::AddressNotAllowed);
            return;
        }
        let digest = digest_of(datagram);
        if let Some(index) = self.half_open.opened_by(&digest) {
            self.note_repeat(now, index, from);
            self.callers(now).answer(index, from, datagram.len());
            return;
        }
        if let Some(live) = self.tunnels.opened_by(&digest) {
            let tunnel = Arc::clone(&live.tunnel);
            // The same message 1 came by a better path. Test that path: only the peer can answer, and its answer
            // moves the tunnel.
            if let Origin::Direct(at) = from {
                let is_better = match tunnel.endpoint() {
                    Some(current) => self.config.is_preferred(at) && !self.config.is_preferred(current),
                    None => !tunnel.is_on_trial(),
                };
                if is_better && self.config.may_be_at(&tunnel.peer_addresses, at) {
                    self.paths(now).try_endpoint(&tunnel, at);
                }
            }
            return;
        }
        if !self.admission.admit(now, from.underlay().ip()) {
            self.outbox.count_drop(DropReason::HandshakeLimit);
            return;
        }
        let Some(local_index) = self.reserve_index() else { return };
        let seed = self.random_bytes();
        let at = self.wall.unix_seconds(now);
        let known = KnownCallers { trust: &self.config.trust, tunnels: &self.tunnels, half_open: &self.half_open };
        let answer = respond(self.own(now), *local_index, seed, datagram, &known, at);
        let (agreed, reply) = match answer {
            Ok(answer) => answer,
            Err(error) => return self.refuse(None, refusal(now, from, error)),
        };
        let done = agreed.negotiated();
        if let Some(reason) = objection(&self.config, done, None, from) {
            return self.refuse(None, refusal_of(now, from, (reason, self.config.relay.force), done, None));
        }
        let peer = done.peer.networks()[0].addr();
        if let Some(primary) = self.forwarder.tunnels().by_address(peer)
            && !primary.initiator
            && primary.peer_time >= done.peer_time
        {
            self.outbox.message(&primary, MessageType::TestRequest, &[]);
            return;
        }
        self.callers(now).insert((local_index, agreed), digest, reply, from, datagram.len());
    }

    /// Message 3: a caller's part of the ML-KEM exchange.
    pub(super) fn handle_offer(&mut self, now: Instant, from: Origin, index: LocalIndex, datagram: &[u8]) {
        let Some(answered) = self.half_open.get_mut(index) else {
            return self.outbox.count_drop(DropReason::BadHandshake);
        };
        let addresses: Vec<_> = answered.addresses().collect();
        if let Origin::Direct(at) = from
            && !self.config.may_be_at(&addresses, at)
        {
            return self.outbox.count_drop(DropReason::AddressNotAllowed);
        }
        match self.callers(now).read_offer(index, from, datagram) {
            Ok(()) => {}
            // Anybody can send such a datagram; the caller's own may still come.
            Err(Error::Noise(_)) => self.outbox.count_drop(DropReason::BadHandshake),
            Err(error) => self.refuse(None, refusal(now, from, error)),
        }
    }

    /// Remembers a caller that this node answered and that goes on calling. What comes at once may have been sent to
    /// several endpoints of this node.
    fn note_repeat(&mut self, now: Instant, index: LocalIndex, from: Origin) {
        let Some(answered) = self.half_open.get_mut(index) else { return };
        if let Origin::Direct(from) = from
            && now >= answered.since + REPEATED_AFTER
            && let Some(peer) = answered.addresses().next()
        {
            self.journal.repeated(now, peer, answered.peer.name(), from);
        }
    }
}

/// Digest that identifies a handshake message. It leaves out the header, which says nothing about the handshake.
pub(in crate::node) fn digest_of(message: &[u8]) -> [u8; 32] {
    sha256(&message[HEADER_LEN..])
}

/// A first message that comes again after this was repeated by the caller, not sent to several places.
const REPEATED_AFTER: Duration = Duration::from_millis(50);

//! Records refused handshakes, and peers that change their certificate and place.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::Node;
use crate::diagnosis::{Claimed, Refusal, RefusalReason};
use crate::handshake::Error;
use crate::tunnel::{Negotiated, Tunnel};
use crate::{DropReason, Event, Origin};

impl Node {
    /// Records that the answer to a handshake of this node was refused.
    pub(super) fn answer_refused(&mut self, now: Instant, peer: IpAddr, refusal: Refusal) {
        self.refused(refusal.from, refusal.text.clone());
        self.journal.refused(now, peer, refusal);
    }

    pub(super) fn refused(&mut self, from: SocketAddr, reason: String) {
        self.outbox.count_drop(DropReason::BadHandshake);
        self.outbox.event(Event::HandshakeRefused { from, reason });
    }

    /// Records that the peer showed another certificate, from another endpoint, than in a tunnel that it still has.
    pub(super) fn note_other_certificate(&mut self, now: Instant, tunnel: &Tunnel, at: SocketAddr) {
        let Some(&peer) = tunnel.peer_addresses.first() else { return };
        let Some(other) = self.tunnels.of_peer(peer).last().and_then(|index| self.tunnels.get(*index)) else { return };
        let (before, after) = (other.tunnel.peer.fingerprint(), tunnel.peer.fingerprint());
        if let Some(place) = other.tunnel.endpoint().filter(|place| before != after && *place != at) {
            self.journal.replaced(now, peer, (before, place), (after, at));
        }
    }
}

/// Turns an error into a refusal, with what the error says about the peer.
pub(super) fn refusal(now: Instant, from: Origin, error: Error) -> Refusal {
    let text = describe(&error);
    let (reason, claimed) = match error {
        Error::Certificate(source, claimed) => (RefusalReason::from(&source), claimed.map(|claimed| *claimed)),
        Error::OwnAddress(claimed) => (RefusalReason::OwnAddress, Some(*claimed)),
        Error::Noise(_) => (RefusalReason::Unreadable, None),
        Error::Payload(_) | Error::NoCertificate => (RefusalReason::Malformed, None),
    };
    Refusal { at: now, from: from.underlay(), reason, text, claimed, times: 1 }
}

pub(super) fn own_address(now: Instant, from: Origin, done: &Negotiated) -> Refusal {
    refusal_of(now, from, RefusalReason::OwnAddress, OWN_ADDRESS.to_owned(), done)
}

pub(super) fn not_allowed(now: Instant, from: Origin, done: &Negotiated) -> Refusal {
    let text = format!("{} may not be at {}", done.peer.name(), from.underlay().ip());
    refusal_of(now, from, RefusalReason::AddressNotAllowed, text, done)
}

/// Like [`refusal`], for a peer whose certificate is valid.
pub(super) fn refusal_of(
    now: Instant,
    from: Origin,
    reason: RefusalReason,
    text: String,
    done: &Negotiated,
) -> Refusal {
    let claimed = Some(Claimed::new(&done.peer, done.peer_time));
    Refusal { at: now, from: from.underlay(), reason, text, claimed, times: 1 }
}

/// The error with its causes, for people.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

const OWN_ADDRESS: &str = "the peer's certificate claims an address of this node, or none";

//! What this node objects to in a handshake, and the record of it.

use std::net::IpAddr;
use std::time::Instant;

use crate::counters::Counter;
use crate::diagnosis::{Claimed, Refusal, RefusalReason};
use crate::handshake::Error;
use crate::node::Node;
use crate::tunnel::{Negotiated, addresses_of};
use crate::{Config, DropReason, Event, Origin, PostQuantum};

impl Node {
    /// Counts and records a refused handshake message: the answer of this peer, or that of a caller.
    pub(super) fn refuse(&mut self, answer_of: Option<IpAddr>, refusal: Refusal) {
        if refusal.reason == RefusalReason::AddressNotAllowed {
            self.outbox.count_drop(DropReason::AddressNotAllowed);
        } else {
            self.outbox.count_drop(DropReason::BadHandshake);
            self.outbox.event(Event::HandshakeRefused { from: refusal.from, reason: refusal.text.clone() });
        }
        if refusal.reason == RefusalReason::OwnAddress {
            self.note_own_address(&refusal);
        }
        match answer_of {
            Some(peer) => self.journal.refused(refusal.at, peer, refusal),
            None => self.journal.caller_refused(refusal.at, refusal),
        }
    }

    /// Another host has an address of this one in its certificate.
    fn note_own_address(&mut self, refusal: &Refusal) {
        let Some(claimed) = &refusal.claimed else { return };
        let own = claimed.addresses.iter().find(|address| self.config.is_own_address(**address));
        let own_name = self.config.identity.primary().name().to_owned();
        if let Some(&address) = own.filter(|_| !own_name.eq_ignore_ascii_case(&claimed.name)) {
            let names = [own_name, claimed.name.clone()];
            self.outbox.counters().add(Counter::AddressConflicts, 1);
            self.outbox.event(Event::AddressConflict { address, names, at: refusal.from, is_own: true });
        }
    }
}

/// What this node objects to in a valid handshake, if anything. `called` is the peer that was called.
pub(super) fn objection(
    config: &Config,
    done: &Negotiated,
    called: Option<IpAddr>,
    from: Origin,
) -> Option<RefusalReason> {
    let addresses = addresses_of(&done.peer);
    // Nobody may claim an address of this node, not even this node itself.
    if addresses.is_empty() || addresses.iter().any(|address| config.is_own_address(*address)) {
        return Some(RefusalReason::OwnAddress);
    }
    if called.is_some_and(|called| !addresses.contains(&called)) {
        return Some(RefusalReason::OtherHost);
    }
    if config.post_quantum == PostQuantum::Require && !done.post_quantum {
        return Some(RefusalReason::NotPostQuantum);
    }
    let may_be_there = from.endpoint().is_none_or(|endpoint| config.may_be_at(&addresses, endpoint));
    (!may_be_there).then_some(RefusalReason::AddressNotAllowed)
}

/// The refusal of a valid handshake for this reason.
pub(super) fn refusal_of(
    now: Instant,
    from: Origin,
    (reason, is_forced): (RefusalReason, bool),
    done: &Negotiated,
    called: Option<IpAddr>,
) -> Refusal {
    let name = done.peer.name();
    let text = match (reason, called) {
        (RefusalReason::OtherHost, Some(called)) => format!("{name} answered for {called}"),
        (RefusalReason::AddressNotAllowed, _) if is_forced => {
            format!("{name} is at {}, and relay.force is set here", from.underlay().ip())
        }
        (RefusalReason::AddressNotAllowed, _) => format!("{name} may not be at {}", from.underlay().ip()),
        (RefusalReason::NotPostQuantum, _) => {
            format!("{name} does not offer ML-KEM, and pki.post_quantum: require is set here")
        }
        _ => "the peer's certificate claims an address of this node, or none".to_owned(),
    };
    let claimed = Some(Claimed::new(&done.peer, done.peer_time));
    Refusal { at: now, from: from.underlay(), reason, text, claimed, times: 1 }
}

/// The refusal of a message that is not a valid handshake.
pub(super) fn refusal(now: Instant, from: Origin, error: Error) -> Refusal {
    let (reason, text, claimed) = error.into_refusal();
    Refusal { at: now, from: from.underlay(), reason, text, claimed, times: 1 }
}

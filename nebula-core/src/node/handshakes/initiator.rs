//! Calls peers: starts and repeats handshakes, and installs the tunnel when the peer answered.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::Version;

use super::refusals::{objection, refusal, refusal_of};
use crate::counters::Direction;
use crate::diagnosis::RefusalReason;
use crate::handshake::{Agreed, Error, Exchange, Initiator, Offered, Opened, Pending, Reached, Waiting};
use crate::index::LocalIndex;
use crate::lighthouse::Place;
use crate::node::Node;
use crate::node::outbox::seal;
use crate::node::timer::Due;
use crate::node::tunnels::Established;
use crate::tunnel::{Negotiated, Tunnel};
use crate::wire::header::MessageType;
use crate::{DropReason, Event, Origin};

impl Node {
    /// Starts a handshake unless one is in progress. `version` overrides the version of the certificate to present.
    pub(in crate::node) fn start_handshake(&mut self, now: Instant, peer: IpAddr, version: Option<Version>) {
        self.start_handshake_with(now, peer, version, Waiting::default());
    }

    /// Starts a handshake, also through relays, unless one is in progress, which goes on at its own pace however many
    /// packets there are.
    pub(in crate::node) fn call(&mut self, now: Instant, peer: IpAddr) {
        if self.start_handshake_with(now, peer, None, Waiting::default()) {
            self.try_relays(now, peer);
        }
    }

    /// Returns whether a new handshake was started.
    fn start_handshake_with(&mut self, now: Instant, peer: IpAddr, version: Option<Version>, waiting: Waiting) -> bool {
        if !self.insert_handshake(now, peer, version, waiting) {
            return false;
        }
        self.ask_lighthouses(now, peer);
        if !self.config.endpoints_of(peer, &self.lighthouse).is_empty() {
            self.attempt(peer);
        }
        self.callers(now).test_all_named(peer);
        true
    }

    /// Starts a handshake with nobody but whoever is at this endpoint, unless one with the peer is in progress.
    pub(in crate::node) fn start_handshake_at(&mut self, now: Instant, peer: IpAddr, at: SocketAddr) {
        if self.insert_handshake(now, peer, None, Waiting::default())
            && let Some(pending) = self.pending.get_mut(peer)
        {
            pending.only = Some(at);
            self.attempt(peer);
        }
    }

    /// Returns whether a new handshake was inserted.
    fn insert_handshake(&mut self, now: Instant, peer: IpAddr, version: Option<Version>, waiting: Waiting) -> bool {
        if self.pending.contains(peer) || self.config.is_own_address(peer) {
            return false;
        }
        let version = version.unwrap_or_else(|| self.config.version_towards(peer));
        if self.config.identity.certificate(version).is_none() {
            return false;
        }
        if !self.make_room(now) {
            self.outbox.counters().drop_one(Direction::Outbound, DropReason::PendingFull);
            return false;
        }
        let Some(local_index) = self.reserve_index() else { return false };
        self.pending.insert(peer, Pending::new(local_index, version, now, waiting));
        self.timer.set(Due::Handshake(peer), now + self.config.handshakes.try_interval);
        true
    }

    /// Gives up a handshake that has found no endpoint if there is no room for another one. Returns `false` if there
    /// is none to give up.
    fn make_room(&mut self, now: Instant) -> bool {
        if self.pending.has_room(self.config.handshakes.max_pending) {
            return true;
        }
        let Some(peer) = self.pending.displaceable(now) else { return false };
        if let Some((displaced, waiting)) = self.take_pending(peer) {
            self.give_up(now, peer, &displaced, &waiting);
        }
        true
    }

    /// The backoff after an attempt is over: retransmits message 1 or gives up.
    pub(in crate::node) fn handshake_due(&mut self, now: Instant, peer: IpAddr) {
        let lost = self.lighthouse.lost_for(now, peer);
        let Some(pending) = self.pending.get_mut(peer) else { return };
        if let Some(offered) = &pending.offered {
            return if offered.times < MAX_OFFERS {
                self.send_offer(now, peer)
            } else {
                self.restart_unanswered(now, peer)
            };
        }
        let retries = if pending.only.is_some() { ATTEMPTS_AT_ONE_PLACE } else { self.config.handshakes.retries };
        let returning = lost.is_some() && pending.has_packets();
        if pending.attempts >= retries && (!returning || pending.only.is_some()) {
            if let Some((ended, waiting)) = self.take_pending(peer) {
                self.give_up(now, peer, &ended, &waiting);
            }
            return;
        }
        self.attempt(peer);
        self.try_relays(now, peer);
        let Some(pending) = self.pending.get_mut(peer) else { return };
        if pending.only.is_some() {
            return self
                .timer
                .set(Due::Handshake(peer), now + pending.pause(self.config.handshakes.try_interval, None));
        }
        let (attempts, pause) = (pending.attempts, pending.pause(self.config.handshakes.try_interval, lost));
        let unanswered = returning && !pending.answered;
        self.timer.set(Due::Handshake(peer), now + pause);
        // A peer that comes back may have moved. The lighthouse knows its endpoint as soon as the peer has
        // registered.
        if unanswered || attempts == REQUERY_AT_ATTEMPT && self.config.endpoints_of(peer, &self.lighthouse).len() <= 1 {
            self.ask_lighthouses(now, peer);
        }
    }

    /// Retries at once if the endpoints of the peer changed. This counts as an attempt but does not move the timer.
    pub(in crate::node) fn retry_if_endpoints_changed(&mut self, peer: IpAddr) {
        let endpoints = self.config.endpoints_of(peer, &self.lighthouse);
        let expected = self.lighthouse.lost_for(self.now, peer).is_some();
        let most = self.config.handshakes.retries.max(if expected { MAX_ATTEMPTS_UNTIL_RETURN } else { 0 });
        let may = |it: &mut Pending| it.may_be_relayed() && it.attempts < most && it.known != endpoints;
        if self.pending.get_mut(peer).is_some_and(may) {
            self.attempt(peer);
        }
    }

    /// Sends message 1 to where the peer may be: see [`Pending::next_targets`].
    fn attempt(&mut self, peer: IpAddr) {
        let only = self.pending.get_mut(peer).and_then(|pending| pending.only);
        let endpoints = only.map_or_else(|| self.config.endpoints_of(peer, &self.lighthouse), |only| vec![only]);
        let likely = if only.is_none() { self.likely_endpoints(peer, &endpoints) } else { Vec::new() };
        let message = if endpoints.is_empty() && likely.is_empty() { None } else { self.first_message(peer) };
        let Some(pending) = self.pending.get_mut(peer) else { return };
        let mut targets = pending.next_targets(&endpoints);
        targets.extend(likely);
        for message in message.iter() {
            targets.iter().for_each(|endpoint| self.outbox.datagram(*endpoint, message.clone()));
        }
        if let Some(opened) = pending.opened.as_mut().filter(|_| message.is_some()) {
            targets.iter().for_each(|endpoint| opened.reached.note(Origin::Direct(*endpoint)));
        }
        pending.attempts += 1;
        let is_repeat = message.is_none() || pending.known == endpoints;
        pending.known = endpoints;
        let before = std::mem::replace(&mut pending.tried, targets);
        // A handshake that succeeds at the first attempt is not recorded.
        if pending.attempts == 2 {
            self.journal.sent(self.now, peer, &before);
        }
        if pending.attempts >= 2 {
            self.journal.sent(self.now, peer, &pending.tried);
        }
        if !is_repeat || tracing::event_enabled!(tracing::Level::DEBUG) {
            let (local_index, attempt, endpoints) = (*pending.local_index, pending.attempts, pending.tried.clone());
            self.outbox.event(Event::HandshakeSent { peer, local_index, endpoints, attempt, is_repeat });
        }
    }

    /// Where the directory expects the peer, apart from `endpoints`: from the second attempt on where nobody else
    /// names an endpoint, and where those do not answer. A lighthouse that is there answers before.
    fn likely_endpoints(&mut self, peer: IpAddr, endpoints: &[SocketAddr]) -> Vec<SocketAddr> {
        let Some(directory) = &self.config.capture else { return Vec::new() };
        let from = if endpoints.is_empty() { 1 } else { LIKELY_FROM_ATTEMPT };
        if self.config.keeps_to_relays(&[peer]) || self.pending.get_mut(peer).is_none_or(|it| it.attempts < from) {
            return Vec::new();
        }
        let mut likely = directory.likely_endpoints(peer);
        likely.truncate(MAX_LIKELY);
        let (peers, lighthouse) = ([peer], &self.lighthouse);
        let rules = self.config.endpoint_rules(&peers);
        likely.retain(|at| {
            rules.believable(*at, Place::Elsewhere) && !endpoints.contains(at) && !lighthouse.is_refused(peer, *at)
        });
        likely
    }

    /// Message 1 of the handshake with `peer`, created on first use.
    pub(in crate::node) fn first_message(&mut self, peer: IpAddr) -> Option<Vec<u8>> {
        let pending = self.pending.get_mut(peer)?;
        if let Some(opened) = &pending.opened {
            return Some(opened.message.clone());
        }
        let (version, local_index) = (pending.version, *pending.local_index);
        let own_certificate = self.config.identity.certificate(version)?.fingerprint();
        let seed = self.random_bytes();
        match Initiator::start(self.own(self.now), version, local_index, seed) {
            Ok((machine, message)) => {
                let reached = Reached::default();
                let opened = Opened { since: self.now, own_certificate, machine, message: message.clone(), reached };
                self.pending.get_mut(peer)?.opened = Some(Box::new(opened));
                Some(message)
            }
            Err(error) => {
                tracing::warn!(%peer, error = %error, "cannot start a handshake");
                None
            }
        }
    }

    /// A tunnel that `peer` opened came up first. A pending handshake goes on if it has created its message 1, and is
    /// dropped otherwise; in both cases, what waits for it is sent now.
    pub(in crate::node) fn overtaken(&mut self, now: Instant, peer: IpAddr) {
        let Some(pending) = self.pending.get_mut(peer) else { return };
        let waiting = match pending.opened.is_some() {
            true => self.pending.take_waiting(peer),
            false => self.take_pending(peer).map(|(_, waiting)| waiting).unwrap_or_default(),
        };
        self.flush(now, peer, waiting);
    }

    /// Takes a pending handshake that is over, and cancels its timer.
    fn take_pending(&mut self, peer: IpAddr) -> Option<(Pending, Waiting)> {
        let (pending, waiting) = self.pending.remove(peer)?;
        self.timer.cancel(Due::Handshake(peer));
        Some((pending, waiting))
    }

    /// A handshake failed: counts what waited for it as dropped.
    fn give_up(&mut self, now: Instant, peer: IpAddr, ended: &Pending, waiting: &Waiting) {
        self.outbox.counters().drop_many(Direction::Outbound, DropReason::NoEndpoint, waiting.packets());
        if self.tunnels.of_peer(peer).is_empty() {
            self.lighthouse.forget_unless_expected(now, peer);
        }
        if ended.only.is_some() {
            return;
        }
        let after = now.saturating_duration_since(ended.started);
        let (local_index, endpoints) = (*ended.local_index, ended.known.clone());
        let attempt = Box::new(self.journal.gave_up(now, peer));
        self.outbox.event(Event::HandshakeTimedOut { peer, local_index, endpoints, after, attempt });
    }

    /// A handshake message from the peer: 2, or 4 of an ML-KEM exchange.
    pub(super) fn handle_answer(&mut self, now: Instant, from: Origin, index: LocalIndex, datagram: &[u8]) {
        let Some(peer) = self.pending.peer_of(index) else {
            self.outbox.count_drop(DropReason::BadHandshake);
            return;
        };
        if let Origin::Direct(at) = from
            && !self.config.may_be_at(&[peer], at)
        {
            self.outbox.count_drop(DropReason::AddressNotAllowed);
            return;
        }
        let at = self.wall.unix_seconds(now);
        let Some(pending) = self.pending.get_mut(peer) else { return };
        if pending.offered.is_some() {
            return self.finish_exchange(now, peer, from, datagram);
        }
        let Some(opened) = &mut pending.opened else { return self.outbox.count_drop(DropReason::BadHandshake) };
        match opened.machine.finish(datagram, &self.config.trust, at) {
            // Anybody can send such a datagram; the peer's own answer may still come.
            Err(Error::Noise(reason)) => {
                self.outbox.count_drop(DropReason::BadHandshake);
                self.journal.unopened(now, peer, from.underlay());
                if tracing::event_enabled!(tracing::Level::DEBUG) {
                    self.outbox.event(Event::HandshakeIgnored { from: from.underlay(), peer, reason });
                }
            }
            Err(error) => {
                self.refuse(Some(peer), refusal(now, from, error));
                self.restart_elsewhere(now, peer, from);
            }
            Ok(agreed) => match objection(&self.config, agreed.negotiated(), Some(peer), from) {
                None => match agreed {
                    Agreed::Tunnel(done) => self.complete(now, peer, done, (from, datagram.len())),
                    Agreed::Exchange(exchange) => self.start_exchange(now, peer, from, exchange),
                },
                Some(reason) => {
                    self.refuse(
                        Some(peer),
                        refusal_of(now, from, (reason, self.config.relay.force), agreed.negotiated(), Some(peer)),
                    );
                    if reason == RefusalReason::OtherHost
                        && let Agreed::Tunnel(done) = agreed
                        && let Some(close) = seal(&Tunnel::new(done, None), MessageType::CloseTunnel, &[])
                    {
                        self.outbox.answer(&self.hops, from, close);
                    }
                    self.restart_elsewhere(now, peer, from);
                }
            },
        }
    }

    /// The Noise part of the handshake with `peer` succeeded, which answered from there: makes an ML-KEM key and sends
    /// it. What waits for the tunnel goes on waiting: there is no way back to the keys of the Noise part.
    fn start_exchange(&mut self, now: Instant, peer: IpAddr, from: Origin, exchange: Exchange) {
        match exchange.offer() {
            Ok((offer, message)) => {
                let Some(pending) = self.pending.get_mut(peer) else { return };
                let since = pending.opened.as_ref().map_or(now, |opened| opened.since);
                let answered_after = now.saturating_duration_since(since);
                pending.offered = Some(Box::new(Offered { offer, message, to: from, times: 0, answered_after }));
                self.send_offer(now, peer);
            }
            Err(error) => tracing::warn!(%peer, error = %error, "cannot continue a handshake"),
        }
    }

    /// Sends message 3, which only goes to where the peer was heard.
    fn send_offer(&mut self, now: Instant, peer: IpAddr) {
        let Some(offered) = self.pending.get_mut(peer).and_then(|pending| pending.offered.as_mut()) else { return };
        offered.times += 1;
        self.outbox.answer(&self.hops, offered.to, offered.message.clone());
        self.timer.set(Due::Handshake(peer), now + offered.pause(self.config.handshakes.try_interval));
        if offered.times > 1 {
            self.journal.offered(now, peer, offered.to.underlay());
        }
    }

    /// Reads message 4: the ML-KEM exchange with `peer` is over.
    fn finish_exchange(&mut self, now: Instant, peer: IpAddr, from: Origin, datagram: &[u8]) {
        let Some(pending) = self.pending.get_mut(peer) else { return };
        let Some(offered) = &pending.offered else { return };
        match offered.offer.read_answer(datagram) {
            Ok(keys) => {
                let Some(offered) = pending.offered.take() else { return };
                // A reload since message 2 may have changed whom this node trusts, and what it asks of peers.
                let (done, at) = (offered.offer.negotiated(), self.wall.unix_seconds(now));
                let refused = match self.config.trust.recheck(&done.peer, at) {
                    Err(error) => Some(refusal(now, from, Error::refused(error, done))),
                    Ok(()) => objection(&self.config, done, Some(peer), from)
                        .map(|reason| refusal_of(now, from, (reason, self.config.relay.force), done, Some(peer))),
                };
                if let Some(refusal) = refused {
                    self.refuse(Some(peer), refusal);
                    return self.restart_elsewhere(now, peer, from);
                }
                let Some(pending) = self.pending.get_mut(peer) else { return };
                // Message 3 went to one place, and only who got it can answer.
                if let Some(opened) = &mut pending.opened {
                    opened.reached = Reached::Only(offered.to);
                }
                self.complete(now, peer, offered.offer.complete(keys), (from, datagram.len()));
            }
            // Also message 2, which comes once for each message 1 that arrived.
            Err(Error::Noise(_)) => self.outbox.count_drop(DropReason::BadHandshake),
            Err(error) => {
                self.refuse(Some(peer), refusal(now, from, error));
                self.restart_elsewhere(now, peer, from);
            }
        }
    }

    /// The handshake with `peer` succeeded: installs the tunnel, and sends what waited for it.
    /// Message 2 came in a datagram of `bytes` bytes.
    fn complete(&mut self, now: Instant, peer: IpAddr, done: Negotiated, (from, bytes): (Origin, usize)) {
        let Some((pending, waiting)) = self.take_pending(peer) else { return };
        let took = Some(now.saturating_duration_since(pending.started));
        let reached = pending.opened.as_ref().map(|opened| opened.reached).unwrap_or_default();
        let own_certificate = pending.opened.map(|opened| opened.own_certificate);
        let own_certificate = own_certificate.unwrap_or_else(|| self.config.fingerprint(done.own_version));
        let is_proven = reached == Reached::Only(from) || self.is_known_to_be_at(peer, from);
        let unproven = from.endpoint().filter(|_| !is_proven).map(|at| (at, bytes));
        let tunnel = Arc::new(Tunnel::new(done, from.endpoint().filter(|_| is_proven)));
        self.install(now, Established { tunnel, from, unproven, since: now, own_certificate, opened_by: None, took });
        self.flush(now, peer, waiting);
    }

    /// Whether the operator says that `peer` is there, or it answered there before: message 1 went to several places,
    /// and whoever got it can write the address of any of them into message 2.
    fn is_known_to_be_at(&mut self, peer: IpAddr, from: Origin) -> bool {
        let Origin::Direct(at) = from else { return true };
        let fixed = self.config.static_hosts.get(&peer);
        fixed.is_some_and(|fixed| fixed.contains(&at)) || self.lighthouse.candidates(peer).was_at(at)
    }

    /// Starts a handshake from the beginning, to wherever the peer is by now: what was sent so far went to another.
    /// Keeps what waits for it.
    pub(in crate::node) fn restart_handshake(&mut self, now: Instant, peer: IpAddr) {
        let Some((_, waiting)) = self.take_pending(peer) else { return };
        self.lighthouse.forget(peer);
        self.start_handshake_with(now, peer, None, waiting);
    }

    /// Nobody answers message 3: the peer was restarted, or is elsewhere by now. Starts from the beginning and keeps
    /// what waits for it.
    fn restart_unanswered(&mut self, now: Instant, peer: IpAddr) {
        let Some((old, waiting)) = self.take_pending(peer) else { return };
        match old.only {
            None => self.start_again(now, peer, &old, waiting),
            Some(_) => self.give_up(now, peer, &old, &waiting),
        }
    }

    /// Another host answered at `wrong`: restarts the handshake with the other endpoints and keeps what waits for it.
    fn restart_elsewhere(&mut self, now: Instant, peer: IpAddr, wrong: Origin) {
        let Some((old, waiting)) = self.take_pending(peer) else { return };
        if let Origin::Direct(wrong) = wrong {
            self.lighthouse.candidates(peer).refuse(wrong);
        }
        self.start_again(now, peer, &old, waiting);
    }

    fn start_again(&mut self, now: Instant, peer: IpAddr, old: &Pending, waiting: Waiting) {
        if old.attempts < self.config.handshakes.retries {
            self.start_handshake_with(now, peer, None, waiting);
            if let Some(pending) = self.pending.get_mut(peer) {
                // Wrong answers must not keep a handshake alive forever.
                pending.attempts = pending.attempts.max(old.attempts + 1);
                pending.started = old.started;
            }
        } else {
            self.give_up(now, peer, old, &waiting);
        }
    }
}

/// Times that message 3 is sent before the handshake starts from the beginning.
const MAX_OFFERS: u32 = 4;

/// The attempt at which the lighthouses are asked again.
const REQUERY_AT_ATTEMPT: u32 = 5;
/// Attempts of a handshake that shows whether a peer is where it was heard.
const ATTEMPTS_AT_ONE_PLACE: u32 = 2;
/// Twice the number of attempts made while a peer is expected back: answers of lighthouses trigger some more.
const MAX_ATTEMPTS_UNTIL_RETURN: u32 = 128;
/// The attempt from which on the directory's endpoints are tried beside others that do not answer.
const LIKELY_FROM_ATTEMPT: u32 = 3;
/// More of them are not tried.
const MAX_LIKELY: usize = 2;

//! Key confirmation: what happens to a handshake after this node answered it.
//!
//! Anybody can replay a first message or forge its sender; only a datagram sealed with the new keys proves who sent it.
//! Until one arrives, the tunnel is half-open. Lanes receive in it, and the control plane sends test requests, which a
//! peer answers even if it has nothing else to send. A half-open tunnel carries no packets of this node and is hidden
//! from all other tables and messages. The first authenticated datagram turns it into a normal tunnel.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{CaPool, Certificate, UnixTime, VerifiedCertificate};

use super::Node;
use super::handshakes::digest_of;
use super::hops::Hops;
use super::outbox::Outbox;
use super::timer::{Due, Timer};
use super::tunnels::{Established, Tunnels};
use crate::handshake::{Agreed, Answered, Error, HalfOpenTable, PendingHandshakes, Verifier};
use crate::index::LocalIndex;
use crate::tunnel::{ReservedIndex, Tunnel};
use crate::{Config, DropReason, Forwarder, Origin};

impl Node {
    /// The caller of a half-open tunnel was heard: installs the tunnel.
    pub(super) fn handle_confirmed(&mut self, now: Instant, index: LocalIndex, from: Origin) {
        let Some((answered, tunnel)) = self.callers(now).confirm(index) else { return };
        let heard = match from {
            Origin::Direct(at) if !self.config.may_be_at(&tunnel.peer_addresses, at) => answered.origin(),
            _ => from,
        };
        // Somebody who overheard message 1 may have replayed it from elsewhere, and the peer may have written another
        // address into this datagram: it is where message 2 went.
        let (origin, unproven) = match (answered.proven(), heard) {
            (Some(proven), Origin::Direct(_)) if proven == heard => (heard, None),
            (Some(proven), Origin::Direct(at)) => (proven, Some(at)),
            (None, Origin::Direct(at)) => (heard, Some(at)),
            (_, Origin::Relayed { .. }) => (heard, None),
        };
        tunnel.set_endpoint(origin.endpoint().filter(|at| unproven != Some(*at)));
        let established = Established {
            tunnel: Arc::clone(&tunnel),
            from: origin,
            unproven: unproven.map(|at| (at, answered.unanswered_bytes(heard))),
            since: answered.since,
            own_certificate: answered.own_certificate,
            opened_by: Some(answered.digest),
            took: None,
        };
        self.install(now, established);
        for &address in &tunnel.peer_addresses {
            self.overtaken(now, address);
        }
    }

    pub(super) fn callers(&mut self, now: Instant) -> Callers<'_> {
        Callers {
            now,
            config: &self.config,
            table: &mut self.half_open,
            timer: &mut self.timer,
            pending: &self.pending,
            hops: &self.hops,
            outbox: &mut self.outbox,
            forwarder: &self.forwarder,
        }
    }
}

/// The callers that are not confirmed yet: answers and tests them, and gives them up. Borrows what it needs of the node
/// for one call.
#[derive(Debug)]
pub(super) struct Callers<'a> {
    now: Instant,
    config: &'a Config,
    table: &'a mut HalfOpenTable,
    timer: &'a mut Timer,
    pending: &'a PendingHandshakes,
    hops: &'a Hops,
    outbox: &'a mut Outbox,
    forwarder: &'a Forwarder,
}

impl Callers<'_> {
    /// Keeps an answered handshake until its caller is confirmed, and sends message 2. Message 1, a datagram of
    /// `received` bytes, has this digest.
    pub(super) fn insert(
        &mut self,
        (reserved, agreed): (ReservedIndex, Agreed),
        digest: [u8; 32],
        reply: Vec<u8>,
        from: Origin,
        received: usize,
    ) {
        let own_certificate = self.config.fingerprint(agreed.negotiated().own_version);
        let index = *reserved;
        let answered = Answered::new((reserved, agreed), own_certificate, digest, reply, (self.now, from));
        if let Some(half_open) = answered.half_open() {
            self.forwarder.tunnels().await_caller(index, Arc::clone(half_open));
        }
        self.timer.set(Due::HalfOpen(index), answered.expires());
        if let Some(evicted) = self.table.insert(answered) {
            self.discard(&evicted);
        }
        self.answer(index, from, received);
    }

    /// Reads message 3 of an ML-KEM exchange, answers it, and lets lanes receive in the tunnel.
    pub(super) fn read_offer(&mut self, index: LocalIndex, from: Origin, offer: &[u8]) -> Result<(), Error> {
        let Some(answered) = self.table.get_mut(index) else {
            return Err(Error::Noise("no handshake has its index".into()));
        };
        // Where message 2 went, if it went to one place: whoever sends this from elsewhere may not be there.
        let to = answered.proven().unwrap_or(from);
        if let Some(half_open) = answered.read_offer(self.now, (offer, digest_of(offer)), to)? {
            self.forwarder.tunnels().await_caller(index, half_open);
        }
        self.answer(index, to, offer.len());
        Ok(())
    }

    /// Sends message 2 of a half-open tunnel to the sender of message 1, a datagram of `received` bytes, unless that
    /// exceeds what this sender may get. Further copies of message 1 raise that limit.
    pub(super) fn answer(&mut self, index: LocalIndex, from: Origin, received: usize) {
        let Some(reply) = self.table.answer(self.now, index, from, received) else {
            return self.outbox.count_drop(DropReason::HandshakeLimit);
        };
        let Some(answered) = self.table.get_mut(index) else { return };
        let is_tested = answered.tests > 0;
        let addresses: Vec<_> = answered.addresses().collect();
        self.outbox.answer(self.hops, from, reply);
        if is_tested {
            return;
        }
        if addresses.iter().any(|address| self.pending.waits_for(*address)) {
            self.test(index);
        }
        // Most callers send something on their own, and a test that overtakes message 2 finds no tunnel, so the first
        // test is delayed. The delay is short for a peer that has another tunnel here, since it may have lost it.
        let replaces = addresses.iter().any(|address| self.forwarder.is_reachable(*address));
        let wait = if replaces { REPLACEMENT_TEST_AFTER } else { FIRST_TEST_AFTER };
        self.timer.set(Due::HalfOpen(index), self.now + wait);
    }

    /// Sends a test request into a half-open tunnel, if the caller's limit allows it.
    fn test(&mut self, index: LocalIndex) {
        let most = self.max_tests();
        if let Some(request) = self.table.test(self.now, index, most)
            && let Some(answered) = self.table.get_mut(index)
        {
            let origin = answered.origin();
            self.outbox.answer(self.hops, origin, request);
        }
    }

    /// Something waits for `peer`: asks recent callers in its name to prove that they hold the keys.
    pub(super) fn test_all_named(&mut self, peer: IpAddr) {
        let untested = self.table.of_peer(peer).take(MAX_CALLERS_TESTED).filter(|answered| answered.tests == 0);
        for index in untested.map(|answered| *answered.local_index).collect::<Vec<_>>() {
            self.test(index);
        }
    }

    /// Tests a caller again, or gives it up once it has expired.
    pub(super) fn due(&mut self, index: LocalIndex) {
        let Some(answered) = self.table.get_mut(index) else { return };
        let (expires, tests, is_answered) = (answered.expires(), answered.tests, answered.is_answered());
        if self.now >= expires {
            self.give_up(index);
            return;
        }
        self.test(index);
        let again = is_answered && tests < self.max_tests();
        let next = if again { self.now + FIRST_TEST_AFTER * (1 << tests) } else { expires };
        self.timer.set(Due::HalfOpen(index), next.min(expires));
    }

    /// Maximum number of tests per caller. In a flood nearly all callers are forged, so each gets one.
    fn max_tests(&self) -> u32 {
        if self.table.is_crowded() { 1 } else { MAX_TESTS }
    }

    fn give_up(&mut self, index: LocalIndex) {
        if let Some(answered) = self.table.remove(index) {
            self.discard(&answered);
        }
    }

    fn discard(&mut self, answered: &Answered) {
        self.timer.cancel(Due::HalfOpen(*answered.local_index));
        if let Some(half_open) = answered.half_open() {
            half_open.discard();
        }
    }

    /// Gives up every caller whose certificate is no longer accepted at `at`.
    pub(super) fn give_up_refused(&mut self, at: UnixTime) {
        let refused = self.table.iter().filter(|answered| self.config.trust.recheck(&answered.peer, at).is_err());
        for index in refused.map(|answered| *answered.local_index).collect::<Vec<_>>() {
            self.give_up(index);
        }
    }

    /// Gives up every caller whose keys would not come from ML-KEM.
    pub(super) fn give_up_classical(&mut self) {
        let classical = self.table.iter().filter(|answered| !answered.is_post_quantum());
        for index in classical.map(|answered| *answered.local_index).collect::<Vec<_>>() {
            self.give_up(index);
        }
    }

    /// Takes a caller that was heard, and its tunnel.
    fn confirm(&mut self, index: LocalIndex) -> Option<(Answered, Arc<Tunnel>)> {
        let answered = self.table.remove(index)?;
        self.table.note_confirmed(self.now, &answered);
        self.timer.cancel(Due::HalfOpen(index));
        let tunnel = answered.half_open()?.tunnel()?;
        tunnel.confirm();
        Some((answered, tunnel))
    }
}

/// Verifies certificates of callers. A certificate of a live tunnel or of another recent caller is neither verified nor
/// stored again.
pub(super) struct KnownCallers<'a> {
    pub(super) trust: &'a CaPool,
    pub(super) tunnels: &'a Tunnels,
    pub(super) half_open: &'a HalfOpenTable,
}

impl Verifier for KnownCallers<'_> {
    fn verify(&self, certificate: Certificate, at: UnixTime) -> Result<VerifiedCertificate, nebula_cert::Error> {
        let address = certificate.networks().first().map(ipnet::IpNet::addr);
        let known = address.and_then(|address| {
            let calling = self.half_open.of_peer(address).next().map(|answered| &answered.peer);
            let newest = || self.tunnels.of_peer(address).last().and_then(|index| self.tunnels.get(*index));
            calling.or_else(|| newest().map(|live| &*live.tunnel.peer))
        });
        self.trust.verify_known(certificate, known, at)
    }
}

/// Maximum number of test requests to one caller. In a flood it is one.
const MAX_TESTS: u32 = 5;
/// Delay before the first test of a caller that may have lost an older tunnel to this node.
const REPLACEMENT_TEST_AFTER: Duration = Duration::from_millis(10);
/// Delay before the first test of other callers; it doubles with each test.
const FIRST_TEST_AFTER: Duration = Duration::from_millis(100);
/// Maximum number of callers in one name that are tested because something waits. All are tested a little later anyway.
const MAX_CALLERS_TESTED: usize = 4;

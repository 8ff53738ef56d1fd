//! Records what went wrong. Bounded whatever happens, and empty while nothing is wrong.

mod recent;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::Fingerprint;

use self::recent::Recent;
use super::{
    Attempt, Diagnosis, Double, Dropped, Elsewhere, PolicyRefusal, Refusal, RelayRefused, SendFailure, Tried, Unheard,
};
use crate::counters::{Direction, DropReason};
use crate::wire::ip::FlowKey;

/// One node's record of what went wrong.
#[derive(Debug, Default)]
pub(crate) struct Journal {
    /// Peers to which message 1 was sent.
    attempts: Recent<IpAddr, Attempt>,
    /// Peers without any known endpoint. Separate, because a scan of the overlay makes many of them.
    nowhere: Recent<IpAddr, Attempt>,
    /// By underlay address and the overlay address they claim.
    callers: Recent<(IpAddr, Option<IpAddr>), Refusal>,
    unheard: Recent<IpAddr, Unheard>,
    probes: Recent<u32, (IpAddr, SocketAddr)>,
    sends: Recent<SocketAddr, SendFailure>,
    drops: Recent<DropKey, Dropped>,
    audited: Recent<DropKey, Dropped>,
    doubles: Recent<IpAddr, Double>,
    /// By lighthouse and own address.
    elsewhere: Recent<(IpAddr, IpAddr), Elsewhere>,
    relays: Recent<(IpAddr, IpAddr), RelayRefused>,
    clock_step: Option<(Instant, i64)>,
}

/// Packets that differ only in a randomly chosen port count as the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DropKey {
    direction: Direction,
    reason: DropReason,
    local: IpAddr,
    remote: IpAddr,
    protocol: u8,
    port: u16,
}

impl Journal {
    /// Message 1 is sent to these endpoints of `peer`.
    pub(crate) fn sent(&mut self, now: Instant, peer: IpAddr, endpoints: &[SocketAddr]) {
        if endpoints.is_empty() {
            return;
        }
        self.nowhere.remove(&peer);
        let attempt = self.attempts.entry(now, peer, MAX_PEERS, || fresh(peer, now));
        (attempt.pending, attempt.last) = (true, now);
        // Where something was refused before and now nothing answers, something else may be wrong. A refusal stays as
        // long as nothing is sent to where it came from: this node itself calls nobody there again.
        attempt.refusal.take_if(|refusal| now > refusal.at + STALE_AFTER && endpoints.contains(&refusal.from));
        for endpoint in endpoints {
            if let Some(tried) = tried_at(now, attempt, *endpoint) {
                (tried.sent, tried.last) = (tried.sent.saturating_add(1), now);
            }
        }
    }

    /// A datagram from an endpoint of `peer` could not be decrypted.
    pub(crate) fn unopened(&mut self, now: Instant, peer: IpAddr, from: SocketAddr) {
        let attempt = self.attempts.entry(now, peer, MAX_PEERS, || fresh(peer, now));
        if let Some(tried) = tried_at(now, attempt, from) {
            tried.unopened = tried.unopened.saturating_add(1);
        }
    }

    /// Message 3 of an ML-KEM exchange is sent there, again.
    pub(crate) fn offered(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) {
        let attempt = self.attempts.entry(now, peer, MAX_PEERS, || fresh(peer, now));
        if let Some(tried) = tried_at(now, attempt, endpoint) {
            (tried.offers, tried.last) = (tried.offers.saturating_add(1), now);
        }
    }

    /// A probe with this index was sent to an endpoint of `peer`.
    pub(crate) fn probed(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr, index: u32) {
        let attempt = self.attempts.entry(now, peer, MAX_PEERS, || fresh(peer, now));
        if let Some(tried) = tried_at(now, attempt, endpoint) {
            tried.probed = Some(now);
            *self.probes.entry(now, index, MAX_PROBES, || (peer, endpoint)) = (peer, endpoint);
        }
    }

    /// A recv_error came from there. Returns whether it answers a probe.
    pub(crate) fn probe_answered(&mut self, now: Instant, from: SocketAddr, index: u32) -> bool {
        let Some(&(peer, endpoint)) = self.probes.get(&index).filter(|(_, endpoint)| *endpoint == from) else {
            return false;
        };
        self.probes.remove(&index);
        let attempt = self.attempts.get_mut(&peer);
        if let Some(tried) = attempt.and_then(|attempt| tried_at(now, attempt, endpoint)) {
            tried.heard = Some(now);
        }
        true
    }

    /// A first message that this node answered came again, directly from there.
    pub(crate) fn repeated(&mut self, now: Instant, peer: IpAddr, name: &str, from: SocketAddr) {
        let new = || Unheard { peer, name: name.to_owned(), from, repeats: 0, last: now };
        let entry = self.unheard.entry(now, peer, MAX_UNHEARD, new);
        (entry.from, entry.last) = (from, now);
        entry.repeats = entry.repeats.saturating_add(1);
    }

    /// Where `peer` calls from although this node answers.
    pub(crate) fn unheard_from(&self, peer: IpAddr) -> Option<SocketAddr> {
        self.unheard.get(&peer).map(|unheard| unheard.from)
    }

    /// The answer of `peer`, or of another host in its place, was refused.
    pub(crate) fn refused(&mut self, now: Instant, peer: IpAddr, refusal: Refusal) {
        let attempt = self.attempts.entry(now, peer, MAX_PEERS, || fresh(peer, now));
        let times = attempt.refusal.as_ref().filter(|last| last.reason == refusal.reason).map_or(0, |last| last.times);
        // A direct answer comes from an endpoint to which something was sent.
        tried_at(now, attempt, refusal.from);
        attempt.refusal = Some(Refusal { times: times.saturating_add(1), ..refusal });
    }

    /// A handshake with `peer` ended without a tunnel.
    pub(crate) fn gave_up(&mut self, now: Instant, peer: IpAddr) -> Attempt {
        let attempt = match self.attempts.get_mut(&peer) {
            Some(attempt) => attempt,
            None => self.nowhere.entry(now, peer, MAX_NOWHERE, || fresh(peer, now)),
        };
        (attempt.pending, attempt.last) = (false, now);
        attempt.given_up = attempt.given_up.saturating_add(1);
        let attempt = attempt.clone();
        self.with_errors(attempt)
    }

    /// A tunnel to the host with these addresses is up: earlier problems are over.
    pub(crate) fn connected(&mut self, addresses: &[IpAddr], at: SocketAddr) {
        let is_empty = self.attempts.is_empty() && self.nowhere.is_empty() && self.unheard.is_empty();
        if is_empty && self.callers.is_empty() && self.sends.is_empty() {
            return;
        }
        for address in addresses {
            self.attempts.remove(address);
            self.nowhere.remove(address);
            self.unheard.remove(address);
            self.callers.remove(&(at.ip(), Some(*address)));
        }
        self.sends.remove(&at);
    }

    /// The first message of a caller was refused.
    pub(crate) fn caller_refused(&mut self, now: Instant, refusal: Refusal) {
        let claimed = refusal.claimed.as_ref().and_then(|claimed| claimed.addresses.first().copied());
        let key = (refusal.from.ip(), claimed);
        let entry = self.callers.entry(now, key, MAX_CALLERS, || Refusal { times: 0, ..refusal.clone() });
        let times = entry.times.saturating_add(1);
        *entry = Refusal { times, ..refusal };
    }

    /// The system refused to send to `to`.
    pub(crate) fn send_failed(&mut self, now: Instant, to: SocketAddr, errno: Option<i32>) {
        let entry = self.sends.entry(now, to, MAX_SENDS, || SendFailure { to, errno, last: now, times: 0 });
        *entry = SendFailure { to, errno, last: now, times: entry.times.saturating_add(1) };
    }

    /// An overlay packet was dropped; `peer` is the peer of its tunnel, and `policy` what refused it, if policies did.
    pub(crate) fn dropped(
        &mut self,
        now: Instant,
        why: (Direction, DropReason),
        flow: FlowKey,
        peer: Option<IpAddr>,
        policy: Option<PolicyRefusal>,
    ) {
        note(&mut self.drops, now, why, flow, peer, policy);
    }

    /// A packet passed that `policy` would refuse.
    pub(crate) fn audited(
        &mut self,
        now: Instant,
        direction: Direction,
        flow: FlowKey,
        peer: Option<IpAddr>,
        policy: Option<PolicyRefusal>,
    ) {
        note(&mut self.audited, now, (direction, DropReason::NetworkPolicy), flow, peer, policy);
    }

    /// A tunnel to `peer` replaces one whose certificate was `before`.
    pub(crate) fn replaced(
        &mut self,
        now: Instant,
        peer: IpAddr,
        before: (Fingerprint, SocketAddr),
        after: (Fingerprint, SocketAddr),
    ) {
        let new = || Double { seen: vec![before], ..alone(peer, now) };
        let entry = self.doubles.entry(now, peer, MAX_DOUBLES, new);
        entry.last = now;
        match entry.seen.iter_mut().find(|(fingerprint, _)| *fingerprint == after.0) {
            // A renewal never goes back to the previous certificate.
            Some(seen) => (*seen, entry.turns) = (after, entry.turns.saturating_add(1)),
            None => {
                if entry.seen.len() >= MAX_CERTIFICATES {
                    entry.seen.remove(0);
                }
                entry.seen.push(after);
            }
        }
    }

    /// The certificates of two tunnels with `peer` have different names.
    pub(crate) fn named_differently(&mut self, now: Instant, peer: IpAddr, names: [&str; 2]) {
        let entry = self.doubles.entry(now, peer, MAX_DOUBLES, || alone(peer, now));
        entry.last = now;
        for name in names {
            if !entry.names.iter().any(|known| known.eq_ignore_ascii_case(name)) && entry.names.len() < MAX_CERTIFICATES
            {
                entry.names.push(name.to_owned());
            }
        }
    }

    /// A lighthouse says that another host has the own address `own`. Returns whether that is news.
    pub(crate) fn address_elsewhere(
        &mut self,
        now: Instant,
        lighthouse: IpAddr,
        own: IpAddr,
        endpoints: &[SocketAddr],
    ) -> bool {
        let is_known = self.elsewhere.get(&(lighthouse, own)).is_some_and(|known| now < known.last + CONFLICT_PAUSE);
        let endpoints = endpoints.iter().take(MAX_ENDPOINTS).copied().collect();
        let told = Elsewhere { address: own, lighthouse, endpoints, last: now };
        self.elsewhere.entry(now, (lighthouse, own), MAX_ELSEWHERE, || told.clone()).clone_from(&told);
        !is_known
    }

    /// A request for a relay was refused.
    pub(crate) fn relay_refused(&mut self, refused: RelayRefused) {
        let key = (refused.from, refused.to);
        *self.relays.entry(refused.last, key, MAX_RELAYS, || refused) = refused;
    }

    /// The wall clock was set, from `before` to `after`.
    pub(crate) fn clock_set(&mut self, now: Instant, before: Duration, after: Duration) {
        let by = i64::try_from(after.abs_diff(before).as_millis()).unwrap_or(i64::MAX);
        if by == 0 {
            return;
        }
        self.clock_step = Some((now, if after < before { -by } else { by }));
    }

    /// The whole record. Two certificates for one address are reported only if they take turns or have different
    /// names.
    pub(crate) fn diagnosis(&self) -> Diagnosis {
        let attempts = self.attempts.values().chain(self.nowhere.values()).cloned();
        Diagnosis {
            attempts: attempts.map(|attempt| self.with_errors(attempt)).collect(),
            callers: self.callers.values().cloned().collect(),
            unheard: self.unheard.values().cloned().collect(),
            sends: self.sends.values().copied().collect(),
            drops: self.drops.values().cloned().collect(),
            audited: self.audited.values().cloned().collect(),
            doubles: self
                .doubles
                .values()
                .filter(|double| double.turns > 0 || double.names.len() > 1)
                .cloned()
                .collect(),
            elsewhere: self.elsewhere.values().cloned().collect(),
            relays: self.relays.values().copied().collect(),
            clock_step: self.clock_step,
            clocks: Vec::new(),
        }
    }

    /// The address of a host that was refused, or is called in vain, and says that this is its name.
    pub(crate) fn claimed(&self, name: &str) -> Option<IpAddr> {
        let refused =
            self.attempts.values().filter_map(|attempt| attempt.refusal.as_ref()).chain(self.callers.values());
        let claims = refused.filter_map(|refusal| refusal.claimed.as_ref());
        let mut claims = claims.filter(|claimed| claimed.name.eq_ignore_ascii_case(name));
        let unheard = || self.unheard.values().find(|caller| caller.name.eq_ignore_ascii_case(name));
        claims.find_map(|claimed| claimed.addresses.first().copied()).or_else(|| Some(unheard()?.peer))
    }

    fn with_errors(&self, mut attempt: Attempt) -> Attempt {
        for tried in &mut attempt.tried {
            let failure = self.sends.get(&tried.endpoint).filter(|failure| failure.last >= tried.last);
            tried.error = failure.map(|failure| failure.errno.unwrap_or(0));
        }
        attempt
    }
}

fn note(
    sample: &mut Recent<DropKey, Dropped>,
    now: Instant,
    (direction, reason): (Direction, DropReason),
    flow: FlowKey,
    peer: Option<IpAddr>,
    policy: Option<PolicyRefusal>,
) {
    let port = if direction == Direction::Inbound { flow.local_port } else { flow.remote_port };
    let key = DropKey { direction, reason, local: flow.local, remote: flow.remote, protocol: flow.protocol, port };
    let new = || Dropped { direction, flow, reason, peer, last: now, times: 0, nearest: None, policy: None };
    let entry = sample.entry(now, key, MAX_DROPS, new);
    (entry.flow, entry.peer, entry.last, entry.policy) = (flow, peer, now, policy);
    entry.times = entry.times.saturating_add(1);
}

fn alone(peer: IpAddr, now: Instant) -> Double {
    Double { peer, seen: Vec::new(), names: Vec::new(), turns: 0, last: now }
}

fn fresh(peer: IpAddr, now: Instant) -> Attempt {
    Attempt { peer, since: now, last: now, pending: false, given_up: 0, tried: Vec::new(), refusal: None }
}

/// The record of an endpoint; `None` if the peer has too many.
fn tried_at(now: Instant, attempt: &mut Attempt, endpoint: SocketAddr) -> Option<&mut Tried> {
    let at = attempt.tried.iter().position(|tried| tried.endpoint == endpoint);
    let at = at.or_else(|| {
        let room = attempt.tried.len() < MAX_ENDPOINTS;
        let new =
            Tried { endpoint, sent: 0, unopened: 0, offers: 0, last: now, error: None, probed: None, heard: None };
        room.then(|| attempt.tried.push(new));
        room.then(|| attempt.tried.len() - 1)
    })?;
    attempt.tried.get_mut(at)
}

const STALE_AFTER: Duration = Duration::from_secs(60);
const MAX_PEERS: usize = 32;
const MAX_NOWHERE: usize = 16;
const MAX_ENDPOINTS: usize = 8;
const MAX_CALLERS: usize = 32;
const MAX_UNHEARD: usize = 32;
const MAX_PROBES: usize = 32;
const MAX_SENDS: usize = 32;
const MAX_DROPS: usize = 32;
const MAX_DOUBLES: usize = 16;
const MAX_CERTIFICATES: usize = 3;
const MAX_ELSEWHERE: usize = 8;
/// Lighthouses say it with each report, most often every ten seconds.
const CONFLICT_PAUSE: Duration = Duration::from_secs(60);
const MAX_RELAYS: usize = 16;

#[cfg(test)]
mod tests;

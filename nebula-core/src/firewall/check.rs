//! Decides whether a packet may pass: by the lane's cache, by connection tracking, or by rules and policies.

use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::conntrack::Seen;
use super::flow_cache::{Passed, Place};
use super::records::{FlowId, Judged, kind_of_refused};
use super::{Amount, Conntrack, Filter, FlowCache, KnownFlow, NearMiss, Occasion, Peer, Policy, PolicyVerdict};
use crate::counters::Direction;
use crate::counters::DropReason;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// How long a lane may cache a busy flow before it must ask the shared table again.
const MAX_CACHED_MS: u64 = 1_000;

/// A packet that the firewall is asked about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) direction: Direction,
    /// As the tunnel carries it.
    pub(crate) flow: &'a FlowKey,
    /// As this node's programs know it, if it is translated.
    pub(crate) original: Option<&'a FlowKey>,
}

/// How a packet passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Passage {
    pub(super) is_in_audit: bool,
    /// Where it is counted.
    pub(super) flow: FlowId,
}

/// The firewall's verdict on a flow, with its reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Whether the certificates of the peer and of this node cover the addresses.
    pub addresses: Result<(), DropReason>,
    /// The tracked flow, if there is one.
    pub known: Option<KnownFlow>,
    /// Why it is no longer allowed. Its packets are then dropped in both directions, until it is allowed again or
    /// expires.
    pub ended: Option<DropReason>,
    /// Position in the policy of the first rule of the direction that allows the flow.
    pub rule: Option<usize>,
    /// Whether the policies of the network refuse the flow.
    pub is_refused_by_network: bool,
    /// Why they refuse it, or would if those in audit were enforced.
    pub network_policy: Option<String>,
    /// If no rule allows the flow: the one that differs least from it.
    pub nearest: Option<NearMiss>,
}

impl Explanation {
    /// Whether a packet of the flow passes.
    ///
    /// # Errors
    /// Returns the reason why it is dropped.
    pub fn verdict(&self) -> Result<(), DropReason> {
        self.addresses?;
        if let Some(reason) = self.ended {
            return Err(reason);
        }
        match self.rule {
            _ if self.known.is_some() => Ok(()),
            None => Err(DropReason::NoRule),
            Some(_) if self.is_refused_by_network => Err(DropReason::NetworkPolicy),
            Some(_) => Ok(()),
        }
    }
}

/// The current rules and the flows of the node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Firewall<'a> {
    pub(crate) filter: &'a Filter,
    pub(crate) conntrack: &'a Conntrack,
}

impl Firewall<'_> {
    /// Whether a packet of `flow` may pass, and where it is then counted. `cache` is the lane's own. `route` returns
    /// the subnet route of the flow, if that route has several gateways and the peer is one of them: these gateways
    /// share the flow.
    pub(crate) fn check(
        &self,
        cache: &mut FlowCache,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<Place, DropReason> {
        let about = About { direction, flow, original: None };
        let hash = self.conntrack.hash(flow);
        self.check_until(cache, (self.conntrack.millis(now), hash), about, tunnel, route).map(|(_, place)| place)
    }

    /// Like [`Self::check`], for a caller that remembers the verdict: returns until when it may. `hash` is the flow's.
    pub(crate) fn check_for_a_while(
        &self,
        cache: &mut FlowCache,
        (now, hash): (Instant, u64),
        about: About<'_>,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<(Instant, Place), DropReason> {
        let millis = self.conntrack.millis(now);
        let (until, place) = self.check_until(cache, (millis, hash), about, tunnel, route)?;
        Ok((now + Duration::from_millis(until - millis), place))
    }

    #[inline(always)]
    fn check_until(
        &self,
        cache: &mut FlowCache,
        (now, hash): (u64, u64),
        about: About<'_>,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<(u64, Place), DropReason> {
        let About { direction, flow, original } = about;
        let passed =
            Passed { flow: *flow, direction, tunnel: tunnel.local_index, generation: self.filter.generation() };
        match cache.until(hash, &passed) {
            Some((until, place)) if now < until => Ok((until, place)),
            _ => self.check_again(cache, (now, hash), passed, original, Peer::new(tunnel, route(flow))),
        }
    }

    /// For a flow that is not cached. Not inlined, so that cached flows do not pay for it.
    #[inline(never)]
    fn check_again(
        &self,
        cache: &mut FlowCache,
        (now, hash): (u64, u64),
        passed: Passed,
        original: Option<&FlowKey>,
        peer: Peer<'_>,
    ) -> Result<(u64, Place), DropReason> {
        let mut told = |tally| self.conntrack.add(&tally, now);
        cache.tell_due(now, &mut told);
        let about = About { direction: passed.direction, flow: &passed.flow, original };
        let Passage { is_in_audit, flow } = self.decide(hash, now, about, peer)?;
        if is_in_audit {
            cache.note_audited(&passed, now);
        }
        // With a short timeout, the flow must be refreshed in the shared table more often.
        let until = now + MAX_CACHED_MS.min(self.filter.timeouts().of(&passed.flow) / 4);
        let place = cache.insert(hash, (passed, flow), (now, until), &mut told);
        Ok((until, place))
    }

    /// Whether an ICMP error of `flow` about a packet of `quoted` may pass: because a rule allows it, or because the
    /// quoted packet belongs to an allowed flow. Errors are not flows themselves: they are not tracked, and an earlier
    /// error does not let later ones through.
    pub(crate) fn check_error(
        &self,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        quoted: Option<&FlowKey>,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<(), DropReason> {
        let peer = Peer::new(tunnel, quoted.and_then(route));
        self.decide_error(self.conntrack.millis(now), direction, flow, quoted, peer)
    }

    pub(super) fn decide_error(
        &self,
        now: u64,
        direction: Direction,
        flow: &FlowKey,
        quoted: Option<&FlowKey>,
        peer: Peer<'_>,
    ) -> Result<(), DropReason> {
        self.filter.check_addresses(flow, peer)?;
        let is_related = |quoted: &FlowKey| {
            // The flow of another peer must not vouch for this one.
            let known = self.conntrack.find(quoted, &peer, direction.opposite(), now, self.filter);
            self.filter.check_addresses(quoted, peer).is_ok() && known.is_some_and(|(_, verdict)| verdict.is_ok())
        };
        let verdict = self.filter.judge(direction, flow, peer, Occasion::Question);
        if quoted.is_some_and(is_related) { Ok(()) } else { verdict.map(|_| ()) }
    }

    pub(super) fn decide(&self, hash: u64, now: u64, about: About<'_>, peer: Peer<'_>) -> Result<Passage, DropReason> {
        let flow = about.flow;
        self.filter.check_addresses(flow, peer)?;
        let seen = Seen { judged: self.judged(now, about, Some(&peer)), peer: &peer, timeouts: self.filter.timeouts() };
        self.conntrack.admit(hash, seen, |direction, occasion| self.filter.judge(direction, flow, peer, occasion))
    }

    /// Counts packets that were refused, for the record. Not for errors about other packets.
    #[cold]
    #[inline(never)]
    pub(crate) fn note_refused(
        &self,
        now: Instant,
        about: About<'_>,
        tunnel: Option<&Tunnel>,
        (reason, amount): (DropReason, Amount),
    ) {
        let records = self.conntrack.records();
        if !records.are_on() || about.flow.remote.is_multicast() {
            return;
        }
        let peer = tunnel.map(|tunnel| Peer::new(tunnel, None));
        let judged = self.judged(self.conntrack.millis(now), about, peer.as_ref());
        let hash = self.conntrack.hash(&kind_of_refused(about.direction, about.flow));
        let which = tunnel.map_or(0, |tunnel| tunnel.identity.name[0]);
        records.refuse(hash ^ which ^ reason as u64 ^ (about.direction as u64) << 32, reason, &judged, amount);
    }

    fn judged<'a>(&self, now: u64, about: About<'a>, peer: Option<&'a Peer<'a>>) -> Judged<'a> {
        let About { direction, flow, original } = about;
        Judged { now, direction, flow, original, peer, generation: self.filter.generation() }
    }

    /// Tells the flow table what a lane has counted, if it is time: see [`FlowCache::due`].
    pub(crate) fn tell_due(&self, cache: &mut FlowCache, now: Instant) {
        let now = self.conntrack.millis(now);
        cache.tell_due(now, &mut |tally| self.conntrack.add(&tally, now));
    }

    /// Tells the flow table all that a lane has counted.
    pub(crate) fn tell_all(&self, cache: &mut FlowCache, now: Instant) {
        let now = self.conntrack.millis(now);
        cache.tell(&mut |tally| self.conntrack.add(&tally, now));
    }

    /// Whether a flow with this peer is tracked.
    pub(crate) fn tracks(&self, now: Instant, flow: &FlowKey, peer: Peer<'_>) -> bool {
        self.conntrack.is_tracked(flow, &peer, self.conntrack.millis(now), self.filter.timeouts())
    }

    /// Explains the verdict on a flow with this peer. `policy` is the policy that the filter was built from.
    pub(crate) fn explain(
        &self,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
        policy: &Policy,
    ) -> Explanation {
        let rule = self.filter.rule_that_allows(policy, direction, flow, peer);
        let known = self.conntrack.find(flow, &peer, direction, self.conntrack.millis(now), self.filter);
        let by_policies = self.filter.policy_verdict(direction, flow, peer, Occasion::Question);
        Explanation {
            addresses: self.filter.check_addresses(flow, peer),
            known: known.map(|(known, _)| known),
            ended: known.and_then(|(_, verdict)| verdict.err()),
            rule,
            is_refused_by_network: by_policies == PolicyVerdict::Refuse,
            network_policy: self.filter.policy_reason(direction, flow, peer),
            nearest: if rule.is_none() { self.filter.nearest(policy, direction, flow, peer) } else { None },
        }
    }
}

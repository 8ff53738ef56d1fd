//! Decides whether a packet may pass: by the lane's cache, by connection tracking, or by the rules.

use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::conntrack::Seen;
use super::flow_cache::Passed;
use super::{Conntrack, Filter, FlowCache, KnownFlow, NearMiss, Peer, Policy};
use crate::counters::Direction;
use crate::counters::DropReason;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// How long a lane may cache a busy flow before it must ask the shared table again.
const MAX_CACHED_MS: u64 = 1_000;

/// The firewall's verdict on a flow, with its reasons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Whether the certificates of the peer and of this node cover the addresses.
    pub addresses: Result<(), DropReason>,
    /// The tracked flow, if there is one and it is still allowed.
    pub known: Option<KnownFlow>,
    /// Position in the policy of the first rule of the direction that allows the flow.
    pub rule: Option<usize>,
    /// Without such a rule: the one that differs least from the flow.
    pub nearest: Option<NearMiss>,
}

impl Explanation {
    /// Whether a packet of the flow passes.
    ///
    /// # Errors
    /// Returns the reason why it is dropped.
    pub fn verdict(&self) -> Result<(), DropReason> {
        self.addresses?;
        if self.known.is_some() || self.rule.is_some() { Ok(()) } else { Err(DropReason::NoRule) }
    }
}

/// The current rules and the flows of the node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Firewall<'a> {
    pub(crate) filter: &'a Filter,
    pub(crate) conntrack: &'a Conntrack,
}

impl Firewall<'_> {
    /// Whether a packet of `flow` may pass. `cache` is the lane's own. `route` returns the subnet route of the flow, if
    /// that route has several gateways and the peer is one of them: these gateways share the flow.
    pub(crate) fn check(
        &self,
        cache: &mut FlowCache,
        now: Instant,
        direction: Direction,
        flow: &FlowKey,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<(), DropReason> {
        let hash = self.conntrack.hash(flow);
        self.check_until(cache, (self.conntrack.millis(now), hash), direction, flow, tunnel, route).map(|_| ())
    }

    /// Like [`Self::check`], for a caller that remembers the verdict: returns until when it may. `hash` is the flow's.
    pub(crate) fn check_for_a_while(
        &self,
        cache: &mut FlowCache,
        (now, hash): (Instant, u64),
        direction: Direction,
        flow: &FlowKey,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<Instant, DropReason> {
        let millis = self.conntrack.millis(now);
        let until = self.check_until(cache, (millis, hash), direction, flow, tunnel, route)?;
        Ok(now + Duration::from_millis(until - millis))
    }

    #[inline(always)]
    fn check_until(
        &self,
        cache: &mut FlowCache,
        (now, hash): (u64, u64),
        direction: Direction,
        flow: &FlowKey,
        tunnel: &Tunnel,
        route: impl FnOnce(&FlowKey) -> Option<IpNet>,
    ) -> Result<u64, DropReason> {
        let passed =
            Passed { flow: *flow, direction, tunnel: tunnel.local_index, generation: self.filter.generation() };
        match cache.until(hash, &passed) {
            Some(until) if now < until => Ok(until),
            _ => self.check_again(cache, hash, now, passed, Peer::new(tunnel, route(flow))),
        }
    }

    /// For a flow that is not cached. Not inlined, so that cached flows do not pay for it.
    #[inline(never)]
    fn check_again(
        &self,
        cache: &mut FlowCache,
        hash: u64,
        now: u64,
        passed: Passed,
        peer: Peer<'_>,
    ) -> Result<u64, DropReason> {
        self.decide(hash, now, passed.direction, &passed.flow, peer)?;
        // With a short timeout, the flow must be refreshed in the shared table more often.
        let until = now + MAX_CACHED_MS.min(self.filter.timeouts().of(&passed.flow) / 4);
        cache.insert(hash, passed, now, until);
        Ok(until)
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
            self.filter.check_addresses(quoted, peer).is_ok() && self.known(now, quoted, peer).is_some()
        };
        let passes = self.filter.allows(direction, flow, peer) || quoted.is_some_and(is_related);
        if passes { Ok(()) } else { Err(DropReason::NoRule) }
    }

    pub(super) fn decide(
        &self,
        hash: u64,
        now: u64,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
    ) -> Result<(), DropReason> {
        self.filter.check_addresses(flow, peer)?;
        let timeouts = self.filter.timeouts();
        let seen = Seen { peer: &peer, direction, now, generation: self.filter.generation(), timeouts };
        self.conntrack.admit(hash, flow, seen, |direction| self.filter.allows(direction, flow, peer))
    }

    /// A tracked flow with `peer` that has not expired and is still allowed.
    fn known(&self, now: u64, flow: &FlowKey, peer: Peer<'_>) -> Option<KnownFlow> {
        let (known, stands) = self.conntrack.find(flow, &peer, now, self.filter)?;
        (stands || self.filter.allows(known.direction, flow, peer)).then_some(known)
    }

    /// Whether a flow with this peer is tracked.
    pub(crate) fn tracks(&self, now: Instant, flow: &FlowKey, peer: Peer<'_>) -> bool {
        self.conntrack.find(flow, &peer, self.conntrack.millis(now), self.filter).is_some()
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
        Explanation {
            addresses: self.filter.check_addresses(flow, peer),
            known: self.known(self.conntrack.millis(now), flow, peer),
            rule,
            nearest: if rule.is_none() { self.filter.nearest(policy, direction, flow, peer) } else { None },
        }
    }
}

//! Decides whether a packet may pass: by what the lane knows, by connection tracking, by the rules.

use std::time::Instant;

use ipnet::IpNet;

use super::conntrack::Seen;
use super::flow_cache::Passed;
use super::{Conntrack, Filter, FlowCache, KnownFlow, NearMiss, Peer, Policy};
use crate::counters::Direction;
use crate::counters::DropReason;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// A lane asks the shared table about a flow it sees all the time only this often.
const MAX_CACHED_MS: u64 = 1_000;

/// What the firewall makes of a flow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// Whether the peer's certificate and the own one cover the addresses.
    pub addresses: Result<(), DropReason>,
    /// The flow, if it is remembered and its rule still stands.
    pub known: Option<KnownFlow>,
    /// First rule of the direction that allows it, by its place in the policy.
    pub rule: Option<usize>,
    /// Without such a rule: the one that differs least from the flow.
    pub nearest: Option<NearMiss>,
}

impl Explanation {
    /// Whether a packet of the flow passes.
    ///
    /// # Errors
    /// Why not.
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
    /// Whether a packet of `flow` may pass. `cache` is the lane's own. `route` says which subnet route the flow takes,
    /// if that has several gateways and the peer is one of them: they share the flow.
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
        let now = self.conntrack.millis(now);
        let passed =
            Passed { flow: *flow, direction, tunnel: tunnel.local_index, generation: self.filter.generation() };
        if cache.contains(hash, &passed, now) {
            return Ok(());
        }
        self.check_anew(cache, hash, now, passed, Peer::new(tunnel, route(flow)))
    }

    /// As [`Self::check`], for a flow that the cache does not have. Not inlined, so that known flows pay nothing for
    /// it.
    #[inline(never)]
    fn check_anew(
        &self,
        cache: &mut FlowCache,
        hash: u64,
        now: u64,
        passed: Passed,
        peer: Peer<'_>,
    ) -> Result<(), DropReason> {
        self.decide(hash, now, passed.direction, &passed.flow, peer)?;
        // Short timeouts need the shared table to hear of the flow more often.
        let cache_for = MAX_CACHED_MS.min(self.filter.timeouts().of(&passed.flow) / 4);
        cache.insert(hash, passed, now, now + cache_for);
        Ok(())
    }

    /// Whether an ICMP error of `flow` about a packet of `quoted` may pass: by a rule, or because the quoted packet is
    /// of a flow that passed. Errors are no flows themselves: neither remembered nor let through because one was.
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
            // A flow of another peer does not vouch for this one.
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

    /// A flow with `peer` that passed, is not yet forgotten, and would pass again.
    fn known(&self, now: u64, flow: &FlowKey, peer: Peer<'_>) -> Option<KnownFlow> {
        let (known, stands) = self.conntrack.find(flow, &peer, now, self.filter)?;
        (stands || self.filter.allows(known.direction, flow, peer)).then_some(known)
    }

    /// Explains a flow with this peer. `policy` is what the filter was made of.
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

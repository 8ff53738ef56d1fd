//! Packet filter: rules over the peer's certificate, and the flows already allowed.

mod conntrack;
mod explain;
mod filter;
mod flow_cache;
mod flow_table;
mod index;
mod rules;
mod shares;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use ipnet::IpNet;
use nebula_cert::Fingerprint;

pub(crate) use conntrack::Conntrack;
pub use explain::{Explanation, KnownFlow};
pub(crate) use filter::Filter;
pub(crate) use flow_cache::FlowCache;
pub use rules::{Cidr, PortRange, Protocol, Rule};

use crate::counters::Direction;
use crate::drop_reason::DropReason;
use crate::tunnel::{PeerIdentity, Tunnel};
use crate::wire::ip::FlowKey;
use conntrack::Seen;
use flow_cache::Passed;

/// A lane asks the shared table about a flow it sees all the time only this often.
const CACHE_MS: u64 = 1_000;

/// Rules and settings; what the configuration says.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Rules for packets from peers.
    pub inbound: Vec<Rule>,
    /// Rules for packets to peers.
    pub outbound: Vec<Rule>,
    /// What becomes of refused packets from peers.
    pub inbound_action: Action,
    /// What becomes of refused packets to peers.
    pub outbound_action: Action,
    /// Without `local_cidr`, a rule covers any local address even if the own certificate has unsafe networks.
    pub default_local_cidr_any: bool,
    /// Idle TCP flows are forgotten after this.
    pub tcp_timeout: Duration,
    /// Idle UDP flows.
    pub udp_timeout: Duration,
    /// Other idle flows.
    pub default_timeout: Duration,
    /// Most flows remembered at a time; when there are more, the longest idle ones of the peers that hold the most are
    /// forgotten early.
    pub max_flows: usize,
}

/// What becomes of a refused packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Action {
    /// Its sender hears nothing.
    #[default]
    Drop,
    /// Its sender gets a TCP reset or an ICMP error.
    Reject,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            inbound: Vec::new(),
            outbound: Vec::new(),
            inbound_action: Action::Drop,
            outbound_action: Action::Drop,
            default_local_cidr_any: false,
            tcp_timeout: Duration::from_secs(12 * 60),
            udp_timeout: Duration::from_secs(3 * 60),
            default_timeout: Duration::from_secs(10 * 60),
            // About 28 MB when full.
            max_flows: 1 << 18,
        }
    }
}

/// What the rules ask of a peer's certificate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer<'a> {
    name: &'a str,
    groups: &'a [String],
    networks: &'a [IpNet],
    unsafe_networks: &'a [IpNet],
    issuer: Fingerprint,
    issuer_name: &'a str,
    /// All of this in a few bytes.
    identity: PeerIdentity,
    /// The subnet route in question, if the peer is one of several gateways of it.
    route: Option<IpNet>,
}

impl<'a> Peer<'a> {
    /// The peer of a tunnel, as one of the gateways of `route`; `None`: as itself.
    pub(crate) fn new(tunnel: &'a Tunnel, route: Option<IpNet>) -> Self {
        let certificate = &tunnel.peer;
        Self {
            name: certificate.name(),
            groups: certificate.groups(),
            networks: certificate.networks(),
            unsafe_networks: certificate.unsafe_networks(),
            issuer: certificate.issuer_fingerprint(),
            issuer_name: certificate.issuer_name(),
            identity: tunnel.identity,
            route,
        }
    }
}

/// The rules of the moment and the flows of the node.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Firewall<'a> {
    pub(crate) filter: &'a Filter,
    pub(crate) conntrack: &'a Conntrack,
}

impl Firewall<'_> {
    /// Whether a packet of `flow` may pass. `cache` is the lane's own. `route` says which subnet route the flow takes, if
    /// that has several gateways and the peer is one of them: they share the flow.
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

    /// As [`Self::check`], for a flow that the cache does not have. Not inlined, so that known flows pay nothing for it.
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
        let cache_for = CACHE_MS.min(self.filter.timeouts().of(&passed.flow) / 4);
        cache.insert(hash, passed, now, now + cache_for);
        Ok(())
    }

    /// Whether an ICMP error of `flow` about a packet of `quoted` may pass: by a rule, or because the quoted packet is of a
    /// flow that passed. Errors are no flows themselves: neither remembered nor let through because one was.
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

    fn decide_error(
        &self,
        now: u64,
        direction: Direction,
        flow: &FlowKey,
        quoted: Option<&FlowKey>,
        peer: Peer<'_>,
    ) -> Result<(), DropReason> {
        self.filter.check_addresses(flow, peer)?;
        let is_related = |quoted: &FlowKey| {
            // Another peer's flow is none of this one's business.
            self.filter.check_addresses(quoted, peer).is_ok() && self.known(now, quoted, peer).is_some()
        };
        let passes = self.filter.allows(direction, flow, peer) || quoted.is_some_and(is_related);
        if passes { Ok(()) } else { Err(DropReason::NoRule) }
    }

    fn decide(
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
}

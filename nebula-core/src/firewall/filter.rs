//! One published policy, compiled: its rules together with this node's addresses, and the policies of the network.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::{Fingerprint, VerifiedCertificate};

use super::index::RuleIndex;
use super::nearest::nearest;
use super::{Action, Decision, NearMiss, NetworkPolicy, Occasion, OtherEnd, Policy, PolicyVerdict};
use crate::counters::{Direction, DropReason};
use crate::tunnel::{PeerIdentity, Tunnel};
use crate::wire::ip::FlowKey;

/// One published set of rules.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    generation: u32,
    inbound: Arc<RuleIndex>,
    outbound: Arc<RuleIndex>,
    networks: Vec<IpNet>,
    unsafe_networks: Vec<IpNet>,
    /// Whether refused packets are answered: inbound, outbound.
    rejects: [bool; 2],
    timeouts: Timeouts,
    network_policy: Option<Arc<dyn NetworkPolicy>>,
}

/// How a flow may pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// Policies of the network in audit would refuse it.
    pub(super) is_in_audit: bool,
}

/// How long an idle flow is tracked, in milliseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    pub(super) tcp: u64,
    pub(super) udp: u64,
    pub(super) other: u64,
}

impl Filter {
    /// `networks` are the own addresses with the prefixes of their networks.
    pub(crate) fn new(policy: &Policy, networks: &[IpNet], unsafe_networks: &[IpNet], generation: u32) -> Self {
        let default_local = default_local(policy, networks, unsafe_networks);
        Self {
            generation,
            inbound: Arc::new(RuleIndex::new(&policy.inbound, default_local)),
            outbound: Arc::new(RuleIndex::new(&policy.outbound, default_local)),
            networks: networks.to_vec(),
            unsafe_networks: unsafe_networks.to_vec(),
            rejects: [policy.inbound_action, policy.outbound_action].map(|action| action == Action::Reject),
            timeouts: Timeouts {
                tcp: millis(policy.tcp_timeout),
                udp: millis(policy.udp_timeout),
                other: millis(policy.default_timeout),
            },
            network_policy: None,
        }
    }

    /// With these policies of the network.
    #[must_use]
    pub(crate) fn under(self, network_policy: Option<Arc<dyn NetworkPolicy>>) -> Self {
        Self { network_policy, ..self }
    }

    /// The same rules with other policies of the network, as another generation.
    pub(crate) fn with(&self, network_policy: Option<Arc<dyn NetworkPolicy>>, generation: u32) -> Self {
        Self { network_policy, generation, ..self.clone() }
    }

    pub(crate) fn network_policy(&self) -> Option<&Arc<dyn NetworkPolicy>> {
        self.network_policy.as_ref()
    }

    /// Differs from the generation of the previous rules.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether refused packets of a direction are answered.
    pub(crate) fn rejects(&self, direction: Direction) -> bool {
        self.rejects[direction as usize]
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        self.timeouts
    }

    /// Whether the peer and this node may use the addresses of the flow at all.
    pub(super) fn check_addresses(&self, flow: &FlowKey, peer: Peer<'_>) -> Result<(), DropReason> {
        let remote_is_peers = if is_address_of(flow.remote, peer.networks) {
            // The peer may also have addresses in networks that this node is not part of.
            is_inside(flow.remote, &self.networks)
        } else {
            is_inside(flow.remote, peer.unsafe_networks)
        };
        if !remote_is_peers {
            return Err(DropReason::RemoteAddress);
        }
        if !is_address_of(flow.local, &self.networks) && !is_inside(flow.local, &self.unsafe_networks) {
            return Err(DropReason::LocalAddress);
        }
        Ok(())
    }

    /// Whether a rule and the policies of the network allow a flow that begins in `direction`.
    pub(super) fn judge(
        &self,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
        occasion: Occasion,
    ) -> Result<Admitted, DropReason> {
        if !self.allows(direction, flow, peer) {
            return Err(DropReason::NoRule);
        }
        match self.policy_verdict(direction, flow, peer, occasion) {
            PolicyVerdict::Allow => Ok(Admitted { is_in_audit: false }),
            PolicyVerdict::AllowInAudit => Ok(Admitted { is_in_audit: true }),
            PolicyVerdict::Refuse => Err(DropReason::NetworkPolicy),
        }
    }

    /// Whether a rule allows a flow that begins in `direction`.
    pub(super) fn allows(&self, direction: Direction, flow: &FlowKey, peer: Peer<'_>) -> bool {
        match direction {
            Direction::Inbound => self.inbound.allows(flow, flow.local_port, peer),
            Direction::Outbound => self.outbound.allows(flow, flow.remote_port, peer),
        }
    }

    /// What the policies of the network say about a flow that begins in `direction`.
    pub(super) fn policy_verdict(
        &self,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
        occasion: Occasion,
    ) -> PolicyVerdict {
        let judge =
            |policy: &Arc<dyn NetworkPolicy>| policy.judge(direction, flow, &OtherEnd::new(flow, peer), occasion);
        self.network_policy.as_ref().map_or(PolicyVerdict::Allow, judge)
    }

    /// Why the policies of the network refuse such a flow, or would refuse it.
    pub(crate) fn policy_reason(&self, direction: Direction, flow: &FlowKey, peer: Peer<'_>) -> Option<String> {
        self.network_policy.as_ref()?.reason(direction, flow, &OtherEnd::new(flow, peer))
    }

    /// What decides about such a flow. `policy` is the one that this filter was built from.
    pub(super) fn decision(&self, policy: &Policy, direction: Direction, flow: &FlowKey, peer: Peer<'_>) -> Decision {
        let by_policies = self.network_policy.as_ref();
        Decision {
            rule: self.rule_that_allows(policy, direction, flow, peer),
            policy: by_policies.and_then(|policy| policy.decision(direction, flow, &OtherEnd::new(flow, peer))),
        }
    }

    /// The first rule that allows a flow in `policy`, from which this filter was built. Tries each rule on its own,
    /// which is fast enough for people but not for packets.
    pub(super) fn rule_that_allows(
        &self,
        policy: &Policy,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
    ) -> Option<usize> {
        let (rules, port) = match direction {
            Direction::Inbound => (&policy.inbound, flow.local_port),
            Direction::Outbound => (&policy.outbound, flow.remote_port),
        };
        let default_local = default_local(policy, &self.networks, &self.unsafe_networks);
        let allows = |rule| RuleIndex::new(std::slice::from_ref(rule), default_local).allows(flow, port, peer);
        rules.iter().position(allows)
    }

    /// The rule of `policy`, of which this filter was made, that differs least from a flow that none allows.
    pub(super) fn nearest(
        &self,
        policy: &Policy,
        direction: Direction,
        flow: &FlowKey,
        peer: Peer<'_>,
    ) -> Option<NearMiss> {
        let (rules, port) = match direction {
            Direction::Inbound => (&policy.inbound, flow.local_port),
            Direction::Outbound => (&policy.outbound, flow.remote_port),
        };
        nearest(rules, default_local(policy, &self.networks, &self.unsafe_networks), flow, port, peer)
    }
}

/// The local addresses that a rule without `local_cidr` covers; `None` means every address.
fn default_local<'a>(policy: &Policy, networks: &'a [IpNet], unsafe_networks: &[IpNet]) -> Option<&'a [IpNet]> {
    // On a gateway, a rule covers the networks behind it only if it says so.
    let all_local = unsafe_networks.is_empty() || policy.default_local_cidr_any;
    (!all_local).then_some(networks)
}

fn is_address_of(address: IpAddr, networks: &[IpNet]) -> bool {
    networks.iter().any(|network| network.addr() == address)
}

fn is_inside(address: IpAddr, networks: &[IpNet]) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The parts of a peer's certificate that rules match.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer<'a> {
    pub(super) name: &'a str,
    pub(super) groups: &'a [String],
    pub(super) networks: &'a [IpNet],
    pub(super) unsafe_networks: &'a [IpNet],
    pub(super) issuer: Fingerprint,
    pub(super) issuer_name: &'a str,
    /// Digest of all of the above.
    pub(super) identity: PeerIdentity,
    /// The subnet route of the flow, if the peer is one of several gateways of it.
    pub(super) route: Option<IpNet>,
    /// For records: the certificate, and the tunnel.
    pub(super) certificate: Option<&'a Arc<VerifiedCertificate>>,
    pub(super) tunnel: Option<&'a Tunnel>,
}

impl<'a> Peer<'a> {
    /// The peer of a tunnel; with `route`, as one of the gateways of that route.
    pub(crate) fn new(tunnel: &'a Tunnel, route: Option<IpNet>) -> Self {
        let peer = Self::with(&tunnel.peer, tunnel.identity, route);
        Self { certificate: Some(&tunnel.peer), tunnel: Some(tunnel), ..peer }
    }

    /// The holder of a certificate with this identity.
    pub(crate) fn with(certificate: &'a VerifiedCertificate, identity: PeerIdentity, route: Option<IpNet>) -> Self {
        Self {
            name: certificate.name(),
            groups: certificate.groups(),
            networks: certificate.networks(),
            unsafe_networks: certificate.unsafe_networks(),
            issuer: certificate.issuer_fingerprint(),
            issuer_name: certificate.issuer_name(),
            identity,
            route,
            certificate: None,
            tunnel: None,
        }
    }
}

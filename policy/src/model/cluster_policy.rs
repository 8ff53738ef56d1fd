//! ClusterNetworkPolicy of `policy.networking.k8s.io/v1alpha2`.

use ipnet::IpNet;

use super::ports::PortMatch;
use super::selector::{PodSelector, Selector};
use crate::program::{Direction, Tier};

/// A ClusterNetworkPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterNetworkPolicy {
    /// Its name.
    pub name: String,
    /// Whether it is evaluated for audit only.
    pub is_audited: bool,
    /// Its tier.
    pub tier: ClusterTier,
    /// Its place in the tier, lower ones first. Policies with the same one are in the order of their names.
    pub priority: u16,
    /// Pods that it applies to.
    pub subject: PodSelector,
    /// Rules for flows to the pods.
    pub ingress: Vec<ClusterRule>,
    /// Rules for flows from the pods.
    pub egress: Vec<ClusterRule>,
}

impl ClusterNetworkPolicy {
    /// Its rules for this direction.
    #[must_use]
    pub fn rules(&self, direction: Direction) -> &[ClusterRule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }
}

/// A tier of ClusterNetworkPolicies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClusterTier {
    /// Before NetworkPolicies.
    Admin,
    /// For pods that no NetworkPolicy selects.
    Baseline,
}

impl From<ClusterTier> for Tier {
    fn from(tier: ClusterTier) -> Self {
        match tier {
            ClusterTier::Admin => Self::Admin,
            ClusterTier::Baseline => Self::Baseline,
        }
    }
}

/// A rule: what happens with flows that match one of the peers and one of the protocols.
///
/// A rule cannot be read if one of its peers or protocols cannot, or if it has no peers. An Accept then matches
/// nothing; Deny and Pass deny everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterRule {
    /// Its name, which may be empty.
    pub name: String,
    /// What happens.
    pub action: Action,
    /// The other ends; at least one.
    pub peers: Vec<ClusterPeer>,
    /// Protocols and destination ports; empty for everything.
    pub protocols: Vec<PortMatch>,
}

/// What happens with a flow that a rule of a ClusterNetworkPolicy matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// It is allowed.
    Accept,
    /// It is denied.
    Deny,
    /// The next tier decides.
    Pass,
    /// Of a newer version: it is denied.
    Unreadable,
}

/// The other end of flows that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClusterPeer {
    /// Pods; `namespaces` of the API is one with a selector of all pods.
    Pods(PodSelector),
    /// Egress only: addresses of nodes with these labels.
    Nodes(Selector),
    /// Egress only: whoever has an address in one of these ranges, in the cluster or not.
    Networks(Vec<IpNet>),
    /// Egress with action Accept only. They match nothing.
    DomainNames(Vec<String>),
    /// Of a newer version, or invalid.
    Unreadable,
}

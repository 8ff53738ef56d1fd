//! Whom a program is asked about, and what it answers.

use core::fmt;
use core::net::IpAddr;
use core::num::NonZeroU32;

/// The number of a set of (namespace, its labels, a pod's labels, its named ports). Pods with equal sets share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(NonZeroU32);

impl Identity {
    /// The identity with this number; `None` for 0, which no identity has.
    #[must_use]
    pub const fn new(number: u32) -> Option<Self> {
        match NonZeroU32::new(number) {
            Some(number) => Some(Self(number)),
            None => None,
        }
    }

    /// Its number.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0.get()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the other end of a flow is known to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Who {
    /// A pod with this identity.
    Pod(Identity),
    /// A pod whose identity is not known yet. It is refused wherever a policy could refuse some pod.
    Unnumbered,
    /// No pod: a host, a pod of the host's network, or somebody outside the cluster. Only its address counts.
    Outside,
}

/// The other end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Peer {
    /// What it is known to be.
    pub who: Who,
    /// Its address: that of its certificate, or of the packet if it came in clear. Of a flow to a Service it is that of
    /// the endpoint.
    pub address: Option<IpAddr>,
}

impl Peer {
    /// A pod.
    #[must_use]
    pub const fn pod(identity: Identity, address: Option<IpAddr>) -> Self {
        Self { who: Who::Pod(identity), address }
    }

    /// Whoever has this address, and is no pod.
    #[must_use]
    pub const fn outside(address: IpAddr) -> Self {
        Self { who: Who::Outside, address: Some(address) }
    }
}

/// Where policies are evaluated, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// ClusterNetworkPolicies before all others.
    Admin,
    /// NetworkPolicies.
    NetworkPolicy,
    /// ClusterNetworkPolicies for pods that no NetworkPolicy selects.
    Baseline,
}

impl Tier {
    pub(super) const fn from_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::Admin),
            1 => Some(Self::NetworkPolicy),
            2 => Some(Self::Baseline),
            _ => None,
        }
    }
}

/// Why a flow is allowed or denied. Policies are numbers for [`super::Program::policy`], rules are places in the list
/// of their direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Allowed: the pod reaches itself.
    Itself,
    /// Allowed: the pod's own node reaches it, and it reaches its node.
    OwnNode,
    /// Allowed: no policy decides.
    NoPolicy,
    /// Allowed or denied by a rule.
    Rule {
        /// Tier of the policy.
        tier: Tier,
        /// The policy.
        policy: u32,
        /// The rule.
        rule: u16,
    },
    /// Denied: at least one NetworkPolicy isolates the pod, and no rule of any of them allows the flow.
    Isolated {
        /// The first of these policies.
        policy: u32,
    },
    /// Denied: it is not known yet who the peer is.
    Unnumbered,
    /// Denied: the pod is closed, because its policies are not known yet or are more than a program can hold.
    Closed,
    /// Denied: the program is damaged.
    Malformed,
}

/// What a set of policies says about a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Decision {
    /// Whether the flow is allowed.
    pub is_allowed: bool,
    /// Why.
    pub reason: Reason,
}

impl Decision {
    pub(super) const fn allow(reason: Reason) -> Self {
        Self { is_allowed: true, reason }
    }

    pub(super) const fn deny(reason: Reason) -> Self {
        Self { is_allowed: false, reason }
    }
}

/// What a program says about a flow.
///
/// Audit compares two sets of policies: those without the audit annotation, whose decision counts, and all of them as
/// if none had it. So the reason of a denial in audit may name a policy that is enforced: one whose rule decides only
/// because an audited rule comes first in another tier, for example.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Verdict {
    /// What happens: the decision of the policies without audit.
    pub enforced: Decision,
    /// What would happen if no policy had the audit annotation; `None` if no audited policy selects the pod.
    pub audited: Option<Decision>,
}

impl Verdict {
    /// Whether the flow passes.
    #[must_use]
    pub const fn is_allowed(&self) -> bool {
        self.enforced.is_allowed
    }

    /// The denial to report: the flow passes, and would not if no policy had the audit annotation.
    #[must_use]
    pub fn would_deny(&self) -> Option<Decision> {
        self.audited.filter(|audited| self.enforced.is_allowed && !audited.is_allowed)
    }

    /// The opposite: the flow is refused, and would pass if no policy had the audit annotation.
    #[must_use]
    pub fn would_allow(&self) -> Option<Decision> {
        self.audited.filter(|audited| !self.enforced.is_allowed && audited.is_allowed)
    }
}

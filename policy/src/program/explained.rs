//! Decisions with the names that they are about, in words for people and for labels of metrics.

use core::fmt;

use super::layout::Program;
use super::verdict::{Decision, Reason, Tier};

/// A decision of a program, with names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Explained<'a> {
    /// The decision.
    pub decision: Decision,
    /// Name of the policy that decides; `None` if none does, or the program has no name for it.
    pub policy: Option<&'a str>,
    /// Name of its rule, if it has one.
    pub rule: Option<&'a str>,
}

impl<'a> Program<'a> {
    /// Names what a decision of this program is about.
    #[must_use]
    pub fn explain(&self, decision: Decision) -> Explained<'a> {
        let policy = decision.reason.policy().and_then(|policy| self.policy(policy));
        let rule = match decision.reason {
            Reason::Rule { policy, rule, .. } => self.rule(policy, rule),
            _ => None,
        };
        Explained { decision, policy: policy.map(|policy| policy.name), rule }
    }
}

impl fmt::Display for Explained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.decision.is_allowed { "allowed" } else { "denied" })?;
        let policy = self.policy.unwrap_or("a policy without a name");
        match self.decision.reason {
            Reason::Itself => f.write_str(": a pod reaches itself"),
            Reason::OwnNode => f.write_str(": a pod and its node reach each other"),
            Reason::NoPolicy => f.write_str(": no policy decides"),
            Reason::Unnumbered => f.write_str(": the labels of the other end are not known yet"),
            Reason::Closed => f.write_str(": the pod is closed, see \"nebula-cni-agent status\""),
            Reason::Malformed => f.write_str(": the program cannot be used"),
            Reason::Isolated { .. } => write!(f, ": {policy} isolates the pod, and no NetworkPolicy allows the flow"),
            Reason::Rule { tier, rule, .. } => {
                write!(f, " by rule {rule}")?;
                self.rule.iter().try_for_each(|name| write!(f, " ({name})"))?;
                write!(f, " of {policy}, tier {}", tier.name())
            }
        }
    }
}

impl Tier {
    /// Its name, as `ClusterNetworkPolicy` writes it; stable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Admin => "Admin",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::Baseline => "Baseline",
        }
    }
}

impl Reason {
    /// As one word; stable.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Itself => "itself",
            Self::OwnNode => "own-node",
            Self::NoPolicy => "no-policy",
            Self::Rule { .. } => "rule",
            Self::Isolated { .. } => "isolated",
            Self::Unnumbered => "unnumbered",
            Self::Closed => "closed",
            Self::Malformed => "malformed",
        }
    }

    /// Tier of the policy that decides.
    #[must_use]
    pub const fn tier(self) -> Option<Tier> {
        match self {
            Self::Rule { tier, .. } => Some(tier),
            Self::Isolated { .. } => Some(Tier::NetworkPolicy),
            _ => None,
        }
    }

    /// Number of the policy that decides.
    #[must_use]
    pub const fn policy(self) -> Option<u32> {
        match self {
            Self::Rule { policy, .. } | Self::Isolated { policy } => Some(policy),
            _ => None,
        }
    }
}

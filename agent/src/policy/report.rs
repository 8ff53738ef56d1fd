//! How far network policies are enforced on this node, for `status`, the metrics and the log.

use std::collections::BTreeMap;
use std::time::Duration;

use nebula_cni_policy::model::Problem;

use crate::readiness::Standing;

/// Why a policy, or a part of it, is not enforced as it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A part of it allows nothing, or denies everything.
    Part,
    /// It names domains.
    DomainNames,
    /// It cannot be read; the version before is enforced, if there was one.
    Unreadable,
    /// There are too many, or they are too large.
    TooMuch,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Part, Self::DomainNames, Self::Unreadable, Self::TooMuch];

    /// As a metric's label.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Part => "part",
            Self::DomainNames => "domain_names",
            Self::Unreadable => "unreadable",
            Self::TooMuch => "too_much",
        }
    }

    pub(super) fn of(problem: &Problem) -> Self {
        match problem {
            Problem::DomainNames { .. } => Self::DomainNames,
            Problem::TooManyPolicies | Problem::TooManyRules { .. } => Self::TooMuch,
            _ => Self::Part,
        }
    }
}

/// A policy that is not enforced as it is written.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NotEnforced {
    /// Kind and name.
    pub policy: String,
    /// What sort of reason.
    pub kind: Kind,
    /// Why.
    pub why: String,
}

/// A pod whose instance asks no policy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unasked {
    /// Namespace and addresses.
    pub shown: String,
    /// That of its certificate.
    pub incarnation: u64,
}

/// How far policies are enforced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Policies that concern this node: NetworkPolicies, and ClusterNetworkPolicies.
    pub policies: [usize; 2],
    /// Numbers for sets of labels that are in use.
    pub identities: usize,
    /// Sets of labels without a number. Pods that have them are refused.
    pub unnumbered: usize,
    /// Own pods with programs, and those among them that are closed.
    pub pods: usize,
    /// Own pods that reach nothing but their node and the DNS, by reason.
    pub closed: BTreeMap<&'static str, usize>,
    /// Policies that are not enforced as they are written.
    pub not_enforced: Vec<NotEnforced>,
    /// Inputs that have not been listed completely since the agent's start.
    pub waits_for: Vec<&'static str>,
    /// Own pods that a policy selects, while nothing enforces that in their tunnels.
    pub unasked: Vec<Unasked>,
    /// Time that numbers and programs took, in total.
    pub took: Duration,
}

impl Report {
    /// How policies stand.
    #[must_use]
    pub fn standing(&self) -> Standing {
        if !self.waits_for.is_empty() {
            let waits = self.waits_for.join(", ");
            let text = format!("waits for {waits}; pods keep what an earlier agent gave them, others are closed");
            return Standing::bad(text).advice("may the agent's account list and watch these? see docs/policy.md");
        }
        let mut wrong: Vec<String> =
            self.closed.iter().map(|(why, pods)| format!("{pods} pod(s) are closed: {why}")).collect();
        if self.unnumbered > 0 {
            wrong.push(format!("{} set(s) of labels have no number; their pods are refused", self.unnumbered));
        }
        let named = self.not_enforced.iter().take(NAMED).map(|one| format!("{}: {}", one.policy, one.why));
        wrong.extend(named);
        if self.not_enforced.len() > NAMED {
            wrong.push(format!("and {} more", self.not_enforced.len() - NAMED));
        }
        if !self.unasked.is_empty() {
            let named: Vec<&str> = self.unasked.iter().take(NAMED).map(|pod| &*pod.shown).collect();
            let text = format!(
                "policies select {} pod(s) that were started without capture or before policies were enabled, and nothing \
                 enforces them in their tunnels: {}",
                self.unasked.len(),
                named.join(", ")
            );
            let text = [vec![text], wrong].concat().join("; ");
            return Standing::bad(text)
                .advice("restart these pods; \"capture.policy\" must be true in the chain entry");
        }
        match wrong.is_empty() {
            true => Standing::good("are enforced as they are written"),
            false => Standing::bad(wrong.join("; "))
                .advice("correct these policies; what they mean meanwhile is in docs/policy.md"),
        }
    }

    /// Logs what this report has and the one before had not.
    pub(crate) fn log_news(&self, before: &Self) {
        for one in self.not_enforced.iter().filter(|one| !before.not_enforced.contains(one)).take(MAX_LOGGED) {
            tracing::warn!(policy = one.policy, why = one.why, "a network policy is not enforced as it is written");
        }
        for (why, pods) in self.closed.iter().filter(|(why, pods)| before.closed.get(*why) != Some(pods)) {
            tracing::warn!(pods, why, "pods of this node are closed");
        }
    }
}

/// Number of policies that a status names.
const NAMED: usize = 8;
/// Number of lines that are logged at once: users who write policies choose how many are wrong.
const MAX_LOGGED: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(n: usize) -> NotEnforced {
        NotEnforced { policy: format!("NetworkPolicy shop/{n}"), kind: Kind::Part, why: "no".to_owned() }
    }

    #[test]
    fn the_status_says_what_is_not_enforced_and_what_to_do() {
        let good = Report { policies: [2, 1], pods: 3, ..Report::default() };
        let standing = good.standing();
        assert!(standing.ok && standing.reason == "are enforced as they are written");
        let waits = Report { waits_for: vec!["policies"], ..good.clone() }.standing();
        assert!(!waits.ok && waits.reason.starts_with("waits for policies;"), "{}", waits.reason);
        let unasked =
            Report { unasked: vec![Unasked { shown: "shop 10.0.0.1".to_owned(), incarnation: 1 }], ..good.clone() }
                .standing();
        assert!(!unasked.ok && unasked.reason.contains("1 pod(s)") && unasked.reason.ends_with("shop 10.0.0.1"));
        assert!(unasked.advice.contains("restart these pods"));
        let closed = Report { closed: [("why", 4)].into(), unnumbered: 5, ..good.clone() }.standing();
        assert!(closed.reason.contains("4 pod(s) are closed: why") && closed.reason.contains("5 set(s)"));
        let many = Report { not_enforced: (0..NAMED + 3).map(wrong).collect(), ..good }.standing();
        assert!(!many.ok && many.reason.contains("NetworkPolicy shop/7: no; and 3 more"), "{}", many.reason);
        assert!(!many.advice.is_empty());
    }
}

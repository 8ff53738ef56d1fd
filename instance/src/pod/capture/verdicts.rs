//! Counts the verdicts of network policies on a pod's flows.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use nebula_cni_contract::instance_status::{PolicyVerdicts, SeenFlows};
use nebula_cni_policy::program::{Decision, Direction, Program, Tier, Verdict};
use serde::{Deserialize, Serialize};

use super::seen_flows::FlowList;

/// The counters of one instance, over all versions of its programs. Nothing is allocated before a policy's first
/// verdict. Packets of known flows do not come here, so a lock is cheap enough.
#[derive(Debug, Default)]
pub struct VerdictCounters {
    /// For ingress and egress.
    directions: [Mutex<Rows>; 2],
    /// Whom the verdicts let pass.
    pub(super) seen: FlowList,
}

/// The counters of one direction.
#[derive(Debug, Default)]
struct Rows {
    /// By the policy's name: without a tier, Admin, NetworkPolicy, Baseline. Those without a tier are verdicts that no
    /// policy made; they have the word for their reason.
    tiers: [BTreeMap<Box<str>, usize>; 4],
    /// By the places that these names have.
    counts: Vec<Counts>,
    /// Of policies beyond the bound.
    other: Counts,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    allowed: u64,
    denied: u64,
    would_deny: u64,
}

impl VerdictCounters {
    /// Counts what the pod's program says about a flow. That a known flow is still allowed does not count.
    pub(super) fn count(&self, direction: Direction, program: Option<&Program<'_>>, verdict: &Verdict, is_new: bool) {
        let counts = is_new || !verdict.enforced.is_allowed;
        let (enforced, would_deny) = (counts.then_some(verdict.enforced), verdict.would_deny());
        if enforced.is_none() && would_deny.is_none() {
            return;
        }
        let mut rows = self.of(direction).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(decision) = enforced {
            let counts = rows.of(program, decision);
            *if decision.is_allowed { &mut counts.allowed } else { &mut counts.denied } += 1;
        }
        if let Some(decision) = would_deny {
            rows.of(program, decision).would_deny += 1;
        }
    }

    /// The counters as the status document has them: those that are not 0.
    pub(crate) fn report(&self) -> Vec<PolicyVerdicts> {
        let mut report = Vec::new();
        for direction in Direction::ALL {
            let rows = self.of(direction).lock().unwrap_or_else(PoisonError::into_inner);
            let named = TIERS.iter().zip(&rows.tiers).flat_map(|(tier, of)| of.iter().map(move |row| (*tier, row)));
            let named = named.filter_map(|(tier, (policy, at))| Some((tier, &**policy, rows.counts.get(*at)?)));
            let other = (rows.other != Counts::default()).then_some((NO_TIER, OTHER, &rows.other));
            report.extend(named.chain(other).map(|(tier, policy, counts)| PolicyVerdicts {
                direction: direction.name().to_owned(),
                tier: tier.to_owned(),
                policy: policy.to_owned(),
                allowed: counts.allowed,
                denied: counts.denied,
                would_deny: counts.would_deny,
            }));
        }
        report
    }

    /// The flows that were seen.
    pub(crate) fn seen(&self) -> SeenFlows {
        self.seen.report()
    }

    /// The counters for the instance that takes over; empty if nothing was counted.
    pub(crate) fn to_document(&self) -> Vec<u8> {
        let policy_verdicts = self.report();
        if policy_verdicts.is_empty() {
            return Vec::new();
        }
        serde_json::to_vec(&Document { version: VERSION, policy_verdicts }).unwrap_or_default()
    }

    /// Goes on from the counters of the instance before this one. What this release cannot read is left out.
    pub(crate) fn take_over(&self, document: &[u8]) {
        if document.is_empty() {
            return;
        }
        let Document { version, policy_verdicts } = match serde_json::from_slice(document) {
            Ok(read) => read,
            Err(error) => return tracing::warn!(%error, "The counted verdicts of the previous instance are not known"),
        };
        if version != VERSION {
            return tracing::warn!(version, "The counted verdicts of the previous instance are of another release");
        }
        for row in policy_verdicts {
            let Some(direction) = Direction::ALL.into_iter().find(|direction| direction.name() == row.direction) else {
                continue;
            };
            let mut rows = self.of(direction).lock().unwrap_or_else(PoisonError::into_inner);
            let counts = match TIERS.iter().position(|tier| *tier == row.tier) {
                Some(place) if (place, row.policy.as_str()) != (0, OTHER) => rows.named(place, &row.policy),
                _ => &mut rows.other,
            };
            for (count, before) in [
                (&mut counts.allowed, row.allowed),
                (&mut counts.denied, row.denied),
                (&mut counts.would_deny, row.would_deny),
            ] {
                *count = count.saturating_add(before).min(MAX_COUNT);
            }
        }
    }

    fn of(&self, direction: Direction) -> &Mutex<Rows> {
        let [ingress, egress] = &self.directions;
        if direction == Direction::Ingress { ingress } else { egress }
    }
}

impl Rows {
    fn of(&mut self, program: Option<&Program<'_>>, decision: Decision) -> &mut Counts {
        let policy = decision.reason.policy().and_then(|policy| program?.policy(policy));
        let tier = policy.map(|policy| policy.tier);
        let name = policy.map_or_else(|| decision.reason.word(), |policy| policy.name);
        let place = match tier {
            None => 0,
            Some(Tier::Admin) => 1,
            Some(Tier::NetworkPolicy) => 2,
            Some(Tier::Baseline) => 3,
        };
        self.named(place, name)
    }

    /// The counters of a policy in the tier at this place.
    fn named(&mut self, place: usize, name: &str) -> &mut Counts {
        let tier = &mut self.tiers[place];
        let at = match tier.get(name) {
            Some(at) => *at,
            // Names come from another process.
            None if self.counts.len() >= MAX_ROWS || name.len() > MAX_NAME => return &mut self.other,
            None => {
                tier.insert(name.into(), self.counts.len());
                self.counts.push(Counts::default());
                self.counts.len() - 1
            }
        };
        self.counts.get_mut(at).unwrap_or(&mut self.other)
    }
}

/// The counters as one instance hands them over to the next.
#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    policy_verdicts: Vec<PolicyVerdicts>,
}

/// Of [`Document`].
const VERSION: u32 = 1;
/// By their places.
const TIERS: [&str; 4] = [NO_TIER, Tier::Admin.name(), Tier::NetworkPolicy.name(), Tier::Baseline.name()];
/// Counting never comes to the end from here.
const MAX_COUNT: u64 = 1 << 60;
/// Policies that have counters of their own, in each direction.
const MAX_ROWS: usize = 256;
/// Of Kubernetes: 63 bytes for a namespace, and 253 for a name.
const MAX_NAME: usize = 63 + 1 + 253;
const NO_TIER: &str = "none";
const OTHER: &str = "other-policies";

#[cfg(test)]
mod tests {
    use super::*;

    const CLOSED: Decision = Decision { is_allowed: false, reason: nebula_cni_policy::program::Reason::Closed };

    #[test]
    fn new_flows_count_and_denials_of_known_ones() {
        let counters = VerdictCounters::default();
        let allowed = Decision { is_allowed: true, ..CLOSED };
        assert_eq!(counters.report(), []);
        for (enforced, audited) in [(CLOSED, None), (allowed, None), (allowed, Some(CLOSED)), (allowed, Some(allowed))]
        {
            for is_new in [true, false] {
                counters.count(Direction::Egress, None, &Verdict { enforced, audited }, is_new);
            }
        }
        let expected = PolicyVerdicts {
            direction: "egress".into(),
            tier: "none".into(),
            policy: "closed".into(),
            allowed: 3,
            denied: 2,
            would_deny: 2,
        };
        assert_eq!(counters.report(), [expected]);
    }

    #[test]
    fn the_next_instance_counts_on_from_where_this_one_stopped() {
        let row = |direction: &str, tier: &str, policy: &str, allowed| PolicyVerdicts {
            direction: direction.into(),
            tier: tier.into(),
            policy: policy.into(),
            allowed,
            denied: 2,
            would_deny: 0,
        };
        let document = |version, policy_verdicts| serde_json::to_vec(&Document { version, policy_verdicts }).unwrap();
        let rows = vec![
            row("ingress", "none", "other-policies", 7),
            row("egress", "NetworkPolicy", "shop/web", 5),
            row("egress", "Baseline", "b", u64::MAX),
        ];
        let before = VerdictCounters::default();
        assert!(before.to_document().is_empty(), "nothing was counted");
        before.take_over(&document(VERSION, rows.clone()));
        let after = VerdictCounters::default();
        after.take_over(&before.to_document());
        let expected = [rows[0].clone(), rows[1].clone(), row("egress", "Baseline", "b", MAX_COUNT)];
        assert_eq!(after.report(), expected);
        after.count(Direction::Egress, None, &Verdict { enforced: CLOSED, audited: None }, true);
        assert_eq!(after.report().len(), 4);

        // A tier and a direction that only a later release has; another version; nonsense.
        let later = VerdictCounters::default();
        later.take_over(&document(VERSION, vec![row("egress", "Cluster", "x", 3), row("sideways", "none", "x", 3)]));
        assert_eq!(later.report(), [row("egress", "none", "other-policies", 3)]);
        later.take_over(&document(VERSION + 1, vec![row("egress", "none", "x", 3)]));
        later.take_over(b"nonsense");
        assert_eq!(later.report().len(), 1);

        // No more names than this instance would count itself.
        let many: Vec<_> = (0..1000).map(|n| row("egress", "NetworkPolicy", &n.to_string(), 1)).collect();
        later.take_over(&document(VERSION, many));
        assert_eq!(later.report().len(), MAX_ROWS + 1);
        assert!(later.to_document().len() < 1 << 20, "the hand-over has room for them");
    }
}

//! Metrics of network policies.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{head, one};
use crate::policy::report::{Kind, Report};

/// How far policies are enforced; nothing if they are not to be.
#[derive(Debug, Default)]
pub(super) struct PolicyNumbers {
    pub(super) report: Option<Report>,
    /// Whether each input is followed.
    pub(super) inputs: BTreeMap<&'static str, bool>,
}

impl PolicyNumbers {
    pub(super) fn write_to(&self, out: &mut String) {
        let Some(report) = &self.report else { return };
        head(out, "nebula_cni_policy_input_ok", "gauge", "Whether an input of network policies is followed.");
        for (input, is_ok) in &self.inputs {
            let _ = writeln!(out, "nebula_cni_policy_input_ok{{input=\"{input}\"}} {}", u8::from(*is_ok));
        }
        head(out, "nebula_cni_policies", "gauge", "Network policies that concern pods of this node.");
        for (kind, count) in ["NetworkPolicy", "ClusterNetworkPolicy"].into_iter().zip(report.policies) {
            let _ = writeln!(out, "nebula_cni_policies{{kind=\"{kind}\"}} {count}");
        }
        let text = "Reasons for which network policies are not enforced as they are written.";
        head(out, "nebula_cni_policies_not_enforced", "gauge", text);
        for kind in Kind::ALL {
            let count = report.not_enforced.iter().filter(|one| one.kind == kind).count();
            let _ = writeln!(out, "nebula_cni_policies_not_enforced{{reason=\"{}\"}} {count}", kind.name());
        }
        let text = "Pods of this node with programs of network policies.";
        one(out, "nebula_cni_policy_pods", "gauge", text, report.pods);
        let closed: usize = report.closed.values().sum();
        let text = "Pods of this node that are closed because their network policies cannot be had.";
        one(out, "nebula_cni_policy_closed_pods", "gauge", text, closed);
        let text = "Pods of this node that network policies select, while nothing enforces those in their tunnels.";
        one(out, "nebula_cni_policy_unenforced_pods", "gauge", text, report.unasked.len());
        let text = "Sets of labels that network policies tell apart.";
        one(out, "nebula_cni_policy_identities", "gauge", text, report.identities);
        let text = "Sets of labels without a number; their pods are refused.";
        one(out, "nebula_cni_policy_unnumbered", "gauge", text, report.unnumbered);
        let text = "Time spent on network policies, with making their programs.";
        let seconds = report.took.as_secs_f64();
        one(out, "nebula_cni_policy_seconds_total", "counter", text, seconds);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::policy::report::{NotEnforced, Unasked};

    #[test]
    fn a_node_without_policies_has_no_series_and_others_have_all() {
        let (mut numbers, mut out) = (PolicyNumbers::default(), String::new());
        numbers.write_to(&mut out);
        assert_eq!(out, "");
        let wrong = NotEnforced { policy: "p".to_owned(), kind: Kind::Unreadable, why: String::new() };
        numbers.report = Some(Report {
            policies: [2, 1],
            identities: 5,
            unnumbered: 1,
            pods: 3,
            closed: [("why", 2)].into(),
            not_enforced: vec![wrong],
            unasked: vec![Unasked { shown: String::new(), incarnation: 1 }; 4],
            took: Duration::from_millis(20),
            ..Report::default()
        });
        numbers.inputs = [("policies", true)].into();
        numbers.write_to(&mut out);
        for line in [
            "nebula_cni_policy_input_ok{input=\"policies\"} 1\n",
            "nebula_cni_policies{kind=\"ClusterNetworkPolicy\"} 1\n",
            "nebula_cni_policies_not_enforced{reason=\"unreadable\"} 1\n",
            "nebula_cni_policies_not_enforced{reason=\"part\"} 0\n",
            "nebula_cni_policy_pods 3\n",
            "nebula_cni_policy_closed_pods 2\n",
            "nebula_cni_policy_unenforced_pods 4\n",
            "nebula_cni_policy_identities 5\n",
            "nebula_cni_policy_unnumbered 1\n",
            "nebula_cni_policy_seconds_total 0.02\n",
        ] {
            assert!(out.contains(line), "{line}: {out}");
        }
    }
}

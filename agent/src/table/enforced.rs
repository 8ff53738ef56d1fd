//! What the facts mean for network policies.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};

use super::facts::{Facts, PolicySettings};
use super::judgement::{Judgement, first_host};
use crate::policy::carried::Carried;
use crate::policy::enforcer::{Enforcer, NodeSeen, Scene};
use crate::policy::report::{Report, Unasked};
use crate::policy::{Records, Relabelled, asking};

/// Keeps what policies put into the table of this node.
#[derive(Debug, Default)]
pub(super) struct Enforced {
    enforcer: Enforcer,
    /// What was reported last.
    report: Report,
    /// Where the records of pods are.
    state_dir: PathBuf,
    /// Whether policies must be enforced in clear, too.
    in_clear: bool,
    /// When the records were read last.
    looked: Option<Instant>,
    /// Pods that a policy selected then, and whose instances judged by no program. A pod that starts or ends counts
    /// only if it is still so the next time.
    unasked: BTreeSet<Unasked>,
}

impl Enforced {
    /// Goes on with the table that an earlier agent wrote.
    pub(super) fn since_table(path: &Path, state_dir: PathBuf, in_clear: bool) -> Self {
        Self { enforcer: Enforcer::new(Carried::of_table(path)), state_dir, in_clear, ..Self::default() }
    }

    /// Looks from time to time for pods that a policy selects and whose instances judge by no program.
    pub(super) fn look(&mut self, now: Instant) {
        if self.looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK_EVERY) {
            return;
        }
        self.looked = Some(now);
        let judging = asking::addresses(&self.state_dir, self.in_clear);
        let unasked = self.enforcer.selected().filter(|(addresses, ..)| {
            let mut all = addresses.iter().flatten();
            !all.any(|address| judging.contains(address))
        });
        let unasked: BTreeSet<Unasked> = unasked
            .map(|(addresses, namespace, incarnation)| {
                let shown: Vec<String> = addresses.iter().flatten().map(ToString::to_string).collect();
                Unasked { shown: format!("{namespace} {}", shown.join(" ")), incarnation }
            })
            .collect();
        self.report.unasked = unasked.intersection(&self.unasked).cloned().collect();
        self.unasked = unasked;
    }

    /// What the table is to say, for the node with this name.
    pub(super) fn records(
        &mut self,
        settings: &PolicySettings,
        facts: &Facts,
        judgement: &Judgement,
        node: &str,
    ) -> Records {
        let began = SystemClock.now();
        // Those that no pod has: a kubelet can make its addresses up.
        let is_of_node = |address: &IpAddr| judgement.nodes.contains(address);
        let nodes = || {
            let seen = facts.nodes.iter().map(|(name, node)| NodeSeen {
                name,
                labels: node.labels.as_ref(),
                addresses: node.reported.iter().copied().filter(is_of_node).collect(),
            });
            seen.collect()
        };
        let scene = Scene {
            said: &facts.said,
            missing: &facts.missing_for_policies(),
            holders: &judgement.holders,
            bystanders: &judgement.bystanders,
            own: &judgement.own,
            node: &facts.addresses_of_node(node).into_iter().filter(is_of_node).collect::<Vec<_>>(),
            resolvers: &facts.resolvers(&settings.dns),
            nodes: &nodes,
        };
        let records = self.enforcer.records(&scene);
        self.reported(began);
        records
    }

    /// What a table is to say after only labels or named ports of these pods changed; `None` if [`Enforced::records`]
    /// has to make it.
    pub(super) fn relabelled(
        &mut self,
        settings: &PolicySettings,
        facts: &Facts,
        pods: &[Relabelled],
    ) -> Option<Records> {
        let began = SystemClock.now();
        let records = self.enforcer.relabelled(pods, &facts.said, &facts.resolvers(&settings.dns));
        self.reported(began);
        records
    }

    fn reported(&mut self, began: Instant) {
        let took = self.report.took + SystemClock.now().saturating_duration_since(began);
        let unasked = std::mem::take(&mut self.report.unasked);
        let report = Report { took, unasked, ..self.enforcer.report().clone() };
        report.log_news(&self.report);
        self.report = report;
    }

    /// Takes how many pods are closed in clear, because what their policies say of addresses is too much.
    pub(super) fn closed_in_clear(&mut self, pods: usize) {
        match pods {
            0 => drop(self.report.closed.remove(TOO_MUCH_IN_CLEAR)),
            pods => drop(self.report.closed.insert(TOO_MUCH_IN_CLEAR, pods)),
        }
    }

    /// The table with the last records is there.
    pub(super) fn published(&mut self) {
        self.enforcer.published(SystemClock.now());
    }

    pub(super) const fn report(&self) -> &Report {
        &self.report
    }
}

impl Facts {
    /// Addresses by which a node speaks to its pods.
    fn addresses_of_node(&self, node: &str) -> Vec<IpAddr> {
        let Some(facts) = self.nodes.get(node) else { return Vec::new() };
        // flannel's device has the first of these, bridges of most plugins the second: probes come from there.
        let first = facts.ranges.iter().flat_map(|range| [Some(range.network()), first_host(*range)]);
        facts.reported.iter().copied().chain(first.flatten()).collect()
    }

    /// Addresses of the cluster's DNS: its Service, and the endpoints behind it, by which flows are judged.
    fn resolvers(&self, dns: &str) -> Vec<IpAddr> {
        let service = self.services.iter().filter(|(name, _)| &***name == dns);
        let slices = self.slices.iter().flat_map(|(_, slices)| slices).filter(|slice| &*slice.service == dns);
        let endpoints = slices.flat_map(|slice| slice.endpoints.iter().map(|endpoint| endpoint.address));
        let mut all: Vec<IpAddr> =
            service.flat_map(|(_, service)| service.addresses().iter().copied()).chain(endpoints).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

const TOO_MUCH_IN_CLEAR: &str =
    "what their policies say of packets in clear is too much, and they have nothing but tunnels";
/// Each look reads a file of every pod of the node.
const LOOK_EVERY: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nebula_cni_contract::clock::{Clock, SystemClock};
    use serde_json::json;

    use super::*;
    use crate::policy::OwnPod;
    use crate::policy::described::{Described, Packed};
    use crate::policy::said::Weighed;
    use crate::table::kept::Keep as _;
    use crate::table::member;

    #[test]
    fn a_pod_that_a_policy_selects_and_nothing_protects_is_named_once_it_is_so_for_long() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("net");
        std::fs::create_dir_all(&folder).unwrap();
        let mut facts = Facts::default();
        for input in crate::table::facts::Input::OF_POLICIES {
            facts.is_heard(input);
        }
        facts.said.namespaces.insert("shop".into(), Packed::of(&[].into()).map(Arc::new));
        let policy = json!({"metadata": {"namespace": "shop", "name": "deny"}, "spec": {"podSelector": {}}});
        let policy = Weighed::policy(&serde_json::from_value(policy).unwrap());
        facts.said.policies.put("shop/deny".into(), Some(policy));
        let pod = |last: u8, incarnation| OwnPod {
            addresses: member::addresses([IpAddr::from([10, 0, 0, last])]),
            incarnation,
            described: Arc::new(Described::new("shop", None, [], [])),
        };
        let judgement = Judgement { own: vec![pod(1, 7), pod(2, 8), pod(3, 0)], ..Judgement::default() };
        let mut enforced = Enforced::since_table(&dir.path().join("cluster/table"), dir.path().to_owned(), false);
        let settings = PolicySettings { dns: "kube-system/kube-dns".to_owned(), ..PolicySettings::default() };
        enforced.records(&settings, &facts, &judgement, "n1");
        let contract = json!({"capture": {"policy": true, "sources": ["10.0.0.1"]}});
        std::fs::write(folder.join("one-eth0.json"), "{}").unwrap();
        std::fs::write(folder.join("one-eth0.launch"), contract.to_string()).unwrap();
        let start = SystemClock.now();
        enforced.look(start);
        enforced.look(start + LOOK_EVERY / 2);
        assert!(enforced.report().unasked.is_empty(), "it may be starting");
        enforced.look(start + LOOK_EVERY);
        let named = [Unasked { shown: "shop 10.0.0.2".to_owned(), incarnation: 8 }];
        assert_eq!(enforced.report().unasked, named, "the third one has no certificate");
        enforced.records(&settings, &facts, &judgement, "n1");
        assert_eq!(enforced.report().unasked.len(), 1, "another table changes nothing");
    }
}

//! A table after a change of nothing but labels or named ports of pods. It says the same of addresses and Services as
//! the one before, and to judge those again would be most of the work: so it is made of that one.

use std::sync::Arc;

use nebula_cni_contract::cluster_table::{Layout, Table};

use super::facts::Facts;
use super::member::{Member, PodId};
use super::outputs::Outputs;
use super::shown::Shown;
use super::writer::WriteError;
use crate::metrics::Written;
use crate::policy::{OwnPod, Relabelled};

impl Outputs {
    /// Writes a table that differs from the last one in numbers of labels and programs only; `None` if it has to be
    /// built from everything.
    pub(super) fn relabel(&mut self, facts: &Facts) -> Result<Option<Written>, WriteError> {
        let Some(settings) = facts.settings.policies.as_ref() else { return Ok(None) };
        let Self { node, writer, clear_policies, enforced, .. } = self;
        let relabelled = writer.changes_since(facts).and_then(|changes| facts.pods.relabelled(changes));
        let Some(relabelled) = relabelled else { return Ok(None) };
        let judged = clear_policies.judged();
        let revise = |bytes: &[u8], version: u64| {
            let layout = Layout::read(bytes).ok()?;
            let table = layout.table(bytes);
            let pods = relabelled.iter().map(|pod| facts.relabelled(*pod, &table, node, !judged.is_empty()));
            let pods: Vec<Relabelled> = pods.collect::<Option<_>>()?;
            let records = enforced.relabelled(settings, facts, &pods)?;
            if !clear_policies.replace_programs(&judged, &records.programs) {
                return None;
            }
            enforced.closed_in_clear(clear_policies.too_much());
            table.with_policies(version, &records.identities, records.programs)
        };
        let written = writer.revise(facts, revise)?;
        if written.is_some() {
            self.enforced.published();
        }
        Ok(written)
    }
}

impl Facts {
    /// The pod as it is now, with its addresses that are enrolled in `table`. `None` if more depends on its labels:
    /// if it is the mirror of a static pod, or one that captured pods meet in clear.
    fn relabelled(&self, id: PodId, table: &Table<'_>, node: &str, some_are_judged: bool) -> Option<Relabelled> {
        let is_met_in_clear = |pod: &Shown| some_are_judged && pod.is_left_out;
        let pod = self.pods.get(&id).filter(|pod| pod.mirrors.is_none() && !is_met_in_clear(pod))?;
        let described = Arc::clone(pod.described.as_ref()?);
        let member = self.members.get(&id);
        let incarnation = member.map_or(0, |member| member.incarnation);
        let all = member.into_iter().flat_map(Member::all);
        let enrolled = all.filter(|address| table.incarnation(*address) == Some(incarnation)).collect();
        // One that the rules leave out has no programs.
        let has_programs = &*pod.node == node && (member.is_some() || !pod.is_left_out);
        let own = OwnPod { addresses: pod.addresses, incarnation, described: Arc::clone(&described) };
        Some(Relabelled { enrolled, described, own: has_programs.then_some(own) })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::IpAddr;
    use std::path::Path;

    use nebula_cni_contract::cluster_table::contents::Contents;
    use nebula_cni_contract::policy_test::Answer;
    use serde_json::json;
    use tokio::time::Instant;

    use super::super::enforced::Enforced;
    use super::super::facts::{Input, PolicySettings};
    use super::super::kept::Keep as _;
    use super::super::member;
    use super::super::writer::Writer;
    use super::*;
    use crate::policy::described::Packed;
    use crate::policy::said::Weighed;
    use crate::policy::{Described, asked};

    /// The first of them are on node `n1`, and the last ones have no certificate.
    const PODS: u8 = 24;
    const OWN: u8 = 3;
    const ENROLLED: u8 = 20;
    const APPS: [&str; 4] = ["web", "db", "job", "other"];

    fn address(pod: u8) -> IpAddr {
        [10, 0, u8::from(pod >= OWN), 1 + pod].into()
    }

    fn shown(pod: u8, app: &str) -> Shown {
        let node = if pod < OWN { "n1" } else { "n2" };
        let labels = [("app".to_owned(), app.to_owned())].into();
        Shown {
            addresses: member::addresses([address(pod)]),
            node: node.into(),
            is_left_out: pod >= ENROLLED,
            counts: true,
            is_host_network: false,
            mirrors: None,
            described: Some(Arc::new(Described::new("shop", Some(&labels), [], []))),
        }
    }

    fn facts() -> Facts {
        let mut facts = Facts::default();
        facts.settings.policies = Some(PolicySettings { dns: "kube-system/kube-dns".to_owned(), ..Default::default() });
        for pod in 0..PODS {
            facts.pods.put(pod.into(), Some(shown(pod, APPS[usize::from(pod) % 2])));
            if pod < ENROLLED {
                let (addresses, port_number) = (member::addresses([address(pod)]), pod.into());
                let member = Member { addresses, incarnation: u64::from(pod) + 1, port_number, is_host: false };
                facts.members.insert(pod.into(), member);
            }
        }
        facts.said.namespaces.insert("shop".into(), Packed::of(&[].into()).map(Arc::new));
        for (name, to, from) in [("db", "db", "web"), ("web", "web", "job")] {
            let policy = json!({"metadata": {"namespace": "shop", "name": name},
                "spec": {"podSelector": {"matchLabels": {"app": to}},
                    "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": from}}}]}]}});
            let policy = Weighed::policy(&serde_json::from_value(policy).unwrap());
            facts.said.policies.put(format!("shop/{name}").into(), Some(policy));
        }
        for input in Input::ALL.into_iter().chain(Input::OF_POLICIES) {
            facts.is_heard(input);
        }
        facts.changes = 1;
        facts
    }

    fn outputs(path: &Path) -> Outputs {
        let enforced = Enforced::since_table(path, path.to_owned(), false);
        Outputs { node: "n1".to_owned(), writer: Writer::open(path), enforced, ..Outputs::default() }
    }

    /// What the table in the file says of addresses, and what its programs say of each flow from or to an own pod.
    fn said(path: &Path) -> (String, Vec<Answer>) {
        let bytes = fs::read(path).unwrap();
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        let mut contents = Contents::of(&table);
        for pod in &mut contents.enrolled {
            assert!(pod.labels.is_some(), "{}", pod.address);
            pod.labels = None;
        }
        let pairs = (0..OWN).flat_map(|own| (0..PODS).flat_map(move |other| [(own, other), (other, own)]));
        let judge = |(from, to)| Answer { version: 0, ..asked::judge(&table, address(from), address(to), 6, 80) };
        let shown = contents.to_string();
        let (_version, addresses) = shown.split_once('\n').unwrap();
        (addresses.to_owned(), pairs.map(judge).collect())
    }

    fn relabel(facts: &mut Facts, pod: u8, app: &str) {
        facts.changes += u64::from(facts.pods.put(pod.into(), Some(shown(pod, app))));
    }

    #[test]
    fn a_table_after_changed_labels_says_what_one_made_of_everything_says() {
        let dir = tempfile::tempdir().unwrap();
        let [path, other] = ["table", "other"].map(|name| dir.path().join("cluster").join(name));
        let (mut facts, mut outputs) = (facts(), outputs(&path));
        outputs.write(&mut facts, Instant::now()).unwrap();
        let allowed = |answers: &[Answer]| {
            let is_allowed = |answer: &&Answer| answer.ingress.as_ref().is_some_and(|said| said.decision.allowed);
            answers.iter().filter(is_allowed).count()
        };
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..60_usize {
            for step in 0..=round % 3 {
                // Pods of this node and of others, some without a certificate.
                let pod = (round * 7 + step * 5) as u8 % PODS;
                relabel(&mut facts, pod, APPS[(round / 3 + step) % APPS.len()]);
            }
            outputs.write(&mut facts, Instant::now()).unwrap();
            let mut whole = self::outputs(&other);
            whole.write(&mut facts, Instant::now()).unwrap();
            let (now, expected) = (said(&path), said(&other));
            assert_eq!(now.0, expected.0, "round {round}");
            assert_eq!(now.1, expected.1, "round {round}");
            seen.insert(allowed(&now.1));
            fs::remove_file(&other).unwrap();
        }
        assert!(seen.len() > 3, "labels decide: {seen:?}");
    }

    #[test]
    fn a_table_is_made_of_the_one_before_only_after_changed_labels() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster/table");
        let (mut facts, mut outputs) = (facts(), outputs(&path));
        let mut is_revised = |facts: &mut Facts, path: &Path| {
            let is_revised = outputs.relabel(facts).unwrap().is_some();
            if !is_revised {
                outputs.write(facts, Instant::now()).unwrap();
            }
            facts.pods.are_written();
            assert!(path.is_file());
            is_revised
        };
        assert!(!is_revised(&mut facts, &path), "there is none yet");
        relabel(&mut facts, OWN, "job");
        assert!(is_revised(&mut facts, &path));
        relabel(&mut facts, PODS - 1, "job");
        assert!(is_revised(&mut facts, &path), "it has no certificate, and no pod is judged in clear");
        relabel(&mut facts, 0, "job");
        assert!(is_revised(&mut facts, &path), "it is of this node, and has other programs");
        relabel(&mut facts, OWN, "web");
        facts.changes += 1;
        assert!(!is_revised(&mut facts, &path), "something else changed");
        relabel(&mut facts, OWN, "db");
        assert!(self::outputs(&path).relabel(&facts).unwrap().is_none(), "an earlier agent wrote it");
        fs::write(&path, "nonsense").unwrap();
        assert!(!is_revised(&mut facts, &path), "somebody has written into it");
        relabel(&mut facts, OWN, "job");
        assert!(is_revised(&mut facts, &path));
        // Numbers that no pod has are taken back from time to time.
        let revised = (0..1_000).filter(|n: &usize| {
            relabel(&mut facts, OWN, &format!("app-{n}"));
            is_revised(&mut facts, &path)
        });
        assert!((990..1_000).contains(&revised.count()));
    }
}

//! The node's metrics, in the text format of Prometheus: how the pods stand, what was repaired, and the numbers of
//! every instance with the labels of its pod.

mod flows;
mod policies;
#[cfg(test)]
mod queries;
mod table;
mod upgrade;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::instance_status::{PolicyVerdicts, Status};

use self::flows::FlowNumbers;
use self::policies::PolicyNumbers;
use self::table::TableNumbers;
pub(crate) use self::table::Written;
use self::upgrade::UpgradeNumbers;
use crate::policy::report::Report;
use crate::reconcile::plan::{Protection, Stand};

/// What is counted and shown. Instances are asked by the reconciliation, not for each scrape: their numbers are at most
/// half a minute old.
#[derive(Debug)]
pub struct Metrics {
    /// Whether there is a series for each pod.
    by_pod: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    looks: u64,
    failed_looks: u64,
    look: Duration,
    pods: Vec<(Stand, Option<Arc<Status>>)>,
    old_settings: usize,
    repairs: BTreeMap<(&'static str, &'static str), u64>,
    events: BTreeMap<&'static str, u64>,
    releases: BTreeMap<&'static str, u64>,
    upgrade: UpgradeNumbers,
    table: TableNumbers,
    policies: PolicyNumbers,
    flows: FlowNumbers,
}

impl Metrics {
    /// Nothing counted yet. `by_pod` is for series with the labels `namespace` and `pod`.
    #[must_use]
    pub fn new(by_pod: bool) -> Self {
        Self { by_pod, state: Mutex::default() }
    }

    /// Takes what a look at the node found.
    pub fn looked(&self, pods: &[Stand], answers: &HashMap<String, Arc<Status>>, took: Duration) {
        let pods = pods.iter().map(|stand| (stand.clone(), answers.get(&stand.sandbox).cloned())).collect();
        let mut state = self.state();
        (state.pods, state.look, state.looks) = (pods, took, state.looks + 1);
    }

    /// Takes how many pods go on with other settings than those of the chain entry.
    pub fn old_settings(&self, pods: usize) {
        self.state().old_settings = pods;
    }

    /// Counts a look at the node that failed.
    pub fn look_failed(&self) {
        self.state().failed_looks += 1;
    }

    /// Counts a repair.
    pub fn repaired(&self, kind: &'static str, is_done: bool) {
        *self.state().repairs.entry((kind, result(is_done))).or_default() += 1;
    }

    /// Counts an upgrade of an instance, by one of the results in `upgrade`.
    pub fn upgraded(&self, result: &'static str) {
        self.state().upgrade.ended(result);
    }

    /// Takes how many instances run another program than the installed one, and whether their upgrade is paused.
    pub fn outdated(&self, instances: usize, is_paused: bool) {
        self.state().upgrade.looked(instances, is_paused);
    }

    /// Counts an event that was reported, or could not be.
    pub fn told(&self, is_done: bool) {
        *self.state().events.entry(result(is_done)).or_default() += 1;
    }

    /// Counts a released pod, or a failed attempt to release one.
    pub fn released(&self, is_done: bool) {
        *self.state().releases.entry(result(is_done)).or_default() += 1;
    }

    /// Takes what became of a table that was to be written, and the numbers of its entries by kind.
    pub fn table_written(&self, written: &Written, counts: &[(&'static str, usize)]) {
        self.state().table.written(written, counts, SystemClock.now());
    }

    /// Takes which inputs of the table are followed.
    pub fn table_inputs(&self, inputs: impl IntoIterator<Item = (&'static str, bool)>) {
        self.state().table.inputs = inputs.into_iter().collect();
    }

    /// Takes how far network policies are enforced.
    pub fn policies(&self, report: &Report) {
        self.state().policies.report = Some(report.clone());
    }

    /// Takes which inputs of policies are followed.
    pub fn policy_inputs(&self, inputs: impl IntoIterator<Item = (&'static str, bool)>) {
        self.state().policies.inputs = inputs.into_iter().collect();
    }

    /// Changes the numbers of kept flow records.
    pub(crate) fn flows(&self, change: impl FnOnce(&mut FlowNumbers)) {
        change(&mut self.state().flows);
    }

    /// The pods of the last look, each with what its instance said.
    pub(crate) fn pods(&self) -> Vec<(Stand, Option<Arc<Status>>)> {
        self.state().pods.clone()
    }

    /// How many enrolled pods run without a tunnel.
    #[must_use]
    pub fn unprotected(&self) -> usize {
        self.state().pods.iter().filter(|(stand, _)| stand.protection.is_unprotected()).count()
    }

    /// All metrics.
    #[must_use]
    pub fn text(&self) -> String {
        let state = self.state();
        let mut out = String::new();
        let unprotected = state.pods.iter().filter(|(stand, _)| stand.protection.is_unprotected()).count();
        one(&mut out, "nebula_cni_unprotected_pods", "gauge", "Enrolled pods that run without a tunnel.", unprotected);
        head(&mut out, "nebula_cni_pods", "gauge", "Pods of this node by how they stand.");
        for name in Protection::NAMES {
            let count = state.pods.iter().filter(|(stand, _)| stand.protection.name() == name).count();
            let _ = writeln!(out, "nebula_cni_pods{{state=\"{name}\"}} {count}");
        }
        one(
            &mut out,
            "nebula_cni_old_settings_pods",
            "gauge",
            "Pods that go on with other settings than those of the chain entry.",
            state.old_settings,
        );
        head(&mut out, "nebula_cni_repairs_total", "counter", "Repairs by kind and result.");
        for ((kind, result), count) in &state.repairs {
            let _ = writeln!(out, "nebula_cni_repairs_total{{kind=\"{kind}\",result=\"{result}\"}} {count}");
        }
        for (name, help, counts) in [
            ("nebula_cni_events_total", "Events for the API server by result.", &state.events),
            (
                "nebula_cni_releases_total",
                "Pods whose certificates were given back to the CA, by result.",
                &state.releases,
            ),
        ] {
            head(&mut out, name, "counter", help);
            for (result, count) in counts {
                let _ = writeln!(out, "{name}{{result=\"{result}\"}} {count}");
            }
        }
        one(&mut out, "nebula_cni_looks_total", "counter", "Looks at sandboxes and records.", state.looks);
        one(
            &mut out,
            "nebula_cni_looks_failed_total",
            "counter",
            "Looks without an answer of the runtime.",
            state.failed_looks,
        );
        one(&mut out, "nebula_cni_look_seconds", "gauge", "Time that the last look took.", state.look.as_secs_f64());
        state.upgrade.write_to(&mut out);
        state.table.write_to(&mut out, SystemClock.now());
        state.policies.write_to(&mut out);
        state.flows.write_to(&mut out, nebula_linux::clock::since_epoch());
        if self.by_pod {
            of_pods(&mut out, &state.pods);
        }
        out
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Counters stay usable after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of_pods(out: &mut String, pods: &[(Stand, Option<Arc<Status>>)]) {
    let now = SystemClock.unix_seconds();
    let labels =
        |stand: &Stand| format!("namespace=\"{}\",pod=\"{}\"", escaped(&stand.pod.namespace), escaped(&stand.pod.name));
    head(out, "nebula_cni_pod_unprotected", "gauge", "Whether an enrolled pod runs without a tunnel.");
    for (stand, _) in pods.iter().filter(|(stand, _)| !stand.protection.is_outside()) {
        let value = u8::from(stand.protection.is_unprotected());
        let _ = writeln!(out, "nebula_cni_pod_unprotected{{{}}} {value}", labels(stand));
    }
    head(out, "nebula_cni_pod_restarts", "gauge", "Restarts in a row of an instance that keeps dying.");
    for (stand, _) in pods {
        if let Protection::CrashLooping { restarts, .. } = stand.protection {
            let _ = writeln!(out, "nebula_cni_pod_restarts{{{}}} {restarts}", labels(stand));
        }
    }
    let answered: Vec<(String, &Status)> =
        pods.iter().filter_map(|(stand, status)| Some((labels(stand), status.as_deref()?))).collect();
    head(out, "nebula_cni_pod_tunnels", "gauge", "Live tunnels of the pod.");
    for (labels, status) in &answered {
        let _ = writeln!(out, "nebula_cni_pod_tunnels{{{labels}}} {}", status.tunnels.len());
    }
    head(out, "nebula_cni_pod_certificate_ttl_seconds", "gauge", "Time until the pod's certificate expires.");
    for (labels, status) in &answered {
        if let Some(certificate) = &status.certificate {
            let left = certificate.not_after.saturating_sub(now);
            let _ = writeln!(out, "nebula_cni_pod_certificate_ttl_seconds{{{labels}}} {left}");
        }
    }
    head(out, "nebula_cni_pod_bytes_total", "counter", "Bytes of the pod's overlay packets.");
    for (labels, status) in &answered {
        for direction in ["in", "out"] {
            let bytes = status.counters.get(&format!("bytes_{direction}")).copied().unwrap_or_default();
            let _ = writeln!(out, "nebula_cni_pod_bytes_total{{{labels},direction=\"{direction}\"}} {bytes}");
        }
    }
    head(out, "nebula_cni_pod_dropped_packets_total", "counter", "Packets of the pod that were dropped.");
    for (labels, status) in &answered {
        // Reasons that never occurred would make most of the page.
        for (name, count) in status.counters.iter().filter(|(_, count)| **count > 0) {
            if let Some((direction, reason)) = name.strip_prefix("dropped_").and_then(|name| name.split_once('_')) {
                let (direction, reason) = (escaped(direction), escaped(reason));
                let labels = format!("{labels},direction=\"{direction}\",reason=\"{reason}\"");
                let _ = writeln!(out, "nebula_cni_pod_dropped_packets_total{{{labels}}} {count}");
            }
        }
    }
    let text = "Verdicts of network policies on flows of the pod.";
    head(out, "nebula_cni_pod_policy_verdicts_total", "counter", text);
    for (labels, status) in &answered {
        for direction in ["ingress", "egress"] {
            let sum = |count: fn(&PolicyVerdicts) -> u64| -> u64 {
                let rows = status.policy_verdicts.iter().filter(|row| row.direction == direction);
                rows.map(count).fold(0, u64::saturating_add)
            };
            let verdicts = [
                ("allowed", sum(|row| row.allowed)),
                ("denied", sum(|row| row.denied)),
                ("would_deny", sum(|row| row.would_deny)),
            ];
            for (verdict, count) in verdicts.into_iter().filter(|(_, count)| *count > 0) {
                let labels = format!("{labels},direction=\"{direction}\",verdict=\"{verdict}\"");
                let _ = writeln!(out, "nebula_cni_pod_policy_verdicts_total{{{labels}}} {count}");
            }
        }
    }
}

fn one(out: &mut String, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
    head(out, name, kind, help);
    let _ = writeln!(out, "{name} {value}");
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn result(is_done: bool) -> &'static str {
    if is_done { "done" } else { "failed" }
}

/// Escapes the characters that a label must not contain; names come from the runtime and from instances.
fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use nebula_cni_contract::launch::Pod;

    use super::*;
    use crate::reconcile::plan::{Reason, Stranded};

    fn stand(name: &str, protection: Protection) -> Stand {
        let pod = Pod { namespace: "shop".into(), name: name.into(), uid: name.into() };
        Stand { sandbox: name.into(), pod, protection }
    }

    fn metrics(by_pod: bool) -> String {
        let metrics = Metrics::new(by_pod);
        let status = r#"{"state":"running","tunnels":[{},{}],"certificate":{"not_after":9999999999},
            "counters":{"bytes_in":7,"bytes_out":8,"dropped_inbound_no_rule":3,"dropped_outbound_no_rule":0},
            "policy_verdicts":[{"direction":"egress","policy":"a","denied":2},{"direction":"egress","policy":"b","denied":3}]}"#;
        let answers = [("web".to_owned(), Arc::new(serde_json::from_str(status).unwrap()))].into();
        let pods = [
            stand("web", Protection::Protected),
            stand("old", Protection::Unprotected(Reason::NoRecord)),
            stand("loop", Protection::CrashLooping { restarts: 5, delay: 4 }),
            stand("a\"}\nb", Protection::NotEnrolled),
            stand("lost", Protection::Stranded(Stranded::CertificateLost)),
        ];
        metrics.looked(&pods, &answers, Duration::from_millis(20));
        metrics.repaired("attach", true);
        metrics.repaired("attach", true);
        metrics.repaired("attach", false);
        metrics.released(true);
        assert_eq!(metrics.unprotected(), 2);
        metrics.text()
    }

    #[test]
    fn pods_repairs_and_the_numbers_of_instances_are_shown() {
        let text = metrics(true);
        for line in [
            "nebula_cni_unprotected_pods 2",
            "nebula_cni_pods{state=\"protected\"} 1",
            "nebula_cni_pods{state=\"crash_looping\"} 1",
            "nebula_cni_pods{state=\"stranded\"} 1",
            "nebula_cni_repairs_total{kind=\"attach\",result=\"done\"} 2",
            "nebula_cni_repairs_total{kind=\"attach\",result=\"failed\"} 1",
            "nebula_cni_releases_total{result=\"done\"} 1",
            "nebula_cni_pod_unprotected{namespace=\"shop\",pod=\"web\"} 0",
            "nebula_cni_pod_unprotected{namespace=\"shop\",pod=\"old\"} 1",
            "nebula_cni_pod_restarts{namespace=\"shop\",pod=\"loop\"} 5",
            "nebula_cni_pod_tunnels{namespace=\"shop\",pod=\"web\"} 2",
            "nebula_cni_pod_bytes_total{namespace=\"shop\",pod=\"web\",direction=\"out\"} 8",
            "nebula_cni_pod_dropped_packets_total{namespace=\"shop\",pod=\"web\",direction=\"inbound\",reason=\"no_rule\"} 3",
            "nebula_cni_pod_policy_verdicts_total{namespace=\"shop\",pod=\"web\",direction=\"egress\",verdict=\"denied\"} 5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} not in\n{text}");
        }
        assert!(!text.contains("outbound"), "reasons that never occurred are left out");
    }

    /// Everything that an agent can show, and that rules or dashboards may name.
    fn full() -> String {
        use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord};

        use crate::flows::export::Target;
        use crate::flows::pairs::{Earlier, Pairs};
        use crate::listener::own_metrics;
        use crate::readiness::Readiness;

        let metrics = Metrics::new(true);
        let status = r#"{"state":"running","tunnels":[{}],"certificate":{"not_after":9999999999},
            "counters":{"bytes_in":7,"dropped_inbound_no_rule":3,"dropped_outbound_conntrack_full":1},
            "policy_verdicts":[{"direction":"egress","policy":"a","denied":2}]}"#;
        let answers = [("web".to_owned(), Arc::new(serde_json::from_str(status).unwrap()))].into();
        let pods =
            [stand("web", Protection::Protected), stand("loop", Protection::CrashLooping { restarts: 5, delay: 4 })];
        metrics.looked(&pods, &answers, Duration::from_millis(20));
        metrics.repaired("attach", true);
        metrics.released(true);
        metrics.told(true);
        metrics.table_written(
            &Written { version: 1, bytes: Some(1), took: Duration::ZERO },
            &[("enrolled", 1), ("services", 1)],
        );
        metrics.table_inputs([("directory", true)]);
        let mut pairs = Pairs::default();
        let record = |direction: &str| FlowRecord {
            direction: direction.to_owned(),
            verdict: "refused".to_owned(),
            source: FlowEnd { name: Some("scan-1".to_owned()), ..FlowEnd::default() },
            destination: FlowEnd { name: Some("scan-1".to_owned()), ..FlowEnd::default() },
            forward: Amount { packets: 1, bytes: 1 },
            ..FlowRecord::default()
        };
        pairs.add("shop", &record("inbound"), Earlier::Nothing, 0);
        pairs.add("shop", &record("outbound"), Earlier::Nothing, 0);
        pairs.settle();
        metrics.flows(|flows| {
            flows.pairs = pairs;
            Target::ALL.iter().for_each(|target| flows.exports_to(*target));
        });
        format!("{}{}", own_metrics(&Readiness::default().now()), metrics.text())
    }

    #[test]
    fn rules_and_dashboards_name_metrics_labels_and_values_that_agents_show() {
        let mut pages = queries::Pages::default();
        pages.add(&full());
        let rules = serde_saphyr::from_str(include_str!("../../../deploy/prometheus-rules.yaml")).unwrap();
        let mut all = queries::of_rules(&rules);
        for dashboard in [
            include_str!("../../../deploy/grafana-cluster.json"),
            include_str!("../../../deploy/grafana-node.json"),
            include_str!("../../../deploy/grafana-pod.json"),
        ] {
            all.extend(queries::of_dashboard(&serde_json::from_str(dashboard).unwrap()));
        }
        let is_ours = |query: &&queries::Query| {
            let used = queries::used(&query.text).0;
            !used.is_empty() && used.iter().all(|used| used.metric.starts_with("nebula_cni_"))
        };
        let ours: Vec<_> = all.iter().filter(is_ours).collect();
        assert!(ours.len() > 50, "{}", ours.len());
        let wrong: Vec<_> = ours.iter().flat_map(|query| pages.wrong(query, |_| false)).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        // Each flow metric is on a dashboard.
        let shown =
            |name: &str| ours.iter().any(|query| queries::used(&query.text).0.iter().any(|used| used.metric == name));
        let unseen: Vec<_> = pages.names().filter(|name| name.starts_with("nebula_cni_flow") && !shown(name)).collect();
        assert!(unseen.is_empty(), "no panel and no alert shows {unseen:?}");
    }

    #[test]
    fn every_series_has_help_and_type_and_hostile_names_break_no_line() {
        for by_pod in [true, false] {
            let text = metrics(by_pod);
            let names = |word: &str| {
                let lines = text.lines().filter_map(|line| line.strip_prefix(word));
                lines.filter_map(|line| line.split(' ').next()).collect::<Vec<_>>()
            };
            let (help, kinds) = (names("# HELP "), names("# TYPE "));
            assert_eq!(help, kinds);
            for line in text.lines().filter(|line| !line.starts_with('#')) {
                let name = line.split(['{', ' ']).next().unwrap();
                assert!(help.contains(&name), "{line}");
                assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
            }
            assert_eq!(text.contains("pod=\"web\""), by_pod);
        }
    }
}

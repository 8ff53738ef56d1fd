//! Whether Nebula works: its workloads, the agents of all nodes, and what they say of their pods.

use nebula_cni_contract::agent_api::{NodeStatus, STATUS_PATH};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::columns::span;
use serde_json::Value;

use super::report::{Category, Report};
use crate::agents::{Agents, remarks};
use crate::cli::Place;
use crate::cluster::Cluster;
use crate::identity::Role;

pub(super) async fn look(cluster: &Cluster, place: &Place, report: &mut Report) {
    match cluster.get("/version").await {
        Ok(version) => {
            let text = version["gitVersion"].as_str().unwrap_or("unknown");
            report.good(Category::Kubernetes, format!("the API server is {text}"));
        }
        Err(error) => {
            return report.bad(Category::Kubernetes, error.to_string(), "look at the kubeconfig, and at the network");
        }
    }
    let workload = async |kind: &str, name: &str| {
        cluster.get(&format!("/apis/apps/v1/namespaces/{}/{kind}/{name}", place.system_namespace)).await
    };
    for (category, kind, name) in WORKLOADS {
        match workload(kind, name).await {
            Ok(object) => judge_workload(category, name, &object, report),
            Err(error) if error.status() == Some(404) && category != Category::Agents => {
                report.good(category, format!("{name} is not part of this release"));
            }
            Err(error) => report.warn(category, error.to_string(), "it was not looked at"),
        }
    }
    let agents = match Agents::find(cluster, place, Role::ClusterViewer).await {
        Ok(agents) => agents,
        Err(error) => return report.bad(Category::Rights, error.to_string(), ""),
    };
    let answers = agents.ask::<NodeStatus>(&agents.all, "GET", STATUS_PATH).await;
    let failed = answers.iter().filter_map(|(node, answer)| Some((node.as_str(), answer.as_ref().err()?)));
    for line in remarks(failed) {
        report.bad(Category::Agents, line, "");
    }
    let known: Vec<&NodeStatus> = answers.iter().filter_map(|(_, answer)| answer.as_ref().ok()).collect();
    judge_nodes(&known, SystemClock.unix_seconds(), report);
}

fn judge_workload(category: Category, name: &str, object: &Value, report: &mut Report) {
    let status = |key: &str| object["status"][key].as_u64().unwrap_or_default();
    let (wanted, ready) = match object["status"].get("desiredNumberScheduled") {
        Some(_) => (status("desiredNumberScheduled"), status("numberReady")),
        None => (object["spec"]["replicas"].as_u64().unwrap_or(1), status("readyReplicas")),
    };
    if wanted == 0 {
        let hint = "is it scaled to 0, or does its node selector fit no node?";
        return report.bad(category, format!("{name}: no pod of it is wanted"), hint);
    }
    if ready >= wanted {
        return report.good(category, format!("{name}: {ready} of {wanted} are ready"));
    }
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("nebula-system");
    report.bad(
        category,
        format!("{name}: {ready} of {wanted} are ready"),
        format!("kubectl describe pods -n {namespace} -l app.kubernetes.io/name={name} says why"),
    );
}

fn judge_nodes(known: &[&NodeStatus], now: i64, report: &mut Report) {
    let mut ready = 0;
    for status in known {
        let node = &status.node;
        ready += usize::from(status.is_ready);
        for part in status.parts.iter().filter(|part| !part.ok) {
            let text = format!("{node}: {}: {}", part.name, part.reason);
            if part.is_required {
                report.bad(Category::Agents, text, &part.advice);
            } else {
                report.warn(Category::Agents, text, &part.advice);
            }
        }
        if status.version != env!("CARGO_PKG_VERSION") {
            let text = format!(
                "{node}: its agent is of release {}, this program of {}",
                status.version,
                env!("CARGO_PKG_VERSION")
            );
            report.warn(Category::Agents, text, "what only one of them knows is not shown");
        }
        if status.pods.unprotected > 0 {
            let text = format!("{node}: {} pods run without protection", status.pods.unprotected);
            report.bad(Category::Pods, text, "kubectl nebula pods -A names them, with the reason");
        }
        if status.pods.closed > 0 {
            let text = format!("{node}: {} pods have no open tunnel: nothing leaves them", status.pods.closed);
            report.warn(Category::Pods, text, "kubectl nebula pods -A says why");
        }
        if let Some(first) = &status.first_to_expire {
            let left = first.not_after - now;
            let hint = "instances renew certificates long before: look at the CA, and at kubectl nebula pods";
            if left <= 0 {
                report.bad(Category::Pods, format!("the certificate of {} has expired", first.pod), hint);
            } else if first.is_late(now) {
                report.warn(
                    Category::Pods,
                    format!("the certificate of {} expires in {}", first.pod, span(left)),
                    hint,
                );
            }
        }
        if status.upgrade.paused.is_some() || !status.upgrade.failed.is_empty() {
            let text = format!("{node}: {}", status.upgrade.why);
            report.warn(Category::Upgrades, text, "kubectl nebula upgrade status says more; upgrade resume goes on");
        }
    }
    let all = known.len();
    if all == 0 {
        return;
    }
    if ready == all {
        report.good(Category::Agents, format!("{all} nodes are ready for pods"));
    }
    let protected: usize = known.iter().map(|status| status.pods.protected).sum();
    if known.iter().all(|status| status.pods.unprotected == 0) {
        report.good(Category::Pods, format!("{protected} pods are protected, and none runs without"));
    }
    let outdated: usize = known.iter().map(|status| status.upgrade.outdated).sum();
    if outdated == 0 {
        report.good(Category::Upgrades, "every instance has the program of its node");
    } else {
        report.warn(
            Category::Upgrades,
            format!("{outdated} instances have another program than the installed one"),
            "",
        );
    }
}

const WORKLOADS: [(Category, &str, &str); 3] = [
    (Category::Ca, "deployments", "nebula-ca"),
    (Category::Lighthouses, "statefulsets", "nebula-lighthouse"),
    (Category::Agents, "daemonsets", "nebula-cni-agent"),
];

#[cfg(test)]
mod tests {
    use nebula_cni_contract::agent_api::{ExpiringCertificate, PartState, PodCounts};
    use serde_json::json;

    use super::*;

    fn judged(status: &NodeStatus) -> Vec<String> {
        let mut report = Report::default();
        judge_nodes(&[status], 1000, &mut report);
        report.found()
    }

    #[test]
    fn a_node_that_is_well_has_good_findings_only_and_each_trouble_its_own() {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let well = NodeStatus { node: "n1".into(), version, is_ready: true, ..NodeStatus::default() };
        assert!(judged(&well).iter().all(|text| text.starts_with("good")), "{:?}", judged(&well));
        let has = |status: NodeStatus, text: &str| {
            assert!(judged(&status).iter().any(|found| found.starts_with(text)), "{text}: {:?}", judged(&status))
        };
        let part = |is_required| {
            vec![PartState { name: "ca".into(), is_required, reason: "away".into(), ..PartState::default() }]
        };
        has(NodeStatus { parts: part(true), ..well.clone() }, "bad: n1: ca: away");
        has(NodeStatus { parts: part(false), ..well.clone() }, "warning: n1: ca: away");
        has(NodeStatus { version: "9.9.9".into(), ..well.clone() }, "warning: n1: its agent is of release 9.9.9");
        has(
            NodeStatus { pods: PodCounts { unprotected: 2, ..PodCounts::default() }, ..well.clone() },
            "bad: n1: 2 pods",
        );
        let expires =
            |not_after| Some(ExpiringCertificate { pod: "shop/web".into(), not_before: not_after - 8000, not_after });
        has(
            NodeStatus { first_to_expire: expires(1000), ..well.clone() },
            "bad: the certificate of shop/web has expired",
        );
        has(
            NodeStatus { first_to_expire: expires(1060), ..well.clone() },
            "warning: the certificate of shop/web expires in 1m 0s",
        );
        // A quarter of its life.
        has(NodeStatus { first_to_expire: expires(2999), ..well.clone() }, "warning: the certificate of shop/web");
        assert_eq!(judged(&NodeStatus { first_to_expire: expires(3000), ..well.clone() }), judged(&well));
    }

    #[test]
    fn workloads_are_judged_by_what_is_ready() {
        let judged = |object: Value| {
            let mut report = Report::default();
            judge_workload(Category::Agents, "x", &object, &mut report);
            report.found().remove(0)
        };
        let agents = json!({"status": {"desiredNumberScheduled": 3, "numberReady": 2}});
        assert_eq!(judged(agents), "bad: x: 2 of 3 are ready");
        assert_eq!(
            judged(json!({"spec": {"replicas": 1}, "status": {"readyReplicas": 1}})),
            "good: x: 1 of 1 are ready"
        );
        assert_eq!(judged(json!({"spec": {"replicas": 2}, "status": {}})), "bad: x: 0 of 2 are ready");
        assert_eq!(judged(json!({"spec": {"replicas": 0}, "status": {}})), "bad: x: no pod of it is wanted");
        assert_eq!(
            judged(json!({"status": {"desiredNumberScheduled": 0, "numberReady": 0}})),
            "bad: x: no pod of it is wanted"
        );
    }
}

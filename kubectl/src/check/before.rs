//! Whether Nebula can be installed: the release of Kubernetes, the nodes, and what the user may do.

use serde_json::{Value, json};

use super::report::{Category, Report};
use crate::cluster::Cluster;

pub(super) async fn look(cluster: &Cluster, report: &mut Report) {
    match cluster.get("/version").await {
        Ok(version) => judge_version(&version, report),
        Err(error) => {
            return report.bad(Category::Kubernetes, error.to_string(), "look at the kubeconfig, and at the network");
        }
    }
    match cluster.get("/api/v1/nodes").await {
        Ok(nodes) => judge_nodes(&nodes, report),
        Err(error) => report.warn(Category::Nodes, error.to_string(), "the nodes were not looked at"),
    }
    for (group, resource, verb) in NEEDED {
        let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {"group": group, "resource": resource, "verb": verb}}});
        match cluster.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", &review).await {
            Ok(answer) if answer["status"]["allowed"] == true => {
                report.good(Category::Rights, format!("you may {verb} {resource}"));
            }
            Ok(_) => report.bad(
                Category::Rights,
                format!("you may not {verb} {resource}"),
                "the chart makes such objects: install it as an administrator of the cluster",
            ),
            Err(error) => report.warn(Category::Rights, error.to_string(), ""),
        }
    }
}

fn judge_version(version: &Value, report: &mut Report) {
    let text = version["gitVersion"].as_str().unwrap_or("unknown");
    let number = |key: &str| {
        let text = version[key].as_str().unwrap_or_default();
        text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().unwrap_or_default()
    };
    match (number("major"), number("minor")) {
        release if release < OLDEST => report.bad(
            Category::Kubernetes,
            format!("the API server is {text}"),
            "the chart needs Kubernetes 1.25 or newer",
        ),
        release if release < WITH_ADMISSION_POLICIES => report.warn(
            Category::Kubernetes,
            format!("the API server is {text}, without ValidatingAdmissionPolicies"),
            "agent.taint, agent.unprotected \"label\" and policy.condition need Kubernetes 1.30, or agent.acceptUnrestrictedToken",
        ),
        _ => report.good(Category::Kubernetes, format!("the API server is {text}")),
    }
}

fn judge_nodes(nodes: &Value, report: &mut Report) {
    let mut good = 0;
    for node in nodes["items"].as_array().into_iter().flatten() {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let info = |key: &str| node["status"]["nodeInfo"][key].as_str().unwrap_or_default();
        let (kernel, runtime) = (info("kernelVersion"), info("containerRuntimeVersion"));
        if info("operatingSystem") != "linux" {
            report.warn(Category::Nodes, format!("{name} does not run Linux"), "its pods get no tunnel");
        } else if !["amd64", "arm64"].contains(&info("architecture")) {
            report.bad(
                Category::Nodes,
                format!("{name} is {}", info("architecture")),
                "there are programs for amd64 and arm64: exclude the node with agent.nodeSelector",
            );
        } else if runtime.starts_with("docker://") {
            report.bad(Category::Nodes, format!("{name} has {runtime}"), "the agent speaks CRI: containerd or CRI-O");
        } else if release_of(kernel) < OLDEST_KERNEL {
            report.warn(
                Category::Nodes,
                format!("{name} has kernel {kernel}"),
                "agent.entry.isolate needs Linux 5.16 there",
            );
        } else {
            good += 1;
        }
    }
    if good > 0 {
        report.good(Category::Nodes, format!("{good} nodes have a kernel, a runtime and an architecture that fit"));
    }
}

fn release_of(kernel: &str) -> (u32, u32) {
    let mut numbers = kernel.split(|c: char| !c.is_ascii_digit()).map(|text| text.parse().unwrap_or_default());
    (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default())
}

const OLDEST: (u32, u32) = (1, 25);
const WITH_ADMISSION_POLICIES: (u32, u32) = (1, 30);
const OLDEST_KERNEL: (u32, u32) = (5, 16);
/// Of what the chart makes, that which few may.
const NEEDED: [(&str, &str, &str); 4] = [
    ("", "namespaces", "create"),
    ("apps", "daemonsets", "create"),
    ("rbac.authorization.k8s.io", "clusterroles", "create"),
    ("rbac.authorization.k8s.io", "clusterrolebindings", "create"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_judged_by_number() {
        let judged = |major: &str, minor: &str| {
            let mut report = Report::default();
            judge_version(&json!({"major": major, "minor": minor, "gitVersion": "v"}), &mut report);
            report.found()[0].split(':').next().unwrap().to_owned()
        };
        assert_eq!(judged("1", "24"), "bad");
        assert_eq!(judged("1", "25"), "warning");
        assert_eq!(judged("1", "29+"), "warning");
        assert_eq!(judged("1", "33+"), "good");
        assert_eq!(judged("", ""), "bad");
    }

    #[test]
    fn nodes_that_do_not_fit_are_named() {
        let node = |name: &str, kernel: &str, runtime: &str, architecture: &str| {
            json!({"metadata": {"name": name}, "status": {"nodeInfo": {"operatingSystem": "linux", "kernelVersion": kernel,
                "containerRuntimeVersion": runtime, "architecture": architecture}}})
        };
        let nodes = json!({"items": [
            node("a", "6.1.0-9-amd64", "containerd://1.7.1", "amd64"),
            node("b", "5.4.0", "containerd://1.7.1", "arm64"),
            node("c", "6.1.0", "docker://20.10", "amd64"),
            node("d", "6.1.0", "cri-o://1.30", "s390x"),
        ]});
        let mut report = Report::default();
        judge_nodes(&nodes, &mut report);
        let found = report.found();
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(
            found[0].contains("b has kernel 5.4.0") && found[1].contains("c has docker") && found[2].contains("s390x")
        );
        assert!(found[3].starts_with("good: 1 nodes"));
    }
}

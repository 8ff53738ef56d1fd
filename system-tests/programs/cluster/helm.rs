//! The chart in the hands of Helm itself (its own packages, `tests/tools/helm.py`), with its hooks: installed,
//! upgraded, not removed while a pod needs it, and removed. `./test kube` runs it where a build of Kubernetes is
//! available.
//!
//! The chart asks for Kubernetes 1.25. The cluster is of release 1.20, so a copy of the chart is used that allows it
//! and has disruption budgets as v1beta1.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::cluster::capture::town::Town;
use crate::cluster::nodes::clean_nodes;
use crate::world::kube::{DELETED_WITHIN, NAMESPACE, Nodes, text};

/// How long each job of the hook waits for the nodes: longer than a pod of the agent takes to go ([`DELETED_WITHIN`]).
const PATIENCE: Duration = Duration::from_secs(75);

pub(super) struct Helm<'a> {
    nodes: &'a Nodes,
    chart: PathBuf,
}

impl<'a> Helm<'a> {
    pub(super) fn new(nodes: &'a Nodes) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let chart = nodes.folder.path().join("chart");
        let script = format!(
            "cp -r {} {chart} && grep -rl policy/v1 {chart} | xargs sed -i 's#policy/v1$#policy/v1beta1#' && \
             sed -i 's/^kubeVersion: .*/kubeVersion: \">=1.20.0-0\"/' {chart}/Chart.yaml",
            root.join("deploy/helm/nebula").display(),
            chart = chart.display()
        );
        let copied = Command::new("sh").args(["-ec", &script]).output().expect("sh runs");
        assert!(copied.status.success(), "{}", text(&copied));
        assert!(root.join("target/helm").is_dir(), "`.ci/chart/check helm` installs the packages of Helm");
        Self { nodes, chart }
    }

    pub(super) fn start(&self, words: &[&str]) -> Child {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let mut helm = self.nodes.tool("run");
        helm.arg("python3").arg(root.join("tests/tools/helm.py")).args(words);
        helm.env("PYTHONPATH", root.join("target/helm")).env("TIMEOUT", "300");
        helm.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("helm.py starts")
    }

    /// With the chart and these values.
    pub(super) fn start_with(&self, verb: &str, values: &serde_json::Value) -> Child {
        let file = self.nodes.folder.path().join("values.json");
        std::fs::write(&file, values.to_string()).expect("write the values");
        self.start_with_file(verb, &file)
    }

    /// With the chart and the values in a file.
    pub(super) fn start_with_file(&self, verb: &str, values: &Path) -> Child {
        self.start(&[verb, &self.chart.display().to_string(), &values.display().to_string()])
    }

    /// Helm waits until all is ready; cluster DNS learns the Service's name meanwhile.
    pub(super) fn install(&self, values: &serde_json::Value, town: &Town) {
        let installing = self.start_with("install", values);
        let service = ["get", "service", "-n", NAMESPACE, "nebula-ca"];
        let is_there = || self.nodes.try_kubectl(&service).status.success();
        self.nodes.until("the CA's Service", Duration::from_secs(60), is_there);
        let ca = town.cluster_ip(NAMESPACE, "nebula-ca");
        town.name(&[
            (ca, &format!("nebula-ca.{NAMESPACE}.svc")),
            (ca, &format!("nebula-ca.{NAMESPACE}.svc.cluster.local")),
        ]);
        self.succeeds("install", installing);
    }

    pub(super) fn succeeds(&self, what: &str, started: Child) -> String {
        let start = Instant::now();
        let output = started.wait_with_output().expect("helm.py ends");
        assert!(output.status.success(), "helm {what}: {}\n{}", text(&output), self.nodes.state());
        println!("helm {what} --wait: {:.1} s", start.elapsed().as_secs_f64());
        text(&output)
    }

    /// What Helm says.
    fn fails(&self, started: Child) -> String {
        let output = started.wait_with_output().expect("helm.py ends");
        assert!(!output.status.success(), "{}\n{}", text(&output), self.nodes.state());
        text(&output)
    }
}

pub(super) fn values(namespaces: &[&str]) -> serde_json::Value {
    json!({
        "enrol": {"namespaces": namespaces},
        // What the instances of these tests are looked for by.
        "network": {"overlay": ["10.42.0.0/16"], "reserved": ["10.42.254.0/24"]},
        "lighthouse": {"network": "10.42.255.0/24"},
        "uninstall": {"kubectlImage": "localhost/kubectl:1", "pauseImage": "localhost/pause:1",
                      "timeoutSeconds": PATIENCE.as_secs()},
    })
}

#[test]
#[ignore = "needs root, containerd, etcd, dnsmasq, a release build, Helm's packages and a build of Kubernetes"]
fn helm_installs_and_upgrades_and_uninstalls_once_no_pod_needs_it() {
    let town = Town::bare();
    let nodes = &town.nodes;
    let helm = Helm::new(nodes);
    let reach = |from: (&str, &str), to: (&str, &str)| {
        let address = nodes.overlay(to.0, to.1).unwrap_or_else(|| panic!("{to:?} has no tunnel\n{}", nodes.state()));
        assert!(nodes.ping(from.0, from.1, &address), "{from:?} does not reach {to:?}\n{}", nodes.state());
    };

    helm.install(&values(&["shop"]), &town);
    assert_eq!(helm.succeeds("list", helm.start(&["list"])), "nebula");
    for (name, node) in [("web", "test-node"), ("db", "node2")] {
        nodes.pod("shop", name, node);
        nodes.wait_for_pod("shop", name);
    }
    reach(("shop", "web"), ("shop", "db"));

    // Wrong values are refused before anything changes.
    let mut wrong = values(&["shop"]);
    wrong["enrol"]["namespace"] = json!("shop");
    let said = helm.fails(helm.start_with("upgrade", &wrong));
    assert!(said.contains("namespace"), "{said}");

    // An upgrade rolls the agents; the pods keep their tunnels, and follow changed settings.
    let mut upgraded = values(&["shop", "other"]);
    upgraded["network"]["mtu"] = json!(1240);
    helm.succeeds("upgrade", helm.start_with("upgrade", &upgraded));
    for (node, pod) in [(1, "web"), (2, "db")] {
        let follows = || {
            let launch = text(&nodes.on(node, &["sh", "-c", "cat /run/nebula-cni/*/*.launch"]));
            launch.contains(&format!("\"name\":\"{pod}\"")) && launch.contains("\"mtu\":1240")
        };
        nodes.until("the running pod has the changed settings", Duration::from_secs(90), follows);
    }
    nodes.pod("other", "late", "node2");
    nodes.wait_for_pod("other", "late");
    reach(("shop", "web"), ("other", "late"));
    reach(("other", "late"), ("shop", "db"));

    // What the new programs would refuse is noticed before anything is replaced.
    let ca_pod =
        || nodes.kubectl(&["get", "pods", "-n", NAMESPACE, "-l", "app.kubernetes.io/name=nebula-ca", "-o", "name"]);
    let before = ca_pod();
    let mut wrong = upgraded.clone();
    wrong["ca"] = json!({"policy": {"pods": {"lives": "6h"}}});
    helm.fails(helm.start_with("upgrade", &wrong));
    let log = nodes.kubectl(&["logs", "-n", NAMESPACE, "job/nebula-check", "-c", "policy"]);
    assert!(log.contains("`lives`"), "{log}");
    assert_eq!(ca_pod(), before, "the CA goes on");

    // The hook names the pods that hold it up, and gives up at last; everything else stays, and the agents come back
    // with the release.
    let uninstalling = helm.start(&["uninstall"]);
    let (mut said, until) = (String::new(), Instant::now() + 2 * PATIENCE);
    while !(said.contains("shop/web") && said.contains("other/late")) {
        assert!(Instant::now() < until, "the hook does not name the pods: {said}\n{}", nodes.state());
        let selector = "app.kubernetes.io/name=nebula-cni-uninstall";
        let log = nodes.try_kubectl(&["logs", "-n", NAMESPACE, "-l", selector, "-c", "uninstall", "--tail=-1"]);
        // What was said so far: an answer may lack one of the two.
        said += &text(&log);
        std::thread::sleep(Duration::from_millis(200));
    }
    helm.fails(uninstalling);
    for object in ["deployment/nebula-ca", "statefulset/nebula-lighthouse"] {
        nodes.kubectl(&["get", "-n", NAMESPACE, object]);
    }
    reach(("shop", "web"), ("shop", "db"));
    helm.succeeds("rollback", helm.start(&["rollback", "2"]));
    nodes.pod("shop", "back", "test-node");
    nodes.wait_for_pod("shop", "back");
    reach(("shop", "back"), ("other", "late"));
    reach(("shop", "web"), ("shop", "db"));

    for (namespace, name) in [("shop", "web"), ("shop", "db"), ("shop", "back"), ("other", "late")] {
        nodes.kubectl(&["delete", "pod", "-n", namespace, name, DELETED_WITHIN]);
    }
    helm.succeeds("uninstall", helm.start(&["uninstall"]));
    assert_eq!(helm.succeeds("list", helm.start(&["list"])), "");
    // The CA's key stays; nothing else does, and no hook.
    let kinds =
        "deployments,statefulsets,daemonsets,jobs,services,roles,rolebindings,networkpolicies,persistentvolumeclaims";
    let left = nodes.kubectl(&["get", "-n", NAMESPACE, kinds, "-o", "name"]);
    assert_eq!(left, "persistentvolumeclaim/nebula-ca");
    // The upgrade made the CA's pod again, with the chain, and it ended after the hook: the plugin stayed on its node
    // to answer that pod's DEL.
    clean_nodes(nodes);
    for node in [1, 2] {
        assert_eq!(nodes.left_on(node), "", "node {node} still has these");
    }
    nodes.kubectl(&["delete", "daemonset", "-n", NAMESPACE, "nebula-cni-uninstall", DELETED_WITHIN]);
    nodes.pod("shop", "after", "node2");
    nodes.wait_for_pod("shop", "after");
    assert_eq!(nodes.overlay("shop", "after"), None);
}

//! A real two-node cluster: API server, controllers, scheduler, kubelets and containerd. What `deploy/kubernetes` has
//! is applied with one command; pods of before and after it reach each other in their tunnels; uninstalled, it leaves
//! nothing. `./test kube` runs it where a build of Kubernetes is available.
//!
//! There is no kube-proxy and no cluster DNS: two rules and a line in `hosts` stand for them. Release 1.20 knows
//! disruption budgets as v1beta1.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::world::clear::Listener;
use crate::world::kube::{DELETED_WITHIN, NAMESPACE, Nodes, text};

/// The manifests as `kubectl apply -k deploy/kubernetes` has them, for release 1.20 and with the namespace `shop`
/// enrolled.
fn manifests() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes");
    let built = Command::new("kubectl").arg("kustomize").arg(folder).output().expect("kubectl runs");
    assert!(built.status.success(), "{}", text(&built));
    let built = String::from_utf8(built.stdout).expect("text");
    let with_shop = built.replace("\"namespaces\": []", "\"namespaces\": [\"shop\"]");
    assert_ne!(with_shop, built, "agent.json has no empty list of namespaces");
    let known = with_shop.replace("apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n");
    // The overlay that the capture of these tests knows.
    known.replace("10.77.", "10.42.")
}

/// Applies the manifests and waits until everything is ready.
pub(crate) fn install(nodes: &Nodes) {
    // What a cluster has and this one has not: a volume, DNS, kube-proxy.
    nodes.volume();

    let start = Instant::now();
    nodes.apply("nebula.yaml", &manifests());
    let service = nodes.kubectl(&["get", "service", "-n", NAMESPACE, "nebula-ca", "-o", "jsonpath={.spec.clusterIP}"]);
    let names = json!({"spec": {"template": {"spec": {"hostAliases": [{"ip": service, "hostnames": ["nebula-ca.nebula-system.svc"]}]}}}});
    nodes.kubectl(&["patch", "statefulset", "-n", NAMESPACE, "nebula-lighthouse", "-p", &names.to_string()]);
    if !nodes.has_proxy {
        let mut endpoint = String::new();
        nodes.until("the CA's address", Duration::from_secs(60), || {
            let of_ca = [
                "get",
                "pods",
                "-n",
                NAMESPACE,
                "-l",
                "app.kubernetes.io/name=nebula-ca",
                "-o",
                "jsonpath={.items[*].status.podIP}",
            ];
            endpoint = nodes.kubectl(&of_ca);
            !endpoint.is_empty()
        });
        let proxied = nodes
            .tool("service")
            .args([format!("{service}:8443"), format!("{endpoint}:8443")])
            .output()
            .expect("it runs");
        assert!(proxied.status.success(), "{}", text(&proxied));
    }
    nodes.wait_for_parts(start + Duration::from_secs(120));
    println!("from the command to all ready: {:.1} s", start.elapsed().as_secs_f64());
}

/// Removes what is left on the nodes, as the documents say.
pub(crate) fn clean_nodes(nodes: &Nodes) {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kubernetes/uninstall.yaml");
    let manifest = std::fs::read_to_string(manifest).expect("the manifest");
    nodes.apply("uninstall.yaml", &manifest.replace("registry.k8s.io/pause:3.10", "localhost/pause:1"));
    nodes.wait_for_rollout(NAMESPACE, "daemonset/nebula-cni-uninstall", Duration::from_secs(60));
}

/// The name of a node's agent.
pub(crate) fn agent_of(nodes: &Nodes, node: u8) -> String {
    let host = if node == 1 { "test-node" } else { "node2" };
    let selector = "app.kubernetes.io/name=nebula-cni-agent";
    let field = format!("spec.nodeName={host},status.phase=Running");
    let words = ["get", "pods", "-n", NAMESPACE, "-l", selector, "--field-selector", &field];
    let name = nodes.kubectl(&[&words[..], &["-o", "jsonpath={.items[0].metadata.name}"]].concat());
    assert!(!name.is_empty(), "no agent on {host}\n{}", nodes.state());
    name
}

#[test]
#[ignore = "needs root, containerd, etcd, a release build and a build of Kubernetes"]
fn one_command_installs_a_cluster_whose_pods_old_and_new_have_tunnels_and_another_removes_it() {
    let nodes = Nodes::start();
    for namespace in ["shop", "other"] {
        nodes.kubectl(&["create", "namespace", namespace]);
    }
    // Pods from before: one of them is to be enrolled.
    nodes.until("accounts", Duration::from_secs(30), || {
        nodes.try_kubectl(&["get", "sa", "-n", "shop", "default"]).status.success()
    });
    nodes.pod("shop", "before", "test-node");
    nodes.pod("other", "plain", "node2");
    nodes.wait_for_pod("shop", "before");
    nodes.wait_for_pod("other", "plain");

    install(&nodes);

    // Attached in place: the same container goes on.
    let before = nodes.until("the pod from before has a tunnel", Duration::from_secs(30), || {
        nodes.overlay("shop", "before").is_some()
    });
    println!("the pod from before has its tunnel {:.1} s later", before.as_secs_f64());
    let restarts = |name| nodes.status("shop", name)["containerStatuses"][0]["restartCount"].clone();
    assert_eq!(restarts("before"), 0);

    // New ones, on both nodes.
    for (name, node) in [("web", "test-node"), ("db", "node2")] {
        nodes.pod("shop", name, node);
    }
    for name in ["web", "db"] {
        println!("pod {name} runs after {:.1} s", nodes.wait_for_pod("shop", name).as_secs_f64());
    }
    let address =
        |name| nodes.overlay("shop", name).unwrap_or_else(|| panic!("{name} has no tunnel\n{}", nodes.state()));
    for (from, to) in [("web", "db"), ("db", "before"), ("before", "web")] {
        assert!(nodes.ping("shop", from, &address(to)), "{from} does not reach {to}\n{}", nodes.state());
    }
    assert_eq!(nodes.overlay("other", "plain"), None);

    // A deleted pod goes as without us, and another takes its name.
    nodes.kubectl(&["delete", "pod", "-n", "shop", "db", DELETED_WITHIN]);
    nodes.pod("shop", "db", "node2");
    nodes.wait_for_pod("shop", "db");
    assert!(nodes.ping("shop", "web", &address("db")), "the new pod is not reached\n{}", nodes.state());

    // Uninstalled: enrolled pods go first, as the documents say.
    for name in ["web", "db", "before"] {
        nodes.kubectl(&["delete", "pod", "-n", "shop", name, DELETED_WITHIN]);
    }
    nodes.kubectl(&["delete", "daemonset", "-n", NAMESPACE, "nebula-cni-agent", DELETED_WITHIN]);
    clean_nodes(&nodes);
    for node in [1, 2] {
        assert_eq!(nodes.left_on(node), "", "node {node} still has these");
    }
    // Pods start as before the installation.
    nodes.pod("shop", "after", "node2");
    nodes.wait_for_pod("shop", "after");
    assert_eq!(nodes.overlay("shop", "after"), None);
}

#[test]
#[ignore = "needs root, containerd, etcd, a release build and a build of Kubernetes"]
fn pods_of_a_node_that_reboots_are_back_in_their_tunnels_and_say_nothing_in_clear() {
    // The CA may be on that node, and has another address afterwards: kube-proxy follows it.
    let nodes = Nodes::with_proxy(&[]);
    nodes.kubectl(&["create", "namespace", "shop"]);
    install(&nodes);
    nodes.pod("shop", "peer", "test-node");
    nodes.wait_for_pod("shop", "peer");
    let peer = nodes.overlay("shop", "peer").unwrap_or_else(|| panic!("no tunnel\n{}", nodes.state()));
    let talk = format!("while :; do ping -q -i 0.2 -w 60 {peer}; done");
    let talkers = ["talker-1", "talker-2", "talker-3"];
    for name in talkers {
        nodes.pod_that_runs("shop", name, "node2", &["sh", "-c", &talk]);
    }
    for name in talkers {
        nodes.wait_for_pod("shop", name);
    }
    let are_heard = || talkers.iter().all(|name| nodes.ping("shop", name, &peer));
    nodes.until("the pods reach their peer", Duration::from_secs(10), are_heard);
    let listener = Listener::start(&nodes.namespace_of(2));
    // The capture hears what is not in a tunnel.
    nodes.on(2, &["ip", "route", "add", "10.42.255.254", "via", "192.0.2.10"]);
    nodes.on(2, &["ping", "-c", "1", "-W", "1", "10.42.255.254"]);
    assert!(!listener.clear().sources.is_empty(), "the capture hears nothing");
    thread::sleep(Duration::from_secs(2));
    listener.forget();

    let started = |name: &str| nodes.status("shop", name)["containerStatuses"][0]["restartCount"].as_u64();
    let before: Vec<_> = talkers.iter().map(|name| started(name)).collect();
    let rebooted = nodes.tool("reboot").arg("2").output().expect("kube-nodes.sh runs");
    assert!(rebooted.status.success(), "{}\n{}", text(&rebooted), nodes.state());
    let took = nodes.until("the pods of the node are back", Duration::from_secs(120), || {
        let all = talkers.iter().zip(&before);
        all.clone().all(|(name, before)| started(name) > *before) && are_heard()
    });
    println!(
        "node ready after a reboot: its {} pods are back in their tunnels {:.1} s later",
        talkers.len(),
        took.as_secs_f64()
    );
    let clear = listener.clear();
    assert!(clear.sources.is_empty(), "{clear:?}\n{}", nodes.state());
    assert!(took < Duration::from_secs(30), "{took:?}\n{}", nodes.state());
}

//! Our plugin as the only one of its list, under real runtimes: containers with an address, access to the outside, and
//! a tunnel where they are enrolled.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::runtime::{Podman, Runtime, only_the_nodes_links_are_left, running, text};
use crate::world::cluster::{Cluster, LIGHTHOUSE, Node, binary};
use crate::world::run;

/// A node whose only plugin is ours.
fn node(cluster: &mut Cluster, version: &str) -> Node {
    let mut node = cluster.node("n1", version);
    let mut ours = node.conf["plugins"][1].take();
    ours["primary"] = true.into();
    ours["subnets"] = json!(["10.244.1.0/24", "fd00:244:1::/64"]);
    node.conf["plugins"] = json!([ours]);
    node
}

/// Of the host outside, which has no route to containers.
fn outside(cluster: &Cluster) -> String {
    cluster.world.underlay("control")
}

fn addresses_left(node: &Node) -> Vec<String> {
    let names =
        std::fs::read_dir(node.dir.join("state/.addresses").join(&node.network)).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.contains(':') || name.starts_with("10.")).collect()
}

fn nothing_is_left(cluster: &Cluster, node: &Node) {
    only_the_nodes_links_are_left(cluster);
    assert_eq!((node.leftovers(), addresses_left(node)), (Vec::<PathBuf>::new(), Vec::new()));
    let tables = cluster.world.run("n1", &["nft", "list", "tables"]);
    assert!(!tables.contains("nebula"), "{tables}");
}

#[test]
#[ignore = "needs root, containerd, busybox and a release build"]
fn pods_of_containerd_need_no_other_plugin() {
    let mut cluster = Cluster::new();
    let node = node(&mut cluster, "1.0.0");
    let runtime = Runtime::start(&cluster.world, &node);
    let pods = ["web", "db"].map(|name| runtime.pod(name));
    let [of_web, of_db] = pods.each_ref().map(|(id, _, _)| node.status(id));
    let tunnel = |status: &Value| {
        status["overlay"][0].as_str().and_then(|one| one.split('/').next()).expect("overlay").to_owned()
    };
    let (_, web, _) = &pods[0];
    let own: Vec<String> = serde_json::from_value(pods[1].2.clone()).expect("addresses");
    assert!(own.len() == 2 && own[0].starts_with("10.244.1.") && own[1].starts_with("fd00:244:1::"), "{own:?}");
    for target in [&own[0], &own[1], &tunnel(&of_db), LIGHTHOUSE, &outside(&cluster)] {
        let ping = runtime.cri(&["exec", web, "--", "/bin/ping", "-c", "3", "-W", "2", target]);
        assert!(ping.is_ok(), "{target}: {ping:?}\n{}", cluster.world.all_logs());
    }
    assert_ne!(tunnel(&of_web), tunnel(&of_db));
    for (pod, ..) in &pods {
        for verb in ["stop-pod", "remove-pod"] {
            runtime.cri(&[verb, pod]).unwrap_or_else(|error| panic!("{verb}: {error}"));
        }
    }
    nothing_is_left(&cluster, &node);
}

#[test]
#[ignore = "needs root, containerd, busybox and a release build"]
fn a_container_of_ctr_needs_no_other_plugin_and_no_certificate() {
    let mut cluster = Cluster::new();
    let mut node = node(&mut cluster, "1.0.0");
    // Ten lines are enough; the rest is for tunnels.
    let state = node.conf["plugins"][0]["stateDir"].clone();
    node.conf["plugins"] =
        json!([{"type": "nebula-cni-plugin", "primary": true, "subnets": ["10.244.1.0/24"], "stateDir": state}]);
    let runtime = Runtime::start(&cluster.world, &node);
    let image = runtime.dir.join("busybox.tar").display().to_string();
    assert!(runtime.ctr(&["image", "import", &image]).status.success());
    let mut one = runtime.ctr_run(&cluster.world, &node, &["--detach"], "one");
    assert!(one.wait().expect("ctr ends").success());
    let ping = ["task", "exec", "--exec-id", "ping", "one", "/bin/ping", "-c", "3", "-W", "2", &outside(&cluster)];
    let said = runtime.ctr(&ping);
    assert!(said.status.success(), "{}", text(&said));
    assert_eq!(addresses_left(&node), ["10.244.1.1"]);
    // In the background nobody calls DEL. The link goes with the namespace, and the lease with the next GC.
    assert!(runtime.ctr(&["task", "delete", "--force", "one"]).status.success());
    assert!(runtime.ctr(&["container", "delete", "one"]).status.success());
    only_the_nodes_links_are_left(&cluster);
    node.conf["cniVersion"] = "1.1.0".into();
    node.chain_ok(&cluster.world, "gc", "one");
    nothing_is_left(&cluster, &node);
}

#[test]
#[ignore = "needs root, podman, runc, busybox and a release build"]
fn containers_of_podman_need_no_other_plugin() {
    let mut cluster = Cluster::new();
    let mut node = node(&mut cluster, "0.4.0");
    node.conf["plugins"][0]["enrol"] = json!({"defaultNamespace": "edge"});
    let podman = Podman::new(&cluster.world, &node);
    let ids = [podman.run(&["--name", "web"]), podman.run(&[])];
    let of_db = running(&node, &ids[1]);
    let tunnel = of_db["overlay"][0].as_str().and_then(|one| one.split('/').next()).expect("overlay");
    let own = podman.ok(&["exec", &ids[1], "/bin/busybox", "ip", "-4", "-o", "addr", "show", "eth0"]);
    let own = own.split_whitespace().find_map(|word| word.strip_suffix("/32")).expect("an address").to_owned();
    for target in [&own, tunnel, LIGHTHOUSE, &outside(&cluster)] {
        podman.ok(&["exec", "web", "/bin/ping", "-c", "3", "-W", "2", target]);
    }
    podman.ok(&["restart", "-t", "0", "web"]);
    podman.ok(&["exec", "web", "/bin/ping", "-c", "3", "-W", "2", &own]);
    podman.ok(&["rm", "-f", "-t", "0", "web", &ids[1]]);
    nothing_is_left(&cluster, &node);
}

/// Plugins of Debian that come behind one that makes the interface.
#[test]
#[ignore = "needs root, network namespaces, Debian's plugins and a release build"]
fn portmap_and_bandwidth_find_what_they_need_in_our_result() {
    let mut cluster = Cluster::new();
    let mut node = node(&mut cluster, "1.0.0");
    let _ = std::os::unix::fs::symlink("/usr/lib/cni/bandwidth", node.dir.join("bin/bandwidth"));
    let plugins = node.conf["plugins"].as_array_mut().expect("plugins");
    plugins.push(json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}));
    plugins.push(json!({"type": "bandwidth", "ingressRate": 1_000_000_000, "ingressBurst": 1_000_000_000}));
    cluster.world.namespace("web");
    node.chain_ok(&cluster.world, "add", "web");
    // No CHECK: that of Debian's portmap looks for rules of IPv6 which its ADD does not make.
    let nat = cluster.world.run("n1", &["iptables", "-t", "nat", "-S"]);
    assert!(nat.contains("--to-destination 10.244.1.1:"), "{nat}");
    let queues = cluster.world.run("n1", &["tc", "qdisc", "show"]);
    assert!(queues.contains("tbf"), "{queues}");
    node.chain_ok(&cluster.world, "del", "web");
    nothing_is_left(&cluster, &node);
}

/// The example for one machine, as it is in the documents.
#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn the_example_for_one_machine_runs() {
    let mut cluster = Cluster::new();
    let mut node = node(&mut cluster, "1.1.0");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/10-nebula-primary.conflist");
    let mut example: Value = serde_json::from_str(&std::fs::read_to_string(path).expect("the example")).expect("JSON");
    example["name"] = node.network.clone().into();
    example["plugins"][0]["stateDir"] = node.dir.join("state").display().to_string().into();
    example["plugins"].as_array_mut().expect("plugins").truncate(1);
    node.conf = example;
    cluster.world.namespace("web");
    node.chain_ok(&cluster.world, "add", "web");
    cluster.world.ping("web", &outside(&cluster), std::time::Duration::from_secs(5));
    for verb in ["check", "status", "del"] {
        node.chain_ok(&cluster.world, verb, "web");
    }
    nothing_is_left(&cluster, &node);
    let version = run(&binary("nebula-cni-plugin").display().to_string(), &[]);
    assert_eq!(version, "", "what it prints for people goes to standard error");
}

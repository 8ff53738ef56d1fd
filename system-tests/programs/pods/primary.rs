//! Our plugin as the only one of its list, under real runtimes: containers with an address, access to the outside, and
//! a tunnel where they are enrolled.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::runtime::{Podman, Runtime, only_the_nodes_links_are_left, running, text};
use crate::world::cluster::{Cluster, LIGHTHOUSE, Node, binary};
use crate::world::peers::ours;
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

/// A configuration of `nebula` for a host of the network `10.244.0.0/16`.
fn daemon(cluster: &Cluster, name: &str, role: &str) -> PathBuf {
    let dir = cluster.world.dir().display().to_string();
    let any = |who: &str| format!("[{{port: any, proto: any, {who}, local_cidr: any}}]");
    let config = format!(
        "pki: {{ca: {dir}/gw-ca.crt, cert: {dir}/gw-{name}.crt, key: {dir}/gw-{name}.key}}
listen: {{host: 0.0.0.0, port: 4343}}
{role}
logging: {{level: info}}
firewall: {{outbound: {}, inbound: {}}}
",
        any("host: any"),
        any("group: node"),
    );
    cluster.world.write(&format!("gw-{name}.yml"), &config)
}

#[test]
#[ignore = "needs root, network namespaces, Go's nebula-cert and a release build"]
fn pods_of_nodes_that_cannot_reach_each_other_do_so_by_a_relay_and_leave_it_when_they_can() {
    let mut cluster = Cluster::new();
    let nodes = [1, 2].map(|n| {
        let mut node = cluster.node(["n1", "n2"][n - 1], "1.0.0");
        let state = node.conf["plugins"][1]["stateDir"].clone();
        node.conf["plugins"] = json!([{
            "type": "nebula-cni-plugin", "primary": true, "stateDir": state, "subnets": [format!("10.244.{n}.0/24")],
            "reserved": [format!("10.244.{n}.1")], "noMasquerade": ["10.244.0.0/16"],
        }]);
        node
    });
    let pods = ["a", "b"];
    for (node, pod) in nodes.iter().zip(pods) {
        node.add_pods(&mut cluster.world, &[pod]);
    }
    let certify = |cluster: &Cluster, name: &str, ip: &str, behind: &str| {
        let [crt, key] = ["crt", "key"].map(|kind| format!("gw-{name}.{kind}"));
        let words =
            ["sign", "-ca-crt", "gw-ca.crt", "-ca-key", "gw-ca.key", "-name", name, "-ip", ip, "-groups", "node"];
        let behind = if behind.is_empty() { vec![] } else { vec!["-subnets", behind] };
        cluster.world.certify(&[&words[..], &behind, &["-out-crt", &crt, "-out-key", &key]].concat());
    };
    cluster.world.certify(&["ca", "-name", "gw", "-duration", "24h", "-out-crt", "gw-ca.crt", "-out-key", "gw-ca.key"]);
    certify(&cluster, "relay", "10.244.255.1/16", "");
    let relay =
        daemon(&cluster, "relay", "lighthouse: {am_lighthouse: true}\nrelay: {am_relay: true}\ntun: {disabled: true}");
    cluster.world.start_in("gw-relay", "control", &ours(), &["-config", &relay.display().to_string()]);
    let at = cluster.world.underlay("control");
    // What the nodes say to each other is lost.
    let underlay = ["n1", "n2"].map(|node| cluster.world.underlay(node));
    for (node, other) in ["n1", "n2"].into_iter().zip([&underlay[1], &underlay[0]]) {
        let rule = format!(
            "table ip apart {{\n chain c {{\n type filter hook input priority 0;\n ip saddr {other} drop\n }}\n}}\n"
        );
        let file = cluster.world.write(&format!("{node}.nft"), &rule);
        cluster.world.run(node, &["nft", "-f", &file.display().to_string()]);
    }
    for (n, other) in [(1, 2), (2, 1)] {
        let name = format!("n{n}");
        certify(&cluster, &name, &format!("10.244.{n}.1/16"), &format!("10.244.{n}.0/24"));
        let role = format!(
            "static_host_map: {{10.244.255.1: [\"{at}:4343\"]}}\nlighthouse: {{hosts: [10.244.255.1]}}\nrelay: {{relays: [10.244.255.1]}}\n\
             tun: {{dev: nebula-node, unsafe_routes: [{{route: 10.244.{other}.0/24, via: 10.244.{other}.1, inside: true}}]}}"
        );
        let config = daemon(&cluster, &name, &role).display().to_string();
        cluster.world.start_in(&format!("gw-{name}"), &name, &ours(), &["-config", &config]);
    }
    let within = std::time::Duration::from_secs(30);
    cluster.world.ping("a", "10.244.2.2", within);
    cluster.world.ping("b", "10.244.1.2", within);
    cluster.world.ping("n1", "10.244.2.2", within);
    // Packets larger than the tunnel's: the pod learns the size.
    cluster.world.transfer("a", "b", "10.244.2.2".parse().expect("an address"), 1_000_000);
    // Once they hear each other, they need the relay no longer.
    let rule =
        format!("flush table ip apart\ntable ip apart {{\n chain c {{\n ip saddr {} counter\n }}\n}}\n", underlay[1]);
    let file = cluster.world.write("heard.nft", &rule).display().to_string();
    cluster.world.run("n1", &["nft", "-f", &file]);
    cluster.world.run("n2", &["nft", "flush", "table", "ip", "apart"]);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(90);
    loop {
        cluster.world.pings("a", "10.244.2.2", 10, "0.05");
        let said = cluster.world.run("n1", &["nft", "-j", "list", "table", "ip", "apart"]);
        let found: Value = serde_json::from_str(&said).expect("JSON");
        let mut parts = found["nftables"]
            .as_array()
            .into_iter()
            .flatten()
            .flat_map(|item| item["rule"]["expr"].as_array().into_iter().flatten());
        if parts.any(|part| part["counter"]["packets"].as_u64() > Some(20)) {
            break;
        }
        assert!(std::time::Instant::now() < until, "{said}\n{}", cluster.world.all_logs());
    }
    assert_eq!(cluster.world.pings("a", "10.244.2.2", 10, "0.05"), 10);
}

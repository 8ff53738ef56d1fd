//! Our plugin in one chain with Debian's: every CNI version, every verb, and other plugins that fail.

use crate::world;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use world::cluster::{Cluster, LIGHTHOUSE, Node, gone_within, links, tool};

#[test]
#[ignore = "needs root, network namespaces, Debian's plugins and a release build"]
fn every_version_has_its_verbs_in_a_chain_of_five_and_results_pass_unchanged() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    long_chain(&mut node);
    cluster.world.namespace("web");
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        node.conf["cniVersion"] = version.into();
        node.conf["plugins"][0]["type"] = if version == "1.1.0" { "newer-bridge" } else { "bridge" }.into();
        let neighbours = json!([
            // For a port mapping, CHECK of Debian's plugin expects IPv6 rules even in a pod without IPv6.
            { "type": "portmap", "capabilities": { "portMappings": version < "0.4.0" } },
            { "type": "firewall" },
            { "type": "bandwidth", "ingressRate": 1_000_000_000, "ingressBurst": 1_000_000_000 },
        ]);
        let ours = node.conf["plugins"].as_array().expect("plugins").iter().find(|p| is_ours(p)).expect("ours").clone();
        let plugins = node.conf["plugins"].as_array_mut().expect("plugins");
        plugins.truncate(1);
        // Debian's plugins support CNI versions up to 1.0.0, and its `firewall` from 0.4.0.
        let speaks = |plugin: &&Value| version != "1.1.0" && (version >= "0.4.0" || plugin["type"] != "firewall");
        plugins.extend(neighbours.as_array().expect("a list").iter().filter(speaks).cloned());
        plugins.push(ours);
        let result = node.chain_ok(&cluster.world, "add", "web");
        assert_eq!(result["cniVersion"], version);
        let call = last_call(&node, "ADD");
        let said: Value = serde_json::from_str(call["stdout"].as_str().expect("text")).expect("JSON");
        assert_eq!(said, prev_result(&call), "{version}: the result is the one before");
        node.chain_ok(&cluster.world, "validate", "web");
        if version >= "0.4.0" {
            node.chain_ok(&cluster.world, "check", "web");
        }
        if version == "1.1.0" {
            node.chain_ok(&cluster.world, "status", "web");
            let _ = node.chain(&cluster.world, "gc", "web");
        }
        node.chain_ok(&cluster.world, "del", "web");
        // Like a kubelet: repeatedly, without a previous result.
        for _ in 0..2 {
            node.chain_ok(&cluster.world, "del", "web");
        }
        nothing_is_left(&cluster, &node, version);
    }
}

#[test]
#[ignore = "needs root, network namespaces, Debian's plugins and a release build"]
fn the_examples_of_a_chain_run() {
    let mut cluster = Cluster::new();
    let control = cluster.ca_url().trim_start_matches("https://").replace("8443", "4242");
    cluster.change_policy(|policy| policy["hosts"] = json!({"lighthouses": {LIGHTHOUSE: [control]}}));
    let mut node = cluster.node("n1", "1.0.0");
    std::os::unix::fs::symlink("/usr/lib/cni/bandwidth", node.dir.join("bin/bandwidth")).expect("a link");
    let (bridge, ours) = (node.conf["plugins"][0].clone(), node.conf["plugins"][1].clone());
    cluster.world.namespace("web");
    for (file, version) in [("10-nebula-1.0.conflist", "1.0.0"), ("10-nebula.conflist", "1.1.0")] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file);
        let text = std::fs::read_to_string(path).expect("the example");
        let mut chain: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(chain["cniVersion"], version);
        // What depends on the node.
        chain["name"] = node.network.clone().into();
        chain["plugins"][0]["ipam"] = bridge["ipam"].clone();
        let plugins = chain["plugins"].as_array_mut().expect("plugins");
        for key in ["ca", "stateDir", "supervisor", "instance"] {
            plugins.last_mut().expect("ours")[key] = ours[key].clone();
        }
        if version == "1.1.0" {
            plugins.iter_mut().filter(|plugin| !is_ours(plugin)).for_each(|plugin| newer(&node, plugin));
        }
        node.conf = chain;
        node.chain_ok(&cluster.world, "add", "web");
        cluster.world.ping("web", LIGHTHOUSE, std::time::Duration::from_secs(10));
        if version == "1.1.0" {
            an_instance_that_was_killed_is_back_after_status(&cluster, &node);
        }
        node.chain_ok(&cluster.world, "del", "web");
        nothing_is_left(&cluster, &node, version);
    }
}

/// What a runtime that polls STATUS, as containerd from 2.0 does, gives to pods with the direct supervisor.
fn an_instance_that_was_killed_is_back_after_status(cluster: &Cluster, node: &Node) {
    let killed = node.status("web")["pid"].as_u64().expect("a process");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(killed).expect("a process id"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it runs");
    assert!(gone_within(killed, std::time::Duration::from_secs(2)));
    node.chain_ok(&cluster.world, "status", "web");
    cluster.world.ping("web", LIGHTHOUSE, std::time::Duration::from_secs(10));
    assert_ne!(node.status("web")["pid"], killed);
}

/// Lets a plugin of Debian's, which support CNI versions up to 1.0.0, take part in a chain of 1.1.0.
fn newer(node: &Node, plugin: &mut Value) {
    let name = plugin["type"].as_str().expect("a name").to_owned();
    let script = format!(
        r#"#!/bin/sh
case $CNI_COMMAND in
  GC | STATUS) exit 0 ;;
  VERSION) echo '{{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}}'; exit 0 ;;
esac
sed 's/"1\.1\.0"/"1.0.0"/g' | /usr/lib/cni/{name} | sed 's/"1\.0\.0"/"1.1.0"/g'
"#
    );
    let path = node.dir.join("bin").join(format!("newer-{name}"));
    std::fs::write(&path, script).expect("a script");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
    plugin["type"] = format!("newer-{name}").into();
}

#[test]
#[ignore = "needs root, network namespaces, Debian's plugins and a release build"]
fn a_failing_neighbour_behind_us_leaves_nothing_of_ours_after_its_del() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    long_chain(&mut node);
    cluster.world.namespace("web");
    let record = node.dir.join("neighbour.jsonl");
    let plugins = node.conf["plugins"].as_array_mut().expect("plugins");
    plugins.push(json!({ "type": "cni-record", "recordTo": record, "failOn": ["ADD"] }));
    assert!(!node.chain(&cluster.world, "add", "web").status.success());
    node.chain_ok(&cluster.world, "del", "web");
    nothing_is_left(&cluster, &node, "its ADD failed");

    let last = node.conf["plugins"].as_array().expect("plugins").len() - 1;
    node.conf["plugins"][last]["failOn"] = json!(["DEL", "CHECK"]);
    node.chain_ok(&cluster.world, "add", "web");
    assert!(!node.chain(&cluster.world, "check", "web").status.success());
    assert!(!node.chain(&cluster.world, "del", "web").status.success());
    assert!(!node.leftovers().is_empty(), "the chain ends before us, and the tunnel serves on");
    node.conf["plugins"][last]["failOn"] = json!([]);
    node.chain_ok(&cluster.world, "del", "web");
    nothing_is_left(&cluster, &node, "its DEL failed once");
}

/// Adds the rest of Debian's plugins, one that records the calls, and a bridge that supports the newest version.
fn long_chain(node: &mut Node) {
    let bin = node.dir.join("bin");
    for plugin in ["firewall", "bandwidth"] {
        std::os::unix::fs::symlink(format!("/usr/lib/cni/{plugin}"), bin.join(plugin)).expect("a link");
    }
    std::os::unix::fs::symlink(tool("cni-record.py"), bin.join("cni-record")).expect("a link");
    let newer = r#"#!/bin/sh
case $CNI_COMMAND in
  GC | STATUS) exit 0 ;;
  VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.1.0"]}'; exit 0 ;;
esac
sed 's/"1\.1\.0"/"1.0.0"/g' | /usr/lib/cni/bridge | sed 's/"1\.0\.0"/"1.1.0"/g'
"#;
    std::fs::write(bin.join("newer-bridge"), newer).expect("a script");
    std::fs::set_permissions(bin.join("newer-bridge"), std::fs::Permissions::from_mode(0o755)).expect("executable");
}

fn is_ours(plugin: &Value) -> bool {
    plugin["type"] == "nebula-cni-plugin"
}

fn last_call(node: &Node, verb: &str) -> Value {
    let text = std::fs::read_to_string(node.dir.join("calls.jsonl")).expect("a record of the calls");
    let mut calls = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    calls.rfind(|call| call["command"] == verb && is_ours(call)).expect("a call of ours")
}

fn prev_result(call: &Value) -> Value {
    match &call["stdin"] {
        Value::String(text) => serde_json::from_str::<Value>(text).expect("JSON")["prevResult"].clone(),
        stdin => stdin["prevResult"].clone(),
    }
}

fn nothing_is_left(cluster: &Cluster, node: &Node, when: &str) {
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new(), "{when}");
    let left = links(&cluster.world.namespace_of(&node.name));
    let expected = |link: &str| ["lo", "eth0", "cni0"].contains(&link) || link.starts_with("bwp");
    assert!(left.iter().all(|link| expected(link)), "{when}: {left:?}");
    assert_eq!(links(&cluster.world.namespace_of("web")), ["lo"], "{when}");
}

//! Pods whose node lost the plugin's state folder while they ran, as when somebody empties `/run`.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::pods::lifecycle::call_again;
use crate::world;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use world::cluster::{Cluster, LIGHTHOUSE, Node, gone_within, links};

const SOON: Duration = Duration::from_secs(10);

fn pid(node: &Node, pod: &str) -> u64 {
    node.status(pod)["pid"].as_u64().expect("a process id")
}

fn empty(node: &Node) {
    std::fs::remove_dir_all(node.dir.join("state")).expect("the state folder");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn check_says_what_is_gone_and_del_and_the_next_add_succeed() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["web", "db"]);
    let (web, db) = (pid(&node, "web"), pid(&node, "db"));
    let address = node.overlay("db");
    empty(&node);
    // Traffic goes on.
    cluster.world.ping("web", &address, SOON);
    let check = node.chain(&cluster.world, "check", "web");
    let said: Value = serde_json::from_slice(&check.stdout).expect("an error object");
    assert!(!check.status.success() && said["details"].to_string().contains("stateDir"), "{said}");
    let plugin = world::cluster::binary("nebula-cni-plugin").display().to_string();
    let reconcile = [plugin.as_str(), "reconcile", &node.dir.join("state").display().to_string()];
    assert!(cluster.world.exec("n1", &reconcile).status.success());

    node.chain_ok(&cluster.world, "del", "web");
    assert!(gone_within(web, SOON), "its instance goes with it");
    assert_eq!(links(&cluster.world.namespace_of("web")), ["lo"]);
    node.chain_ok(&cluster.world, "add", "web");
    cluster.world.ping("web", LIGHTHOUSE, SOON);

    // Without a DEL in between, the instance that nobody remembers makes way.
    let forgotten = pid(&node, "web");
    empty(&node);
    call_again(&cluster, &node, "ADD");
    assert!(gone_within(forgotten, SOON));
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    node.delete_pods(&cluster.world, &["web", "db"]);
    assert!(gone_within(db, SOON));
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

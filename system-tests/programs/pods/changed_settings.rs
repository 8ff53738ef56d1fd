//! What reaches pods that run when the operator changes the chain's entry.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::net::IpAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::world::World;
use crate::world::cluster::{Cluster, Node, binary, gone_within};
use crate::world::traffic::Flow;

const SOON: Duration = Duration::from_secs(10);

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn running_pods_follow_the_entry_and_connections_that_the_new_rules_allow_go_on() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.add_pods(&mut cluster.world, &["a", "b"]);
    let at: IpAddr = node.overlay("b").parse().expect("an address");
    cluster.world.ping("a", &at.to_string(), SOON);
    let flow = Flow::start(&cluster.world, "a", "b", at);
    assert_eq!(
        refresh(&node, &cluster.world),
        json!({"refreshed": [], "outdated": [], "failed": []}),
        "nothing changed"
    );

    // Tightened: UDP no longer.
    let entry = |node: &mut Node, key: &str, value: Value| node.conf["plugins"][1]["nebula"][key] = value;
    let rule = |proto: &str| json!({"port": "any", "proto": proto, "host": "any"});
    let tight = json!({"outbound": [rule("any")], "inbound": [rule("tcp"), rule("icmp")]});
    entry(&mut node, "firewall", tight.clone());
    entry(&mut node, "tun", json!({"mtu": 1200}));
    let before = Instant::now();
    assert_eq!(refresh(&node, &cluster.world)["refreshed"], json!(["shop/a", "shop/b"]));
    println!("two pods have the changed settings after {:?}", before.elapsed());
    flow.watch();
    sleep(Duration::from_secs(2));
    let (tcp, udp) = flow.silence();
    assert!(flow.broken().is_none() && tcp < Duration::from_millis(500), "{tcp:?} {:?}", flow.broken());
    assert!(udp > Duration::from_millis(1900), "a flow that the new rules refuse goes on: {udp:?}");
    for pod in ["a", "b"] {
        assert_eq!(mtu(&cluster.world, pod), 1200);
        assert_eq!(node.launch(pod).expect("a launch file")["nebula"]["firewall"], tight);
    }
    assert_eq!(refresh(&node, &cluster.world)["refreshed"], json!([]), "once");

    // A call that ended in the middle, with the file written and nobody told: the next one tells the instance.
    let record = node.records().join("a-eth0.json");
    let mut half: Value = serde_json::from_slice(&std::fs::read(&record).expect("a record")).expect("JSON");
    half["is_being_told"] = true.into();
    std::fs::write(&record, half.to_string()).expect("write the record");
    let reloads = node.status("a")["settings"]["reloads"].as_u64().expect("a number");
    assert_eq!(refresh(&node, &cluster.world)["refreshed"], json!(["shop/a"]));
    assert_eq!(node.status("a")["settings"]["reloads"], reloads + 1);
    assert_eq!(refresh(&node, &cluster.world)["refreshed"], json!([]));

    // What an instance refuses changes nothing, and is named.
    entry(
        &mut node,
        "firewall",
        json!({"outbound": [rule("any")], "inbound": [{"port": "70000", "proto": "tcp", "host": "any"}]}),
    );
    let refused = refresh(&node, &cluster.world);
    assert_eq!(refused["failed"].as_array().map(Vec::len), Some(2), "{refused}");
    assert!(refused["failed"][0]["why"].to_string().contains("70000"), "{refused}");
    assert_eq!(node.launch("a").expect("a launch file")["nebula"]["firewall"], tight);
    flow.watch();
    sleep(Duration::from_secs(1));
    assert!(flow.silence().0 < Duration::from_millis(500) && flow.broken().is_none(), "{:?}", flow.broken());

    // What needs another start, or another pod, is named.
    entry(&mut node, "firewall", tight.clone());
    entry(&mut node, "cipher", json!("chachapoly"));
    node.conf["plugins"][1]["memoryLimitMiB"] = json!(48);
    let old = refresh(&node, &cluster.world);
    assert_eq!(old["refreshed"], json!(["shop/a", "shop/b"]));
    assert_eq!(old["outdated"][0], json!({"pod": "shop/a", "keys": ["memoryLimitMiB"]}));
    assert_eq!(node.status("a")["settings"]["at_the_next_start"], json!(["cipher"]));
    entry(&mut node, "cipher", json!("aes"));
    refresh(&node, &cluster.world);
    assert_eq!(node.status("a")["settings"]["at_the_next_start"], json!([]), "as at its start");
    drop(flow);

    // An instance that is started again has the settings of the one before.
    let killed = node.status("b")["pid"].as_u64().expect("a process");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(killed as i32), nix::sys::signal::SIGKILL).expect("it runs");
    assert!(gone_within(killed, SOON));
    let (plugin, state) = (binary("nebula-cni-plugin").display().to_string(), node.dir.join("state"));
    assert!(cluster.world.exec("n1", &[&plugin, "reconcile", &state.display().to_string()]).status.success());
    cluster.world.ping("a", &at.to_string(), SOON);
    assert_eq!(mtu(&cluster.world, "b"), 1200);
    let probe = Flow::start(&cluster.world, "a", "b", at);
    sleep(Duration::from_secs(1));
    let (tcp, udp) = probe.silence();
    assert!(tcp < Duration::from_millis(500) && udp > Duration::from_millis(900), "{tcp:?} {udp:?}");
    drop(probe);
    node.delete_pods(&cluster.world, &["a", "b"]);
    assert_eq!(node.leftovers(), Vec::<std::path::PathBuf>::new());
}

fn mtu(world: &World, pod: &str) -> u64 {
    let links: Value = serde_json::from_str(&world.run(pod, &["ip", "-j", "link", "show", "nebula0"])).expect("JSON");
    links[0]["mtu"].as_u64().expect("an MTU")
}

/// As the node agent does it.
fn refresh(node: &Node, world: &World) -> Value {
    node.refresh(&world.namespace_of(&node.name))
}

//! Hosts and pods whose kernel has IPv6 switched off, in an overlay that has both families.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test ends at the first surprise, on a real clock"
)]

use crate::{loopback, world};

use std::time::{Duration, Instant};

use loopback::{Network, ours};
use serde_json::json;
use world::World;
use world::cluster::{Cluster, LIGHTHOUSE};

const SOON: Duration = Duration::from_secs(20);
const SAID: &str = "IPv6 is switched off here";

fn switch_off(world: &World, host: &str) {
    assert!(world.exec(host, &["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"]).status.success());
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_gets_the_ipv4_address_of_an_overlay_with_both_families() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("overlay", json!(["10.42.0.0/16", "fd42::/96"]))]);
    let node = cluster.node("n1", "1.0.0");
    cluster.world.namespace("web");
    switch_off(&cluster.world, "web");
    node.chain_ok(&cluster.world, "add", "web");
    assert_eq!(node.status("web")["overlay"].as_array().map(Vec::len), Some(2), "{}", node.status("web"));
    cluster.world.ping("web", LIGHTHOUSE, SOON);
    assert!(node.instance_logs().contains(SAID), "{}", node.instance_logs());
    node.chain_ok(&cluster.world, "check", "web");
    // What is missing for another reason is still found.
    cluster.world.run("web", &["ip", "addr", "flush", "dev", "nebula0"]);
    assert!(!node.chain(&cluster.world, "check", "web").status.success());
    node.delete_pods(&cluster.world, &["web"]);
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_pod_whose_traffic_is_captured_in_both_families_is_captured_in_ipv4() {
    let mut cluster = Cluster::new();
    cluster.set_policy(&[("address", "same".into()), ("overlay", json!(["10.42.0.0/16", "fd00:42::/48"]))]);
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["capture"] =
        json!({"ranges": ["10.42.0.0/16", "fd00:42::/48"], "services": ["10.96.0.0/24", "fd00:96::/112"]});
    let (v4, v6) = (json!([{"subnet": "10.42.1.0/24"}]), json!([{"subnet": "fd00:42:0:1::/64"}]));
    // The primary plugin switches IPv6 on for an interface to which it gives such an address: the tunnel's has none
    // then.
    for (pod, ranges, off_after) in
        [("four", json!([v4]), false), ("both", json!([v4, v6]), false), ("late", json!([v4, v6]), true)]
    {
        node.conf["plugins"][0]["ipam"]["ranges"] = ranges;
        node.conf["plugins"][0]["ipam"]["dataDir"] = node.dir.join(format!("ipam-{pod}")).display().to_string().into();
        node.conf["plugins"][0]["bridge"] = format!("cni-{pod}").into();
        cluster.world.namespace(pod);
        if !off_after {
            switch_off(&cluster.world, pod);
        }
        node.chain_ok(&cluster.world, "add", pod);
        if off_after {
            // Afterwards the kernel takes addresses and routes away, and CHECK still finds everything else.
            switch_off(&cluster.world, pod);
        }
        let check = node.chain(&cluster.world, "check", pod);
        // The primary plugin misses its own address.
        let said = String::from_utf8_lossy(&check.stderr).into_owned() + &String::from_utf8_lossy(&check.stdout);
        assert!(check.status.success() || off_after && !said.contains("capture"), "{pod}: {said}");
        let rules = cluster.world.run(pod, &["ip", "rule"]);
        assert!(rules.contains("30000:"), "{pod}: {rules}");
        node.delete_pods(&cluster.world, &[pod]);
        assert!(node.leftovers().is_empty(), "{pod}: {:?}", node.leftovers());
    }
}

#[test]
#[ignore = "needs root and network namespaces"]
fn a_host_starts_with_ipv4_and_one_that_has_nothing_else_says_what_is_off() {
    let (mut world, network) = (World::new(), Network::new());
    let settings = "tun: {dev: neb0}\nlisten: {host: '::', port: 0}\ndaemon: {control_socket: false}";
    for (name, addresses, starts) in
        [("both", &["10.42.0.7/16", "fd42::7/64"][..], true), ("six", &["fd42::8/64"][..], false)]
    {
        world.namespace(name);
        switch_off(&world, name);
        let config = network.configure(name, addresses, settings);
        world.start(name, &ours(), &["-config", &config.display().to_string()]);
        let until = Instant::now() + SOON;
        while !world.log(name).contains(SAID) {
            assert!(Instant::now() < until, "{}", world.all_logs());
            std::thread::sleep(Duration::from_millis(20));
        }
        if starts {
            while !world.log(name).contains("Nebula interface is active") {
                assert!(Instant::now() < until, "{}", world.all_logs());
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(world.run(name, &["ip", "address", "show", "neb0"]).contains("10.42.0.7/16"));
        } else {
            assert_eq!(world.ended(name, SOON), Some(2), "{}", world.all_logs());
        }
    }
}

//! Adds and deletes many pods on one node in random order while plugin, instances and CA are killed at random. Checks
//! what is left over and which packets left unencrypted. `runtime.rs` does the same with a containerd that is killed as
//! well.
//!
//! `CHAOS_PODS` (60) is the number of pods; `CHAOS_SEED` repeats a run.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::time::{Duration, Instant};

use serde_json::json;
use world::capture::Capture;
use world::chaos::{
    Kills, Random, Talker, among, certificates_are_distinct, end_all, end_instances, expose, nothing_is_left, number,
    only_control_was_heard, restart_ca, seed,
};
use world::cluster::{Cluster, Node};

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn pods_that_come_and_go_among_random_kills_leave_nothing_and_say_nothing_in_clear() {
    let (pods, seed) = (number("CHAOS_PODS", 60), seed());
    println!("CHAOS_PODS={pods} CHAOS_SEED={seed}");
    let (mut random, mut kills, began) = (Random::new(seed), Kills::default(), Instant::now());
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    expose(&mut node);
    let capture = Capture::start(&cluster.world.namespace_of("n1"));
    let netns = |cluster: &Cluster, pod: &str| format!("/run/netns/{}", cluster.world.namespace_of(pod));
    // This pod is created while no pod is enrolled.
    cluster.world.namespace("outsider");
    node.conf["plugins"][1]["enrol"] = json!({"namespaces": []});
    let control = node.chain_ok(&cluster.world, "add", "outsider");
    node.conf["plugins"][1]["enrol"] = json!({});
    let control = control["ips"][0]["address"].as_str().and_then(|net| net.split('/').next()).expect("an address");
    let leak = Talker::start("outsider", "", &netns(&cluster, "outsider"));

    // The plugin's processes are found by pod name, so these names must be unique.
    let mut waiting: Vec<String> = (0..pods).map(|n| format!("p{}-{n}", std::process::id())).collect();
    let mut live: Vec<Talker> = Vec::new();
    while !waiting.is_empty() || !live.is_empty() {
        if !waiting.is_empty() && (live.len() < 3 || random.below(3) > 0) && live.len() < 40 {
            let pod = waiting.swap_remove(random.below(waiting.len()));
            cluster.world.namespace(&pod);
            if random.one_in(6) {
                kills.plugins += usize::from(killed_in(&node, &cluster, "add", &pod, &mut random));
                // A runtime calls DEL after a failed ADD, and a kubelet tries again.
                node.chain_ok(&cluster.world, "del", &pod);
            }
            node.chain_ok(&cluster.world, "add", &pod);
            live.push(Talker::start(&pod, &format!("uid-{pod}"), &netns(&cluster, &pod)));
        } else {
            let pod = live.swap_remove(random.below(live.len()));
            if random.one_in(6) {
                kills.plugins += usize::from(killed_in(&node, &cluster, "del", &pod.id, &mut random));
            }
            node.chain_ok(&cluster.world, "del", &pod.id);
            let namespace = cluster.world.namespace_of(&pod.id);
            drop(pod);
            world::run("ip", &["netns", "del", &namespace]);
        }
        if !live.is_empty() && random.one_in(5) {
            let launch = node.records().join(format!("{}-eth0.launch", live[random.below(live.len())].id));
            kills.instances += end_instances(&launch.display().to_string());
        }
        if random.one_in(15) {
            restart_ca(&mut cluster);
            kills.cas += 1;
        }
        if random.one_in(10) {
            certificates_are_distinct(&cluster, &node, &live);
        }
    }
    println!("{kills:?} in {:.0} s", began.elapsed().as_secs_f64());
    assert!(kills.plugins > 0 && kills.instances > 0 && kills.cas > 0, "the seed is too kind");
    only_control_was_heard(&capture, control.parse().expect("an address"));
    drop(leak);
    node.chain_ok(&cluster.world, "del", "outsider");
    nothing_is_left(&cluster, &node);
}

/// Runs a verb and kills the plugin in the middle of it. Returns whether there was a process to kill.
fn killed_in(node: &Node, cluster: &Cluster, verb: &str, pod: &str, random: &mut Random) -> bool {
    let patience = Duration::from_millis(random.below(60) as u64);
    among(pod, patience, end_all, || node.chain(&cluster.world, verb, pod)).killed > 0
}

//! Adds and deletes many pods on one node in random order while plugin, instances and CA are killed at random. Checks
//! what is left over and which packets left unencrypted, and then measures the latency of one pod and the cost of many.
//! `runtime.rs` does the same with a containerd that is killed as well.
//!
//! `CHAOS_PODS` (60) is the number of pods; `CHAOS_SEED` repeats a run. `LATENCY_PODS` (30) are measured and may take
//! `LATENCY_SLACK` (2) times their limits: on an idle machine a factor of 1 is enough, but this one may be shared.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use world::capture::Capture;
use world::chaos::{
    Kills, Random, Talker, among, certificates_are_distinct, end_all, end_instances, expose, nothing_is_left, number,
    only_control_was_heard, restart_ca, seed,
};
use world::cluster::{Cluster, Node, binary};
use world::cost::{cpu_ticks, memory_kib, quantile};

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

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn a_pod_starts_in_time_and_many_cost_little() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    // As with the plugin's default folder for its records, this one is in memory. The CA's ledger is on disk.
    let memory_only = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    std::os::unix::fs::symlink(memory_only.path(), node.dir.join("state")).expect("a link to it");
    let pods: Vec<String> = (0..number("LATENCY_PODS", 30)).map(|n| format!("p{n}")).collect();
    for pod in &pods {
        cluster.world.namespace(pod);
        node.chain_ok(&cluster.world, "add", pod);
    }
    thread::sleep(Duration::from_secs(2));
    let pids: Vec<u64> = pods.iter().map(|pod| node.status(pod)["pid"].as_u64().expect("a pid")).collect();
    let private: Vec<f64> = pids.iter().map(|pid| memory_kib(*pid, "Private_")).collect();
    let resident: Vec<f64> = pids.iter().map(|pid| memory_kib(*pid, "Rss:")).collect();
    let (before, began) = (cpu_ticks(&pids), Instant::now());
    thread::sleep(Duration::from_secs(10));
    let cpu = (cpu_ticks(&pids) - before) as f64 * 10.0 / began.elapsed().as_secs_f64() / pids.len() as f64;
    for pod in &pods {
        node.chain_ok(&cluster.world, "del", pod);
    }
    let (add, del) = (times(&node, "ADD"), times(&node, "DEL"));
    let version: Vec<f64> = (0..100).map(|_| version_ms()).collect();
    let slack = number("LATENCY_SLACK", 2) as f64;
    println!("| one of {} pods on a node | p50 | p99 | bars |\n| --- | ---: | ---: | ---: |", pods.len());
    let mut late = Vec::new();
    for (what, times, bars) in [
        ("ADD", &add, [Some(60.0), Some(150.0)]),
        ("DEL", &del, [Some(20.0), None]),
        ("VERSION", &version, [Some(5.0), None]),
    ] {
        let quantiles = [quantile(times, 0.5), quantile(times, 0.99)];
        let [p50, p99] = bars.map(|bar| bar.map_or_else(|| "-".to_owned(), |bar| format!("{bar:.0}")));
        println!("| {what}, ms | {:.1} | {:.1} | {p50} / {p99} |", quantiles[0], quantiles[1]);
        let is_late = |(time, bar): (f64, Option<f64>)| bar.is_some_and(|bar| time > bar * slack);
        late.extend(quantiles.into_iter().zip(bars).any(is_late).then_some(what));
    }
    for (what, memory, bar) in [("private memory", &private, Some(MEMORY_KIB)), ("resident memory", &resident, None)] {
        let bar = bar.map_or_else(|| "-".to_owned(), |bar: f64| format!("{bar:.0}"));
        println!("| {what}, KiB | {:.0} | {:.0} | {bar} / - |", quantile(memory, 0.5), quantile(memory, 0.99));
    }
    println!("| CPU when idle, ms per s | {cpu:.2} | | |");
    // On an idle machine all stay within their limits (LATENCY_SLACK=1).
    assert!(quantile(&private, 0.5) <= MEMORY_KIB, "private memory: {private:?} KiB");
    assert!(late.is_empty(), "{late:?} took more than {slack} times as long as the bars allow");
}

/// `STORM_PODS` (120) at once: with twenty seconds for each, a node with two processors would not start all of them.
#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn all_pods_of_a_node_that_starts_at_once_come_up() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let memory_only = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    std::os::unix::fs::symlink(memory_only.path(), node.dir.join("state")).expect("a link to it");
    let pods: Vec<String> = (0..number("STORM_PODS", 120)).map(|n| format!("p{n}")).collect();
    for pod in &pods {
        cluster.world.namespace(pod);
    }
    let all_at_once = |node: &Node, verb: &str| {
        let (began, world) = (Instant::now(), &cluster.world);
        thread::scope(|scope| {
            for pod in &pods {
                scope.spawn(move || node.chain_ok(world, verb, pod));
            }
        });
        began.elapsed()
    };
    let ours = node.conf["plugins"][1].clone();
    node.conf["plugins"].as_array_mut().expect("plugins").truncate(1);
    let without = all_at_once(&node, "add");
    all_at_once(&node, "del");
    node.conf["plugins"].as_array_mut().expect("plugins").push(ours);
    let with = all_at_once(&node, "add");
    println!("{} pods at once: {without:.1?} without us, {with:.1?} with us", pods.len());
    let waited = times(&node, "ADD");
    println!(
        "ADD of our plugin, with its time in the queue: p50 {:.0} ms, longest {:.0} ms",
        quantile(&waited, 0.5),
        quantile(&waited, 1.0)
    );
    assert!(with < Duration::from_secs(180), "a kubelet gives up after four minutes");
    let last = node.overlay(&pods[pods.len() - 1]);
    cluster.world.ping(&pods[0], &last, Duration::from_secs(10));
    let removed = all_at_once(&node, "del");
    println!("DEL of all: {removed:.1?}");
    nothing_is_left(&cluster, &node);
}

// Private memory of one idle instance; a busy machine is no reason for more.
const MEMORY_KIB: f64 = 700.0;

/// Runs a verb and kills the plugin in the middle of it. Returns whether there was a process to kill.
fn killed_in(node: &Node, cluster: &Cluster, verb: &str, pod: &str, random: &mut Random) -> bool {
    let patience = Duration::from_millis(random.below(60) as u64);
    among(pod, patience, end_all, || node.chain(&cluster.world, verb, pod)).killed > 0
}

/// Milliseconds that our plugin alone took, from the recorded calls.
fn times(node: &Node, verb: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(node.dir.join("calls.jsonl")).expect("a record of the calls");
    let calls = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let ours = calls.filter(|call| call["command"] == verb && call["type"] == "nebula-cni-plugin");
    ours.filter_map(|call| call["ms"].as_f64()).collect()
}

fn version_ms() -> f64 {
    let began = Instant::now();
    let status = Command::new(binary("nebula-cni-plugin"))
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    assert!(status.expect("it runs").success());
    began.elapsed().as_secs_f64() * 1000.0
}

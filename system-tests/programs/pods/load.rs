//! How long a pod of one node takes to start, what many cost, and whether a hundred that start at once come up.
//!
//! `LATENCY_PODS` (30) are measured and may take `LATENCY_SLACK` (2) times their limits: on an idle machine a factor
//! of 1 is enough, but this one may be shared. `STORM_PODS` (120) start at once.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::pods::runtime::Runtime;
use crate::service_manager::{PLACE, Systemd};
use crate::world;

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use world::chaos::{nothing_is_left, number};
use world::cluster::{Cluster, Node, binary};
use world::cost::{cpu_ticks, memory_kib, quantile};

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn a_pod_starts_in_time_and_many_cost_little() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let _memory = keep_records_in_memory(&node);
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

/// Units of systemd beside processes of the plugin's own, turn by turn, so that both meet the same machine.
#[test]
#[ignore = "needs root, network namespaces, systemd, D-Bus and a release build; prints figures"]
fn a_pod_starts_in_time_under_systemd_too() {
    let mut cluster = Cluster::below(Path::new(PLACE));
    let mut node = cluster.node("n1", "1.0.0");
    let systemd = Systemd::start_in(&Path::new("/run/netns").join(cluster.world.namespace_of("n1")));
    node.bus = Some(systemd.bus());
    let _memory = keep_records_in_memory(&node);
    let pods: Vec<String> = (0..number("LATENCY_PODS", 30) / 3).map(|n| format!("p{n}")).collect();
    for pod in &pods {
        cluster.world.namespace(pod);
    }
    let supervisors = ["direct", "systemd"];
    for supervisor in supervisors.repeat(2) {
        node.conf["plugins"][1]["supervisor"] = supervisor.into();
        for verb in ["add", "del"] {
            for pod in &pods {
                node.chain_ok(&cluster.world, verb, pod);
            }
        }
    }
    let add = times(&node, "ADD");
    let slack = number("LATENCY_SLACK", 2) as f64;
    println!("| ADD of {} pods, ms | p50 | p99 | bar |\n| --- | ---: | ---: | ---: |", add.len() / 2);
    for (nth, supervisor) in supervisors.into_iter().enumerate() {
        let turns = add.chunks(pods.len()).skip(nth).step_by(2);
        let times: Vec<f64> = turns.flatten().copied().collect();
        let p50 = quantile(&times, 0.5);
        println!("| {supervisor} | {p50:.1} | {:.1} | 60 |", quantile(&times, 0.99));
        assert!(p50 <= 60.0 * slack, "{supervisor}: {p50} ms");
    }
}

/// `STORM_PODS` (120) at once: with twenty seconds for each, a node with two processors would not start all of them.
#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn all_pods_of_a_node_that_starts_at_once_come_up() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let _memory = keep_records_in_memory(&node);
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

/// As a kubelet does that starts: `STORM_PODS` (120) with a container each, `STORM_ROUNDS` (1) times without us and
/// with us.
#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a release build; prints figures"]
fn pods_of_containerd_that_start_at_once_take_little_longer_than_without_us() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let _memory = keep_records_in_memory(&node);
    let runtime = Runtime::start(&cluster.world, &node);
    let pods = number("STORM_PODS", 120);
    let mut alone = node.conf.clone();
    alone["plugins"].as_array_mut().expect("plugins").truncate(1);
    let run = |round: u64, conf: &serde_json::Value| {
        let file = runtime.dir.join("net.d/10-nebula.conflist");
        std::fs::write(&file, conf.to_string()).expect("write the chain");
        // containerd follows its folder, and says nothing when it has read a file.
        thread::sleep(Duration::from_secs(2));
        let (prefix, count) = (format!("shop/r{round}-"), pods.to_string());
        let began = Instant::now();
        let said = runtime
            .cri(&["run-pods", &prefix, &count, "localhost/busybox:1", "--", "/bin/sleep", "3600"])
            .unwrap_or_else(|error| panic!("{error}"));
        let took = began.elapsed();
        let ids: Vec<String> = said.lines().map(id).collect();
        let is_ours = ids.iter().filter(|id| node.launch(id).is_some()).count();
        runtime.cri(&["purge"]).unwrap_or_else(|error| panic!("{error}"));
        (took, is_ours as u64)
    };
    let mut ratios = Vec::new();
    for round in 0..number("STORM_ROUNDS", 1) {
        let (without, none) = run(2 * round, &alone);
        let (with, all) = run(2 * round + 1, &node.conf);
        assert_eq!((none, all), (0, pods), "pods with a tunnel");
        let ratio = with.as_secs_f64() / without.as_secs_f64();
        println!("{pods} pods of containerd at once: {without:.1?} without us, {with:.1?} with us, {ratio:.2} times");
        ratios.push(ratio);
    }
    let slack = number("LATENCY_SLACK", 2) as f64;
    assert!(quantile(&ratios, 0.5) <= 1.0 + (STORM_RATIO - 1.0) * slack, "{ratios:?}");
}

const STORM_RATIO: f64 = 1.3;

/// As with the plugin's default folder for its records. The CA's ledger is on disk.
fn keep_records_in_memory(node: &Node) -> tempfile::TempDir {
    let memory = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    std::os::unix::fs::symlink(memory.path(), node.dir.join("state")).expect("a link to it");
    memory
}

fn id(pod: &str) -> String {
    let pod: serde_json::Value = serde_json::from_str(pod).expect("JSON");
    pod["id"].as_str().expect("an id").to_owned()
}

// Private memory of one idle instance; a busy machine is no reason for more.
const MEMORY_KIB: f64 = 700.0;

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

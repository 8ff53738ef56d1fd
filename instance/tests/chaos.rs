//! Many pods on one node, added and deleted in random order while plugin, instances and CA are killed at random: what is
//! left afterwards, and what was seen in clear meanwhile. Then the times of one pod and the cost of many.
//!
//! `CHAOS_PODS` (60) says how many, `CHAOS_SEED` repeats a run.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

mod world;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use world::cluster::{Cluster, LIGHTHOUSE, Node, alive, binary, links, status_at};

const OVERLAY: &str = "10.42.0.0/16";

#[test]
#[ignore = "needs root, network namespaces, nftables and a release build"]
fn pods_that_come_and_go_among_random_kills_leave_nothing_and_say_nothing_in_clear() {
    let pods = number("CHAOS_PODS", 60);
    let seed = number("CHAOS_SEED", u64::from(std::process::id()));
    println!("CHAOS_PODS={pods} CHAOS_SEED={seed}");
    let mut random = Random(seed | 1);
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    node.conf["plugins"][1]["overlay"] = json!([OVERLAY]);
    node.conf["plugins"][1]["timeoutSeconds"] = 8.into();
    watch_bridge(&cluster);
    let mut waiting: Vec<String> = (0..pods).map(|n| format!("p{n}")).collect();
    let mut live: Vec<(String, Child)> = Vec::new();
    let (mut plugin_kills, mut instance_kills, mut ca_kills) = (0, 0, 0);
    while !waiting.is_empty() || !live.is_empty() {
        let add = !waiting.is_empty() && (live.len() < 3 || random.below(3) > 0) && live.len() < 40;
        if add {
            let pod = waiting.swap_remove(random.below(waiting.len()));
            cluster.world.namespace(&pod);
            if random.below(6) == 0 {
                plugin_kills += usize::from(killed_in(&node, &cluster, "add", &pod, &mut random));
                // A runtime calls DEL after an ADD that failed, and a kubelet tries again.
                node.chain_ok(&cluster.world, "del", &pod);
            }
            node.chain_ok(&cluster.world, "add", &pod);
            let traffic = talk(&cluster, &pod);
            live.push((pod, traffic));
        } else {
            let (pod, mut traffic) = live.swap_remove(random.below(live.len()));
            if random.below(6) == 0 {
                plugin_kills += usize::from(killed_in(&node, &cluster, "del", &pod, &mut random));
            }
            node.chain_ok(&cluster.world, "del", &pod);
            end(&mut traffic);
            world::run("ip", &["netns", "del", &cluster.world.namespace_of(&pod)]);
        }
        if !live.is_empty() && random.below(5) == 0 {
            let launch = node.records().join(format!("{}-eth0.launch", live[random.below(live.len())].0));
            instance_kills += kill_all_with(&launch.display().to_string());
        }
        if random.below(15) == 0 {
            cluster.world.stop("control", Signal::SIGKILL);
            cluster.start_ca();
            ca_kills += 1;
        }
        if random.below(10) == 0 {
            addresses_are_distinct(&node, &live);
        }
    }
    println!("killed: {plugin_kills} plugins, {instance_kills} instances, {ca_kills} CAs");
    assert!(plugin_kills > 0 && instance_kills > 0 && ca_kills > 0, "the seed is too kind");
    assert_eq!(in_clear(&cluster), 0, "packets for the overlay were seen in clear on the bridge");
    let state = node.dir.join("state");
    assert!(
        Command::new(binary("nebula-cni-plugin")).arg("reconcile").arg(&state).status().expect("it runs").success()
    );
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
    assert_eq!(kill_all_with(&state.display().to_string()), 0, "processes are left");
    let names: BTreeSet<String> = links(&cluster.world.namespace_of("n1")).into_iter().collect();
    assert_eq!(names, ["cni0", "eth0", "lo"].map(str::to_owned).into(), "links are left");
    let leases = std::fs::read_dir(node.dir.join("ipam").join(&node.network)).expect("the primary plugin's leases");
    let leases =
        leases.filter(|entry| entry.as_ref().is_ok_and(|e| e.file_name().to_string_lossy().starts_with("10.")));
    assert_eq!(leases.count(), 0, "addresses are left");
    let routes = cluster.world.exec("n1", &["ip", "route", "show", "proto", "78"]).stdout;
    assert!(routes.is_empty(), "routes are left");
}

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn a_pod_starts_in_time_and_many_cost_little() {
    let mut cluster = Cluster::new();
    let node = cluster.node("n1", "1.0.0");
    let pods: Vec<String> = (0..number("LATENCY_PODS", 30)).map(|n| format!("p{n}")).collect();
    for pod in &pods {
        cluster.world.namespace(pod);
        node.chain_ok(&cluster.world, "add", pod);
    }
    thread::sleep(Duration::from_secs(2));
    let pids: Vec<u64> = pods.iter().map(|pod| node.status(pod)["pid"].as_u64().expect("a pid")).collect();
    let memory: Vec<f64> = pids.iter().map(|pid| private_kib(*pid)).collect();
    let (before, began) = (cpu_ticks(&pids), Instant::now());
    thread::sleep(Duration::from_secs(10));
    let cpu = (cpu_ticks(&pids) - before) as f64 * 10.0 / began.elapsed().as_secs_f64() / pids.len() as f64;
    for pod in &pods {
        node.chain_ok(&cluster.world, "del", pod);
    }
    let (add, del) = (times(&node, "ADD"), times(&node, "DEL"));
    let version: Vec<f64> = (0..100).map(|_| version_ms()).collect();
    println!("| | p50 | p99 | bar |\n| --- | --- | --- | --- |");
    for (what, times, bar) in [("ADD, ms", &add, "60 / 150"), ("DEL, ms", &del, "20"), ("VERSION, ms", &version, "5")] {
        println!("| {what} | {:.1} | {:.1} | {bar} |", quantile(times, 0.5), quantile(times, 0.99));
    }
    println!("| private memory of a pod, KiB | {:.0} | {:.0} | |", quantile(&memory, 0.5), quantile(&memory, 0.99));
    println!("| CPU of an idle pod among {}, ms per s | {cpu:.2} | | |", pods.len());
    // Far above the bars, which hold on a quiet machine: this catches what became slow, not who else runs.
    assert!(quantile(&add, 0.5) < 1500.0 && quantile(&del, 0.5) < 500.0 && quantile(&version, 0.5) < 100.0);
}

/// Numbers that repeat with their seed (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs a verb and kills the plugin in the middle of it. Whether it was there to be killed.
fn killed_in(node: &Node, cluster: &Cluster, verb: &str, pod: &str, random: &mut Random) -> bool {
    let patience = Duration::from_millis(random.below(60) as u64);
    thread::scope(|scope| {
        let run = scope.spawn(|| node.chain(&cluster.world, verb, pod));
        let mut killed = false;
        while !killed && !run.is_finished() {
            let found = plugins_of(pod);
            if !found.is_empty() {
                thread::sleep(patience);
                killed = found.iter().filter(|pid| kill(Pid::from_raw(**pid), Signal::SIGKILL).is_ok()).count() > 0;
            }
            thread::sleep(Duration::from_millis(1));
        }
        let _ = run.join();
        killed
    })
}

/// Plugins at work for a pod: by their environment, since they have no arguments.
fn plugins_of(pod: &str) -> Vec<i32> {
    let wanted = format!("CNI_CONTAINERID={pod}\0");
    processes(|dir| {
        std::fs::read_to_string(dir.join("comm")).is_ok_and(|name| name.trim() == "nebula-cni-plug")
            && std::fs::read(dir.join("environ")).is_ok_and(|env| String::from_utf8_lossy(&env).contains(&wanted))
    })
}

fn kill_all_with(argument: &str) -> usize {
    let found = processes(|dir| {
        std::fs::read(dir.join("cmdline")).is_ok_and(|line| {
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("--launch") && line.contains(argument)
        })
    });
    found.iter().filter(|pid| kill(Pid::from_raw(**pid), Signal::SIGKILL).is_ok()).count()
}

fn processes(is_wanted: impl Fn(&PathBuf) -> bool) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").expect("/proc").flatten();
    let numbered = entries.filter_map(|e| Some((e.file_name().to_str()?.parse().ok()?, e.path())));
    numbered.filter(|(_, dir)| is_wanted(dir)).map(|(pid, _)| pid).collect()
}

/// A pod that talks to the overlay all the time, whatever becomes of its instance.
fn talk(cluster: &Cluster, pod: &str) -> Child {
    let namespace = cluster.world.namespace_of(pod);
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &namespace, "ping", "-n", "-q", "-i", "0.2", "-c", "2000", LIGHTHOUSE]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("ping runs")
}

fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Counts what arrives on the bridge for the overlay, in the clear.
fn watch_bridge(cluster: &Cluster) {
    let rule = format!("iifname \"cni0\" ip daddr {OVERLAY} counter");
    let rules = format!("table ip watch {{\nchain pre {{\ntype filter hook prerouting priority -300\n{rule}\n}}\n}}");
    let loaded = cluster.world.exec("n1", &["nft", &rules]);
    assert!(loaded.status.success(), "{}", String::from_utf8_lossy(&loaded.stderr));
}

fn in_clear(cluster: &Cluster) -> u64 {
    let text = cluster.world.exec("n1", &["nft", "list", "table", "ip", "watch"]).stdout;
    let text = String::from_utf8_lossy(&text).into_owned();
    let mut words = text.split_whitespace().skip_while(|word| *word != "packets").skip(1);
    words.next().and_then(|count| count.parse().ok()).expect("a counter")
}

fn addresses_are_distinct(node: &Node, live: &[(String, Child)]) {
    let mut seen = BTreeSet::new();
    for (pod, _) in live {
        let Ok(launch) = std::fs::read(node.records().join(format!("{pod}-eth0.launch"))) else { continue };
        let launch: serde_json::Value = serde_json::from_slice(&launch).expect("JSON");
        let socket = PathBuf::from(launch["status_socket"].as_str().expect("a path"));
        // One that was just killed does not answer.
        if std::os::unix::net::UnixStream::connect(&socket).is_err() {
            continue;
        }
        for address in status_at(&socket)["overlay"].as_array().cloned().unwrap_or_default() {
            assert!(seen.insert(address.to_string()), "{address} has two live certificates");
        }
    }
}

/// Milliseconds of our plugin alone, from the record of the chain.
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

fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

/// What ends with the process: pages that it shares with nobody.
fn private_kib(pid: u64) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a live process");
    let lines = text.lines().filter(|line| line.starts_with("Private_"));
    lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok()).sum()
}

/// User and system time of all, in hundredths of a second.
fn cpu_ticks(pids: &[u64]) -> u64 {
    let of = |pid: &u64| -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    };
    assert!(pids.iter().all(|pid| alive(*pid)));
    pids.iter().filter_map(of).sum()
}

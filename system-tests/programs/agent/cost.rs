//! What the node agent costs beside a real containerd: memory and CPU time at rest, and the time that a pod's ADD
//! takes.
//!
//! `COST_PODS` (30) is the number of pods on the node; `ADD_PODS` (30) are started one after the other with the agent
//! and as many without it. Bars are asserted with programs of a release build. What is a time may be `COST_SLACK` (2)
//! times its bar: on an idle machine a factor of 1 should be enough, but this one may be shared.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::agent::prepared::{Prepared, STATE};
use crate::world;

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use world::chaos::number;
use world::cluster::{answer_at, binary};
use world::cost::{cpu_ticks, memory_kib, quantile};
use world::cri_session::CriSession;

const RESIDENT_KIB: f64 = 15.0 * 1024.0;
/// Of one core, in percent.
const CPU: f64 = 0.5;
const ADD_MS: f64 = 30.0;
/// One thorough look at all pods is in it, and fifteen quick ones.
const RESTS: Duration = Duration::from_secs(30);

#[test]
#[ignore = "needs root, containerd, the shared CRI tools and a release build; prints figures"]
fn the_agent_of_a_full_node_needs_little() {
    let mut p = Prepared::new();
    p.start();
    p.wait("ready", || true);
    let cri = CriSession::new(&p.runtime.dir.join("run/containerd.sock"));
    let alone = memory_kib(u64::from(p.cluster.world.pid("agent")), "Rss:");
    let sandboxes: Vec<String> = (0..number("COST_PODS", 30))
        .map(|number| {
            let pod = cri.sandbox("shop", &format!("p{number}"), 0).unwrap_or_else(|error| panic!("{error}"));
            pod["id"].as_str().expect("an id").to_owned()
        })
        .collect();
    let is_protected = |sandbox: &String| {
        let launch = p.node.launch(sandbox);
        let socket = launch.as_ref().and_then(|launch| launch["status_socket"].as_str());
        socket.is_some_and(|socket| answer_at(Path::new(socket)).is_ok_and(|status| status["state"] == "running"))
    };
    p.wait("every pod is protected", || sandboxes.iter().all(is_protected));
    // Past the first thorough look at all of them.
    thread::sleep(Duration::from_secs(10));
    let agent = u64::from(p.cluster.world.pid("agent"));
    let (before, began) = (cpu_ticks(&[agent]), Instant::now());
    thread::sleep(RESTS);
    let cpu = (cpu_ticks(&[agent]) - before) as f64 / began.elapsed().as_secs_f64();
    let (resident, private) = (memory_kib(agent, "Rss:"), memory_kib(agent, "Private_"));
    let threads = fs::read_dir(format!("/proc/{agent}/task")).expect("a live process").count();
    println!("| the agent with {} pods | | bar |\n| --- | ---: | ---: |", sandboxes.len());
    println!("| resident memory, KiB (without pods {alone:.0}) | {resident:.0} | {RESIDENT_KIB:.0} |");
    println!("| private memory, KiB | {private:.0} | |");
    println!("| CPU at rest, % of a core | {cpu:.2} | {CPU} |\n| threads | {threads} | |");
    for sandbox in &sandboxes {
        cri.remove(sandbox).unwrap_or_else(|error| panic!("{error}"));
    }
    if is_release() {
        let log = p.cluster.world.log("agent");
        assert!(
            resident <= RESIDENT_KIB,
            "{resident} KiB, {} of them anonymous\n{log}",
            memory_kib(agent, "Anonymous:")
        );
        assert!(cpu <= CPU * slack(), "{cpu} % of a core\n{log}");
    }
}

#[test]
#[ignore = "needs root, network namespaces, the shared CRI tools and a release build; prints figures"]
fn a_pod_starts_as_fast_with_the_agent_as_without_it() {
    // As on a node, where /run is in memory.
    let _state = Memory::mount(Path::new(STATE));
    let mut p = Prepared::new();
    let rounds = 2;
    let pods: Vec<String> = (0..number("ADD_PODS", 30) / rounds).map(|number| format!("p{number}")).collect();
    for pod in &pods {
        p.cluster.world.namespace(pod);
    }
    // Turn by turn, so that both meet the same machine.
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        p.start();
        p.wait("ready", || true);
        p.node.conf = serde_json::from_slice(&fs::read(p.own_file()).expect("our file")).expect("JSON");
        with.extend(add_and_delete(&p, &pods));
        p.stop(Signal::SIGTERM);
        without.extend(add_and_delete(&p, &pods));
    }
    println!("| ADD of {} pods, ms | p50 | p99 | bar |\n| --- | ---: | ---: | ---: |", with.len());
    for (what, times) in [("with the agent", &with), ("without it", &without)] {
        println!("| {what} | {:.1} | {:.1} | {ADD_MS:.0} |", quantile(times, 0.5), quantile(times, 0.99));
    }
    let (with, without) = (quantile(&with, 0.5), quantile(&without, 0.5));
    if is_release() {
        assert!(with <= ADD_MS * slack(), "{with} ms");
    }
    assert!(with <= without * 1.25 + 2.0, "{with} ms with the agent, {without} ms without it");
}

/// How long our plugin alone took for each ADD.
fn add_and_delete(p: &Prepared, pods: &[String]) -> Vec<f64> {
    let calls = p.node.dir.join("calls.jsonl");
    let _ = fs::remove_file(&calls);
    for verb in ["add", "del"] {
        for pod in pods {
            p.node.chain_ok(&p.cluster.world, verb, pod);
        }
    }
    let text = fs::read_to_string(calls).expect("a record of the calls");
    let calls = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let ours = calls.filter(|call| call["command"] == json!("ADD") && call["type"] == json!("nebula-cni-plugin"));
    ours.filter_map(|call| call["ms"].as_f64()).collect()
}

pub(super) fn slack() -> f64 {
    number("COST_SLACK", 2) as f64
}

pub(super) fn is_release() -> bool {
    binary("nebula-cni-agent").parent().is_some_and(|dir| dir.ends_with("release"))
}

/// A file system in memory, unmounted on drop.
struct Memory<'a>(&'a Path);

impl<'a> Memory<'a> {
    fn mount(place: &'a Path) -> Self {
        fs::create_dir_all(place).expect("a folder");
        world::run("mount", &["-t", "tmpfs", "none", &place.display().to_string()]);
        Self(place)
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        world::run("umount", &[&self.0.display().to_string()]);
        let _ = fs::remove_dir(self.0);
    }
}

//! How much memory programs use during a scan by a pod or a burst of flows from a peer, and that they return it.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use world::World;
use world::cluster::{Cluster, Node, binary};
use world::mesh::Mesh;

const SOON: Duration = Duration::from_secs(10);
/// Time to free everything: handshakes are given up after 5.5 seconds, flows expire after ten here.
const PATIENCE: Duration = Duration::from_secs(45);
/// Limit for an instance that holds everything its limits allow.
const MOST_KIB: u64 = 16 << 10;
/// How much more than before may remain.
const REST_KIB: u64 = 1 << 10;
/// The same for a daemon on a host, whose limits are up to eight times as large.
const REST_OF_HOST_KIB: u64 = 2 << 10;

const SCAN: Duration = Duration::from_millis(10);
const SPRAY: Duration = Duration::from_millis(1);

/// Private memory of a process: resident memory without the program's file.
fn private_kib(pid: u64) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a live process");
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("a line about memory");
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
}

/// The peak of a process's private memory while `work` runs.
fn peak_kib(pid: u64, work: impl FnOnce()) -> u64 {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                most = most.max(private_kib(pid));
                thread::sleep(Duration::from_millis(10));
            }
            most.max(private_kib(pid))
        });
        work();
        over.store(true, Ordering::Relaxed);
        watch.join().expect("the watch")
    })
}

/// Waits until a process holds at most `most`, or [`PATIENCE`] is over; returns how much it holds then, and the time.
fn rest_kib(pid: u64, most: u64) -> (u64, Duration) {
    let start = Instant::now();
    loop {
        let now = private_kib(pid);
        if now <= most || start.elapsed() > PATIENCE {
            return (now, start.elapsed());
        }
        thread::sleep(Duration::from_millis(200));
    }
}

/// Sends a datagram to each target, as an unprivileged program in this network namespace: twenty, then a pause.
fn send_to_all(namespace: &str, pause: Duration, targets: impl Iterator<Item = SocketAddr> + Send) {
    thread::scope(|scope| {
        scope.spawn(|| {
            world::enter(namespace);
            let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
            for (nth, target) in targets.enumerate() {
                // Errors from the kernel or from peers do not matter here.
                let _ = socket.send_to(b"scan", target);
                if nth % 20 == 19 {
                    thread::sleep(pause);
                }
            }
        });
    });
}

/// Ten thousand unused overlay addresses.
fn nobody() -> impl Iterator<Item = SocketAddr> + Send {
    (0..10_000_u16).map(|n| {
        let [high, low] = n.to_be_bytes();
        SocketAddr::from((Ipv4Addr::new(10, 42, 100 + high, low), 9))
    })
}

fn pid(node: &Node, pod: &str) -> u64 {
    node.status(pod)["pid"].as_u64().expect("a pid")
}

/// Two pods on two nodes whose flows expire quickly.
fn two_pods() -> (Cluster, [Node; 2]) {
    let mut cluster = Cluster::new();
    let nodes = [("n1", "a"), ("n2", "b")].map(|(node, pod)| {
        let mut node = cluster.node(node, "1.0.0");
        let short = serde_json::json!({ "udp_timeout": "10s", "default_timeout": "10s" });
        node.conf["plugins"][1]["nebula"]["firewall"]["conntrack"] = short;
        node.add_pods(&mut cluster.world, &[pod]);
        node
    });
    cluster.world.ping("a", &nodes[1].overlay("b"), SOON);
    (cluster, nodes)
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_scan_of_ten_thousand_addresses_by_a_pod_costs_its_instance_little_and_nothing_stays() {
    let (cluster, [node, other]) = two_pods();
    let pid = pid(&node, "a");
    let before = private_kib(pid);
    let namespace = cluster.world.namespace_of("a");
    let peak = peak_kib(pid, || send_to_all(&namespace, SCAN, nobody().chain(nobody())));
    cluster.world.ping("a", &other.overlay("b"), SOON);
    let (after, took) = rest_kib(pid, before + REST_KIB);
    println!("scan by a pod: {before} kB before, {peak} kB at most, {after} kB after {took:?}");
    assert!(peak < MOST_KIB, "{peak} kB");
    assert!(after <= before + REST_KIB, "{after} kB, {before} kB before");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_spray_of_flows_by_a_peer_costs_an_instance_little_and_nothing_stays() {
    let (cluster, [_, other]) = two_pods();
    let pid = pid(&other, "b");
    let before = private_kib(pid);
    let target: Ipv4Addr = other.overlay("b").parse().expect("an address");
    let ports = || (1..=60_000_u16).map(move |port| SocketAddr::from((target, port)));
    let namespace = cluster.world.namespace_of("a");
    let peak = peak_kib(pid, || {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| send_to_all(&namespace, SPRAY, ports()));
            }
        });
    });
    let (after, took) = rest_kib(pid, before + REST_KIB);
    println!("spray of flows: {before} kB before, {peak} kB at most, {after} kB after {took:?}");
    assert!(peak < MOST_KIB, "{peak} kB");
    assert!(after <= before + REST_KIB, "{after} kB, {before} kB before");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_daemon_gives_back_what_a_scan_cost_it() {
    let cluster = Cluster::new();
    let pid = cluster.world.pid("lighthouse").into();
    // Memory used only by the start is freed after two seconds.
    thread::sleep(Duration::from_secs(4));
    let before = private_kib(pid);
    let namespace = cluster.world.namespace_of("control");
    let peak = peak_kib(pid, || send_to_all(&namespace, SCAN, nobody()));
    let (after, took) = rest_kib(pid, before + REST_OF_HOST_KIB);
    println!("scan by a host: {before} kB before, {peak} kB at most, {after} kB after {took:?}");
    assert!(peak < MOST_KIB, "{peak} kB");
    assert!(after <= before + REST_OF_HOST_KIB, "{after} kB, {before} kB before");
}

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn a_scan_by_a_program_of_a_host_costs_its_daemon_as_little() {
    const MESH: Mesh<'_> = Mesh { members: &["l", "a"], network: [10, 42], interval: 10 };
    let mut world = World::new();
    world.certify(&["ca", "-name", "scanned"]);
    let lighthouse = world.host("l");
    for name in MESH.members {
        if *name != "l" {
            world.host(name);
        }
        world.certify(&["sign", "-name", name, "-networks", &format!("{}/16", MESH.overlay(name))]);
        MESH.configure(&world, name, lighthouse.into(), "");
        let config = world.dir().join(format!("{name}.yml")).display().to_string();
        world.start(name, &binary("nebula"), &["-config", &config]);
    }
    // Unlike a lighthouse it asks for each address, and keeps what it asked.
    world.ping("a", &MESH.overlay("l").to_string(), SOON);
    thread::sleep(Duration::from_secs(4));
    let pid = world.pid("a").into();
    let before = private_kib(pid);
    let namespace = world.namespace_of("a");
    let peak = peak_kib(pid, || send_to_all(&namespace, SCAN, nobody()));
    world.ping("a", &MESH.overlay("l").to_string(), SOON);
    let (after, took) = rest_kib(pid, before + REST_OF_HOST_KIB);
    println!("scan by a program of a host: {before} kB before, {peak} kB at most, {after} kB after {took:?}");
    assert!(peak < MOST_KIB, "{peak} kB");
    assert!(after <= before + REST_OF_HOST_KIB, "{after} kB, {before} kB before");
}

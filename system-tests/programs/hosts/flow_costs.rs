//! What flow records cost a tunnel, turn by turn with and without them: speed and processor time of two daemons, and
//! the memory of instances whose rings are full.
//!
//! `FLOW_ROUNDS` (5) rounds of `FLOW_COST_SECONDS` (4) each way measure the speed; bars are asserted with programs of a
//! release build. That of the speed may be exceeded `COST_SLACK` (2) times.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use std::fs;
use std::io::{Read, Write};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nebula_cni_contract::flow_records::{FlowRecords, read_answer, request};
use serde_json::{Value, json};

use super::flow_records::{ctl, overlay, start};
use crate::world::chaos::number;
use crate::world::cluster::{Cluster, Node};
use crate::world::cost::{cpu_ticks, is_release, memory_kib, quantile, slack};
use crate::world::{World, enter};

/// Of the speed, in percent.
const SLOWER: f64 = 3.0;
/// Private memory of an instance.
const MORE_KIB: f64 = 64.0;
const SOON: Duration = Duration::from_secs(20);
const RULES: &str = "[{port: any, proto: any, host: any}]";

/// With records, or without.
#[derive(Default)]
struct Way {
    gbps: Vec<f64>,
    /// Processor time of both daemons, in seconds per GB.
    cpu: Vec<f64>,
}

#[test]
#[ignore = "needs root, network namespaces, iperf3 and a release build; prints figures"]
fn one_stream_is_as_fast_with_records_as_without() {
    let mut world = World::new();
    let [_, at_b] = ["a", "b"].map(|host| world.host(host));
    world.certify(&["ca", "-name", "costs"]);
    for host in ["a", "b"] {
        world.certify(&["sign", "-name", host, "-networks", &format!("{}/24", overlay(host))]);
    }
    start(&mut world, "b", "", RULES);
    start(&mut world, "a", &format!("\"{}\": [\"{at_b}:4242\"]", overlay("b")), RULES);
    world.ping("a", &overlay("b"), SOON);
    world.start_in("iperf3", "b", Path::new("iperf3"), &["-s"]);
    let configs =
        ["a", "b"].map(|host| fs::read_to_string(world.dir().join(format!("{host}.yml"))).expect("a configuration"));
    let mut ways = [Way::default(), Way::default()];
    // The first run finds caches and buffers small.
    measure(&world, &mut Way::default());
    for round in 0..number("FLOW_ROUNDS", 5) {
        for n in [round % 2, 1 - round % 2] {
            switch(&world, &configs, n == 0);
            measure(&world, &mut ways[n as usize]);
        }
    }
    let [with, without] = &ways;
    let ratios =
        |of: fn(&Way) -> &Vec<f64>| -> Vec<f64> { of(with).iter().zip(of(without)).map(|(a, b)| a / b).collect() };
    let [speed, cpu] =
        [ratios(|way| &way.gbps), ratios(|way| &way.cpu)].map(|ratios| (quantile(&ratios, 0.5) - 1.0) * 100.0);
    println!("\n| one TCP stream between two daemons | Gbit/s | CPU s per GB |\n| --- | ---: | ---: |");
    for (title, way) in [("with records", with), ("without", without)] {
        println!("| {title} | {:.3} | {:.3} |", quantile(&way.gbps, 0.5), quantile(&way.cpu, 0.5));
    }
    println!("| median of the rounds' differences | {speed:+.1} % | {cpu:+.1} % |\n");
    for (title, way) in [("with records", with), ("without", without)] {
        println!("- {title}: {:.2?} Gbit/s, {:.2?} CPU s per GB", way.gbps, way.cpu);
    }
    println!("load average {}", fs::read_to_string("/proc/loadavg").expect("/proc").trim());
    if is_release() {
        assert!(speed >= -SLOWER * slack(), "{speed} %");
        assert!(cpu <= SLOWER * slack(), "{cpu} % more processor time");
    }
}

/// Turns records on or off at both ends, while the daemons run.
fn switch(world: &World, configs: &[String; 2], is_on: bool) {
    for (host, config) in ["a", "b"].into_iter().zip(configs) {
        world.write(&format!("{host}.yml"), &format!("{config}flows: {{records: {is_on}}}\n"));
        ctl(world, host, &["reload"]);
        let until = Instant::now() + SOON;
        while ctl(world, host, &["flows"]).contains("flows are not recorded here") == is_on {
            assert!(Instant::now() < until, "{}", world.log(host));
            thread::sleep(Duration::from_millis(50));
        }
    }
}

fn measure(world: &World, way: &mut Way) {
    let pids = ["a", "b"].map(|host| u64::from(world.pid(host)));
    let (seconds, address) = (number("FLOW_COST_SECONDS", 4).to_string(), overlay("b"));
    let until = Instant::now() + SOON;
    let (sum, spent) = loop {
        let before = cpu_ticks(&pids);
        let said = world.exec("a", &["timeout", "60", "iperf3", "--json", "-c", &address, "-t", &seconds]).stdout;
        let spent = cpu_ticks(&pids) - before;
        let said: Value = serde_json::from_slice(&said).unwrap_or_default();
        // The server may not have ended the run before.
        if said["error"].is_null() && said["end"]["sum_received"]["bytes"].as_u64() > Some(0) {
            break (said["end"]["sum_received"].clone(), spent);
        }
        assert!(Instant::now() < until, "{said}\n{}", world.all_logs());
        thread::sleep(Duration::from_millis(200));
    };
    let number = |key: &str| sum[key].as_f64().expect("a number");
    way.gbps.push(number("bits_per_second") / 1e9);
    way.cpu.push(spent as f64 / 100.0 / (number("bytes") / 1e9));
}

const PODS: usize = 4;
/// Of refused packets: more than the ring of an instance has places.
const KINDS: u16 = 400;
/// Flows that go on.
const FLOWS: u16 = 20;
const ALLOWED: u16 = 2000;
const REFUSED: u16 = 3000;

#[test]
#[ignore = "needs root, network namespaces and a release build; prints figures"]
fn a_full_ring_costs_an_instance_little_memory() {
    let mut cluster = Cluster::new();
    let mut nodes = ["n1", "n2"].map(|name| cluster.node(name, "1.0.0"));
    let other = &nodes[1];
    other.add_pods(&mut cluster.world, &["peer"]);
    let peer = other.overlay("peer");
    let pods: Vec<(String, bool)> =
        (0..PODS).flat_map(|n| [(format!("with{n}"), true), (format!("without{n}"), false)]).collect();
    let node = &mut nodes[0];
    for (pod, is_on) in &pods {
        let nebula = &mut node.conf["plugins"][1]["nebula"];
        nebula["flows"] = json!({ "records": is_on });
        let last = ALLOWED + FLOWS;
        nebula["firewall"]["outbound"] = json!([{ "port": "any", "proto": "icmp", "host": "any" },
            { "port": format!("{ALLOWED}-{last}"), "proto": "udp", "host": "any" }]);
        node.add_pods(&mut cluster.world, &[pod]);
        cluster.world.ping(pod, &peer, SOON);
    }
    let stop = AtomicBool::new(false);
    let memory = thread::scope(|scope| {
        for (pod, _) in &pods {
            let (namespace, peer, stop) = (cluster.world.namespace_of(pod), &peer, &stop);
            scope.spawn(move || speak(&namespace, peer, stop));
        }
        // All kinds were refused, and what the start took was given back.
        thread::sleep(Duration::from_secs(8));
        let pids: Vec<u64> = pods.iter().map(|(pod, _)| node.status(pod)["pid"].as_u64().expect("a pid")).collect();
        let mut samples = vec![Vec::new(); pods.len()];
        for _ in 0..20 {
            for (pid, samples) in pids.iter().zip(&mut samples) {
                samples.push(memory_kib(*pid, "Private_"));
            }
            thread::sleep(Duration::from_millis(200));
        }
        stop.store(true, Ordering::Relaxed);
        samples.iter().map(|samples| quantile(samples, 0.5)).collect::<Vec<_>>()
    });
    for (pod, is_on) in &pods {
        let answer = records(node, pod);
        assert_eq!(answer.is_on, *is_on, "{pod}");
        assert_eq!(answer.records.len() > 180, *is_on, "{pod}: {} records", answer.records.len());
    }
    let of = |wanted: bool| -> Vec<f64> {
        pods.iter().zip(&memory).filter(|((_, is_on), _)| *is_on == wanted).map(|(_, kib)| *kib).collect()
    };
    let (with, without) = (of(true), of(false));
    let more = quantile(&with, 0.5) - quantile(&without, 0.5);
    println!(
        "\n| private memory of an instance, {FLOWS} flows and refused packets of {KINDS} kinds | KiB |\n| --- | ---: |"
    );
    println!("| ring of {} records | {:.0} |", records(node, &pods[0].0).records.len(), quantile(&with, 0.5));
    println!("| without records | {:.0} |\n| more | {more:.0} |\n", quantile(&without, 0.5));
    println!("- with: {with:.0?}\n- without: {without:.0?}");
    assert!(!is_release() || more <= MORE_KIB, "{more} KiB");
}

/// Sends to all ports, those that the pod's rules allow and those that they refuse.
fn speak(namespace: &str, to: &str, stop: &AtomicBool) {
    enter(namespace);
    let sockets: Vec<_> = (0..FLOWS).map(|_| UdpSocket::bind("0.0.0.0:0").expect("a socket")).collect();
    while !stop.load(Ordering::Relaxed) {
        for (port, socket) in (ALLOWED..).zip(&sockets) {
            let _ = socket.send_to(&[7; 1000], (to, port));
        }
        for (n, port) in (REFUSED..REFUSED + KINDS).enumerate() {
            let _ = sockets[0].send_to(&[7; 100], (to, port));
            if n % 20 == 19 {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

fn records(node: &Node, pod: &str) -> FlowRecords {
    let mut stream = UnixStream::connect(node.status_socket(pod)).expect("an instance");
    stream.write_all(request(0).as_bytes()).expect("it is asked");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("it answers");
    read_answer(&answer).expect("records")
}

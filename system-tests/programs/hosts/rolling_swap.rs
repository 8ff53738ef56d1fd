//! A live network of six Go nodes in which one node after another is replaced by our `nebula` with the same files, and
//! back.
//!
//! Every TCP connection that survives a restart of a node with its own Go must survive the swaps too. The outage caused
//! by each restart is printed as a table.
//!
//! `l` is the lighthouse, `r` the relay; `a` and `b` have no route to each other and use the relay; `c` and `d` run
//! older releases.

#![allow(clippy::disallowed_methods, reason = "these tests watch real processes on a real clock")]

use crate::world;

use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use world::mesh::Mesh;
use world::peers::{go, ours};
use world::traffic::Flow;
use world::{World, run};

const SOON: Duration = Duration::from_secs(30);
/// A connection that is silent for this long after a swap is given up.
const GIVE_UP: Duration = Duration::from_secs(45);

/// Name, release, and description.
const NODES: [(&str, &str, &str); 6] = [
    ("l", "sid", "lighthouse, 1.11.0"),
    ("r", "sid", "relay, 1.11.0"),
    ("a", "sid", "end of the relay, 1.11.0"),
    ("b", "sid", "other end, 1.11.0"),
    ("c", "trixie", "1.9.3"),
    ("d", "bookworm", "1.6.1"),
];
const MESH: Mesh<'_> = Mesh { members: &["l", "r", "a", "b", "c", "d"], network: [10, 77], interval: 2 };

const FLOWS: [(&str, &str); 8] =
    [("a", "b"), ("c", "d"), ("a", "c"), ("d", "b"), ("c", "l"), ("d", "r"), ("r", "a"), ("l", "b")];

#[derive(Clone, Copy, PartialEq)]
enum Maker {
    Ours,
    Go,
}

use Maker::{Go, Ours};

struct Site {
    flows: Vec<Flow>,
    world: World,
}

/// How the restart of one node affected the flows.
struct Outcome {
    survivors: Vec<bool>,
    tcp: Duration,
    udp: Duration,
}

impl Site {
    fn new() -> Self {
        let mut world = World::new();
        let underlay = NODES.map(|(name, ..)| IpAddr::V4(world.host(name)));
        for (end, other) in [("a", underlay[3]), ("b", underlay[2])] {
            run("ip", &["-n", &world.namespace_of(end), "route", "add", "blackhole", &other.to_string()]);
        }
        world.certify(&["ca", "-name", "swap", "-version", "1"]);
        for (name, ..) in NODES {
            world.certify(&["sign", "-name", name, "-networks", &format!("{}/24", MESH.overlay(name))]);
            configure(&world, name, underlay[0]);
        }
        let mut site = Self { world, flows: Vec::new() };
        for (name, ..) in NODES {
            site.start(name, Go);
        }
        site.settle();
        site.flows = FLOWS.map(|(from, to)| site.flow(from, to)).into();
        site
    }

    fn flow(&self, from: &str, to: &str) -> Flow {
        self.world.ping(from, &MESH.overlay(to).to_string(), SOON);
        Flow::start(&self.world, from, to, MESH.overlay(to))
    }

    fn start(&mut self, name: &str, maker: Maker) {
        let (_, suite, _) = NODES.into_iter().find(|(node, ..)| *node == name).expect("a known node");
        let program = if maker == Ours { ours() } else { go("nebula", suite) };
        let config = self.world.dir().join(format!("{name}.yml")).display().to_string();
        self.world.start(name, &program, &["-config", &config]);
    }

    /// Waits until every node has reported its endpoints to the lighthouse.
    fn settle(&self) {
        for (name, ..) in &NODES[1..] {
            self.world.ping(name, &MESH.overlay("l").to_string(), SOON);
        }
    }

    /// Restarts `name` as a service manager does, and waits until every flow has recovered or is lost. Lost ones are
    /// restarted.
    fn swap(&mut self, name: &str, to: Maker) -> Outcome {
        self.flows.iter().for_each(Flow::watch);
        self.world.stop(name, Signal::SIGTERM);
        self.start(name, to);
        self.world.ping(name, &MESH.overlay(if name == "l" { "c" } else { "l" }).to_string(), SOON);
        let before: Vec<_> = self.flows.iter().map(Flow::answers).collect();
        let goes_on = |(flow, (tcp, udp)): (&Flow, &(u64, u64))| {
            let now = flow.answers();
            now.0 >= tcp + 20 && now.1 >= udp + 20
        };
        let end = Instant::now() + GIVE_UP;
        while Instant::now() < end && !self.flows.iter().zip(&before).all(goes_on) {
            thread::sleep(Duration::from_millis(20));
        }
        let survivors: Vec<_> =
            self.flows.iter().zip(&before).map(|both| both.0.broken().is_none() && goes_on(both)).collect();
        let longest = |silence: fn(&Flow) -> Duration| {
            self.flows.iter().zip(&survivors).filter(|(_, lives)| **lives).map(|(flow, _)| silence(flow)).max()
        };
        let (tcp, udp) = (longest(|flow| flow.silence().0), longest(|flow| flow.silence().1));
        self.settle();
        for (at, (from, to)) in FLOWS.into_iter().enumerate().filter(|(at, _)| !survivors[*at]) {
            self.flows[at] = self.flow(from, to);
        }
        Outcome { survivors, tcp: tcp.unwrap_or_default(), udp: udp.unwrap_or_default() }
    }
}

fn configure(world: &World, name: &str, lighthouse: IpAddr) {
    let relay = match name {
        "r" => "am_relay: true".to_owned(),
        "a" | "b" => format!("relays: [{}]", MESH.overlay("r")),
        _ => String::new(),
    };
    MESH.configure(world, name, lighthouse, &format!("relay: {{{relay}}}\npunchy: {{punch: true}}\n"));
}

/// How long each restart interrupted packets.
struct Table(Vec<String>);

impl Table {
    fn new() -> Self {
        Self(vec![format!(
            "{:<30}{:<14}{:>12}{:>14}{:>12}",
            "node", "swap", "connections", "UDP away, s", "TCP away, s"
        )])
    }

    fn add(&mut self, name: &str, swap: &str, outcome: &Outcome) {
        let (_, _, what) = NODES.into_iter().find(|(node, ..)| *node == name).expect("a known node");
        let alive = outcome.survivors.iter().filter(|lives| **lives).count();
        self.0.push(format!(
            "{:<30}{swap:<14}{:>12}{:>14.2}{:>12.2}",
            format!("{name} ({what})"),
            format!("{alive}/{}", FLOWS.len()),
            outcome.udp.as_secs_f64(),
            outcome.tcp.as_secs_f64(),
        ));
    }

    fn print(&self) {
        eprintln!("\n{}", self.0.join("\n"));
    }
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn tcp_connections_survive_every_swap_that_they_survive_from_go_to_go() {
    let mut site = Site::new();
    let mut table = Table::new();
    let mut lost = Vec::new();
    for (name, ..) in NODES {
        let baseline = site.swap(name, Go);
        table.add(name, "Go to Go", &baseline);
        for (swap, to) in [("Go to ours", Ours), ("ours to Go", Go)] {
            let outcome = site.swap(name, to);
            table.add(name, swap, &outcome);
            for (at, (from, to)) in FLOWS.iter().enumerate() {
                if baseline.survivors[at] && !outcome.survivors[at] {
                    lost.push(format!("{from} -> {to} when {name} went {swap}"));
                }
            }
        }
    }
    table.print();
    assert!(lost.is_empty(), "lost: {lost:#?}\n{}", site.world.all_logs());
}

#[test]
#[ignore = "needs root, network namespaces and the Go peers in target/peers"]
fn tcp_connections_survive_that_node_after_node_becomes_ours_and_is_restarted() {
    let mut site = Site::new();
    let mut table = Table::new();
    let mut lost = Vec::new();
    // The ends of the relayed tunnel come before the relay, because they are the ones that find another path.
    for swap in ["Go to ours", "ours to ours"] {
        for name in ["l", "c", "d", "a", "b", "r"] {
            let outcome = site.swap(name, Ours);
            table.add(name, swap, &outcome);
            if outcome.survivors.contains(&false) {
                lost.push(format!("{:?} when {name} went {swap}", outcome.survivors));
            }
        }
    }
    table.print();
    assert!(lost.is_empty(), "lost: {lost:#?}\n{}", site.world.all_logs());
}

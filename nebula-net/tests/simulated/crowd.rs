//! A thousand nodes with a stack each, in one process.

#![allow(clippy::disallowed_methods, reason = "it prints how long the simulation takes")]

use std::time::{Duration, Instant};

use nebula_core::simulator::{HostSpec, SimNet};
use nebula_net::stack::StackOptions;

use crate::world::World;

const SECOND: Duration = Duration::from_secs(1);
const NODES: usize = 1000;

fn address(node: usize) -> String {
    format!("10.42.{}.{}", 1 + node / 250, 1 + node % 250)
}

/// They know a lighthouse and nobody else.
#[test]
fn a_thousand_nodes_find_each_other_and_stream() {
    let began = Instant::now();
    let mut net = SimNet::new(20);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let before = resident();
    let hosts: Vec<_> = (0..NODES)
        .map(|node| {
            let spec = HostSpec::new(&format!("node-{node}")).networks(&[&format!("{}/16", address(node))]);
            net.add(spec.lighthouse(lighthouse))
        })
        .collect();
    let mut world = World::new(net);
    for (node, host) in hosts.into_iter().enumerate() {
        world.node(host, &[&address(node)], StackOptions::default());
    }
    // All report to the lighthouse.
    world.run_for(5 * SECOND);
    let idle = resident().saturating_sub(before) / NODES;
    let (made, began) = (began.elapsed(), Instant::now());
    for node in 0..NODES {
        for step in [1, 37, 411] {
            let other = (node + step) % NODES;
            world.dial(node, other, &address(other), [20_000, 2_000]);
        }
    }
    let took = world.expect_all(60 * SECOND);
    assert!(took < 5 * SECOND, "{took:?}");
    println!(
        "{NODES} nodes made in {made:?}, {idle} KiB each; {} streams in {took:?}, simulated in {:?}, {} KiB a node then",
        3 * NODES,
        began.elapsed(),
        resident().saturating_sub(before) / NODES
    );
}

/// Resident memory in KiB, also of what other tests of this process hold.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

//! The simulation itself.

use std::time::Duration;

use nebula_core::simulator::{HostSpec, Link, NatBehaviour, SimNet, Step};

/// Every datagram of a run: who sent what to whom, and when.
fn run(seed: u64) -> Vec<Step> {
    let mut net = SimNet::new(seed);
    net.set_post_quantum(nebula_core::PostQuantum::Off);
    net.set_link(Link { loss: 10, duplicate: 10, jitter: Duration::from_millis(30), ..Link::default() });
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let nat = net.add_nat(NatBehaviour::home());
    let a = net.add(HostSpec::new("a").behind(nat).lighthouse(lighthouse));
    let b = net.add(HostSpec::new("b").lighthouse(lighthouse));
    net.run_for(Duration::from_secs(2));
    net.ping(a, b).until_delivered();
    net.run_for(Duration::from_secs(60));
    net.flow().cloned().collect()
}

#[test]
fn the_same_seed_gives_the_same_datagrams_byte_for_byte() {
    let first = run(11);
    assert!(first.len() > 20);
    assert!(first == run(11), "two runs of one seed differ");
    assert!(first != run(12));
}

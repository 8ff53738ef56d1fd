//! A network of three hosts on one virtual clock: a laptop behind a NAT finds a server through a lighthouse.
//!
//! ```sh
//! cargo run --example network --features simulator
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

use std::time::Duration;

use nebula_core::simulator::{HostSpec, NatBehaviour, SimNet};

fn main() {
    let mut net = SimNet::new(7);
    let lighthouse = net.add(HostSpec::new("lighthouse").am_lighthouse());
    let home = net.add_nat(NatBehaviour::home());
    let server = net.add(HostSpec::new("server").lighthouse(lighthouse));
    let laptop = net.add(HostSpec::new("laptop").lighthouse(lighthouse).behind(home));

    // Both hosts tell the lighthouse where they are.
    net.run_for(Duration::from_secs(1));
    let took = net.ping(laptop, server).until_delivered();

    println!("{}", net.diagram());
    println!("the first packet took {took:?}; {:?} of virtual time passed", net.elapsed());
    println!("the server sees the laptop at {:?}", net.endpoint_of(server, laptop));
}

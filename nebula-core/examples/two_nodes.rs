//! Two nodes without sockets, threads or a clock: the program carries the datagrams itself.
//!
//! ```sh
//! cargo run --example two_nodes
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use std::collections::VecDeque;
use std::error::Error;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::{Authority, udp_packet};
use nebula_core::forward::Offload;
use nebula_core::{Engine, Output, Seed, WallClock};

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    let now = Instant::now();
    let clock = WallClock { at: now, unix: Duration::from_secs(1_800_000_000) };
    let authority = Authority::new("example CA")?;
    let underlay: [SocketAddr; 2] = ["192.0.2.1:4242".parse()?, "192.0.2.2:4242".parse()?];
    let mut engines = Vec::new();
    for (own, peer) in [(0, 1), (1, 0)] {
        let config = authority.config(own + 1, (peer + 1, underlay[usize::from(peer)]))?;
        engines.push((underlay[usize::from(own)], Engine::new(config, clock, Seed::from_os()?)?));
    }

    let mut wire = VecDeque::new();
    let (at, engine) = &mut engines[0];
    // Without a tunnel the packet waits in the node, which starts a handshake.
    let output = engine.send(now, &mut udp_packet(1, 2, b"hello"), Offload::default());
    carry(*at, output, &mut wire);
    while let Some((from, to, mut datagram)) = wire.pop_front() {
        println!("{from} -> {to}: {} bytes", datagram.len());
        let Some((at, engine)) = engines.iter_mut().find(|(at, _)| *at == to) else { continue };
        let output = engine.receive(now, from, &mut datagram);
        for packet in output.packets() {
            println!("{to} received: {}", String::from_utf8_lossy(&packet.to_vec()[28..]));
        }
        carry(*at, output, &mut wire);
    }
    Ok(())
}

/// Puts the datagrams of a host onto the wire. A program that runs for longer calls [`Engine::timeout`], too.
fn carry(from: SocketAddr, output: Output<'_>, wire: &mut VecDeque<(SocketAddr, SocketAddr, Vec<u8>)>) {
    for event in output.events() {
        println!("{from}: {event:?}");
    }
    wire.extend(output.datagrams().map(|datagram| (from, datagram.to, datagram.bytes.to_vec())));
}

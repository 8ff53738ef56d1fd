//! Two nodes without sockets, threads or a clock: the program carries the datagrams itself.
//!
//! ```sh
//! cargo run --example two_nodes
//! ```

#![allow(clippy::print_stdout, reason = "an example speaks to people")]

mod common;

use std::collections::VecDeque;
use std::error::Error;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::Authority;
use nebula_core::firewall::Rule;
use nebula_core::forward::{Offload, Received};
use nebula_core::{Config, Forwarder, Lane, Node, Transmit, Verdict, WallClock};

const OVERLAY: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 42, 0, 1), Ipv4Addr::new(10, 42, 0, 2)];

/// One node: the control plane, the forwarding plane, and one lane, which belongs to the thread that uses it.
struct Host {
    underlay: SocketAddr,
    node: Node,
    forwarder: Arc<Forwarder>,
    lane: Lane,
}

impl Host {
    /// Sends an overlay packet. Without a tunnel the lane punts it to the control plane, which starts a handshake.
    fn send(&mut self, now: Instant, packet: &mut [u8]) -> Vec<Transmit> {
        if let Verdict::Drop(reason) = self.forwarder.outbound(&mut self.lane, now, packet, Offload::default()) {
            println!("dropped: {reason:?}");
        }
        self.finish(now)
    }

    /// Takes a datagram in. Returns the overlay packets that were in it, and the datagrams to send.
    fn receive(&mut self, now: Instant, from: SocketAddr, mut datagram: Vec<u8>) -> (Vec<Vec<u8>>, Vec<Transmit>) {
        let received = Received { from, range: 0..datagram.len(), segment_size: datagram.len() };
        self.forwarder.inbound(&mut self.lane, now, &mut datagram, &[received]);
        let packets = self.lane.deliveries().iter().map(|delivery| {
            let pieces = &self.lane.pieces()[delivery.pieces.clone()];
            let payload = pieces.iter().flat_map(|piece| &datagram[piece.clone()]);
            self.lane.headers()[delivery.header.clone()].iter().chain(payload).copied().collect()
        });
        (packets.collect(), self.finish(now))
    }

    /// What has to be done after every call of the forwarding plane: hand its punts to the control plane, and send what
    /// both planes want to send.
    fn finish(&mut self, now: Instant) -> Vec<Transmit> {
        let punts: Vec<_> = self.lane.take_punts().collect();
        punts.into_iter().for_each(|punt| self.node.handle_punt(now, punt));
        let mut transmits = Vec::new();
        for run in self.lane.runs() {
            for datagram in self.lane.arena()[run.range.clone()].chunks(run.segment_size) {
                transmits.push(Transmit { to: run.to, datagram: datagram.to_vec() });
            }
        }
        self.lane.clear();
        transmits.extend(std::iter::from_fn(|| self.node.poll_transmit()));
        while let Some(event) = self.node.poll_event() {
            println!("{}: {event:?}", self.underlay);
        }
        // A program that runs for longer calls `handle_timeout` when `poll_timeout` says so.
        transmits
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    let now = Instant::now();
    let wall = WallClock { at: now, unix: Duration::from_secs(1_800_000_000) };
    let authority = Authority::new("example CA")?;
    let underlay: [SocketAddr; 2] = ["192.0.2.1:4242".parse()?, "192.0.2.2:4242".parse()?];
    let mut hosts = Vec::new();
    for (own, peer) in [(0, 1), (1, 0)] {
        let identity = authority.identity(["a", "b"][own], &format!("{}/16", OVERLAY[own]))?;
        let mut config = Config::new(identity, authority.trust()?);
        config.static_hosts.insert(IpAddr::V4(OVERLAY[peer]), vec![underlay[peer]]);
        config.firewall.outbound.push(Rule::any());
        config.firewall.inbound.push(Rule::any());
        // A real program takes the seed from the operating system.
        let (node, forwarder) = Node::new(config, now, wall, [own as u8 + 1; 32]);
        let lane = forwarder.lane();
        hosts.push(Host { underlay: underlay[own], node, forwarder, lane });
    }

    let mut wire = VecDeque::new();
    let sent = hosts[0].send(now, &mut udp_packet(b"hello"));
    wire.extend(sent.into_iter().map(|transmit| (underlay[0], transmit)));
    while let Some((from, Transmit { to, datagram })) = wire.pop_front() {
        println!("{from} -> {to}: {} bytes", datagram.len());
        let Some(host) = hosts.iter_mut().find(|host| host.underlay == to) else { continue };
        let (packets, answers) = host.receive(now, from, datagram);
        for packet in packets {
            println!("{to} received: {}", String::from_utf8_lossy(&packet[28..]));
        }
        wire.extend(answers.into_iter().map(|transmit| (to, transmit)));
    }
    Ok(())
}

/// An IPv4 packet from the first host to the second. The kernel would fill in the checksums.
fn udp_packet(payload: &[u8]) -> Vec<u8> {
    let udp_length = 8 + payload.len() as u16;
    let mut packet = vec![0x45, 0];
    packet.extend((20 + udp_length).to_be_bytes());
    packet.extend([0, 0, 0, 0, 64, 17, 0, 0]);
    packet.extend(OVERLAY[0].octets());
    packet.extend(OVERLAY[1].octets());
    for field in [1000, 2000, udp_length, 0] {
        packet.extend(field.to_be_bytes());
    }
    packet.extend(payload);
    packet
}

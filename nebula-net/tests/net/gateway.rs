//! A gateway that floods a peer.

use std::net::{IpAddr, UdpSocket};
use std::time::{Duration, Instant, SystemTime};

use nebula_core::forward::Offload;
use nebula_core::forward::checksum::{Sum, finish_ipv4_header};
use nebula_core::{Config, Engine, Output, Seed, WallClock};

/// A gateway without a stack of its own: it sends SYNs of hosts in the network behind it, and never answers.
pub(crate) struct Gateway {
    engine: Engine,
    socket: UdpSocket,
}

#[allow(clippy::disallowed_methods, reason = "it is a program of its own, which reads the clock")]
impl Gateway {
    pub(crate) fn start(socket: UdpSocket, config: Config) -> Self {
        socket.set_nonblocking(true).expect("a socket");
        let clock = WallClock::new(Instant::now(), SystemTime::now());
        let engine = Engine::new(config, clock, Seed::from_os().expect("random bytes")).expect("it starts");
        Self { engine, socket }
    }

    /// Waits until there is a tunnel.
    pub(crate) fn connect(&mut self, peer: IpAddr) {
        send_out(&self.socket, self.engine.connect(Instant::now(), peer));
        let mut datagram = [0; 2000];
        while self.engine.certificate(peer).is_none() {
            if let Ok((len, from)) = self.socket.recv_from(&mut datagram) {
                send_out(&self.socket, self.engine.receive(Instant::now(), from, &mut datagram[..len]));
            }
            send_out(&self.socket, self.engine.timeout(Instant::now()));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Sends a datagram of a host behind it to port 53.
    pub(crate) fn datagram(&mut self, from: [u8; 4], to: [u8; 4]) {
        let mut packet = vec![0x45, 0, 0, 29, 0, 0, 0x40, 0, 64, 17, 0, 0];
        packet.extend(from);
        packet.extend(to);
        // Without a checksum.
        packet.extend([0x9c, 0x40, 0, 53, 0, 9, 0, 0, b'x']);
        finish_ipv4_header(&mut packet[..20]);
        send_out(&self.socket, self.engine.send(Instant::now(), &mut packet, Offload::default()));
    }

    /// Sends a SYN of a host behind it to port 7.
    pub(crate) fn syn(&mut self, from: [u8; 4], port: u16, to: [u8; 4]) {
        let mut packet = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
        packet.extend(from);
        packet.extend(to);
        packet.extend(port.to_be_bytes());
        packet.extend([0, 7, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0xff, 0xff, 0, 0, 0, 0]);
        finish_ipv4_header(&mut packet[..20]);
        let sum = Sum::default().add_pseudo_header(&packet[12..20], 6, 20).partial();
        packet[36..38].copy_from_slice(&sum.to_be_bytes());
        let offload = Offload { segment: None, checksum: Some((20, 16)) };
        send_out(&self.socket, self.engine.send(Instant::now(), &mut packet, offload));
    }
}

fn send_out(socket: &UdpSocket, output: Output<'_>) {
    for datagram in output.datagrams() {
        socket.send_to(datagram.bytes, datagram.to).expect("loopback takes it");
    }
}

//! Throughput of a tunnel through the real driver: its threads, its UDP sockets on loopback, and a socket pair in place
//! of each overlay device. One thread writes packets at one end and reads them at the other.

#![allow(clippy::disallowed_methods, reason = "a tunnel of real threads runs on a real clock")]

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nebula_benches::{NO_GO, Stream, identity, is_smoke_test, note, tcp_super_packet, udp};
use nebula_cert::Curve;
use nebula_core::Config;
use nebula_core::config::Cipher;
use nebula_core::firewall::Rule;
use nebula_core::io::{Driver, Options, SocketOptions, Tun, UdpSocket};
use nebula_core::simulator::Authority;
use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt};

/// Maximum bytes and packets in flight: enough to keep every thread busy, and far too few to fill the socket's buffer.
const WINDOW: usize = 1 << 20;
const WINDOW_PACKETS: usize = 1024;
/// Milliseconds without a delivery after which the packets in flight count as lost.
const LOST_AFTER: u16 = 200;
const DEVICE_BUFFER: usize = 4 << 20;
const VNET_HEADER: usize = 10;

struct Ends {
    /// Declared first, so that the drivers are dropped before their devices.
    _drivers: [Driver; 2],
    /// The device that packets are written to, and the one that they are read from.
    devices: [OwnedFd; 2],
    lost: u64,
}

impl Ends {
    fn new(cipher: Cipher) -> Self {
        let authority = Authority::new(Curve::Curve25519);
        let sockets = [0, 1].map(|_| {
            let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            UdpSocket::bind(any_port, 1, &SocketOptions::default()).expect("a socket on loopback")
        });
        let addresses = [&sockets[0], &sockets[1]].map(|sockets| sockets[0].local_addr().expect("a bound socket"));
        let mut devices = Vec::new();
        let mut at = 0..;
        let drivers = sockets.map(|sockets| {
            let at = at.next().expect("two ends");
            let (near, far) =
                socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::empty()).expect("a socket pair");
            for end in [&near, &far] {
                // Without root, take what the system allows.
                if setsockopt(end, sockopt::SndBufForce, &DEVICE_BUFFER).is_err() {
                    setsockopt(end, sockopt::SndBuf, &DEVICE_BUFFER).expect("a buffer");
                }
            }
            devices.push(near);
            let mut config = Config::new(identity(&authority, at + 1), authority.trust());
            config.cipher = cipher;
            config.firewall.inbound = vec![Rule::any()];
            config.firewall.outbound = vec![Rule::any()];
            let peer = Ipv4Addr::new(10, 0, 0, 2 - at as u8).into();
            config.static_hosts = BTreeMap::from([(peer, vec![addresses[1 - at as usize]])]);
            let tun = Tun::from_socket(far).expect("a stand-in for a device");
            let mut options = Options::default();
            (options.advertise_interfaces, options.raise_priority) = (false, true);
            Driver::start(config, Some(tun), sockets, options).expect("a driver")
        });
        let devices = devices.try_into().expect("two ends");
        let ends = Self { devices, _drivers: drivers, lost: 0 };
        let hello = with_vnet_header(&udp(40_000, 53, 36), [0; VNET_HEADER]);
        let begun = Instant::now();
        while !ends.write(&hello) || ends.read(&mut [0; 1 << 12]).is_none() {
            assert!(begun.elapsed() < Duration::from_secs(10), "no tunnel");
        }
        ends
    }

    /// Transfers `count` copies of the packet, each of which delivers `bytes`. Lost packets are counted and sent again.
    fn carry(&mut self, packet: &[u8], bytes: usize, count: u64) {
        let mut buffer = vec![0; 1 << 17];
        let window = WINDOW.min(WINDOW_PACKETS * bytes);
        let (mut left, mut on_the_way) = (count as usize * bytes, 0);
        while left > 0 {
            while on_the_way < window.min(left) && self.write(packet) {
                on_the_way += bytes;
            }
            match self.read(&mut buffer) {
                Some(came) => {
                    left = left.saturating_sub(came);
                    on_the_way = on_the_way.saturating_sub(came);
                }
                None => {
                    self.lost += (on_the_way / bytes) as u64;
                    on_the_way = 0;
                }
            }
        }
    }

    /// Writes a packet; returns false if the device is full.
    fn write(&self, packet: &[u8]) -> bool {
        let mut ready = [PollFd::new(self.devices[0].as_fd(), PollFlags::POLLOUT)];
        poll(&mut ready, 0_u8).is_ok_and(|count| count > 0) && nix::unistd::write(&self.devices[0], packet).is_ok()
    }

    /// Reads the next delivery and returns its payload length; `None` if nothing arrives in time.
    fn read(&self, buffer: &mut [u8]) -> Option<usize> {
        let mut ready = [PollFd::new(self.devices[1].as_fd(), PollFlags::POLLIN)];
        if poll(&mut ready, LOST_AFTER).is_ok_and(|count| count == 0) {
            return None;
        }
        let len = nix::unistd::read(&self.devices[1], buffer).expect("the device of the second end");
        let packet = &buffer[VNET_HEADER..len];
        Some(packet.len() - header_len(packet))
    }
}

/// Length of the IP and transport headers.
fn header_len(packet: &[u8]) -> usize {
    let transport = if packet[9] == 6 { usize::from(packet[32] >> 4) * 4 } else { 8 };
    20 + transport
}

fn with_vnet_header(packet: &[u8], header: [u8; VNET_HEADER]) -> Vec<u8> {
    [&header, packet].concat()
}

/// CPU time of the drivers' threads so far, in nanoseconds.
fn drivers_time() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a list of own threads").flatten();
    let of_driver = tasks.filter_map(|task| {
        let name = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let spent = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        name.starts_with("nebula-").then_some(spent.split(' ').next()?.parse::<u64>().ok()?)
    });
    of_driver.sum()
}

fn tunnel(c: &mut Criterion) {
    let (super_packet, offload) = tcp_super_packet(Stream { port: 40_000, sequence: 1, acknowledgement: 1 }, 1248, 48);
    let segment = offload.segment.expect("a super-packet").size;
    let mut header = [0; VNET_HEADER];
    // The virtio-net header: a checksum to complete and a TCP segment over IPv4 to split, with their sizes and offsets.
    (header[0], header[1]) = (1, 1);
    header[2..4].copy_from_slice(&52_u16.to_ne_bytes());
    header[4..6].copy_from_slice(&segment.to_ne_bytes());
    header[6..8].copy_from_slice(&20_u16.to_ne_bytes());
    header[8..10].copy_from_slice(&16_u16.to_ne_bytes());
    let super_packet = with_vnet_header(&super_packet, header);
    let small = with_vnet_header(&udp(40_000, 53, 36), [0; VNET_HEADER]);
    let large = with_vnet_header(&udp(40_000, 53, 1200), [0; VNET_HEADER]);
    for (name, cipher) in [("aes", Cipher::Aes256Gcm), ("chachapoly", Cipher::ChaCha20Poly1305)] {
        let mut group = c.benchmark_group(format!("tunnel_{name}"));
        let mut ends = Ends::new(cipher);
        for (what, packet) in [("48_segments", &super_packet), ("1228_bytes", &large), ("64_bytes", &small)] {
            let ip = &packet[VNET_HEADER..];
            let bytes = ip.len() - header_len(ip);
            group.throughput(Throughput::Bytes(bytes as u64));
            let (spent, mut moved) = (drivers_time(), 0);
            group.bench_function(what, |bencher| {
                bencher.iter_custom(|iterations| {
                    moved += iterations;
                    let begun = Instant::now();
                    ends.carry(packet, bytes, iterations);
                    begun.elapsed()
                });
            });
            if moved > 0 && !is_smoke_test() {
                let each = (drivers_time() - spent) as f64 / moved as f64;
                note(&format!("tunnel, {name}, {what}, CPU of both drivers"), Some(each), None, NO_GO);
                eprintln!("{:.2} CPU s per GB of payload; {} lost so far", each / bytes as f64, ends.lost);
            }
        }
        group.finish();
    }
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = tunnel);
criterion_main!(benches);

//! Looks for a nonce that is used twice with one key, in all Nebula datagrams on the links of a host.
//!
//! The receiver of a tunnel chooses its index at random, so an index is one key in one direction, and the counter in
//! the header is the nonce: no key is needed to see that two different datagrams have both in common.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use nix::sys::socket::{MsgFlags, recv};

use super::capture::packet_socket;
use super::cluster::links;
use super::{World, enter};

/// What was seen of one index.
type Counters = HashMap<u64, u64>;

/// Records datagrams until it is asked what it saw.
pub struct Nonces {
    stop: Arc<AtomicBool>,
    recorder: JoinHandle<Seen>,
}

/// All datagrams.
#[derive(Debug, Default)]
pub struct Seen {
    /// By the address of the receiver and its index: counters, and the digest of what was sent with each.
    tunnels: BTreeMap<(Ipv4Addr, u32), Counters>,
    /// Datagrams of which another one had the same index and counter.
    pub reused: Vec<String>,
    /// Frames that are longer than a link allows: several datagrams in one, of which the others are not seen.
    pub merged: usize,
}

impl Nonces {
    /// Records what is sent to and from UDP port `port` on the links of `host`. From now on the kernel cuts bursts of
    /// datagrams before the links of `hosts`, because a capture sees a burst as one frame.
    pub fn record(world: &World, host: &str, hosts: &[&str], port: u16) -> Self {
        for name in hosts {
            let namespace = world.namespace_of(name);
            for link in links(&namespace).iter().filter(|link| *link != "lo" && !link.starts_with("neb")) {
                world.run(name, &["ethtool", "-K", link, "tx-udp-segmentation", "off", "gro", "off"]);
            }
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, namespace) = (Arc::clone(&stop), world.namespace_of(host));
        let (ready, started) = std::sync::mpsc::channel();
        let recorder = thread::spawn(move || {
            enter(&namespace);
            let packets = packet_socket();
            ready.send(()).expect("the test waits");
            let (mut seen, mut frame) = (Seen::default(), vec![0; 64 << 10]);
            while !stopped.load(Ordering::Relaxed) {
                if let Ok(len) = recv(packets.as_raw_fd(), &mut frame, MsgFlags::empty()) {
                    seen.packet(&frame[..len], port);
                }
            }
            seen
        });
        started.recv().expect("the recorder runs");
        Self { stop, recorder }
    }

    pub fn finish(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.recorder.join().expect("the recorder goes on")
    }
}

impl Seen {
    /// How many tunnels and how many datagrams were recorded.
    pub fn counts(&self) -> (usize, usize) {
        (self.tunnels.len(), self.tunnels.values().map(HashMap::len).sum())
    }

    fn packet(&mut self, packet: &[u8], port: u16) {
        const PLAIN_IPV4: u8 = 0x45;
        const UDP: u8 = 17;
        if packet.len() < 28 || packet[0] != PLAIN_IPV4 || packet[9] != UDP {
            return;
        }
        let number = |at: usize| u16::from_be_bytes([packet[at], packet[at + 1]]);
        if number(20) != port && number(22) != port {
            return;
        }
        self.merged += usize::from(packet.len() > 1500);
        let to = Ipv4Addr::new(packet[16], packet[17], packet[18], packet[19]);
        self.datagram(to, &packet[28..]);
    }

    fn datagram(&mut self, to: Ipv4Addr, datagram: &[u8]) {
        // Nebula's `header/header.go`: version and type, subtype, reserved, index of the receiver, counter.
        let Some((header, rest)) = datagram.split_at_checked(16) else { return };
        let (kind, subtype) = (header[0] & 0xf, header[1]);
        // Handshakes have keys and counters of their own, and `recv_error` is not encrypted.
        if header[0] >> 4 != 1 || ![MESSAGE, LIGHTHOUSE, TEST, CLOSE_TUNNEL, CONTROL].contains(&kind) {
            return;
        }
        let index = u32::from_be_bytes(header[4..8].try_into().expect("four bytes"));
        let counter = u64::from_be_bytes(header[8..16].try_into().expect("eight bytes"));
        let mut digest = DefaultHasher::new();
        datagram.hash(&mut digest);
        let digest = digest.finish();
        let earlier = self.tunnels.entry((to, index)).or_default().insert(counter, digest);
        if earlier.is_some_and(|earlier| earlier != digest) {
            self.reused.push(format!("type {kind} to {to}, index {index}, counter {counter}"));
        }
        if (kind, subtype) == (MESSAGE, RELAYED) {
            // Without the tag of the relay's tunnel. The key is that of both ends, wherever it passes.
            self.datagram(Ipv4Addr::UNSPECIFIED, &rest[..rest.len().saturating_sub(16)]);
        }
    }
}

const MESSAGE: u8 = 1;
const LIGHTHOUSE: u8 = 3;
const TEST: u8 = 4;
const CLOSE_TUNNEL: u8 = 5;
const CONTROL: u8 = 6;
const RELAYED: u8 = 1;

#[test]
fn a_counter_that_is_used_twice_is_found_and_a_datagram_that_is_seen_twice_is_none() {
    let datagram = |index: u8, counter: u8, body: &[u8]| {
        [&[0x11, 0, 0, 0, 0, 0, 0, index, 0, 0, 0, 0, 0, 0, 0, counter], body].concat()
    };
    let to = Ipv4Addr::new(192, 0, 2, 1);
    let mut seen = Seen::default();
    for (index, counter, body) in [(1, 1, b"a"), (1, 1, b"a"), (1, 2, b"b"), (2, 1, b"b")] {
        seen.datagram(to, &datagram(index, counter, body));
    }
    assert_eq!((seen.counts(), seen.reused.len()), ((2, 3), 0));
    seen.datagram(to, &datagram(1, 2, b"c"));
    assert_eq!(seen.reused, ["type 1 to 192.0.2.1, index 1, counter 2"]);
    let relayed = |counter: u8, inner: &[u8]| {
        let mut outer = datagram(9, counter, &[inner, &[0; 16]].concat());
        outer[1] = RELAYED;
        outer
    };
    seen.datagram(to, &relayed(1, &datagram(5, 1, b"d")));
    seen.datagram(to, &relayed(2, &datagram(5, 1, b"e")));
    assert_eq!(seen.reused.len(), 2, "behind a relay, too");
}

//! A path that loses, delays, duplicates and reorders datagrams, and rebinds as NATs do: each end sees the other at the
//! proxy's address, with ports that change.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, poll};
use nix::sys::socket::{setsockopt, sockopt};

use super::world::enter;

/// Ports on each side. Replies to any of them pass, whichever is in use.
const PORTS: u16 = 16;
/// Time between two rebindings.
const REBIND: Duration = Duration::from_secs(3);
/// Rates per 10,000 datagrams.
const LOST: u64 = 20;
const REPEATED: u64 = 100;
const LATE: u64 = 200;
const LATEST: Duration = Duration::from_millis(4);
/// Maximum number of delayed datagrams.
const WAITING: usize = 4096;
const BUFFER: usize = 4 << 20;

/// Counts what the path did, in both directions.
#[derive(Debug, Default)]
pub(super) struct Deeds {
    pub passed: AtomicU64,
    pub lost: AtomicU64,
    pub repeated: AtomicU64,
    pub late: AtomicU64,
}

/// A running proxy; it stops on drop.
pub(super) struct Proxy {
    pub deeds: Arc<Deeds>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Proxy {
    /// Connects two `ends` through a separate namespace with the given address. Each end finds the other at this
    /// address and at the first port of its side; both endpoints are returned.
    pub(super) fn start(namespace: &str, address: Ipv4Addr, ends: [SocketAddr; 2]) -> (Self, [SocketAddr; 2]) {
        let name = namespace.to_owned();
        let open = thread::spawn(move || {
            enter(&name);
            [5000, 6000].map(|first| (first..first + PORTS).map(|port| open(address, port)).collect::<Vec<_>>())
        });
        let sides = open.join().expect("the proxy's sockets").map(Arc::new);
        let first = [0, 1].map(|side| sides[side][0].local_addr().expect("a bound socket"));
        let (deeds, stop) = (Arc::new(Deeds::default()), Arc::new(AtomicBool::new(false)));
        let threads = [0, 1].map(|side| {
            let path = Path {
                from: ends[side],
                to: ends[1 - side],
                incoming: Arc::clone(&sides[side]),
                outgoing: Arc::clone(&sides[1 - side]),
                begun: Instant::now(),
                waiting: BinaryHeap::new(),
                chance: 0x9e37_79b9_7f4a_7c15 + side as u64,
                deeds: Arc::clone(&deeds),
            };
            let stop = Arc::clone(&stop);
            thread::spawn(move || path.run(&stop))
        });
        (Self { deeds, stop, threads: threads.into() }, first)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn open(address: Ipv4Addr, port: u16) -> UdpSocket {
    let socket = UdpSocket::bind((address, port)).expect("a port of the proxy");
    socket.set_nonblocking(true).expect("a socket that does not wait");
    setsockopt(&socket, sockopt::RcvBufForce, &BUFFER).expect("a large buffer (needs root)");
    setsockopt(&socket, sockopt::SndBufForce, &BUFFER).expect("a large buffer (needs root)");
    socket
}

/// One direction.
struct Path {
    from: SocketAddr,
    to: SocketAddr,
    incoming: Arc<Vec<UdpSocket>>,
    outgoing: Arc<Vec<UdpSocket>>,
    begun: Instant,
    waiting: BinaryHeap<Reverse<(Instant, Vec<u8>)>>,
    chance: u64,
    deeds: Arc<Deeds>,
}

impl Path {
    fn run(mut self, stop: &AtomicBool) {
        let mut buffer = vec![0; 1 << 16];
        let incoming = Arc::clone(&self.incoming);
        while !stop.load(Ordering::Relaxed) {
            let mut ready: Vec<_> = incoming.iter().map(|s| PollFd::new(s.as_fd(), PollFlags::POLLIN)).collect();
            let wait = if self.waiting.is_empty() { 50_u16 } else { 1 };
            // After an interrupt the wait is merely shorter.
            let _ = poll(&mut ready, wait);
            for (socket, ready) in incoming.iter().zip(&ready) {
                if ready.any() == Some(true) {
                    self.take(socket, &mut buffer);
                }
            }
            self.send_due();
        }
    }

    fn take(&mut self, socket: &UdpSocket, buffer: &mut [u8]) {
        // Bounded, because delayed datagrams are due on time.
        for _ in 0..64 {
            match socket.recv_from(buffer) {
                Ok((len, from)) if from == self.from => self.pass(&buffer[..len]),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // An ICMP error about an end that has not started yet.
                Err(_) => {}
            }
        }
    }

    fn pass(&mut self, datagram: &[u8]) {
        let fate = self.draw() % 10_000;
        if fate < LOST {
            self.deeds.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let late = (LOST..LOST + LATE).contains(&fate);
        let repeated = (LOST + LATE..LOST + LATE + REPEATED).contains(&fate);
        if (late || repeated) && self.waiting.len() < WAITING {
            let after = LATEST.mul_f64(self.draw() as f64 / u64::MAX as f64);
            self.waiting.push(Reverse((Instant::now() + after, datagram.to_vec())));
            let deed = if late { &self.deeds.late } else { &self.deeds.repeated };
            deed.fetch_add(1, Ordering::Relaxed);
            if late {
                return;
            }
        }
        self.send(datagram);
    }

    fn send_due(&mut self) {
        let now = Instant::now();
        while self.waiting.peek().is_some_and(|Reverse((due, _))| *due <= now) {
            if let Some(Reverse((_, datagram))) = self.waiting.pop() {
                self.send(&datagram);
            }
        }
    }

    fn send(&self, datagram: &[u8]) {
        let turn = self.begun.elapsed().as_secs() / REBIND.as_secs();
        let socket = &self.outgoing[turn as usize % self.outgoing.len()];
        // A full buffer drops it, as a router would.
        if socket.send_to(datagram, self.to).is_ok() {
            self.deeds.passed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Xorshift: every run with the same datagrams makes the same decisions.
    fn draw(&mut self) -> u64 {
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        self.chance
    }
}

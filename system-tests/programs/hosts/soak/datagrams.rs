//! Streams of UDP datagrams whose contents the receiver can verify byte for byte.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{setsockopt, sockopt};

use super::world::enter;

const BUFFER: usize = 8 << 20;
/// Pause between two bursts.
const PAUSE: Duration = Duration::from_millis(5);
/// Time for datagrams that are still in flight when the sender has ended.
const LINGER: Duration = Duration::from_millis(500);
const NUMBER: usize = 8;

/// Datagrams sent from one namespace to another.
#[derive(Debug, Clone)]
pub(super) struct Stream {
    pub what: &'static str,
    pub from: String,
    pub to: String,
    pub address: IpAddr,
    /// Minimum and maximum payload; with `offload`, all have the maximum.
    pub sizes: [usize; 2],
    /// Datagrams per burst.
    pub burst: usize,
    /// Hand a burst to the kernel as one super-packet.
    pub offload: bool,
}

/// How many datagrams were sent, and how many of them arrived.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tally {
    pub sent: u64,
    pub received: u64,
}

impl Stream {
    /// Sends for `time`. Panics if a datagram arrives twice, or one arrives that was not sent.
    pub(super) fn run(&self, time: Duration) -> Tally {
        let (ready, listening) = sync_channel(1);
        let (done, ended) = sync_channel(1);
        thread::scope(|scope| {
            let receiver = scope.spawn(move || {
                enter(&self.to);
                let socket = UdpSocket::bind((self.address, 0)).expect("bind to the overlay address");
                setsockopt(&socket, sockopt::RcvBufForce, &BUFFER).expect("a large buffer (needs root)");
                socket.set_read_timeout(Some(LINGER)).expect("a timeout");
                ready.send(socket.local_addr().expect("own address")).expect("the sender waits");
                let mut seen = Seen::default();
                let (mut buffer, mut expected) = (vec![0; 1 << 16], Vec::new());
                loop {
                    match socket.recv(&mut buffer) {
                        Ok(len) => self.check(&buffer[..len], &mut expected, &mut seen),
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {
                            if ended.try_recv().is_ok() {
                                return seen;
                            }
                        }
                        Err(error) => panic!("{}: cannot receive: {error}", self.what),
                    }
                }
            });
            let sender = scope.spawn(move || {
                enter(&self.from);
                let to = listening.recv().expect("the receiver listens");
                let sent = self.send(to, time);
                done.send(()).expect("the receiver is there");
                sent
            });
            let sent = sender.join().expect("the sender");
            let seen = receiver.join().expect("the receiver");
            let last = seen.last.map_or(0, |last| last + 1);
            assert!(last <= sent, "{}: number {last} came, but only {sent} were sent", self.what);
            Tally { sent, received: seen.count }
        })
    }

    fn send(&self, to: SocketAddr, time: Duration) -> u64 {
        let any: IpAddr = if to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
        let socket = UdpSocket::bind((any, 0)).expect("a socket");
        socket.connect(to).expect("a route to the peer");
        if self.offload {
            setsockopt(&socket, sockopt::UdpGsoSegment, &(self.sizes[1] as i32)).expect("segmentation offload");
        }
        let (begun, mut number, mut burst, mut one) = (Instant::now(), 0, Vec::new(), Vec::new());
        while begun.elapsed() < time {
            burst.clear();
            for _ in 0..self.burst {
                self.fill(number, &mut one);
                number += 1;
                if self.offload {
                    burst.extend_from_slice(&one);
                } else {
                    // If the device's queue is full, the datagram is lost, as on any path.
                    let _ = socket.send(&one);
                }
            }
            if self.offload {
                let _ = socket.send(&burst);
            }
            thread::sleep(PAUSE);
        }
        number
    }

    fn check(&self, datagram: &[u8], expected: &mut Vec<u8>, seen: &mut Seen) {
        let number = datagram.first_chunk::<NUMBER>().map(|bytes| u64::from_be_bytes(*bytes));
        let number = number.unwrap_or_else(|| panic!("{}: a datagram of {} bytes", self.what, datagram.len()));
        self.fill(number, expected);
        assert!(datagram == expected, "{}: number {number} changed on its way", self.what);
        assert!(seen.first_time(number), "{}: number {number} came twice", self.what);
    }

    /// Fills a payload. Its contents are derived from the datagram's number.
    fn fill(&self, number: u64, payload: &mut Vec<u8>) {
        let mut state = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let [least, most] = if self.offload { [self.sizes[1]; 2] } else { self.sizes };
        let len = least + next() as usize % (most - least + 1);
        payload.clear();
        payload.extend_from_slice(&number.to_be_bytes());
        while payload.len() < len {
            payload.extend_from_slice(&next().to_le_bytes());
        }
        payload.truncate(len);
    }
}

/// The numbers that have arrived.
#[derive(Debug, Default)]
struct Seen {
    bits: Vec<u64>,
    last: Option<u64>,
    count: u64,
}

impl Seen {
    fn first_time(&mut self, number: u64) -> bool {
        // Enough for ten minutes of the fastest stream; a bogus number must not allocate memory.
        assert!(number < 1 << 26, "a number that nobody sent: {number}");
        let (word, bit) = ((number / 64) as usize, 1 << (number % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        let new = self.bits[word] & bit == 0;
        self.bits[word] |= bit;
        self.count += u64::from(new);
        self.last = self.last.max(Some(number));
        new
    }
}

//! Two stacks, packets carried by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use nebula_core::forward::cut_packet;

use super::*;

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

struct Pair {
    now: Instant,
    stacks: [Stack; 2],
    addresses: [IpAddr; 2],
    /// Packets that were carried.
    packets: usize,
    refuse: bool,
}

pub(super) fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

impl Pair {
    fn new(addresses: [&str; 2], options: StackOptions) -> Self {
        #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
        let now = Instant::now();
        let addresses = addresses.map(|address| address.parse::<IpAddr>().unwrap());
        let stack = |at: usize| Stack::new(now, vec![addresses[at]], options.clone(), [at as u8; 32]);
        Self { now, stacks: [stack(0), stack(1)], addresses, packets: 0, refuse: false }
    }

    fn v4() -> Self {
        Self::new(["10.0.0.1", "10.0.0.2"], StackOptions::default())
    }

    /// Carries packets until there are none.
    fn carry(&mut self) {
        let mut packet = Vec::new();
        loop {
            let mut idle = true;
            for from in 0..2 {
                while let Some(offload) = self.stacks[from].poll_packet(self.now, &mut packet) {
                    idle = false;
                    let mut cut = Vec::new();
                    assert!(cut_packet(&packet, offload, |piece| cut.push(piece.to_vec())) > 0);
                    self.packets += cut.len();
                    for piece in cut {
                        self.stacks[1 - from].receive(self.now, &[&piece], Offload::default());
                    }
                    self.decide(1 - from);
                }
            }
            if idle {
                return;
            }
        }
    }

    fn decide(&mut self, at: usize) {
        while let Some(asked) = self.stacks[at].next_asked() {
            if self.refuse {
                self.stacks[at].refuse(&asked);
            } else {
                self.stacks[at].admit(self.now, asked, None);
            }
        }
        while let Some((id, _)) = self.stacks[at].next_opened() {
            self.stacks[at].set_sender(id, None);
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        let now = self.now;
        self.stacks.iter_mut().for_each(|stack| stack.timeout(now));
        self.carry();
    }

    fn remote(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.addresses[1], port)
    }

    /// A connection of the first to a listener of the second.
    fn connect(&mut self, port: u16) -> (Id, Id) {
        let id = self.stacks[0].connect(self.now, self.remote(port)).unwrap();
        self.carry();
        assert_eq!(self.stacks[0].poll_open(id, &mut context()), Poll::Ready(Ok(())));
        let Poll::Ready(Some(accepted)) = self.stacks[1].poll_accept(None, port, &mut context()) else {
            panic!("nothing to accept")
        };
        (id, accepted)
    }

    fn write(&mut self, at: usize, id: Id, bytes: &[u8]) -> Poll<Result<usize, Error>> {
        self.stacks[at].poll_write(self.now, id, &mut context(), bytes)
    }

    fn read(&mut self, at: usize, id: Id) -> Poll<Result<Vec<u8>, Error>> {
        let mut out = vec![0; 100_000];
        let read = self.stacks[at].poll_read(self.now, id, &mut context(), &mut out);
        read.map_ok(|count| out[..count].to_vec())
    }
}

#[test]
fn a_connection_carries_data_both_ways_over_either_family() {
    for addresses in [["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]] {
        let mut pair = Pair::new(addresses, StackOptions::default());
        assert_eq!(pair.stacks[1].listen(None, 80), Some(80));
        let (near, far) = pair.connect(80);
        let data: Vec<u8> = (0..10_000).map(|at| at as u8).collect();
        assert_eq!(pair.write(0, near, &data), Poll::Ready(Ok(data.len())));
        pair.carry();
        assert_eq!(pair.read(1, far), Poll::Ready(Ok(data)));
        assert_eq!(pair.write(1, far, b"answer"), Poll::Ready(Ok(6)));
        pair.stacks[1].close(pair.now, far);
        pair.carry();
        assert_eq!(pair.read(0, near), Poll::Ready(Ok(b"answer".to_vec())));
        assert_eq!(pair.read(0, near), Poll::Ready(Ok(Vec::new())));
        pair.stacks[0].close(pair.now, near);
        pair.carry();
        assert_eq!(pair.stacks[0].connections(), 0, "the side that closed last forgets at once");
        assert_eq!(pair.stacks[1].connections(), 1);
        pair.pass(Duration::from_secs(61));
        assert_eq!(pair.stacks[1].connections(), 0);
    }
}

#[test]
fn a_closed_port_and_a_refused_peer_answer_with_a_reset() {
    let mut pair = Pair::v4();
    let id = pair.stacks[0].connect(pair.now, pair.remote(81)).unwrap();
    pair.carry();
    assert_eq!(pair.stacks[0].poll_open(id, &mut context()), Poll::Ready(Err(Error::Refused)));
    pair.stacks[1].listen(None, 80).unwrap();
    pair.refuse = true;
    let id = pair.stacks[0].connect(pair.now, pair.remote(80)).unwrap();
    pair.carry();
    assert_eq!(pair.stacks[0].poll_open(id, &mut context()), Poll::Ready(Err(Error::Refused)));
    assert_eq!(pair.stacks[1].connections(), 0);
}

#[test]
fn a_waiting_program_is_woken_once_there_is_something() {
    let mut pair = Pair::v4();
    pair.stacks[1].listen(None, 80).unwrap();
    let (near, far) = pair.connect(80);
    let count = Arc::new(Count::default());
    let waker = Waker::from(Arc::clone(&count));
    let mut waiting = Context::from_waker(&waker);
    assert!(pair.stacks[1].poll_read(pair.now, far, &mut waiting, &mut [0; 10]).is_pending());
    pair.carry();
    assert_eq!(count.0.load(Ordering::Relaxed), 0);
    assert_eq!(pair.write(0, near, b"x"), Poll::Ready(Ok(1)));
    pair.carry();
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    // Nobody reads, so the writer waits until somebody does.
    while pair.write(0, near, &[0; 10_000]).is_ready() {
        pair.carry();
    }
    assert!(pair.stacks[0].poll_write(pair.now, near, &mut waiting, b"x").is_pending());
    while pair.read(1, far).is_ready() {
        pair.carry();
    }
    assert_eq!(count.0.load(Ordering::Relaxed), 2);
}

#[test]
fn half_open_connections_of_a_silent_peer_end() {
    let mut pair = Pair::v4();
    pair.stacks[1].listen(None, 80).unwrap();
    pair.stacks[0].connect(pair.now, pair.remote(80)).unwrap();
    let mut packet = Vec::new();
    let offload = pair.stacks[0].poll_packet(pair.now, &mut packet).unwrap();
    cut_packet(&packet, offload, |piece| pair.stacks[1].receive(pair.now, &[piece], Offload::default()));
    pair.decide(1);
    for _ in 0..400 {
        pair.now += Duration::from_secs(1);
        pair.stacks[1].timeout(pair.now);
        while pair.stacks[1].poll_packet(pair.now, &mut packet).is_some() {}
    }
    assert_eq!((pair.stacks[1].connections(), pair.stacks[1].half_open.len()), (0, 0));
}

#[test]
fn a_listener_that_ends_resets_those_who_wait_in_it() {
    let mut pair = Pair::v4();
    pair.stacks[1].listen(None, 80).unwrap();
    let id = pair.stacks[0].connect(pair.now, pair.remote(80)).unwrap();
    pair.carry();
    pair.stacks[1].unlisten(pair.now, None, 80);
    pair.carry();
    assert_eq!(pair.read(0, id), Poll::Ready(Err(Error::Reset)));
    assert_eq!(pair.stacks[1].connections(), 0);
}

#[test]
fn datagrams_arrive_with_their_source_and_more_than_fits_is_dropped() {
    let limits = Limits { udp_buffer: 1000, ..Limits::default() };
    let mut pair = Pair::new(["10.0.0.1", "10.0.0.2"], StackOptions { limits, ..StackOptions::default() });
    assert_eq!(pair.stacks[1].bind_udp(None, 53), Some(53));
    assert_eq!(pair.stacks[1].bind_udp(None, 53), None, "taken");
    let port = pair.stacks[0].bind_udp(None, 0).unwrap();
    let remote = pair.remote(53);
    for _ in 0..10 {
        assert_eq!(pair.stacks[0].send_to(None, port, remote, b"question"), Ok(()));
    }
    let too_long = pair.stacks[0].send_to(None, port, remote, &[0; 1273]);
    assert_eq!(too_long, Err(SendError::TooLong { most: 1272 }));
    assert_eq!(std::io::Error::from(too_long.unwrap_err()).raw_os_error(), Some(90), "EMSGSIZE");
    for (to, error) in [("[fd00::1]:53", SendError::NoAddress), ("10.0.0.2:0", SendError::NoDestination)] {
        assert_eq!(pair.stacks[0].send_to(None, port, to.parse().unwrap(), b"x"), Err(error));
    }
    pair.carry();
    let from = SocketAddr::new(pair.addresses[0], port);
    for _ in 0..9 {
        let got = pair.stacks[1].poll_receive_from(None, 53, &mut context());
        let Poll::Ready(Some(got)) = got else { panic!("{got:?}") };
        assert_eq!((got.from, got.payload.as_slice(), got.tunnel), (from, &b"question"[..], None));
    }
    assert!(pair.stacks[1].poll_receive_from(None, 53, &mut context()).is_pending());
}

#[test]
fn an_icmp_error_ends_a_connection_that_is_being_opened_and_shrinks_the_segments_of_another() {
    let mut pair = Pair::v4();
    let id = pair.stacks[0].connect(pair.now, pair.remote(80)).unwrap();
    let mut packet = Vec::new();
    pair.stacks[0].poll_packet(pair.now, &mut packet).unwrap();
    let error = |about: &[u8], kind: u8, code: u8, mtu: u16| {
        let mut error = Vec::new();
        packet::begin("10.0.0.9".parse().unwrap(), "10.0.0.1".parse().unwrap(), protocol::ICMP, &mut error);
        error.extend_from_slice(&[kind, code, 0, 0, 0, 0]);
        error.extend_from_slice(&mtu.to_be_bytes());
        error.extend_from_slice(&about[..28]);
        packet::finish(&mut error, 2);
        error
    };
    pair.stacks[0].receive(pair.now, &[&error(&packet, 3, 13, 0)], Offload::default());
    assert_eq!(pair.stacks[0].poll_open(id, &mut context()), Poll::Ready(Err(Error::Unreachable)));

    pair.stacks[1].listen(None, 80).unwrap();
    let (near, far) = pair.connect(80);
    assert_eq!(pair.write(0, near, &[0; 5000]), Poll::Ready(Ok(5000)));
    let offload = pair.stacks[0].poll_packet(pair.now, &mut packet).unwrap();
    assert_eq!(offload.segment.unwrap().size, 1300 - 40 - 12);
    pair.stacks[0].receive(pair.now, &[&error(&packet, 3, 4, 700)], Offload::default());
    assert_eq!(pair.write(0, near, &[0; 5000]), Poll::Ready(Ok(5000)));
    let offload = pair.stacks[0].poll_packet(pair.now, &mut packet).unwrap();
    assert_eq!(offload.segment.unwrap().size, 700 - 40 - 12);
    // What did not fit is sent again at once, and after ten minutes larger segments are tried again.
    pair.carry();
    pair.pass(Duration::from_secs(1));
    assert_eq!(pair.read(1, far).map_ok(|bytes| bytes.len()), Poll::Ready(Ok(10_000)));
    pair.pass(Duration::from_secs(601));
    assert_eq!(pair.write(0, near, &[0; 5000]), Poll::Ready(Ok(5000)));
    let offload = pair.stacks[0].poll_packet(pair.now, &mut packet).unwrap();
    assert_eq!(offload.segment.unwrap().size, 1300 - 40 - 12);
}

#[test]
fn packets_that_are_none_are_ignored() {
    let mut pair = Pair::v4();
    for bytes in [&[][..], &[0x45; 20], &[0x45; 40], &[0x60; 40], &[0x60; 80], &[0xff; 100]] {
        pair.stacks[0].receive(pair.now, &[bytes], Offload::default());
    }
    pair.stacks[0].receive(pair.now, &[], Offload::default());
    assert!(!pair.stacks[0].has_packets());
}

#[test]
fn the_oldest_of_too_many_in_time_wait_makes_room() {
    let limits = Limits { time_wait: 3, ..Limits::default() };
    let mut pair = Pair::new(["10.0.0.1", "10.0.0.2"], StackOptions { limits, ..StackOptions::default() });
    pair.stacks[1].listen(None, 80).unwrap();
    for _ in 0..10 {
        let (near, far) = pair.connect(80);
        pair.stacks[0].close(pair.now, near);
        pair.carry();
        pair.stacks[1].close(pair.now, far);
        pair.carry();
    }
    assert_eq!([0, 1].map(|at| pair.stacks[at].connections()), [3, 0]);
}

/// As many short connections to one port as there are ports, and more.
#[test]
fn a_port_in_time_wait_is_used_again_once_its_timestamps_have_gone_on() {
    const PORTS: usize = random::EPHEMERAL as usize;
    let limits = Limits { time_wait: 1 << 16, ..Limits::default() };
    let mut pair = Pair::new(["10.0.0.1", "10.0.0.2"], StackOptions { limits, ..StackOptions::default() });
    pair.stacks[1].listen(None, 80).unwrap();
    let end = |pair: &mut Pair, (near, far)| {
        pair.stacks[0].close(pair.now, near);
        pair.carry();
        pair.stacks[1].close(pair.now, far);
        pair.carry();
    };
    for _ in 0..PORTS {
        let ends = pair.connect(80);
        end(&mut pair, ends);
    }
    assert_eq!(pair.stacks[0].connections(), PORTS);
    assert_eq!(pair.stacks[0].connect(pair.now, pair.remote(80)), Err(Error::NoPort));
    let other = pair.stacks[0].connect(pair.now, pair.remote(81)).unwrap();
    pair.stacks[0].close(pair.now, other);
    pair.pass(Duration::from_secs(1));
    let mut seen = std::collections::HashSet::new();
    for _ in 0..1000 {
        let ends = pair.connect(80);
        assert!(seen.insert(pair.stacks[0].flow(ends.0).unwrap()), "the one that rests longest");
        assert_eq!(pair.write(0, ends.0, b"hello"), Poll::Ready(Ok(5)));
        pair.carry();
        assert_eq!(pair.read(1, ends.1), Poll::Ready(Ok(b"hello".to_vec())));
        end(&mut pair, ends);
    }
    assert_eq!(pair.stacks[0].connections(), PORTS);
    pair.pass(Duration::from_secs(61));
    assert_eq!(pair.stacks[0].connections(), 0);
}

/// The peer rests as well: it tells the new connection by its timestamps.
#[test]
fn a_port_is_used_again_though_the_peer_closed_first() {
    let mut pair = Pair::v4();
    pair.stacks[1].listen(None, 80).unwrap();
    let (near, far) = pair.connect(80);
    let flow = pair.stacks[0].flow(near).unwrap();
    for (at, id) in [(1, far), (0, near)] {
        pair.stacks[at].close(pair.now, id);
        pair.carry();
    }
    assert_eq!([0, 1].map(|at| pair.stacks[at].connections()), [0, 1]);
    pair.now += Duration::from_millis(5);
    // The same secret begins with the same port again.
    pair.stacks[0].secret = Secret::new([0; 32]);
    let (again, _) = pair.connect(80);
    assert_eq!(pair.stacks[0].flow(again), Some(flow));
    assert_eq!([0, 1].map(|at| pair.stacks[at].connections()), [1, 1]);
}

#[test]
fn what_keeps_a_node_from_connecting_has_an_error_of_its_own() {
    let limits = Limits { connections: 1, ..Limits::default() };
    let mut pair = Pair::new(["10.0.0.1", "10.0.0.2"], StackOptions { limits, ..StackOptions::default() });
    assert_eq!(pair.stacks[0].connect(pair.now, "[fd00::2]:80".parse().unwrap()), Err(Error::NoAddress));
    assert_eq!(pair.stacks[0].connect(pair.now, "10.0.0.1:80".parse().unwrap()), Err(Error::OwnAddress));
    assert!(pair.stacks[0].connect(pair.now, pair.remote(80)).is_ok());
    assert_eq!(pair.stacks[0].connect(pair.now, pair.remote(80)), Err(Error::TooMany));
}

#[test]
fn unread_data_of_all_connections_together_is_bounded() {
    let limits = Limits { receive_memory: 100_000, ..Limits::default() };
    let mut pair = Pair::new(["10.0.0.1", "10.0.0.2"], StackOptions { limits, ..StackOptions::default() });
    pair.stacks[1].listen(None, 80).unwrap();
    let ends: Vec<_> = (0..10).map(|_| pair.connect(80)).collect();
    let mut written = 0;
    for _ in 0..20 {
        for (near, _) in &ends {
            if let Poll::Ready(Ok(count)) = pair.write(0, *near, &[7; 10_000]) {
                written += count;
            }
        }
        pair.pass(Duration::from_millis(500));
    }
    let unread = |pair: &Pair| {
        ends.iter().map(|(_, far)| pair.stacks[1].connections.get(*far).unwrap().connection.buffered()).sum::<usize>()
    };
    assert_eq!(pair.stacks[1].buffered(), unread(&pair));
    // One peer has half of it, and a little for each connection.
    assert!((50_000..100_000).contains(&unread(&pair)), "{}", unread(&pair));
    // Whoever is read goes on.
    let mut read = 0;
    for _ in 0..400 {
        for (_, far) in &ends {
            if let Poll::Ready(Ok(bytes)) = pair.read(1, *far) {
                read += bytes.len();
            }
        }
        pair.pass(Duration::from_millis(500));
    }
    assert_eq!(read, written);
    assert_eq!(pair.stacks[1].buffered(), unread(&pair));
    ends.iter().for_each(|(_, far)| pair.stacks[1].close(pair.now, *far));
    pair.carry();
    assert_eq!(pair.stacks[1].buffered(), 0);
}

//! Two connections and a bad link between them, on a virtual clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::segment::{Flags, Header};
use super::*;

const PORTS: [(u16, u16); 2] = [(1000, 80), (80, 1000)];

/// What the link does with segments.
#[derive(Debug, Clone)]
struct Link {
    seed: u64,
    /// Per thousand.
    loss: u64,
    duplicate: u64,
    delay: Duration,
    jitter: Duration,
    /// Bytes per second; 0: any.
    rate: u64,
    /// Bytes that wait for the rate; more are dropped.
    queue: u64,
    /// Longest segment, header included; longer ones vanish.
    longest: usize,
    /// Super-packets stay whole.
    joined: bool,
}

impl Default for Link {
    fn default() -> Self {
        let delay = Duration::from_millis(10);
        let (jitter, longest) = (Duration::ZERO, usize::MAX);
        Self { seed: 1, loss: 0, duplicate: 0, delay, jitter, rate: 0, queue: 1 << 30, longest, joined: false }
    }
}

/// What the program at one end does.
#[derive(Debug, Clone)]
struct Program {
    send: usize,
    /// Most bytes per read, and the pause after one.
    read: usize,
    pause: Duration,
    close_at_once: bool,
}

impl Default for Program {
    fn default() -> Self {
        Self { send: 0, read: 1 << 20, pause: Duration::ZERO, close_at_once: true }
    }
}

struct End {
    connection: Option<Connection>,
    options: Arc<TcpOptions>,
    program: Program,
    written: usize,
    /// The next bytes to be written; making them again for each attempt would be most of a test's time.
    next: Vec<u8>,
    received: usize,
    ended: bool,
    reads_again: Instant,
    /// When the link is free.
    free: Instant,
}

struct World {
    start: Instant,
    now: Instant,
    random: u64,
    link: Link,
    ends: [End; 2],
    wire: BTreeMap<(Instant, u64), (usize, Vec<u8>)>,
    sent: u64,
    /// Longest segment that the link took.
    longest_arrival: usize,
    /// Each segment in order makes its receiver forget what is out of order.
    forgetful: bool,
    mss: u16,
}

/// Where virtual time begins.
pub(super) fn now() -> Instant {
    #[allow(clippy::disallowed_methods, reason = "where virtual time begins")]
    Instant::now()
}

fn byte(end: usize, at: usize) -> u8 {
    (at.wrapping_mul(31) ^ (at >> 8) ^ (end * 77)) as u8
}

impl World {
    fn new(link: Link, options: [TcpOptions; 2], programs: [Program; 2]) -> Self {
        let start = now();
        let mut options = options.into_iter().zip(programs);
        let mut end = || {
            let (options, program) = options.next().unwrap();
            End {
                connection: None,
                options: Arc::new(options),
                program,
                written: 0,
                next: Vec::new(),
                received: 0,
                ended: false,
                reads_again: start,
                free: start,
            }
        };
        let ends = [end(), end()];
        let random = link.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let wire = BTreeMap::new();
        let mut world = Self {
            start,
            now: start,
            random,
            link,
            ends,
            wire,
            sent: 0,
            longest_arrival: 0,
            forgetful: false,
            mss: 1240,
        };
        world.ends[0].connection = Some(Connection::connect(start, world.begin(0)));
        world
    }

    fn begin(&self, end: usize) -> Begin {
        Begin {
            options: Arc::clone(&self.ends[end].options),
            // Sequence numbers and timestamps wrap early.
            initial: u32::MAX - 5000 - end as u32,
            timestamp_offset: u32::MAX - 100,
            epoch: self.start,
            mss: self.mss,
            chunks: Arc::default(),
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        if below == 0 { 0 } else { (self.random >> 11) % below }
    }

    /// Lets the program of an end write and read, and sends what is to be sent.
    fn serve(&mut self, end: usize) {
        let now = self.now;
        let this = &mut self.ends[end];
        let Some(connection) = &mut this.connection else { return };
        if connection.is_established() && this.written <= this.program.send {
            while this.written < this.program.send {
                if this.next.is_empty() {
                    let until = this.program.send.min(this.written + 50_000);
                    this.next = (this.written..until).map(|at| byte(end, at)).collect();
                }
                match connection.write(&this.next) {
                    Ok(0) | Err(_) => break,
                    Ok(count) => {
                        this.written += count;
                        this.next.drain(..count);
                    }
                }
            }
            if this.written == this.program.send && this.program.close_at_once {
                connection.shut_down();
                this.written += 1;
            }
        }
        while now >= this.reads_again {
            let mut buffer = vec![0; this.program.read];
            match connection.read(now, &mut buffer) {
                Ok(Some(0)) => {
                    this.ended = true;
                    break;
                }
                Ok(Some(count)) => {
                    for (at, got) in buffer[..count].iter().enumerate() {
                        assert_eq!(*got, byte(1 - end, this.received + at), "byte {}", this.received + at);
                    }
                    this.received += count;
                    this.reads_again = now + this.program.pause;
                }
                Ok(None) | Err(_) => break,
            }
        }
        let mut out = Vec::new();
        let mut packets = Vec::new();
        while let Some(size) = connection.transmit(now, PORTS[end], &mut out) {
            packets.push((std::mem::take(&mut out), size));
            assert!(packets.len() < 10_000, "it never stops sending");
        }
        connection.check();
        for (packet, size) in packets {
            if self.link.joined {
                self.send(end, packet);
            } else {
                cut(&packet, size).into_iter().for_each(|packet| self.send(end, packet));
            }
        }
    }

    fn send(&mut self, from: usize, packet: Vec<u8>) {
        self.sent += 1;
        if self.random(1000) < self.link.loss || packet.len() > self.link.longest {
            return;
        }
        self.longest_arrival = self.longest_arrival.max(packet.len());
        let copies = if self.random(1000) < self.link.duplicate { 2 } else { 1 };
        let mut at = self.now;
        if self.link.rate > 0 {
            let time = |bytes: u64| Duration::from_nanos(bytes * 1_000_000_000 / self.link.rate);
            let free = self.ends[from].free.max(self.now);
            if free - self.now > time(self.link.queue) {
                return;
            }
            at = free + time(packet.len() as u64 + 40);
            self.ends[from].free = at;
        }
        for _ in 0..copies {
            let jitter = Duration::from_micros(self.random(self.link.jitter.as_micros() as u64 + 1));
            let key = (at + self.link.delay + jitter, self.sent * 4 + copies + self.random(2));
            self.wire.insert(key, (1 - from, packet.clone()));
        }
    }

    fn deliver(&mut self, to: usize, packet: &[u8]) {
        let (header, len) = Header::parse(packet).unwrap();
        if self.ends[to].connection.is_none() {
            if header.flags != Flags::SYN {
                return;
            }
            self.ends[to].connection = Some(Connection::accept(self.now, self.begin(to), &header));
            return;
        }
        let payload = &packet[len..];
        let half = payload.len() / 2;
        let slices = [&payload[..half], &payload[half..]];
        if let Some(connection) = &mut self.ends[to].connection {
            if self.forgetful {
                connection.make_room(&header, usize::MAX);
            }
            let _ = connection.receive(self.now, &header, &slices);
        }
    }

    /// The next time at which anything happens.
    fn next(&self) -> Option<Instant> {
        let mut next: Option<Instant> = self.wire.first_key_value().map(|((at, _), _)| *at);
        for end in &self.ends {
            let reads = (end.reads_again > self.now).then_some(end.reads_again);
            let due = end.connection.as_ref().and_then(Connection::deadline);
            next = [next, reads, due].into_iter().flatten().min();
        }
        next
    }

    /// Runs until `done`; fails if it takes longer than `limit`.
    fn run(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> Duration {
        let mut idle = 0;
        loop {
            (0..2).for_each(|end| self.serve(end));
            if done(self) {
                return self.now - self.start;
            }
            let Some(next) = self.next() else { panic!("nothing will ever happen: {}", self.summary()) };
            idle = if next > self.now { 0 } else { idle + 1 };
            assert!(idle < 10_000, "the clock stands still: {}", self.summary());
            self.now = self.now.max(next);
            assert!(self.now - self.start < limit, "not done in time: {}", self.summary());
            while let Some(first) = self.wire.first_entry()
                && first.key().0 <= self.now
            {
                let (to, packet) = first.remove();
                self.deliver(to, &packet);
            }
            for end in &mut self.ends {
                if let Some(connection) = &mut end.connection {
                    connection.timeout(self.now);
                }
            }
        }
    }

    fn run_to_the_end(&mut self, limit: Duration) -> Duration {
        self.run(limit, |world| {
            let over = |end: &End| {
                let state = end.connection.as_ref().map(Connection::state);
                end.ended && matches!(state, Some(State::TimeWait | State::Closed))
            };
            world.ends.iter().all(over)
        })
    }

    fn summary(&self) -> String {
        let ends = self.ends.iter().map(|end| {
            let state = end.connection.as_ref().map(|connection| (connection.state(), connection.error()));
            format!("{state:?} written {} received {} ended {}", end.written, end.received, end.ended)
        });
        format!("after {:?}: {:?}", self.now - self.start, ends.collect::<Vec<_>>())
    }

    fn assert_complete(&self) {
        for end in 0..2 {
            assert_eq!(self.ends[end].received, self.ends[1 - end].program.send, "{}", self.summary());
            let connection = self.ends[end].connection.as_ref().unwrap();
            assert_eq!(connection.error(), None, "{}", self.summary());
        }
    }
}

/// Cuts a super-packet as a network card does.
fn cut(packet: &[u8], size: usize) -> Vec<Vec<u8>> {
    let (header, len) = Header::parse(packet).unwrap();
    if packet.len() - len <= size {
        return vec![packet.to_vec()];
    }
    let pieces = packet[len..].chunks(size);
    let count = pieces.len();
    let piece = |(at, bytes): (usize, &[u8])| {
        let mut flags = header.flags;
        if at + 1 < count {
            flags.0 &= !(Flags::FIN.0 | Flags::PSH.0);
        }
        let sequence = header.sequence.wrapping_add((at * size) as u32);
        let mut out = Vec::new();
        Header { sequence, flags, ..header }.emit(&mut out);
        out.extend_from_slice(bytes);
        out
    };
    pieces.enumerate().map(piece).collect()
}

fn small_windows(receive: usize, send: usize) -> TcpOptions {
    TcpOptions {
        receive_window: receive,
        max_receive_window: receive,
        send_buffer: send,
        max_send_buffer: send,
        ..TcpOptions::default()
    }
}

fn sends(send: usize) -> Program {
    Program { send, ..Program::default() }
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_peer_that_forgets_what_it_had_out_of_order_gets_it_again() {
    let link = Link { loss: 30, ..Link::default() };
    let mut world = World::new(link, Default::default(), [sends(500_000), sends(0)]);
    world.forgetful = true;
    world.run_to_the_end(Duration::from_secs(120));
    world.assert_complete();
}

#[test]
fn a_stream_arrives_whole_and_both_sides_close() {
    let mut world = World::new(Link::default(), Default::default(), [sends(3_000_000), sends(0)]);
    let took = world.run_to_the_end(HOUR);
    world.assert_complete();
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_closed_window_opens_again() {
    let slow = Program { read: 700, pause: Duration::from_millis(300), ..Program::default() };
    let mut world =
        World::new(Link::default(), [TcpOptions::default(), small_windows(2000, 2000)], [sends(20_000), slow]);
    world.run_to_the_end(HOUR);
    world.assert_complete();
}

#[test]
fn loss_slows_a_stream_no_more_than_the_congestion_window_has_it() {
    // 20 Mbit/s and 50 ms; 0.1 % of the segments are lost, with which Reno's window is 39 segments: 26 s.
    let delay = Duration::from_millis(25);
    let link = Link { loss: 1, delay, rate: 2_500_000, queue: 125_000, ..Link::default() };
    let mut world = World::new(link, Default::default(), [sends(25_000_000), sends(0)]);
    let took = world.run_to_the_end(HOUR);
    world.assert_complete();
    assert!(took < Duration::from_secs(26), "{took:?}");
}

#[test]
fn windows_grow_to_what_a_long_path_holds() {
    // 400 Mbit/s and 40 ms: 2 MB are on the way.
    let link = Link { delay: Duration::from_millis(20), rate: 50_000_000, queue: 4_000_000, ..Link::default() };
    let mut world = World::new(link, Default::default(), [sends(100_000_000), sends(0)]);
    let took = world.run_to_the_end(HOUR);
    world.assert_complete();
    assert!(took < Duration::from_secs(5), "{took:?} for what takes 2 s at least");
}

#[test]
fn a_black_hole_interrupts_a_stream_for_a_second_and_is_left_behind() {
    // 8 Mbit/s, so that the stream takes 150 s: the guess is believed for 40 s at the end.
    let link = Link { rate: 1_000_000, queue: 50_000, ..Link::default() };
    let mut world = World::new(link, Default::default(), [sends(150_000_000), sends(0)]);
    let pause = |world: &mut World, bytes: usize| {
        let (mut longest, until) = (Duration::ZERO, world.ends[1].received + bytes);
        while world.ends[1].received < until {
            let (at, before) = (world.now, world.ends[1].received);
            world.run(HOUR, |world| world.ends[1].received > before);
            longest = longest.max(world.now - at);
        }
        longest
    };
    pause(&mut world, 2_000_000);
    for longest in [1150, 700] {
        world.link.longest = longest;
        let first = pause(&mut world, 1_000_000);
        assert!(first > Duration::from_millis(200) && first < Duration::from_millis(2500), "{first:?}");
        // The largest is tried every now and then, and more rarely each time.
        let again = pause(&mut world, 12_000_000);
        assert!(again < Duration::from_millis(1500), "{again:?}");
    }
    world.link.longest = usize::MAX;
    world.longest_arrival = 0;
    world.run_to_the_end(HOUR);
    world.assert_complete();
    assert!(world.longest_arrival > 1240, "segments are as long as before: {}", world.longest_arrival);
}

#[test]
fn a_reset_ends_the_other_side() {
    let mut world =
        World::new(Link::default(), Default::default(), [sends(1000), Program { close_at_once: false, ..sends(0) }]);
    world.run(HOUR, |world| world.ends[1].received == 1000);
    world.ends[1].connection.as_mut().unwrap().abort();
    world.run(HOUR, |world| world.ends[0].connection.as_ref().unwrap().error().is_some());
    assert_eq!(world.ends[0].connection.as_ref().unwrap().error(), Some(Error::Reset));
}

#[test]
fn a_peer_that_is_gone_is_given_up() {
    let mut world = World::new(Link::default(), Default::default(), [sends(100_000), sends(0)]);
    world.run(HOUR, |world| world.ends[1].received > 0);
    world.link.loss = 1000;
    let took = world.run(HOUR, |world| world.ends[0].connection.as_ref().unwrap().error().is_some());
    assert_eq!(world.ends[0].connection.as_ref().unwrap().error(), Some(Error::TimedOut));
    assert!(took > Duration::from_secs(120), "{took:?}");
}

/// The queue of the link holds a fifth of a round trip's data, which a window that is sent at once overflows.
#[test]
fn a_slow_link_with_a_short_queue_loses_little_of_a_paced_stream() {
    let (size, rate, delay) = (20_000_000, 12_500_000, Duration::from_millis(20));
    let link = Link { rate, delay, queue: 100_000, ..Link::default() };
    let mut world = World::new(link, Default::default(), [sends(size), sends(0)]);
    let took = world.run_to_the_end(HOUR);
    world.assert_complete();
    // The link alone needs 1.7 s. Without pacing it took 3.1, with it 2.1.
    assert!(took < Duration::from_millis(2500), "{took:?}");
}

#[test]
fn nobody_answers_a_syn() {
    let link = Link { loss: 1000, ..Link::default() };
    let mut world = World::new(link, Default::default(), [sends(1), sends(0)]);
    world.run(HOUR, |world| world.ends[0].connection.as_ref().unwrap().state() == State::Closed);
    assert_eq!(world.ends[0].connection.as_ref().unwrap().error(), Some(Error::TimedOut));
}

#[test]
fn unread_data_makes_close_a_reset() {
    let deaf = Program { read: 1, pause: HOUR, close_at_once: false, ..Program::default() };
    let mut world = World::new(Link::default(), Default::default(), [sends(1000), deaf]);
    world.run(HOUR, |world| world.ends[1].connection.as_ref().is_some_and(|it| it.is_readable()));
    let now = world.now;
    world.ends[1].connection.as_mut().unwrap().close(now);
    world.run(HOUR, |world| world.ends[0].connection.as_ref().unwrap().error() == Some(Error::Reset));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_link_does_both_streams_arrive_whole(
        seed: u64,
        loss in 0_u64..150,
        duplicate in 0_u64..100,
        jitter in 0_u64..40,
        delay in 0_u64..60,
        sizes in [0_usize..200_000, 0_usize..200_000],
        windows in [400_usize..70_000, 400_usize..70_000],
        read in 100_usize..100_000,
        pause in 0_u64..20,
        joined: bool,
        no_delay: bool,
    ) {
        let link = Link {
            seed,
            loss,
            duplicate,
            delay: Duration::from_millis(delay),
            jitter: Duration::from_millis(jitter),
            joined,
            ..Link::default()
        };
        let options = windows.map(|window| TcpOptions { no_delay, ..small_windows(window, window) });
        let slow = Program { read, pause: Duration::from_millis(pause), send: sizes[1], ..Program::default() };
        let mut world = World::new(link, options, [sends(sizes[0]), slow]);
        world.run_to_the_end(24 * HOUR);
        world.assert_complete();
    }

    #[test]
    fn hostile_segments_do_no_harm(
        seed: u64,
        segments in proptest::collection::vec((any::<[u8; 40]>(), 0_usize..3000, 0_u8..8, -70_000_i64..70_000, -70_000_i64..70_000), 1..60),
    ) {
        let link = Link { seed, ..Link::default() };
        let mut world = World::new(link, Default::default(), [sends(50_000), Program { close_at_once: false, ..sends(10_000) }]);
        world.run(HOUR, |world| world.ends[1].received > 20_000);
        let (known, _) = world.wire.values().find(|(to, _)| *to == 1).map(|(_, packet)| Header::parse(packet).unwrap()).unwrap_or_default();
        for (noise, len, near, sequence, ack) in segments {
            let mut bytes = noise.to_vec();
            bytes[12] = bytes[12].max(0x50);
            let Some((mut header, _)) = Header::parse(&bytes) else { continue };
            if near & 1 != 0 {
                header.sequence = known.sequence.wrapping_add(sequence as u32);
                header.acknowledgement = known.acknowledgement.wrapping_add(ack as u32);
                header.flags = Flags((header.flags.0 & 0x3b) | Flags::ACK.0);
            }
            if near & 2 != 0 {
                header.options = known.options;
                header.options.sack.push(known.acknowledgement.wrapping_sub(100), known.acknowledgement.wrapping_add(ack as u32));
            }
            if near & 4 != 0 {
                header.flags.0 &= !Flags::FIN.0;
            }
            let payload = vec![0x55; len];
            let connection = world.ends[1].connection.as_mut().unwrap();
            let _ = connection.receive(world.now, &header, &[&payload]);
            connection.check();
            let mut out = Vec::new();
            for _ in 0..1000 {
                if connection.transmit(world.now, PORTS[1], &mut out).is_none() {
                    break;
                }
                out.clear();
            }
            world.now += Duration::from_millis(3);
            connection.timeout(world.now);
            prop_assert!(connection.deadline().is_none_or(|due| due > world.now - Duration::from_secs(1)));
        }
    }
}

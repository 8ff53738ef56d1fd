//! Hosts of the simulator with a stack each, and programs that stream through them, all on one virtual clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use nebula_core::forward::{Offload, cut_packet};
use nebula_core::simulator::{Deadlines, HostId, SimNet};
use nebula_core::{Event, TunnelDownReason, Verdict};
use nebula_net::stack::{Flow, Stack, StackOptions};
use nebula_net::tcp::Error;

use crate::stream::End;

/// Where every node listens.
const PORT: u16 = 7;

/// A simulated network with stacks.
pub(crate) struct World {
    pub(crate) net: SimNet,
    nodes: Vec<Node>,
    by_host: BTreeMap<HostId, usize>,
    /// Of the stacks of nodes that are up.
    deadlines: Deadlines,
    /// Nodes that may have something to do.
    busy: BTreeSet<usize>,
    streams: Vec<Stream>,
    /// Connections end when the tunnel of their peer is given up as dead.
    pub(crate) ends_with_tunnel: bool,
    woken: Arc<Mutex<Vec<Key>>>,
}

struct Node {
    host: HostId,
    addresses: Vec<IpAddr>,
    options: StackOptions,
    stack: Stack,
    starts: u8,
    /// Events of the host that were looked at.
    events: usize,
}

/// A connection with a program at each end: the one that dialled, and the one that accepted.
struct Stream {
    flow: Flow,
    ends: [End; 2],
}

/// Number of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamId(usize);

/// Who is to be called.
#[derive(Debug, Clone, Copy)]
enum Key {
    Listener(usize),
    End(usize, usize),
}

struct Caller {
    key: Key,
    woken: Arc<Mutex<Vec<Key>>>,
}

impl Wake for Caller {
    fn wake(self: Arc<Self>) {
        self.woken.lock().unwrap_or_else(PoisonError::into_inner).push(self.key);
    }
}

impl Node {
    fn start(&mut self, now: Instant) {
        self.starts += 1;
        self.stack = Stack::new(now, self.addresses.clone(), self.options.clone(), [self.starts; 32]);
        self.stack.listen(None, PORT).expect("the port is free");
    }
}

impl World {
    pub(crate) fn new(mut net: SimNet) -> Self {
        net.allow_datagrams(1_000_000);
        net.keep_steps(1000);
        Self {
            net,
            nodes: Vec::new(),
            by_host: BTreeMap::new(),
            deadlines: Deadlines::default(),
            busy: BTreeSet::new(),
            streams: Vec::new(),
            ends_with_tunnel: false,
            woken: Arc::default(),
        }
    }

    /// Gives a host a stack with these addresses that listens. Returns its number.
    pub(crate) fn node(&mut self, host: HostId, addresses: &[&str], options: StackOptions) -> usize {
        let addresses: Vec<IpAddr> = addresses.iter().map(|address| address.parse().expect("an address")).collect();
        let now = self.net.now();
        let stack = Stack::new(now, Vec::new(), options.clone(), [0; 32]);
        let mut node = Node { host, addresses, options, stack, starts: 0, events: 0 };
        node.start(now);
        let at = self.nodes.len();
        self.nodes.push(node);
        self.by_host.insert(host, at);
        self.call(Key::Listener(at));
        at
    }

    /// The program and the engine of this node start again, and know nothing of before.
    pub(crate) fn restart(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        self.net.restart(node.host);
        node.events = 0;
        node.start(self.net.now());
        let ends = self.streams.iter_mut().flat_map(|stream| &mut stream.ends).filter(|end| end.node == at);
        for end in ends.filter(|end| end.outcome.is_none()) {
            end.outcome = Some(Err(Error::Closed));
        }
        self.call(Key::Listener(at));
        self.settle();
    }

    /// Opens a stream to an address of another node. Each end sends so many bytes: the one that dials, and the other.
    pub(crate) fn dial(&mut self, from: usize, to: usize, address: &str, bytes: [u64; 2]) -> StreamId {
        let remote = SocketAddr::new(address.parse().expect("an address"), PORT);
        let (now, number) = (self.net.now(), self.streams.len());
        let stack = &mut self.nodes[from].stack;
        let id = stack.connect(now, remote).expect("room for a connection");
        let flow = stack.flow(id).expect("it was just made");
        let programs = [2 * number as u64, 2 * number as u64 + 1];
        let dialler = End::new(from, Some(id), programs, bytes[0]);
        let acceptor = End::new(to, None, [programs[1], programs[0]], bytes[1]);
        self.streams.push(Stream { flow, ends: [dialler, acceptor] });
        self.call(Key::End(number, 0));
        self.settle();
        StreamId(number)
    }

    /// Bytes that have arrived at the end that dialled and at the other.
    pub(crate) fn received(&self, stream: StreamId) -> [u64; 2] {
        self.streams[stream.0].ends.each_ref().map(|end| end.received)
    }

    /// The program at an end, 0 for the one that dialled, reads no more.
    pub(crate) fn stop_reading(&mut self, stream: StreamId, end: usize) {
        self.streams[stream.0].ends[end].reads = false;
    }

    /// How the end that dialled and the other ended.
    pub(crate) fn outcomes(&self, stream: StreamId) -> [Option<Result<(), Error>>; 2] {
        self.streams[stream.0].ends.each_ref().map(|end| end.outcome)
    }

    /// Whether no end waits for anything.
    pub(crate) fn is_over(&self, stream: StreamId) -> bool {
        self.outcomes(stream).iter().all(Option::is_some)
    }

    /// Whether the dial found no way to the other end, which then never began.
    pub(crate) fn is_unreachable(&self, stream: StreamId) -> bool {
        self.outcomes(stream) == [Some(Err(Error::Unreachable)), None] && self.received(stream) == [0, 0]
    }

    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + use<> {
        (0..self.streams.len()).map(StreamId)
    }

    /// Largest number of connections, in all states, of any node.
    pub(crate) fn connections(&self) -> usize {
        self.nodes.iter().map(|node| node.stack.connections()).max().unwrap_or(0)
    }

    /// Runs until `done`, at most for `limit`; returns how long it took, or nothing if it is not done.
    pub(crate) fn run_until(&mut self, limit: Duration, done: impl Fn(&Self) -> bool) -> Option<Duration> {
        let began = self.net.now();
        let end = began + limit;
        self.settle();
        while !done(self) {
            if !self.step(end) {
                return None;
            }
        }
        Some(self.net.now() - began)
    }

    /// Runs until `done`; panics if that takes longer than `limit`. Returns how long it took.
    pub(crate) fn expect(&mut self, what: &str, limit: Duration, done: impl Fn(&Self) -> bool) -> Duration {
        self.run_until(limit, done).unwrap_or_else(|| panic!("{what}: not within {limit:?}\n{}", self.describe()))
    }

    /// Runs until every stream is over, and checks that all its bytes arrived.
    pub(crate) fn expect_all(&mut self, limit: Duration) -> Duration {
        let took = self.expect("all streams", limit, |world| world.streams().all(|stream| world.is_over(stream)));
        for stream in &self.streams {
            let [near, far] = &stream.ends;
            assert_eq!([near.outcome, far.outcome], [Some(Ok(())); 2], "{:?}", stream.ends);
            assert_eq!([near.received, far.received], [far.to_send, near.to_send], "{:?}", stream.ends);
        }
        took
    }

    /// As [`World::expect_all`], but a dial may have found no way. Returns how long it took, and how many found one.
    pub(crate) fn expect_all_that_began(&mut self, limit: Duration) -> (Duration, usize) {
        let is_over = |world: &Self, stream| world.is_over(stream) || world.is_unreachable(stream);
        let took = self.expect("all streams", limit, |world| world.streams().all(|stream| is_over(world, stream)));
        let began: Vec<_> = self.streams().filter(|stream| !self.is_unreachable(*stream)).collect();
        for stream in &began {
            let [near, far] = &self.streams[stream.0].ends;
            assert_eq!([near.outcome, far.outcome], [Some(Ok(())); 2], "{:?}", [near, far]);
            assert_eq!([near.received, far.received], [far.to_send, near.to_send], "{:?}", [near, far]);
        }
        (took, began.len())
    }

    pub(crate) fn run_for(&mut self, time: Duration) {
        let end = self.net.now() + time;
        self.settle();
        while self.step(end) {}
    }

    fn describe(&self) -> String {
        let ends = self.streams.iter().map(|stream| format!("{:?} {:?}\n", stream.flow, stream.ends));
        format!("{}{}", ends.collect::<String>(), self.net.diagram())
    }

    /// Handles what is next; returns `false` at the end.
    fn step(&mut self, end: Instant) -> bool {
        let event = self.net.next_event();
        let next = [self.deadlines.next(), event].into_iter().flatten().min().filter(|next| *next <= end);
        match next {
            Some(next) if event == Some(next) => _ = self.net.step(),
            next => self.net.run_for(next.unwrap_or(end).saturating_duration_since(self.net.now())),
        }
        self.settle();
        next.is_some()
    }

    /// Carries packets between hosts and stacks, and calls programs, until nobody has anything to do.
    fn settle(&mut self) {
        self.busy.extend(self.deadlines.due(self.net.now()));
        loop {
            self.busy.extend(self.net.take_changed().filter_map(|host| self.by_host.get(&host)));
            let busy = std::mem::take(&mut self.busy);
            let idle = busy.is_empty();
            busy.into_iter().for_each(|at| self.carry(at));
            let woken = std::mem::take(&mut *self.woken.lock().unwrap_or_else(PoisonError::into_inner));
            if idle && woken.is_empty() {
                return;
            }
            woken.into_iter().for_each(|key| self.call(key));
        }
    }

    /// Carries packets between a host and its stack. What comes of it changes the host, which is carried again then.
    fn carry(&mut self, at: usize) {
        let Self { net, nodes, deadlines, ends_with_tunnel, .. } = self;
        let Node { host, stack, events, .. } = &mut nodes[at];
        let (host, now) = (*host, net.now());
        if !net.is_up(host) {
            deadlines.set(at, None);
            return;
        }
        for packet in net.take_packets(host) {
            stack.receive(now, &[&packet], Offload::default());
        }
        for event in &net.events(host)[*events..] {
            match event {
                Event::HandshakeTimedOut { peer, .. } => stack.peer_unreachable(now, *peer),
                Event::TunnelDown { peer, reason: TunnelDownReason::Dead, .. } if *ends_with_tunnel => {
                    stack.lose_peer(now, peer);
                }
                _ => {}
            }
        }
        *events = net.events(host).len();
        while let Some(asked) = stack.next_asked() {
            let sender = net.certificate(host, asked.flow().remote.ip());
            stack.admit(now, asked, sender);
        }
        while let Some((id, flow)) = stack.next_opened() {
            stack.set_sender(id, net.certificate(host, flow.remote.ip()));
        }
        stack.timeout(now);
        let mut packet = Vec::new();
        while let Some(offload) = stack.poll_packet(now, &mut packet) {
            let mut pieces = Vec::new();
            assert!(cut_packet(&packet, offload, |piece| pieces.push(piece.to_vec())) > 0, "a packet that can be cut");
            for piece in pieces {
                if matches!(net.send_packet(host, &piece), Verdict::Drop(_)) {
                    stack.unreachable(now, &piece);
                }
            }
        }
        deadlines.set(at, stack.poll_timeout());
    }

    fn call(&mut self, key: Key) {
        let waker = Waker::from(Arc::new(Caller { key, woken: Arc::clone(&self.woken) }));
        let mut context = Context::from_waker(&waker);
        let now = self.net.now();
        match key {
            Key::End(stream, end) => {
                let end = &mut self.streams[stream].ends[end];
                self.busy.insert(end.node);
                end.drive(&mut self.nodes[end.node].stack, now, &mut context);
            }
            Key::Listener(at) => {
                self.busy.insert(at);
                while let Poll::Ready(Some(id)) = self.nodes[at].stack.poll_accept(None, PORT, &mut context) {
                    let Flow { local, remote } = self.nodes[at].stack.flow(id).expect("it was just accepted");
                    let flow = Flow { local: remote, remote: local };
                    let number = self.streams.iter().rposition(|stream| stream.flow == flow).expect("it was dialled");
                    let end = &mut self.streams[number].ends[1];
                    assert!(end.id.is_none() || end.outcome.is_some(), "a stream is accepted once: {end:?}");
                    if end.outcome.is_none() {
                        end.id = Some(id);
                        self.call(Key::End(number, 1));
                    } else {
                        self.nodes[at].stack.close(now, id);
                    }
                }
            }
        }
    }
}

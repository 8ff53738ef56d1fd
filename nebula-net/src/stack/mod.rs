//! The transport layer of one node without IO: connections by flow, listeners, UDP sockets and timers.
//!
//! A packet costs one lookup by flow and the work of its connection, however many others there are.

mod arrivals;
mod asked;
mod bindings;
mod cookies;
#[cfg(test)]
mod crowd_tests;
mod entry;
mod outgoing;
mod packet;
mod peers;
mod ports;
mod random;
mod shares;
mod slots;
mod sockets;
#[cfg(test)]
mod tests;
mod timers;
mod udp;
mod waiters;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::VerifiedCertificate;
use nebula_core::forward::Offload;
use nebula_core::protocol;

use self::bindings::Bindings;
use self::entry::{Entry, Stage};
use self::outgoing::Outgoing;
use self::packet::IpPacket;
use self::peers::Peers;
use self::ports::Ports;
use self::random::Secret;
use self::shares::Shares;
use self::timers::Timers;
use crate::tcp::segment::{Header, MIN_HEADER};
use crate::tcp::{Begin, Chunks, Connection, Error, State, TcpOptions};

pub use self::asked::Asked;
pub use self::slots::Id;
use self::slots::Slots;
pub use self::sockets::Read;
pub use self::udp::{Received, SendError};
use self::waiters::Waiters;
pub use self::waiters::{Ticket, Waiter};

/// Bounds on what peers can make a node keep.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Connections in all states. A peer may open as many as are still free, so one alone has at most half of them.
    /// Default: 65,536.
    pub connections: usize,
    /// Connections of one listener that wait to be accepted. Of a full queue, the newest of the peer with most of
    /// them makes room. Default: 4096.
    pub backlog: usize,
    /// Connections that peers are opening, at all listeners together; the oldest of the peer with most of them makes
    /// room. It is open nevertheless when the peer's answer comes, for that brings back what has to be known (SYN
    /// cookies, RFC 4987). Default: 4096.
    pub half_open: usize,
    /// Connections that rest after both sides closed them; the oldest make room. Default: 16,384.
    pub time_wait: usize,
    /// Bytes of memory for data that arrived and was not read, of all connections together. The data of a peer may
    /// take as much as is still free, so that of one alone takes at most half of it. Beyond that each connection
    /// keeps a little, and the rest is left to the peers to send again. Default: 256 MiB.
    pub receive_memory: usize,
    /// Bytes of datagrams that wait in one UDP socket. Default: 256 KiB.
    pub udp_buffer: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1 << 16,
            backlog: 4096,
            half_open: 4096,
            time_wait: 1 << 14,
            receive_memory: 256 << 20,
            udp_buffer: 256 << 10,
        }
    }
}

/// Settings of a [`Stack`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StackOptions {
    /// Longest overlay packet, in bytes; Nebula's own default is 1300.
    pub mtu: u16,
    /// Settings of connections.
    pub tcp: TcpOptions,
    /// Bounds.
    pub limits: Limits,
}

impl Default for StackOptions {
    fn default() -> Self {
        Self { mtu: 1300, tcp: TcpOptions::default(), limits: Limits::default() }
    }
}

/// The two ends of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Flow {
    /// This node's end.
    pub local: SocketAddr,
    /// The peer's end.
    pub remote: SocketAddr,
}

/// The transport layer of one node.
///
/// ```
/// use nebula_net::stack::{Stack, StackOptions};
///
/// # let now = std::time::Instant::now();
/// let mut stack = Stack::new(now, vec!["10.42.0.1".parse()?], StackOptions::default(), [7; 32]);
/// let id = stack.connect(now, "10.42.0.2:7".parse()?)?;
/// let mut packet = Vec::new();
/// while let Some(_offload) = stack.poll_packet(now, &mut packet) {
///     // It goes into the tunnel; what comes out of that is for `stack.receive`.
///     assert_eq!(packet[16..20], [10, 42, 0, 2]);
/// }
/// assert!(stack.poll_timeout().is_some(), "the SYN is sent again");
/// # let _ = id;
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Stack {
    addresses: Vec<IpAddr>,
    mtu: u16,
    options: Arc<TcpOptions>,
    limits: Limits,
    secret: Secret,
    epoch: Instant,
    flows: HashMap<Flow, Id>,
    connections: Slots<Entry>,
    bindings: Bindings,
    timers: Timers,
    /// Connections that may have something to send.
    ready: VecDeque<Id>,
    outgoing: Outgoing,
    /// Segments that ask for a connection, about which nobody decided.
    asked: VecDeque<Asked>,
    /// Connections that peers are opening.
    half_open: Shares<Id>,
    /// Until then, an answer to a SYN may come back whose connection was forgotten.
    cookies_until: Instant,
    peers: Peers,
    ports: Ports,
    counters: Counters,
    /// Connections of this side that were opened since the last look.
    opened: VecDeque<Id>,
    time_wait: VecDeque<Id>,
    /// Connections that have something to deliver, and who waits until there is none.
    unfinished: usize,
    idle: Waiters,
    /// Everything has ended.
    is_shut: bool,
    /// Memory of the connections' queues.
    chunks: Arc<Chunks>,
}

/// What a stack had to do because peers asked for much.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Connections that were half open and made room for another one.
    pub half_open_evicted: u64,
    /// Of these, the ones that their peer finished.
    pub resumed: u64,
    /// Requests for a connection that were not answered, because the peer has too many.
    pub over_share: u64,
    /// Connections that were open and, because nobody accepted them, made room for another one.
    pub backlog_evicted: u64,
    /// Segments that were dropped because the memory for unread data was used up.
    pub out_of_memory: u64,
}

/// Whether a certificate names an address as that of its host, and not as one in a network behind it.
pub(crate) fn names(certificate: &VerifiedCertificate, address: IpAddr) -> bool {
    certificate.networks().iter().any(|network| network.addr() == address)
}

/// What each connection may keep beyond [`Limits::receive_memory`].
const RESERVE: usize = 4096;
/// Offset of the checksum in a TCP header.
const TCP_CHECKSUM: usize = 16;

impl Stack {
    /// A stack for a node with these overlay addresses. `secret` makes sequence numbers and ports hard to guess.
    #[must_use]
    pub fn new(now: Instant, addresses: Vec<IpAddr>, options: StackOptions, secret: [u8; 32]) -> Self {
        let StackOptions { mtu, tcp, limits } = options;
        Self {
            addresses,
            mtu: mtu.clamp(576, 65_000),
            options: Arc::new(tcp),
            bindings: Bindings::default(),
            limits,
            secret: Secret::new(secret),
            epoch: now,
            flows: HashMap::new(),
            connections: Slots::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            outgoing: Outgoing::default(),
            asked: VecDeque::new(),
            half_open: Shares::default(),
            cookies_until: now,
            peers: Peers::default(),
            ports: Ports::default(),
            counters: Counters::default(),
            opened: VecDeque::new(),
            time_wait: VecDeque::new(),
            unfinished: 0,
            idle: Waiters::default(),
            is_shut: false,
            chunks: Arc::default(),
        }
    }

    /// The node's addresses.
    #[must_use]
    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Number of connections in all states.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.connections.len()
    }

    /// Number of connections that still have something to deliver.
    #[must_use]
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// Frees what tables keep for connections that have ended, to be called after a load.
    pub fn release_memory(&mut self) {
        self.flows.shrink_to_fit();
        self.timers.shrink();
        self.time_wait.shrink_to_fit();
        self.opened.shrink_to_fit();
        self.asked.shrink_to_fit();
        self.chunks.release();
    }

    /// What happened because peers asked for much.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes of memory that data takes which arrived and was not read.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.peers.buffered()
    }

    /// Fails if the accounts do not agree with what is kept. Slow.
    #[doc(hidden)]
    pub fn audit(&self) {
        let entries = || self.connections.ids().filter_map(|id| self.connections.get(id));
        for entry in entries() {
            assert_eq!(entry.connection.buffered(), entry.connection.measure(), "of {}", entry.flow.remote);
        }
        let buffered: usize = entries().map(|entry| entry.connection.buffered()).sum();
        assert_eq!(self.peers.totals(), (self.connections.len(), buffered));
        assert_eq!(entries().filter(|entry| !entry.finished).count(), self.unfinished);
        // A segment may make the last chunk of a connection grow by as much as it has.
        let most = self.limits.receive_memory + self.connections.len() * (2 * RESERVE) + (1 << 16);
        assert!(buffered <= most, "{buffered} bytes are kept");
        let half_open = entries().filter(|entry| matches!(entry.stage, Stage::HalfOpen(_))).count();
        assert!(half_open == self.half_open.len() && half_open <= self.limits.half_open);
    }

    /// The next connection of this side that the peer accepted, whose certificate is to be set.
    pub fn next_opened(&mut self) -> Option<(Id, Flow)> {
        while let Some(id) = self.opened.pop_front() {
            if let Some(entry) = self.connections.get(id) {
                return Some((id, entry.flow));
            }
        }
        None
    }

    /// Sets the certificate of the tunnel that the peer's answer came by; only then is a connection that this side
    /// opened open for the program.
    pub fn set_sender(&mut self, id: Id, sender: Option<VerifiedCertificate>) {
        if let Some(entry) = self.connections.get_mut(id) {
            let buffered = entry.connection.buffered();
            self.peers.close(entry.peer, buffered);
            entry.peer = self.peers.open(sender.as_ref().map(VerifiedCertificate::fingerprint));
            self.peers.buffer(entry.peer, 0, buffered);
            entry.sender = sender;
            entry.stage = Stage::Open;
            entry.wake();
        }
    }

    /// Writes the next packet to send into `out`, which is cleared. It may be a super-packet.
    pub fn poll_packet(&mut self, now: Instant, out: &mut Vec<u8>) -> Option<Offload> {
        out.clear();
        if let Some((packet, offload)) = self.outgoing.pop() {
            *out = packet;
            return Some(offload);
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(entry) = self.connections.get_mut(id) else { continue };
            entry.queued = false;
            if let Some(offload) = entry.transmit(now, out) {
                // The others have their turn before it has the next one.
                entry.queued = true;
                self.ready.push_back(id);
                return Some(offload);
            }
            self.follow(now, id);
        }
        if self.ready.capacity() > 1024 {
            self.ready = VecDeque::new();
        }
        None
    }

    /// Whether there may be something to send.
    #[must_use]
    pub fn has_packets(&self) -> bool {
        !self.outgoing.is_empty() || !self.ready.is_empty()
    }

    /// The packet that was sent last for this flow found no way.
    pub fn unreachable(&mut self, now: Instant, packet: &[u8]) {
        let Some(packet) = IpPacket::parse(packet).filter(|packet| packet.protocol == protocol::TCP) else { return };
        let Some((header, _)) = Header::parse(packet.transport) else { return };
        let flow = Flow {
            local: SocketAddr::new(packet.source, header.source),
            remote: SocketAddr::new(packet.destination, header.destination),
        };
        if let Some(id) = self.flows.get(&flow).copied()
            && let Some(entry) = self.connections.get_mut(id)
        {
            entry.connection.unreachable(Error::Unreachable);
            self.settle(now, id);
        }
    }

    /// There is no tunnel to this peer, so connections to it that are being opened fail at once.
    pub fn peer_unreachable(&mut self, now: Instant, peer: IpAddr) {
        for id in self.connections.ids().collect::<Vec<_>>() {
            if let Some(entry) = self.connections.get_mut(id).filter(|entry| entry.flow.remote.ip() == peer) {
                entry.connection.unreachable(Error::Unreachable);
                self.settle(now, id);
            }
        }
    }

    /// Connections that this side is opening.
    #[must_use]
    pub fn opening(&self) -> Vec<(Id, Flow)> {
        let ids = self.connections.ids();
        let opening = ids.filter_map(|id| Some((id, self.connections.get(id)?)));
        opening.filter(|(_, entry)| entry.stage == Stage::Opening).map(|(id, entry)| (id, entry.flow)).collect()
    }

    /// A connection that this side is opening fails, for there is no way to the peer.
    pub fn fail_opening(&mut self, now: Instant, id: Id) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.unreachable(Error::Unreachable);
            self.settle(now, id);
        }
    }

    /// Ends all connections to the peer with these addresses, and to hosts behind it, because it is known to be gone.
    pub fn lose_peer(&mut self, now: Instant, peer: &[IpAddr]) {
        for id in self.connections.ids().collect::<Vec<_>>() {
            let Some(entry) = self.connections.get_mut(id) else { continue };
            let sender = entry.sender.as_ref();
            let is_behind = sender.is_some_and(|sender| peer.iter().any(|address| names(sender, *address)));
            if is_behind || peer.contains(&entry.flow.remote.ip()) {
                entry.connection.lose_peer();
                self.settle(now, id);
            }
        }
    }

    /// When to call [`Stack::timeout`] at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Does what is due by time, as far as [`Stack::poll_packet`] does not; call that next.
    pub fn timeout(&mut self, now: Instant) {
        while let Some((at, id)) = self.timers.pop(now) {
            let Some(entry) = self.connections.get_mut(id).filter(|entry| entry.scheduled == Some(at)) else {
                continue;
            };
            entry.scheduled = None;
            entry.connection.timeout(now);
            // What is due is done when it is sent, and only then is the next timer known.
            if !entry.queued {
                entry.queued = true;
                self.ready.push_back(id);
            }
        }
    }

    /// Opens a connection. It is open once [`Stack::poll_open`] says so.
    ///
    /// # Errors
    /// Returns an error if the node has no address of that family, the remote address is its own, or there are too many
    /// connections.
    pub fn connect(&mut self, now: Instant, remote: SocketAddr) -> Result<Id, Error> {
        if self.is_shut {
            return Err(Error::NodeEnded);
        }
        if self.addresses.contains(&remote.ip()) {
            return Err(Error::OwnAddress);
        }
        let local = self.local_for(remote.ip()).ok_or(Error::NoAddress)?;
        let (flow, initial) = self.free_flow(now, local, remote).ok_or(Error::NoPort)?;
        if self.connections.len() >= self.limits.connections {
            self.ports.release((local, remote), flow.local.port());
            return Err(Error::TooMany);
        }
        let begin = self.begin(now, flow);
        let begin = Begin { initial: initial.unwrap_or(begin.initial), ..begin };
        let peer = self.peers.open(None);
        let mut entry = Entry::new(flow, Connection::connect(now, begin), Stage::Opening, peer);
        entry.dialled = true;
        let id = self.insert(entry);
        self.settle(now, id);
        Ok(id)
    }

    fn local_for(&self, remote: IpAddr) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == remote.is_ipv4())
    }

    /// A flow to `remote` from a port that has none. If all have one, it follows the one that is in TIME-WAIT longest
    /// (RFC 6191), with the initial sequence number that this asks for.
    fn free_flow(&mut self, now: Instant, local: IpAddr, remote: SocketAddr) -> Option<(Flow, Option<u32>)> {
        let destination = (local, remote);
        let flow = |port| Flow { local: SocketAddr::new(local, port), remote };
        let Self { ports, secret, flows, bindings, connections, .. } = self;
        let is_usable = |port| !flows.contains_key(&flow(port)) && !bindings.has_listener(SocketAddr::new(local, port));
        if let Some(port) = ports.take(destination, || secret.port(local, remote), is_usable) {
            return Some((flow(port), None));
        }
        let connection = |id| connections.get(id).map(|entry| &entry.connection);
        let is_over = |id| connection(id).is_none_or(|it| it.state() != State::TimeWait);
        let may_follow = |id| connection(id).is_some_and(|it| it.may_be_followed(now));
        let old = ports.take_resting(destination, is_over, may_follow)?;
        let flow = self.connections.get(old)?.flow;
        let wanted = self.begin(now, flow).initial;
        let entry = self.connections.get_mut(old)?;
        // Its port is the next one's.
        entry.dialled = false;
        let initial = entry.connection.later_initial(wanted);
        self.remove(old);
        Some((flow, Some(initial)))
    }

    fn begin(&self, now: Instant, flow: Flow) -> Begin {
        let (initial, timestamp_offset) = self.secret.numbers(flow);
        // A step each four microseconds, so that a later connection of the flow has later numbers.
        let clock = now.saturating_duration_since(self.epoch).as_micros() / 4;
        let initial = initial.wrapping_add(clock as u32);
        Begin {
            options: Arc::clone(&self.options),
            initial,
            timestamp_offset,
            epoch: self.epoch,
            mss: self.mss(flow.remote.ip()),
            chunks: Arc::clone(&self.chunks),
        }
    }

    /// Largest payload of a segment without options that the MTU allows.
    fn mss(&self, remote: IpAddr) -> u16 {
        self.mtu - (packet::header_len(remote) + MIN_HEADER) as u16
    }

    fn insert(&mut self, entry: Entry) -> Id {
        let flow = entry.flow;
        let id = self.connections.insert(entry);
        self.unfinished += 1;
        self.flows.insert(flow, id);
        id
    }

    /// Follows up on whatever happened to a connection, which may have something to send now.
    fn settle(&mut self, now: Instant, id: Id) {
        if let Some(entry) = self.connections.get_mut(id).filter(|entry| !entry.queued) {
            entry.queued = true;
            self.ready.push_back(id);
        }
        self.follow(now, id);
    }

    fn follow(&mut self, now: Instant, id: Id) {
        let Some(entry) = self.connections.get_mut(id) else { return };
        let state = entry.connection.state();
        if let Some(due) = entry.connection.deadline()
            && entry.scheduled.is_none_or(|at| due < at)
        {
            entry.scheduled = Some(due);
            self.timers.push(due, id);
        }
        if entry.connection.is_established() && state != State::Closed {
            match entry.stage {
                Stage::HalfOpen(place) => {
                    entry.stage = Stage::Waiting;
                    self.half_open.remove(place);
                    self.enqueue(now, id);
                    return self.follow(now, id);
                }
                Stage::Opening => {
                    entry.stage = Stage::Unnamed;
                    self.opened.push_back(id);
                }
                Stage::Unnamed | Stage::Waiting | Stage::Open => {}
            }
        }
        if state == State::Closed
            && let Stage::HalfOpen(place) = entry.stage
        {
            self.half_open.remove(place);
            entry.orphaned = true;
            entry.stage = Stage::Open;
        }
        entry.wake_if_ready();
        if matches!(state, State::TimeWait | State::Closed) {
            self.finish(id);
        }
        let Some(entry) = self.connections.get_mut(id) else { return };
        if state == State::TimeWait && !entry.resting {
            entry.resting = true;
            if entry.dialled {
                let destination = (entry.flow.local.ip(), entry.flow.remote);
                let Self { ports, connections, .. } = self;
                let state = |id| connections.get(id).map(|entry| entry.connection.state());
                ports.rest(destination, id, |id| state(id) != Some(State::TimeWait));
            }
            self.time_wait.push_back(id);
            self.limit_time_wait();
        } else if state == State::Closed && !entry.queued {
            // The flow may begin again, even if the program has not looked at the end of this one.
            let is_orphaned = entry.orphaned;
            self.free(id);
            if is_orphaned {
                self.remove(id);
            }
        }
    }

    fn limit_time_wait(&mut self) {
        while let Some(first) = self.time_wait.front().copied() {
            let over = self.connections.get(first).is_none_or(|entry| entry.connection.state() != State::TimeWait);
            if !over && self.time_wait.len() <= self.limits.time_wait {
                break;
            }
            self.time_wait.pop_front();
            if !over && self.connections.get(first).is_some_and(|entry| entry.orphaned) {
                self.remove(first);
            }
        }
    }

    /// A connection has nothing to deliver any more.
    fn finish(&mut self, id: Id) {
        let Some(entry) = self.connections.get_mut(id) else { return };
        if !std::mem::replace(&mut entry.finished, true) {
            self.unfinished -= 1;
        }
        if self.unfinished == 0 {
            self.idle.wake_all();
        }
    }

    /// Another connection may have the flow of this one.
    fn free(&mut self, id: Id) {
        let Some(entry) = self.connections.get(id) else { return };
        let flow = entry.flow;
        if self.flows.get(&flow) == Some(&id) {
            self.flows.remove(&flow);
            if entry.dialled {
                self.ports.release((flow.local.ip(), flow.remote), flow.local.port());
            }
        }
    }

    fn remove(&mut self, id: Id) {
        self.free(id);
        let Some(entry) = self.connections.get(id) else { return };
        // A program that still holds it is told that it ended.
        if entry.orphaned {
            self.finish(id);
            let Some(entry) = self.connections.get(id) else { return };
            self.peers.close(entry.peer, entry.connection.buffered());
            self.connections.remove(id);
        } else if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.abort();
            entry.wake();
        }
    }
}

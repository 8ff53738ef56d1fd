//! The transport layer of one node without IO: connections by flow, listeners, UDP sockets and timers.
//!
//! A packet costs one lookup by flow and the work of its connection, however many others there are.

mod arrivals;
mod bindings;
mod entry;
mod packet;
mod random;
mod slots;
mod sockets;
#[cfg(test)]
mod tests;
mod timers;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::VerifiedCertificate;
use nebula_core::forward::{Offload, Segment, SegmentKind};
use nebula_core::protocol;

use self::bindings::Bindings;
use self::entry::{Entry, Stage};
use self::packet::IpPacket;
use self::random::Secret;
use self::timers::Timers;
use crate::tcp::segment::{Flags, Header, MIN_HEADER};
use crate::tcp::{Begin, Connection, Error, State, TcpOptions};

pub use self::slots::Id;
use self::slots::Slots;

/// Bounds on what peers can make a node keep.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Connections in all states. Default: 65,536.
    pub connections: usize,
    /// Connections of one listener that are opened or wait to be accepted. Default: 1024.
    pub backlog: usize,
    /// Of these, from one peer and not yet open. Addresses of peers are authentic, so a flood of SYNs is that of one peer, and takes
    /// nothing from the others. Default: 64.
    pub half_open_per_peer: usize,
    /// Connections that rest after both sides closed them; the oldest make room. Default: 16,384.
    pub time_wait: usize,
    /// Bytes of data that arrived and were not read, of all connections together. Beyond that each keeps a little, and the rest is left
    /// to the peers to send again. Default: 256 MiB.
    pub receive_memory: usize,
    /// Bytes of datagrams that wait in one UDP socket. Default: 256 KiB.
    pub udp_buffer: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 1 << 16,
            backlog: 1024,
            half_open_per_peer: 64,
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
    /// Whole packets to send, and where their checksum begins and lies.
    outgoing: VecDeque<(Vec<u8>, Offload)>,
    /// SYNs that nobody decided about.
    asked: VecDeque<Id>,
    /// Connections of this side that were opened since the last look.
    opened: VecDeque<Id>,
    time_wait: VecDeque<Id>,
    /// Bytes of data that arrived and were not read.
    buffered: usize,
}

/// What each connection may keep beyond [`Limits::receive_memory`].
const RESERVE: usize = 4096;
/// Answers and datagrams that wait to be sent; more are dropped.
const MAX_OUTGOING: usize = 256;
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
            outgoing: VecDeque::new(),
            asked: VecDeque::new(),
            opened: VecDeque::new(),
            time_wait: VecDeque::new(),
            buffered: 0,
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
        let over = |id: &Id| {
            let state = self.connections.get(*id).map(|entry| entry.connection.state());
            matches!(state, None | Some(State::TimeWait | State::Closed))
        };
        self.connections.ids().filter(|id| !over(id)).count()
    }

    /// The next SYN to decide about, by [`Stack::admit`] or [`Stack::refuse`].
    pub fn next_asked(&mut self) -> Option<(Id, Flow)> {
        while let Some(id) = self.asked.pop_front() {
            if let Some(entry) = self.connections.get(id) {
                return Some((id, entry.flow));
            }
        }
        None
    }

    /// Lets a SYN be answered.
    pub fn admit(&mut self, now: Instant, id: Id, certificate: Option<VerifiedCertificate>) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.certificate = certificate;
            entry.connection.admit(now);
            self.settle(now, id);
        }
    }

    /// Answers a SYN with a reset.
    pub fn refuse(&mut self, now: Instant, id: Id) {
        if let Some(entry) = self.connections.get_mut(id) {
            let (flow, sequence) = (entry.flow, entry.connection.peer_initial());
            entry.connection.abort();
            self.settle(now, id);
            self.reset(flow, &Header { sequence, flags: Flags::SYN, ..Header::default() }, 0);
        }
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

    /// Sets the peer's certificate; only then is a connection that this side opened open for the program.
    pub fn set_certificate(&mut self, id: Id, certificate: Option<VerifiedCertificate>) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.certificate = certificate;
            entry.stage = Stage::Open;
            entry.wake();
        }
    }

    fn send(&mut self, packet: Vec<u8>, offload: Offload) {
        if self.outgoing.len() < MAX_OUTGOING {
            self.outgoing.push_back((packet, offload));
        }
    }

    /// Writes the next packet to send into `out`, which is cleared. It may be a super-packet.
    pub fn poll_packet(&mut self, now: Instant, out: &mut Vec<u8>) -> Option<Offload> {
        out.clear();
        if let Some((packet, offload)) = self.outgoing.pop_front() {
            *out = packet;
            return Some(offload);
        }
        while let Some(id) = self.ready.pop_front() {
            let Some(entry) = self.connections.get_mut(id) else { continue };
            entry.queued = false;
            let Flow { local, remote } = entry.flow;
            packet::begin(local.ip(), remote.ip(), protocol::TCP, out);
            let headers = out.len();
            if let Some(size) = entry.connection.transmit(now, (local.port(), remote.port()), out) {
                // The others have their turn before it has the next one.
                entry.queued = true;
                self.ready.push_back(id);
                let start = packet::finish(out, TCP_CHECKSUM);
                let header = usize::from(out[headers + 12] >> 4) * 4;
                let segment = (out.len() - headers - header > size)
                    .then_some(Segment { kind: SegmentKind::Tcp, size: size as u16 });
                return Some(Offload { segment, checksum: Some((start as u16, TCP_CHECKSUM as u16)) });
            }
            out.clear();
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
        if self.addresses.contains(&remote.ip()) {
            return Err(Error::OwnAddress);
        }
        let local = self.local_for(remote.ip()).ok_or(Error::Unreachable)?;
        if self.connections.len() >= self.limits.connections {
            return Err(Error::Unreachable);
        }
        let flow = self.free_flow(local, remote).ok_or(Error::Unreachable)?;
        let begin = self.begin(now, flow);
        let id = self.insert(flow, Connection::connect(now, begin), Stage::Opening);
        self.settle(now, id);
        Ok(id)
    }

    fn local_for(&self, remote: IpAddr) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|address| address.is_ipv4() == remote.is_ipv4())
    }

    /// A flow to `remote` from an ephemeral port that has none yet (RFC 6056).
    fn free_flow(&mut self, local: IpAddr, remote: SocketAddr) -> Option<Flow> {
        let first = self.secret.port(local, remote);
        (0..random::EPHEMERAL).map(|step| random::ephemeral(first, step)).find_map(|port| {
            let flow = Flow { local: SocketAddr::new(local, port), remote };
            (!self.flows.contains_key(&flow) && self.bindings.listener(flow.local).is_none()).then_some(flow)
        })
    }

    fn begin(&self, now: Instant, flow: Flow) -> Begin {
        let headers = packet::header_len(flow.remote.ip()) + MIN_HEADER;
        let (initial, timestamp_offset) = self.secret.numbers(flow);
        // A step each four microseconds, so that a later connection of the flow has later numbers.
        let clock = now.saturating_duration_since(self.epoch).as_micros() / 4;
        let initial = initial.wrapping_add(clock as u32);
        Begin {
            options: Arc::clone(&self.options),
            initial,
            timestamp_offset,
            epoch: self.epoch,
            mss: self.mtu - headers as u16,
        }
    }

    fn insert(&mut self, flow: Flow, connection: Connection, stage: Stage) -> Id {
        let id = self.connections.insert(Entry::new(flow, connection, stage));
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
                Stage::HalfOpen => {
                    entry.stage = Stage::Waiting;
                    let flow = entry.flow;
                    match self.bindings.listener(flow.local) {
                        Some(listener) => listener.established(flow.remote.ip(), id),
                        None => entry.connection.close(now),
                    }
                }
                Stage::Opening => {
                    entry.stage = Stage::Unnamed;
                    self.opened.push_back(id);
                }
                Stage::Unnamed | Stage::Waiting | Stage::Open => {}
            }
        }
        let Some(entry) = self.connections.get_mut(id) else { return };
        if state == State::Closed && entry.stage == Stage::HalfOpen {
            let flow = entry.flow;
            entry.orphaned = true;
            entry.stage = Stage::Open;
            if let Some(listener) = self.bindings.listener(flow.local) {
                listener.failed(flow.remote.ip());
            }
        }
        let Some(entry) = self.connections.get_mut(id) else { return };
        entry.wake_if_ready();
        if state == State::TimeWait && !entry.resting {
            entry.resting = true;
            self.time_wait.push_back(id);
            self.limit_time_wait();
        } else if state == State::Closed && !entry.queued {
            // The flow may begin again, even if the program has not looked at the end of this one.
            if self.flows.get(&entry.flow) == Some(&id) {
                self.flows.remove(&entry.flow);
            }
            if entry.orphaned {
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

    fn remove(&mut self, id: Id) {
        let Some(entry) = self.connections.get(id) else { return };
        let flow = entry.flow;
        if self.flows.get(&flow) == Some(&id) {
            self.flows.remove(&flow);
        }
        // A program that still holds it is told that it ended.
        if entry.orphaned {
            self.buffered -= entry.connection.buffered();
            self.connections.remove(id);
        } else if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.abort();
            entry.wake();
        }
    }
}

//! The task that owns the engine and the socket, and moves packets between them and the stack.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nebula_cert::VerifiedCertificate;

use nebula_core::io::without_missing_v6;
use nebula_core::{Engine, Event, Forwarder, LocalIndex, Node, Output, Packet, TunnelDownReason};
use tokio::sync::{Notify, broadcast, mpsc, watch};

use super::rest::Rest;
use super::socket::{RECEIVE_BUFFER, Socket};
use super::{clock, dial};
use crate::stack::{Stack, names};

/// Calls the control plane.
pub(crate) type Work = Box<dyn for<'a> FnOnce(&'a mut Engine, Instant) -> Output<'a> + Send>;
/// Decides whether a peer may connect.
pub(crate) type Allow = Arc<dyn Fn(&VerifiedCertificate) -> bool + Send + Sync>;

/// Called when memory can be given back.
pub(crate) type OnIdle = Box<dyn Fn() + Send>;

/// Receive calls, and packets sent, before others have their turn.
const BURST: usize = 32;
/// How long connections have to deliver what was written once the program has dropped everything.
const LINGER: Duration = Duration::from_secs(5);
/// How long the last words of a node may wait for room in the socket, which may be full of data.
const FAREWELL: Duration = Duration::from_millis(250);
/// Longest sleep.
const IDLE: Duration = Duration::from_secs(3600);

/// What the task and the program's streams share.
pub(crate) struct Shared {
    stack: Mutex<Stack>,
    /// The stack may have something to send, or is due earlier.
    wake: Notify,
    /// `None` once the node has ended.
    events: Mutex<Option<broadcast::Sender<Event>>>,
    ended: watch::Sender<bool>,
    forwarder: Arc<Forwarder>,
    allow: Option<Allow>,
    /// Connections end when the tunnel of their peer is given up.
    ends_with_tunnel: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("stack", &self.stack).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn new(stack: Stack, forwarder: Arc<Forwarder>, allow: Option<Allow>, ends_with_tunnel: bool) -> Self {
        let (stack, events) = (Mutex::new(stack), Mutex::new(Some(broadcast::Sender::new(64))));
        Self {
            stack,
            wake: Notify::new(),
            events,
            ended: watch::Sender::new(false),
            forwarder,
            allow,
            ends_with_tunnel,
        }
    }

    /// The certificate of the peer at the other end of a tunnel.
    pub(crate) fn certificate(&self, tunnel: LocalIndex) -> Option<VerifiedCertificate> {
        self.forwarder.certificate(tunnel)
    }

    /// Calls the stack, and lets what comes of it be sent.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Stack, Instant) -> T) -> T {
        let (result, send) = {
            let mut stack = self.stack();
            let result = work(&mut stack, clock::now());
            (result, stack.has_packets())
        };
        if send {
            self.wake.notify_one();
        }
        result
    }

    /// Lets the task look what there is to do.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// What happens in the control plane from now on.
    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Event> {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        // Of a node that has ended, a receiver whose sender is gone.
        events.as_ref().map_or_else(|| broadcast::channel(1).1, broadcast::Sender::subscribe)
    }

    /// Waits until the node has ended.
    pub(crate) async fn ended(&self) {
        // An error would say that the sender is gone, which this keeps.
        let _ = self.ended.subscribe().wait_for(|ended| *ended).await;
    }

    fn stack(&self) -> MutexGuard<'_, Stack> {
        self.stack.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Datagrams that the socket did not take yet.
#[derive(Debug)]
struct Unsent {
    to: SocketAddr,
    bytes: Vec<u8>,
    size: usize,
}

pub(crate) struct Driver {
    engine: Engine,
    socket: Socket,
    shared: Arc<Shared>,
    work: mpsc::UnboundedReceiver<Work>,
    /// While there are some, nothing else is sent.
    unsent: VecDeque<Unsent>,
    buffer: Vec<u8>,
    packet: Vec<u8>,
    rest: Rest,
    on_idle: Option<OnIdle>,
}

impl Driver {
    pub(crate) fn new(
        engine: Engine,
        socket: Socket,
        shared: Arc<Shared>,
        work: mpsc::UnboundedReceiver<Work>,
        on_idle: Option<OnIdle>,
    ) -> Self {
        let (unsent, packet, rest) = (VecDeque::new(), Vec::new(), Rest::default());
        Self { engine, socket, shared, work, unsent, buffer: vec![0; RECEIVE_BUFFER], packet, rest, on_idle }
    }

    /// Runs until the program has dropped everything that belongs to the node.
    pub(crate) async fn run(mut self) {
        let mut ends = None;
        loop {
            let more = self.turn();
            let now = clock::now();
            if self.shared.stack().is_shut() && !more {
                break;
            }
            if ends.is_some_and(|at| now >= at) || ends.is_some() && self.shared.stack().unfinished() == 0 {
                break;
            }
            if more {
                tokio::task::yield_now().await;
                continue;
            }
            let (open, stack_due) = {
                let stack = self.shared.stack();
                (stack.unfinished(), stack.poll_timeout())
            };
            if self.rest.look(now, open) {
                self.give_memory_back();
            }
            let due = [self.engine.poll_timeout(), stack_due, self.rest.due(), ends];
            let due = due.into_iter().flatten().min().unwrap_or(now + IDLE);
            let shared = Arc::clone(&self.shared);
            tokio::select! {
                _ = self.socket.readable() => {}
                _ = self.socket.writable(), if !self.unsent.is_empty() => {}
                () = shared.wake.notified() => {}
                work = self.work.recv(), if ends.is_none() => match work {
                    Some(work) => self.call(work),
                    None => ends = Some(now + LINGER),
                },
                () = tokio::time::sleep_until(due.into()) => {}
            }
        }
        self.say_goodbye().await;
    }

    /// Sends the resets of connections, and tells peers that the node ends.
    async fn say_goodbye(&mut self) {
        let end = clock::now() + FAREWELL;
        while self.flush(end).await && self.turn() | !self.unsent.is_empty() && clock::now() < end {}
        let now = clock::now();
        let ((), output) = self.engine.control(now, |node: &mut Node| node.close_all(now));
        send_out(output, &mut self.socket, &mut self.unsent);
        self.flush(end).await;
    }

    /// Waits until the socket has taken everything, or until `end`. Returns whether it has.
    async fn flush(&mut self, end: Instant) -> bool {
        while !self.unsent.is_empty() {
            let writable = tokio::time::timeout_at(end.into(), self.socket.writable()).await;
            if !matches!(writable, Ok(Ok(_))) {
                return false;
            }
            self.send_unsent();
        }
        true
    }

    /// Gives the memory back that many connections needed.
    fn give_memory_back(&mut self) {
        self.shared.stack().release_memory();
        self.engine.release_memory();
        self.packet = Vec::new();
        self.unsent.shrink_to_fit();
        if let Some(on_idle) = &self.on_idle {
            on_idle();
        }
    }

    fn call(&mut self, work: Work) {
        let now = clock::now();
        let output = work(&mut self.engine, now);
        let lost = self.shared.take(output, now, &mut self.socket, &mut self.unsent);
        self.give_up(now, &lost);
    }

    /// Connections that are being opened to these peers, or to hosts behind them, fail.
    fn give_up(&self, now: Instant, lost: &[IpAddr]) {
        if lost.is_empty() {
            return;
        }
        let mut stack = self.shared.stack();
        for (id, flow) in stack.opening() {
            if dial::peer_of(self.engine.node(), now, flow).is_some_and(|peer| lost.contains(&peer)) {
                stack.fail_opening(now, id);
            }
        }
    }

    /// Does what can be done without waiting. Returns whether there is more.
    fn turn(&mut self) -> bool {
        let now = clock::now();
        self.send_unsent();
        let received = self.receive(now);
        let Self { engine, socket, shared, unsent, .. } = self;
        if engine.poll_timeout().is_some_and(|due| due <= now) {
            let lost = shared.take(engine.timeout(now), now, socket, unsent);
            self.give_up(now, &lost);
        }
        self.shared.stack().timeout(now);
        let sent = self.send(now);
        received || sent
    }

    fn send_unsent(&mut self) {
        let Self { socket, unsent, .. } = self;
        while let Some(first) = unsent.front_mut() {
            let sent = socket.send(first.to, &first.bytes, first.size);
            if sent < first.bytes.len() {
                first.bytes.drain(..sent);
                break;
            }
            unsent.pop_front();
        }
    }

    /// Receives what is there, up to a limit. Returns whether that was reached.
    fn receive(&mut self, now: Instant) -> bool {
        for _ in 0..BURST {
            match self.socket.receive(&mut self.buffer) {
                Ok(Some(received)) => {
                    let output = self.engine.receive_all(now, &mut self.buffer, &[received]);
                    let lost = self.shared.take(output, now, &mut self.socket, &mut self.unsent);
                    self.give_up(now, &lost);
                }
                Ok(None) => return false,
                // An ICMP error for an earlier datagram.
                Err(error) => tracing::debug!(%error, "cannot receive on the underlay"),
            }
        }
        true
    }

    /// Sends what the stack has, up to a limit. Returns whether that was reached.
    fn send(&mut self, now: Instant) -> bool {
        for _ in 0..BURST {
            let Self { engine, socket, shared, unsent, packet, .. } = self;
            if !unsent.is_empty() {
                return false;
            }
            let Some(offload) = shared.stack().poll_packet(now, packet) else { return false };
            // The headers, for the engine leaves the packet in an unknown state.
            let head: [u8; 128] = std::array::from_fn(|at| packet.get(at).copied().unwrap_or(0));
            let len = packet.len().min(head.len());
            let output = engine.send(now, packet, offload);
            let dropped = output.dropped();
            let lost = shared.take(output, now, socket, unsent);
            if dropped.is_some() {
                shared.stack().unreachable(now, &head[..len]);
            }
            self.give_up(now, &lost);
        }
        true
    }
}

/// However it ends: by itself, with its runtime, or because a closure of the program panicked.
impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.with(|stack, now| stack.shut(now));
        *self.shared.events.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.shared.ended.send_replace(true);
    }
}

impl Shared {
    /// Does what an output of the engine asks for.
    ///
    /// Returns the peers that did not answer a handshake.
    fn take(
        &self,
        output: Output<'_>,
        now: Instant,
        socket: &mut Socket,
        unsent: &mut VecDeque<Unsent>,
    ) -> Vec<IpAddr> {
        let mut lost = Vec::new();
        send_out(output, socket, unsent);
        let mut packets = output.packets().peekable();
        if packets.peek().is_some() {
            let mut stack = self.stack();
            let mut slices = Vec::new();
            for packet in packets {
                slices.clear();
                slices.extend(packet.slices());
                stack.receive_by(now, packet.tunnel(), &slices, packet.offload());
                self.decide(&mut stack, now, packet);
            }
        }
        for event in output.events() {
            tracing::debug!(?event, "overlay");
            match event {
                Event::HandshakeTimedOut { peer, .. } => lost.push(*peer),
                Event::TunnelDown { peer, reason, .. } if self.ends_with_tunnel && is_gone(reason) => {
                    self.stack().lose_peer(now, peer);
                }
                _ => {}
            }
            if let Some(events) = self.events.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
                // Nobody may be interested.
                let _ = events.send(event.clone());
            }
        }
        lost
    }

    /// Decides about the connection that a packet asks for, and gives the one that it opens the peer's certificate.
    fn decide(&self, stack: &mut Stack, now: Instant, packet: Packet<'_>) {
        while let Some(asked) = stack.next_asked() {
            let sender = packet.sender();
            let named = sender.as_ref().filter(|it| names(it, asked.flow().remote.ip()));
            if self.allow.as_ref().is_none_or(|allow| named.is_some_and(|it| allow(it))) {
                stack.admit(now, asked, sender);
            } else {
                stack.refuse(&asked);
            }
        }
        while let Some((id, _)) = stack.next_opened() {
            stack.set_sender(id, packet.sender());
        }
    }
}

/// Whether a tunnel has ended such that its peer is not expected back.
fn is_gone(reason: &TunnelDownReason) -> bool {
    matches!(reason, TunnelDownReason::Dead | TunnelDownReason::CertificateInvalid | TunnelDownReason::PeerReplaced)
}

/// Sends the datagrams of an output, or keeps them until the socket takes more. Their number is bounded: nothing new
/// is sent then, and what is received asks for a few datagrams at most.
fn send_out(output: Output<'_>, socket: &mut Socket, unsent: &mut VecDeque<Unsent>) {
    for batch in output.batches() {
        let sent = if unsent.is_empty() { socket.send(batch.to, batch.bytes, batch.segment_size) } else { 0 };
        if sent < batch.bytes.len() && unsent.len() < MAX_UNSENT {
            unsent.push_back(Unsent { to: batch.to, bytes: batch.bytes[sent..].to_vec(), size: batch.segment_size });
        }
    }
}

/// Batches that wait for the socket; more are dropped.
const MAX_UNSENT: usize = 64;

/// Binds the underlay socket; `::` means IPv4 where there is no IPv6.
pub(crate) fn bind(address: SocketAddr) -> io::Result<std::net::UdpSocket> {
    std::net::UdpSocket::bind(without_missing_v6(address))
}

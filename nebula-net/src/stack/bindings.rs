//! Ports that are open: listeners with their queues, and UDP sockets with theirs.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::task::Poll;

use nebula_core::LocalIndex;

use super::random::{self, EPHEMERAL};
use super::shares::Shares;
use super::waiters::{Waiter, Waiters};
use super::{Id, Received};

/// A port of one address, or of all.
type Binding = (Option<IpAddr>, u16);

/// Open ports.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    listeners: HashMap<Binding, Listener>,
    udp: HashMap<Binding, UdpPort>,
}

/// A listener and the connections that wait in it.
#[derive(Debug, Default)]
pub(crate) struct Listener {
    pub(crate) waiting: Shares<Id>,
    pub(crate) waiters: Waiters,
}

/// A UDP socket and the datagrams that wait in it.
#[derive(Debug, Default)]
pub(crate) struct UdpPort {
    datagrams: VecDeque<Received>,
    /// Bytes of them, and what each costs beside.
    bytes: usize,
    pub(crate) waiters: Waiters,
}

/// What a datagram takes beside its payload.
const DATAGRAM_OVERHEAD: usize = 100;

impl Bindings {
    /// The listener that serves this end: that of its address comes before that of all.
    pub(crate) fn listener(&mut self, local: SocketAddr) -> Option<&mut Listener> {
        let of_address = (Some(local.ip()), local.port());
        let key = if self.listeners.contains_key(&of_address) { of_address } else { (None, local.port()) };
        self.listeners.get_mut(&key)
    }

    pub(crate) fn has_listener(&self, local: SocketAddr) -> bool {
        [Some(local.ip()), None].iter().any(|address| self.listeners.contains_key(&(*address, local.port())))
    }

    pub(crate) fn listener_at(&mut self, address: Option<IpAddr>, port: u16) -> Option<&mut Listener> {
        self.listeners.get_mut(&(address, port))
    }

    pub(crate) fn listen(&mut self, address: Option<IpAddr>, port: u16, first: u16) -> Option<u16> {
        let port = free_port(&self.listeners, address, port, first)?;
        self.listeners.insert((address, port), Listener::default());
        Some(port)
    }

    pub(crate) fn unlisten(&mut self, address: Option<IpAddr>, port: u16) -> Option<Listener> {
        self.listeners.remove(&(address, port))
    }

    pub(crate) fn udp(&mut self, local: SocketAddr) -> Option<&mut UdpPort> {
        let of_address = (Some(local.ip()), local.port());
        let key = if self.udp.contains_key(&of_address) { of_address } else { (None, local.port()) };
        self.udp.get_mut(&key)
    }

    pub(crate) fn udp_at(&mut self, address: Option<IpAddr>, port: u16) -> Option<&mut UdpPort> {
        self.udp.get_mut(&(address, port))
    }

    pub(crate) fn bind_udp(&mut self, address: Option<IpAddr>, port: u16, first: u16) -> Option<u16> {
        let port = free_port(&self.udp, address, port, first)?;
        self.udp.insert((address, port), UdpPort::default());
        Some(port)
    }

    pub(crate) fn unbind_udp(&mut self, address: Option<IpAddr>, port: u16) {
        self.udp.remove(&(address, port));
    }

    /// Ends all of them; whoever waits is told.
    pub(crate) fn wake_all(&mut self) {
        let listeners = self.listeners.drain().map(|(_, listener)| listener.waiters);
        let udp = self.udp.drain().map(|(_, port)| port.waiters);
        listeners.chain(udp).for_each(|mut waiters| waiters.wake_all());
    }
}

/// The wanted port, or a free ephemeral one if that is 0. `None` if it is taken.
fn free_port<T>(taken: &HashMap<Binding, T>, address: Option<IpAddr>, wanted: u16, first: u16) -> Option<u16> {
    let free = |port: &u16| !taken.contains_key(&(address, *port));
    if wanted != 0 {
        return Some(wanted).filter(free);
    }
    (0..EPHEMERAL).map(|step| random::ephemeral(first, step)).find(free)
}

impl Listener {
    /// Whether a peer may open another connection, of so many that may wait. Who has most of a full queue may not.
    pub(crate) fn may_open(&self, peer: Option<Id>, backlog: usize) -> bool {
        self.waiting.len() < backlog || !peer.is_some_and(|peer| self.waiting.is_heaviest(peer))
    }

    /// A connection is open, and waits to be accepted. Returns one that has to make room.
    #[must_use]
    pub(crate) fn established(&mut self, peer: Id, id: Id, backlog: usize) -> Option<Id> {
        self.waiting.push(peer, id);
        let crowded_out = if self.waiting.len() > backlog { self.waiting.take_newest_of_heaviest() } else { None };
        self.waiters.wake_one();
        crowded_out
    }

    pub(crate) fn accept(&mut self, waiter: Waiter<'_>) -> Poll<Id> {
        match self.waiting.pop() {
            Some(id) => waiter.served(id),
            None => self.waiters.wait(waiter),
        }
    }

    /// Connections that nobody will accept.
    pub(crate) fn into_waiting(self) -> impl Iterator<Item = Id> {
        self.waiting.into_items()
    }
}

impl UdpPort {
    /// Queues a datagram, unless too much waits already.
    pub(crate) fn push(&mut self, from: SocketAddr, tunnel: Option<LocalIndex>, payload: &[u8], limit: usize) {
        let cost = payload.len() + DATAGRAM_OVERHEAD;
        if self.bytes + cost > limit {
            return;
        }
        self.bytes += cost;
        self.datagrams.push_back(Received { from, payload: payload.to_vec(), tunnel });
        self.waiters.wake_one();
    }

    pub(crate) fn take(&mut self) -> Option<Received> {
        let received = self.datagrams.pop_front()?;
        self.bytes -= received.payload.len() + DATAGRAM_OVERHEAD;
        Some(received)
    }

    pub(crate) fn pop(&mut self, waiter: Waiter<'_>) -> Poll<Received> {
        match self.take() {
            Some(received) => waiter.served(received),
            None => self.waiters.wait(waiter),
        }
    }

    /// Waits until there is a datagram, and takes none.
    pub(crate) fn ready(&mut self, waiter: Waiter<'_>) -> Poll<()> {
        if self.datagrams.is_empty() {
            return self.waiters.wait(waiter);
        }
        let ready = waiter.served(());
        // Whoever is told may leave the datagram there; another one that waits finds it.
        self.waiters.wake_one();
        ready
    }
}

//! The control plane: owns every control table, wires the parts together.

mod deadlines;
mod timer;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::{CaPool, Identity};

use crate::{Config, Event, Forwarder, Punt, Transmit, firewall};

/// Ties the monotonic clock to the wall clock, for certificates and the handshake's Time field.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    /// Moment of the reading.
    pub at: Instant,
    /// Wall clock then, since the Unix epoch.
    pub unix: Duration,
}

/// A live tunnel, for people and programs that ask.
#[derive(Debug, Clone)]
pub struct TunnelStatus {
    /// Peer's overlay addresses.
    pub peer: Vec<IpAddr>,
    /// Peer's certificate name.
    pub name: String,
    /// Current endpoint.
    pub endpoint: Option<SocketAddr>,
    /// Own index.
    pub local_index: crate::tunnel::LocalIndex,
    /// Peer's index.
    pub remote_index: crate::tunnel::RemoteIndex,
    /// Next send counter.
    pub message_counter: u64,
    /// Carries this node's packets to the peer.
    pub primary: bool,
    /// Time the handshake took, for tunnels this node initiated.
    pub handshake: Option<Duration>,
}

/// The control plane of one node. `&mut self`, no locks, no clock, no sockets.
///
/// After any `handle_*` or setter: drain [`Node::poll_transmit`], then [`Node::poll_event`], then read
/// [`Node::poll_timeout`]. Time never goes back.
#[derive(Debug)]
pub struct Node {}

impl Node {
    /// A node and its forwarding plane. `seed` feeds the only random generator.
    #[must_use]
    pub fn new(_config: Config, _now: Instant, _wall: WallClock, _seed: [u8; 32]) -> (Self, Arc<Forwarder>) {
        unimplemented!()
    }
    /// Something the forwarding plane could not finish.
    pub fn handle_punt(&mut self, _now: Instant, _punt: Punt) {
        unimplemented!()
    }
    /// A deadline passed.
    pub fn handle_timeout(&mut self, _now: Instant) {
        unimplemented!()
    }
    /// Next datagram to send.
    #[must_use]
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        unimplemented!()
    }
    /// Next thing that happened.
    #[must_use]
    pub fn poll_event(&mut self) -> Option<Event> {
        unimplemented!()
    }
    /// When to call [`Node::handle_timeout`]; `None`: nothing is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        unimplemented!()
    }
    /// Re-anchors the wall clock (start, and after a clock step).
    pub fn set_wall_clock(&mut self, _wall: WallClock) {
        unimplemented!()
    }
    /// New certificate or key: used for new handshakes at once; live tunnels re-handshake.
    pub fn set_identity(&mut self, _now: Instant, _identity: Identity) {
        unimplemented!()
    }
    /// New CAs or blocklist: live tunnels are checked again.
    pub fn set_trust(&mut self, _now: Instant, _trust: CaPool) {
        unimplemented!()
    }
    /// New rules; known flows are checked again.
    pub fn set_firewall(&mut self, _policy: firewall::Policy) {
        unimplemented!()
    }
    /// New static endpoints (also after a DNS look-up).
    pub fn set_static_hosts(&mut self, _now: Instant, _hosts: BTreeMap<IpAddr, Vec<SocketAddr>>) {
        unimplemented!()
    }
    /// Addresses of local interfaces, to advertise to lighthouses.
    pub fn set_local_addresses(&mut self, _addresses: Vec<IpAddr>) {
        unimplemented!()
    }
    /// Starts a handshake if there is no tunnel.
    pub fn connect(&mut self, _now: Instant, _peer: IpAddr) {
        unimplemented!()
    }
    /// Closes every tunnel (sends CloseTunnel); drain transmits afterwards.
    pub fn close_all(&mut self, _now: Instant) {
        unimplemented!()
    }
    /// Live tunnels, ordered by peer address.
    #[must_use]
    pub fn tunnels(&self) -> Vec<TunnelStatus> {
        unimplemented!()
    }
}

//! A tunnel: a verified peer, where it is, and the session keys (a security association).

pub mod cipher;
pub(crate) mod liveness;
mod replay_window;
mod session;
mod table;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use nebula_cert::{VerifiedCertificate, Version};

pub use replay_window::ReplayWindow;
pub use session::{Session, SessionKeys};
pub use table::TunnelTable;

/// Index this node allocated; peers put it into datagrams to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalIndex(pub u32);

/// Index the peer allocated; this node puts it into datagrams to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteIndex(pub u32);

/// One live tunnel. Keys are immutable; the send counter, the replay window, the endpoint and the traffic marks are the
/// only mutable state, each safe to touch from any lane.
#[derive(Debug)]
pub struct Tunnel {
    /// Own index.
    pub local_index: LocalIndex,
    /// Peer's index.
    pub remote_index: RemoteIndex,
    /// Who the peer proved to be.
    pub peer: VerifiedCertificate,
    /// The peer's overlay addresses, primary first.
    pub peer_addresses: Vec<IpAddr>,
    /// Keys, counter, replay window.
    pub session: Session,
    /// Whether this node initiated.
    pub initiator: bool,
    /// Version of the own certificate used in the handshake.
    pub own_version: Version,
    /// Time value of the peer's handshake message, nanoseconds since the Unix epoch by the peer's clock.
    pub peer_time: u64,
    endpoint: ArcSwapOption<SocketAddr>,
    received: AtomicBool,
    sent: AtomicBool,
}

impl Tunnel {
    /// A tunnel from a completed handshake.
    #[must_use]
    pub fn new(done: crate::handshake::Completed, endpoint: Option<SocketAddr>) -> Self {
        Self {
            local_index: done.local_index,
            remote_index: done.remote_index,
            peer_addresses: done.peer.networks().iter().map(ipnet::IpNet::addr).collect(),
            peer: done.peer,
            session: Session::new(done.keys),
            initiator: done.initiator,
            own_version: done.own_version,
            peer_time: done.peer_time,
            endpoint: ArcSwapOption::new(endpoint.map(Arc::new)),
            received: AtomicBool::new(false),
            sent: AtomicBool::new(true),
        }
    }
    /// Current underlay endpoint.
    #[must_use]
    pub fn endpoint(&self) -> Option<SocketAddr> {
        self.endpoint.load().as_deref().copied()
    }
    /// Moves the tunnel.
    pub fn set_endpoint(&self, endpoint: Option<SocketAddr>) {
        self.endpoint.store(endpoint.map(Arc::new));
    }
    /// Notes authenticated traffic from the peer.
    pub fn mark_received(&self) {
        if !self.received.load(Ordering::Relaxed) {
            self.received.store(true, Ordering::Relaxed);
        }
    }
    /// Notes traffic to the peer.
    pub fn mark_sent(&self) {
        if !self.sent.load(Ordering::Relaxed) {
            self.sent.store(true, Ordering::Relaxed);
        }
    }
    /// (received, sent) since the last call; clears both.
    pub fn take_traffic(&self) -> (bool, bool) {
        (self.received.swap(false, Ordering::Relaxed), self.sent.swap(false, Ordering::Relaxed))
    }
}

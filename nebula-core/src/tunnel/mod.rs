//! A tunnel: a verified peer, where it is, and the session keys (a security association).

pub mod cipher;
mod hint;
pub(crate) mod liveness;
mod replay_window;
mod session;
mod table;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwapOption;
use nebula_cert::{VerifiedCertificate, Version};

pub(crate) use hint::TunnelHint;
pub(crate) use replay_window::CounterSet;
pub use replay_window::ReplayWindow;
pub use session::{Session, SessionKeys};
pub(crate) use table::Lookup;
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
    pub(crate) fn new(done: crate::handshake::Completed, endpoint: Option<SocketAddr>) -> Self {
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

#[cfg(test)]
mod tests {
    use nebula_cert::{CaPool, Identity, Version};

    use super::cipher::Cipher;
    use super::*;
    use crate::handshake::{Initiator, Own, respond};

    const CERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/vectors/certs/v2-25519/");

    fn tunnel() -> Tunnel {
        let identity = |name| Identity::read(format!("{CERTS}{name}.crt"), format!("{CERTS}{name}.key")).unwrap();
        let (plain, multi) = (identity("host-plain"), identity("host-multi"));
        let trust = CaPool::from_pem(&std::fs::read(format!("{CERTS}ca.crt")).unwrap()).unwrap();
        let own = |identity| Own { identity, default_version: Version::V2, cipher: Cipher::Aes256Gcm, time: 7 };
        let (_, first) = Initiator::start(own(&multi), Version::V2, LocalIndex(1), [1; 32]).unwrap();
        let (done, _) = respond(own(&plain), LocalIndex(2), [2; 32], &first, &trust, 1_800_000_000).unwrap();
        Tunnel::new(done, Some("192.0.2.1:4242".parse().unwrap()))
    }

    #[test]
    fn every_address_of_the_certificate_is_the_peer_and_the_first_is_primary() {
        let tunnel = tunnel();
        let addresses: [IpAddr; 4] =
            ["10.3.0.9", "10.77.9.9", "fd01:2:3::9", "fd77::9"].map(|text| text.parse().unwrap());
        assert_eq!(tunnel.peer_addresses, addresses);
        assert_eq!((tunnel.local_index, tunnel.remote_index), (LocalIndex(2), RemoteIndex(1)));
        assert_eq!((tunnel.peer_time, tunnel.initiator), (7, false));
    }

    #[test]
    fn a_new_tunnel_counts_as_sent_to_and_marks_are_cleared_when_taken() {
        let tunnel = tunnel();
        assert_eq!(tunnel.take_traffic(), (false, true));
        assert_eq!(tunnel.take_traffic(), (false, false));
        tunnel.mark_received();
        assert_eq!(tunnel.take_traffic(), (true, false));
        tunnel.mark_sent();
        assert_eq!(tunnel.take_traffic(), (false, true));
    }

    #[test]
    fn the_endpoint_can_move_and_go() {
        let tunnel = tunnel();
        assert_eq!(tunnel.endpoint(), Some("192.0.2.1:4242".parse().unwrap()));
        tunnel.set_endpoint(Some("[2001:db8::1]:1".parse().unwrap()));
        assert_eq!(tunnel.endpoint(), Some("[2001:db8::1]:1".parse().unwrap()));
        tunnel.set_endpoint(None);
        assert_eq!(tunnel.endpoint(), None);
    }
}

//! Creates tunnels without a handshake, to measure a node that has very many.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::VerifiedCertificate;

use crate::Origin;
use crate::index::{LocalIndex, RemoteIndex};
use crate::node::{Established, Node};
use crate::tunnel::{Negotiated, SessionKeys, Tunnel};

impl Node {
    /// Creates a tunnel with random keys to the host with these overlay addresses, as if that host had initiated it
    /// from `endpoint`. All hosts may share one certificate. Returns `None` if the table is full.
    pub fn adopt(
        &mut self,
        now: Instant,
        certificate: VerifiedCertificate,
        addresses: Vec<IpAddr>,
        endpoint: SocketAddr,
    ) -> Option<LocalIndex> {
        let (send, receive) = (self.random_bytes(), self.random_bytes());
        let keys = SessionKeys { cipher: self.config().cipher, send, receive };
        let remote_index = RemoteIndex(u32::from_be_bytes(self.random_bytes()).max(1));
        self.adopt_session(now, certificate, addresses, endpoint, keys, remote_index)
    }

    /// Like [`Node::adopt`], but with the keys and the peer's index of a known session, such as one that was recorded.
    pub fn adopt_session(
        &mut self,
        now: Instant,
        certificate: VerifiedCertificate,
        addresses: Vec<IpAddr>,
        endpoint: SocketAddr,
        keys: SessionKeys,
        remote_index: RemoteIndex,
    ) -> Option<LocalIndex> {
        let local_index = self.reserve_index()?;
        let own_version = self.config().default_version();
        let digest = self.random_bytes();
        let done = Negotiated {
            local_index: *local_index,
            remote_index,
            peer: certificate,
            keys,
            initiator: false,
            own_version,
            peer_time: 0,
            answers_long_tests: true,
            post_quantum: false,
        };
        let mut tunnel = Tunnel::new(done, Some(endpoint));
        tunnel.peer_addresses = addresses;
        tunnel.confirm();
        let established = Established {
            tunnel: Arc::new(tunnel),
            from: Origin::Direct(endpoint),
            unproven: None,
            since: now,
            own_certificate: self.config().fingerprint(own_version),
            opened_by: Some(digest),
            took: None,
        };
        self.install(now, established);
        Some(*local_index)
    }
}

//! Tunnels without a handshake, to measure a node that has very many.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nebula_cert::VerifiedCertificate;
use rand_chacha::rand_core::RngCore as _;

use super::Node;
use super::handshakes::Origins;
use crate::Origin;
use crate::index::{LocalIndex, RemoteIndex};
use crate::tunnel::{Negotiated, SessionKeys, Tunnel};

impl Node {
    /// A tunnel with random keys to the host with these overlay addresses, as if it had called from `endpoint`. All hosts
    /// may share one certificate. `None`: the table is full.
    pub fn adopt(
        &mut self,
        now: Instant,
        certificate: VerifiedCertificate,
        addresses: Vec<IpAddr>,
        endpoint: SocketAddr,
    ) -> Option<LocalIndex> {
        let (send, receive) = (self.random_seed(), self.random_seed());
        let keys = SessionKeys { cipher: self.config.cipher, send, receive };
        let remote_index = RemoteIndex(self.rng.next_u32().max(1));
        self.adopt_session(now, certificate, addresses, endpoint, keys, remote_index)
    }

    /// As [`Node::adopt`], with keys and the peer's index of a session that is known, such as one that was recorded.
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
        let own_version = self.default_version();
        let digest = self.random_seed();
        let done = Negotiated {
            local_index,
            remote_index,
            peer: certificate,
            keys,
            initiator: false,
            own_version,
            peer_time: 0,
        };
        let mut tunnel = Tunnel::new(done, Some(endpoint));
        tunnel.peer_addresses = addresses;
        tunnel.confirm();
        let origins = Origins { from: Origin::Direct(endpoint), since: now };
        self.install(now, Arc::new(tunnel), origins, self.fingerprint(own_version), Some(digest), None);
        Some(local_index)
    }
}

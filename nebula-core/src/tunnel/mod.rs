//! A tunnel: a verified peer, its endpoint and the session keys (a security association).

pub(crate) mod cipher;
mod half_open;
mod hint;
mod identity;
pub(crate) mod liveness;
mod path_limit;
mod replay_record;
mod replay_window;
mod session;
mod table;
mod trial;
mod vacancies;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwapOption;
use nebula_cert::{Certificate, VerifiedCertificate, Version};

pub(crate) use half_open::{HalfOpen, TEST_LEN};
pub(crate) use hint::TunnelHint;
pub(crate) use identity::{PeerIdentity, route_digest};
pub(crate) use path_limit::{PathLimit, PathState};
pub(crate) use replay_record::ReplayRecord;
pub(crate) use replay_window::CounterSet;
pub use replay_window::ReplayWindow;
pub(crate) use session::{Negotiated, Opening};
pub use session::{Session, SessionKeys};
pub(crate) use table::Lookup;
pub(crate) use table::TunnelTable;
pub(crate) use trial::Trial;
pub(crate) use vacancies::ReservedIndex;

use crate::index::Hop;
pub(crate) use crate::index::{LocalIndex, RemoteIndex};

/// One live tunnel. Keys are immutable; the send counter, the replay window, the endpoint and the traffic marks are the
/// only mutable state, each safe to touch from any lane.
#[derive(Debug)]
pub(crate) struct Tunnel {
    /// Own index.
    pub local_index: LocalIndex,
    /// Peer's index.
    pub remote_index: RemoteIndex,
    /// The peer's verified certificate, shared with records of its flows.
    pub peer: Arc<VerifiedCertificate>,
    /// The identity that owns the flows in this tunnel.
    pub(crate) identity: PeerIdentity,
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
    /// Whether the peer may be sent test requests with a body.
    pub(crate) answers_long_tests: bool,
    /// Whether an ML-KEM secret is part of the keys.
    pub(crate) post_quantum: bool,
    /// Where the peer is. It answered there what only who is there can answer.
    endpoint: ArcSwapOption<SocketAddr>,
    /// Where it may be.
    trial: ArcSwapOption<Trial>,
    /// Both indexes of the hop to use while there is no endpoint; 0 if there is none.
    hop: AtomicU64,
    /// The largest packet that the path carries.
    pub(crate) path_limit: PathLimit,
    confirmed: AtomicBool,
    received: AtomicBool,
    relayed: AtomicBool,
    sent: AtomicBool,
}

/// What a tunnel carried since the last check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Authenticated traffic came from the peer's endpoint.
    pub direct: bool,
    /// Authenticated traffic came through a relay.
    pub relayed: bool,
    /// Something was sent.
    pub sent: bool,
}

impl Tunnel {
    /// A tunnel from a completed handshake.
    #[must_use]
    pub(crate) fn new(done: Negotiated, endpoint: Option<SocketAddr>) -> Self {
        Self::starting_at(done, endpoint, session::FIRST_COUNTER)
    }

    /// Like [`Tunnel::new`], but counters before `counter` were used already.
    pub(crate) fn starting_at(done: Negotiated, endpoint: Option<SocketAddr>, counter: u64) -> Self {
        Self {
            local_index: done.local_index,
            remote_index: done.remote_index,
            peer_addresses: addresses_of(&done.peer),
            identity: (&done.peer).into(),
            peer: Arc::new(done.peer),
            session: Session::starting_at(done.keys, counter),
            initiator: done.initiator,
            own_version: done.own_version,
            peer_time: done.peer_time,
            answers_long_tests: done.answers_long_tests,
            post_quantum: done.post_quantum,
            endpoint: ArcSwapOption::new(endpoint.map(Arc::new)),
            trial: ArcSwapOption::empty(),
            hop: AtomicU64::new(0),
            path_limit: PathLimit::off(),
            // Only the holder of the keys can send the second handshake message; the first may be a replay.
            confirmed: AtomicBool::new(done.initiator),
            received: AtomicBool::new(false),
            relayed: AtomicBool::new(false),
            sent: AtomicBool::new(true),
        }
    }

    /// A tunnel that another process of this node had: it only opens what the peer still sends in it. `placeholder`:
    /// see [`Session::opening`].
    pub(crate) fn opening(
        local_index: LocalIndex,
        peer: VerifiedCertificate,
        endpoint: Option<SocketAddr>,
        opening: &Opening,
        placeholder: [u8; 32],
    ) -> Self {
        let (remote_index, own_version) = (RemoteIndex(0), peer.version());
        let keys = SessionKeys { cipher: opening.cipher, send: placeholder, receive: placeholder };
        let done = Negotiated {
            local_index,
            remote_index,
            peer,
            keys,
            initiator: true,
            own_version,
            peer_time: 0,
            answers_long_tests: false,
            post_quantum: false,
        };
        Self { session: Session::opening(opening, placeholder), ..Self::new(done, endpoint) }
    }

    /// Current underlay endpoint.
    #[must_use]
    pub(crate) fn endpoint(&self) -> Option<SocketAddr> {
        self.endpoint.load().as_deref().copied()
    }

    /// Changes the underlay endpoint, and ends a trial.
    pub(crate) fn set_endpoint(&self, endpoint: Option<SocketAddr>) {
        self.set_trial(None);
        let is_other = self.endpoint() != endpoint;
        self.endpoint.store(endpoint.map(Arc::new));
        if is_other {
            self.path_limit.forget();
        }
    }

    /// The endpoint on trial.
    #[cold]
    pub(crate) fn trial(&self) -> Option<Arc<Trial>> {
        if self.path_limit.is_on_trial() { self.trial.load_full() } else { None }
    }

    /// Begins the trial of an endpoint, or ends it.
    pub(crate) fn set_trial(&self, trial: Option<Trial>) {
        let is_on = trial.is_some();
        if is_on || self.path_limit.is_on_trial() {
            self.trial.store(trial.map(Arc::new));
            self.path_limit.set_trial(is_on);
        }
    }

    /// Whether there is an endpoint on trial.
    pub(crate) fn is_on_trial(&self) -> bool {
        self.path_limit.is_on_trial()
    }

    /// Whether datagrams reach the peer without a relay, as far as is known.
    pub(crate) fn is_direct(&self) -> bool {
        self.endpoint().is_some() || self.is_on_trial()
    }

    /// The hop to use while there is no endpoint.
    #[must_use]
    pub(crate) fn hop(&self) -> Option<Hop> {
        let packed = self.hop.load(Ordering::Relaxed);
        let hop = Hop { tunnel: LocalIndex((packed >> 32) as u32), index: RemoteIndex(packed as u32) };
        (packed != 0).then_some(hop)
    }

    /// Sets the hop to use while there is no endpoint.
    pub(crate) fn set_hop(&self, hop: Option<Hop>) {
        let packed = hop.map_or(0, |hop| u64::from(hop.tunnel.0) << 32 | u64::from(hop.index.0));
        let before = self.hop.swap(packed, Ordering::Relaxed);
        if before != packed && self.endpoint().is_none() {
            self.path_limit.forget();
        }
    }

    /// Whether the peer has proved that it has the keys of this tunnel (key confirmation).
    #[must_use]
    pub(crate) fn is_confirmed(&self) -> bool {
        self.confirmed.load(Ordering::Relaxed)
    }

    /// Records that the peer was heard in this tunnel. Returns `true` the first time.
    pub(crate) fn confirm(&self) -> bool {
        !self.confirmed.swap(true, Ordering::Relaxed)
    }

    /// Records authenticated traffic from the peer's endpoint.
    pub(crate) fn mark_received(&self) {
        if !self.received.load(Ordering::Relaxed) {
            self.received.store(true, Ordering::Relaxed);
        }
    }

    /// Records authenticated traffic from the peer through a relay.
    pub(crate) fn mark_relayed(&self) {
        self.relayed.store(true, Ordering::Relaxed);
    }

    /// Whether there was such traffic since the last call of [`Tunnel::take_traffic`].
    pub(crate) fn was_relayed(&self) -> bool {
        self.relayed.load(Ordering::Relaxed)
    }

    /// Records traffic to the peer.
    pub(crate) fn mark_sent(&self) {
        if !self.sent.load(Ordering::Relaxed) {
            self.sent.store(true, Ordering::Relaxed);
        }
    }

    /// Whether something was sent since the last call of [`Tunnel::take_traffic`].
    pub(crate) fn was_sent_to(&self) -> bool {
        self.sent.load(Ordering::Relaxed)
    }

    /// Whether the peer was heard since the last call of [`Tunnel::take_traffic`].
    #[must_use]
    pub(crate) fn was_heard(&self) -> bool {
        self.received.load(Ordering::Relaxed) || self.relayed.load(Ordering::Relaxed)
    }

    /// Traffic since the last call.
    pub(crate) fn take_traffic(&self) -> Traffic {
        let take = |mark: &AtomicBool| mark.swap(false, Ordering::Relaxed);
        Traffic { direct: take(&self.received), relayed: take(&self.relayed), sent: take(&self.sent) }
    }
}

/// The overlay addresses of the holder of a certificate, primary first.
pub(crate) fn addresses_of(certificate: &Certificate) -> Vec<IpAddr> {
    certificate.networks().iter().map(ipnet::IpNet::addr).collect()
}

impl Traffic {
    /// Whether the peer was heard.
    #[must_use]
    pub(crate) fn received(self) -> bool {
        self.direct || self.relayed
    }
}

#[cfg(test)]
mod tests {
    use nebula_cert::{CaPool, Identity, Version};

    use super::cipher::Cipher;
    use super::*;
    use crate::handshake::{Initiator, Own, respond};

    const CERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/certs/v2-25519/");

    fn tunnel() -> Tunnel {
        let identity = |name| Identity::read(format!("{CERTS}{name}.crt"), format!("{CERTS}{name}.key")).unwrap();
        let (plain, multi) = (identity("host-plain"), identity("host-multi"));
        let trust = CaPool::from_pem(&std::fs::read(format!("{CERTS}ca.crt")).unwrap()).unwrap();
        let own = |identity| Own {
            identity,
            default_version: Version::V2,
            cipher: Cipher::Aes256Gcm,
            time: 7,
            offers_kem: false,
        };
        let (_, first) = Initiator::start(own(&multi), Version::V2, LocalIndex(1), [1; 32]).unwrap();
        let (done, _) = respond(own(&plain), LocalIndex(2), [2; 32], &first, &trust, 1_800_000_000).unwrap();
        Tunnel::new(done.tunnel(), Some("192.0.2.1:4242".parse().unwrap()))
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
        let nothing = Traffic { direct: false, relayed: false, sent: false };
        assert_eq!(tunnel.take_traffic(), Traffic { sent: true, ..nothing });
        assert_eq!(tunnel.take_traffic(), nothing);
        tunnel.mark_received();
        assert_eq!(tunnel.take_traffic(), Traffic { direct: true, ..nothing });
        tunnel.mark_relayed();
        assert_eq!(tunnel.take_traffic(), Traffic { relayed: true, ..nothing });
        tunnel.mark_sent();
        assert_eq!(tunnel.take_traffic(), Traffic { sent: true, ..nothing });
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

    #[test]
    fn a_hop_is_kept_as_it_was_set() {
        let tunnel = tunnel();
        assert_eq!(tunnel.hop(), None);
        let hop = Hop { tunnel: LocalIndex(0x8000_0001), index: RemoteIndex(0xffff_fffe) };
        tunnel.set_hop(Some(hop));
        assert_eq!(tunnel.hop(), Some(hop));
        tunnel.set_hop(None);
        assert_eq!(tunnel.hop(), None);
    }
}

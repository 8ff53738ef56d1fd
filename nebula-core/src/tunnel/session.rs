//! Session state: immutable keys, an atomic send counter and the replay window (SA state).

use nebula_cert::{VerifiedCertificate, Version};
use zeroize::Zeroizing;

use super::cipher::{AeadKey, Cipher};
use super::{LocalIndex, RemoteIndex, ReplayRecord, ReplayWindow};
use crate::sync::CachePadded;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Keys of both directions, as a handshake yields them. Zeroized on drop.
#[derive(zeroize::Zeroize, zeroize::ZeroizeOnDrop)]
pub struct SessionKeys {
    #[zeroize(skip)]
    /// AEAD.
    pub cipher: Cipher,
    /// Key for what this node sends.
    pub send: [u8; 32],
    /// Key for what the peer sends.
    pub receive: [u8; 32],
}

impl std::fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SessionKeys(redacted)")
    }
}

/// Session state shared by all lanes.
#[derive(Debug)]
pub struct Session {
    /// Seals outgoing datagrams.
    pub send_key: AeadKey,
    /// Opens incoming datagrams.
    pub receive_key: AeadKey,
    /// Padded, because every run sent writes it while other lanes read the keys.
    sent: CachePadded<Sent>,
    /// What came from the peer.
    pub(crate) received: CachePadded<Received>,
}

/// What was sent.
#[derive(Debug)]
struct Sent {
    /// Next send counter.
    next: AtomicU64,
    /// Bytes of overlay packets.
    bytes: AtomicU64,
}

/// What came from the peer.
#[derive(Debug)]
pub(crate) struct Received {
    /// Which counters of the peer were accepted.
    pub(crate) replay: ReplayWindow,
    /// Bytes of overlay packets that were delivered.
    bytes: AtomicU64,
    /// The key of what the peer sends, as another process may get it. Here the padding has room for it.
    key: Zeroizing<[u8; 32]>,
}

/// What another process needs to open what the peer sends in a session. Opening uses up no nonce, so two processes may
/// have it; they must not deliver the same datagram twice, hence the replay record. It holds nothing to seal with.
pub(crate) struct Opening {
    /// AEAD.
    pub(crate) cipher: Cipher,
    /// Key of what the peer sends.
    pub(crate) key: Zeroizing<[u8; 32]>,
    /// Which counters of the peer were accepted.
    pub(crate) replay: ReplayRecord,
}

impl std::fmt::Debug for Opening {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opening(redacted)")
    }
}

/// Upper bound on the counters that one call of [`Session::reserve`] takes: more than the segments of a super-packet,
/// and more than the relayed datagrams of one receive call.
const MAX_RESERVED_AT_ONCE: u64 = 1 << 16;

// The handshake messages count as 1 and 2 in both directions.
pub(super) const FIRST_COUNTER: u64 = 3;

impl Session {
    /// From this counter on, a tunnel should be replaced by a new handshake. This is long before the counter could run
    /// out, and rare: about every 4.8 hours at a million packets per second.
    pub const REKEY_AFTER: u64 = 1 << 34;
    /// This counter and all above it are never used. The distance to the end of the number space lets every lane
    /// overshoot once without a wrap.
    pub const REJECT_AFTER: u64 = u64::MAX - (1 << 40);

    /// A session whose first send counter is 3.
    #[must_use]
    pub fn new(keys: SessionKeys) -> Self {
        Self::starting_at(keys, FIRST_COUNTER)
    }

    /// A session whose first send counter is `counter`.
    pub(super) fn starting_at(keys: SessionKeys, counter: u64) -> Self {
        Self {
            send_key: AeadKey::new(keys.cipher, &keys.send),
            receive_key: AeadKey::new(keys.cipher, &keys.receive),
            sent: CachePadded::new(Sent { next: AtomicU64::new(counter), bytes: AtomicU64::new(0) }),
            received: CachePadded::new(Received {
                replay: ReplayWindow::new(),
                bytes: AtomicU64::new(0),
                key: Zeroizing::new(keys.receive),
            }),
        }
    }

    /// A session of another process, which opens what the peer sends and never seals: no counter is left from the
    /// start, and in the place of the sealing key is `placeholder`, random bytes that nobody else knows.
    pub(super) fn opening(opening: &Opening, placeholder: [u8; 32]) -> Self {
        let keys = SessionKeys { cipher: opening.cipher, send: placeholder, receive: *opening.key };
        let session = Self::starting_at(keys, Self::REJECT_AFTER);
        let Received { bytes, key, .. } = session.received.into_inner();
        let received = Received { replay: ReplayWindow::from(&opening.replay), bytes, key };
        Self { received: CachePadded::new(received), ..session }
    }

    /// What it takes to open what the peer sends from now on.
    pub(crate) fn to_opening(&self) -> Opening {
        Opening {
            cipher: self.receive_key.cipher(),
            key: self.received.key.clone(),
            replay: (&self.received.replay).into(),
        }
    }

    /// Gives out no counter from now on, so that nothing is sealed in this session any more. A lane that takes some at
    /// this moment gets either some of those before, or none.
    pub(crate) fn stop_sealing(&self) {
        // Not beyond: lanes that passed the check before add to it, and must not make it wrap.
        self.sent.next.fetch_max(Self::REJECT_AFTER, Ordering::Relaxed);
    }

    /// Takes `n` consecutive send counters and returns the first, or `None` near exhaustion (`2^64 - 1 - 2^40`).
    #[must_use]
    pub fn reserve(&self, n: u64) -> Option<u64> {
        let last_start = Self::REJECT_AFTER.checked_sub(n)?;
        // Checking first keeps the counter from creeping towards a wrap once it is exhausted; the second check catches
        // lanes that passed the first one at the same time.
        if self.sent.next.load(Ordering::Relaxed) > last_start {
            return None;
        }
        let first = self.sent.next.fetch_add(n, Ordering::Relaxed);
        (first <= last_start).then_some(first)
    }

    /// The counter that would be taken next.
    #[must_use]
    pub fn next_counter(&self) -> u64 {
        self.sent.next.load(Ordering::Relaxed)
    }

    /// Counts the bytes of one (super-)packet that was sealed. The cache line is this lane's: it has just reserved
    /// there.
    pub(crate) fn count_sent(&self, bytes: u64) {
        self.sent.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts the bytes that a run of datagrams delivered.
    pub(crate) fn count_received(&self, bytes: u64) {
        self.received.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of overlay packets sent.
    pub(crate) fn bytes_sent(&self) -> u64 {
        self.sent.bytes.load(Ordering::Relaxed)
    }

    /// Bytes of overlay packets delivered.
    pub(crate) fn bytes_received(&self) -> u64 {
        self.received.bytes.load(Ordering::Relaxed)
    }

    /// Continues with `counter`.
    #[cfg(test)]
    pub(crate) fn skip_to(&self, counter: u64) {
        self.sent.next.store(counter, Ordering::Relaxed);
    }

    /// Whether the tunnel should be replaced by a new handshake.
    #[must_use]
    pub fn is_worn(&self) -> bool {
        self.next_counter() >= Self::REKEY_AFTER
    }

    /// Whether the largest run of datagrams would find no counters left, so that the tunnel must be removed. Single
    /// datagrams might still get one, but a tunnel that carries some packets and no super-packets would starve its bulk
    /// traffic forever.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.next_counter() > Self::REJECT_AFTER - MAX_RESERVED_AT_ONCE
    }
}

/// The outcome of a finished handshake: everything that a tunnel is made of.
#[derive(Debug)]
pub(crate) struct Negotiated {
    /// Own index.
    pub(crate) local_index: LocalIndex,
    /// Peer's index.
    pub(crate) remote_index: RemoteIndex,
    /// The peer's verified certificate.
    pub(crate) peer: VerifiedCertificate,
    /// Traffic keys.
    pub(crate) keys: SessionKeys,
    /// Whether this node initiated.
    pub(crate) initiator: bool,
    /// Version of the own certificate sent.
    pub(crate) own_version: Version,
    /// Time field of the peer's message.
    pub(crate) peer_time: u64,
    /// Whether the peer may be asked to measure paths. Go Nebula 1.9 and earlier ones garble the body.
    pub(crate) answers_long_tests: bool,
    /// Whether an ML-KEM secret is part of the keys, or will be before they are used.
    pub(crate) post_quantum: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session::new(SessionKeys { cipher: Cipher::Aes256Gcm, send: [1; 32], receive: [2; 32] })
    }

    #[test]
    fn the_first_counter_is_three_and_runs_do_not_overlap() {
        let session = session();
        assert_eq!(session.reserve(1), Some(3));
        assert_eq!(session.reserve(64), Some(4));
        assert_eq!(session.reserve(1), Some(68));
        assert_eq!(session.next_counter(), 69);
    }

    #[test]
    fn sending_stops_before_the_counter_wraps() {
        let session = session();
        session.skip_to(Session::REJECT_AFTER - 2);
        assert!(session.is_exhausted());
        assert_eq!(session.reserve(3), None);
        assert_eq!(session.reserve(2), Some(Session::REJECT_AFTER - 2));
        for _ in 0..1000 {
            assert_eq!(session.reserve(1), None);
        }
        assert_eq!(session.next_counter(), Session::REJECT_AFTER);
        assert_eq!(session.reserve(u64::MAX), None);
    }

    #[test]
    fn a_tunnel_is_exhausted_exactly_when_the_largest_run_finds_no_counters() {
        let last = Session::REJECT_AFTER - MAX_RESERVED_AT_ONCE;
        for (next, is_exhausted) in [(last - 1, false), (last, false), (last + 1, true), (u64::MAX - (1 << 40), true)] {
            let session = session();
            session.skip_to(next);
            assert_eq!(session.is_exhausted(), is_exhausted, "{next}");
            assert_eq!(session.reserve(MAX_RESERVED_AT_ONCE).is_none(), is_exhausted, "{next}");
        }
    }

    #[test]
    fn a_tunnel_is_renewed_from_its_limit_on() {
        let session = session();
        session.skip_to(Session::REKEY_AFTER - 1);
        assert!(!session.is_worn());
        session.skip_to(Session::REKEY_AFTER);
        assert!(session.is_worn() && !session.is_exhausted());
    }

    #[test]
    fn after_it_stopped_sealing_there_is_no_counter_and_the_rest_of_the_session_stays() {
        let session = session();
        assert_eq!(session.reserve(5), Some(3));
        session.stop_sealing();
        for n in [1, 64, MAX_RESERVED_AT_ONCE] {
            assert_eq!(session.reserve(n), None);
        }
        assert!(session.received.replay.commit(3));
    }

    #[test]
    fn another_process_opens_what_this_one_has_not_and_seals_nothing() {
        let ours = session();
        let peer = Session::new(SessionKeys { cipher: Cipher::Aes256Gcm, send: [2; 32], receive: [1; 32] });
        assert!(ours.received.replay.commit(3));
        let theirs = Session::opening(&ours.to_opening(), [9; 32]);
        assert_eq!(theirs.reserve(1), None);
        assert!(!theirs.received.replay.check(3) && theirs.received.replay.check(4));
        let mut frame = b"data".to_vec();
        let tag = peer.send_key.seal(4, &[], &mut frame);
        frame.extend_from_slice(&tag);
        assert!(theirs.receive_key.open(4, &[], &mut frame));
        assert_eq!(theirs.to_opening().key, ours.to_opening().key, "a third process can go on");
    }

    #[test]
    fn lanes_never_share_a_counter() {
        let session = session();
        let mut taken: Vec<u64> = std::thread::scope(|scope| {
            let lanes: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..1000).filter_map(|_| session.reserve(3)).collect::<Vec<_>>()))
                .collect();
            lanes.into_iter().flat_map(|lane| lane.join().unwrap()).collect()
        });
        taken.sort_unstable();
        assert!(taken.windows(2).all(|pair| pair[1] - pair[0] == 3));
        assert_eq!(taken.len(), 4000);
    }

    #[test]
    fn each_direction_has_its_own_key() {
        let (own, peer) =
            (session(), Session::new(SessionKeys { cipher: Cipher::Aes256Gcm, send: [2; 32], receive: [1; 32] }));
        let mut frame = b"data".to_vec();
        let tag = own.send_key.seal(3, &[], &mut frame);
        frame.extend_from_slice(&tag);
        assert!(!own.receive_key.open(3, &[], &mut frame.clone()));
        assert!(peer.receive_key.open(3, &[], &mut frame));
    }
}

//! Immutable keys, an atomic send counter, the replay window (SA state).

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

use super::ReplayWindow;
use super::cipher::{AeadKey, Cipher};

/// Keys of both directions, as a handshake yields them. Zeroized on drop.
#[derive(zeroize::Zeroize, zeroize::ZeroizeOnDrop)]
pub struct SessionKeys {
    #[zeroize(skip)]
    /// AEAD.
    pub cipher: Cipher,
    /// Seals what this node sends.
    pub send: [u8; 32],
    /// Opens what the peer sends.
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
    /// Seals.
    pub send_key: AeadKey,
    /// Opens.
    pub receive_key: AeadKey,
    next: AtomicU64,
    /// Locked once per run of datagrams, not per datagram.
    pub replay: Mutex<ReplayWindow>,
}

impl Session {
    /// First counter sent is 3.
    #[must_use]
    pub fn new(_keys: SessionKeys) -> Self {
        unimplemented!()
    }
    /// Takes `n` consecutive send counters; the first is returned, `None` near exhaustion (`2^64 - 1 - 2^40`).
    #[must_use]
    pub fn reserve(&self, _n: u64) -> Option<u64> {
        unimplemented!()
    }
    /// The counter that would be taken next.
    #[must_use]
    pub fn next_counter(&self) -> u64 {
        self.next.load(std::sync::atomic::Ordering::Relaxed)
    }
}

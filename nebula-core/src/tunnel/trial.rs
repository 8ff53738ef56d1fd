//! An endpoint at which the peer was heard, and which has not answered a challenge yet (path validation, RFC 9000,
//! section 8).

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

/// Who holds the keys of a tunnel can write any source address into a datagram. Until an answer from there shows that
/// the peer is there, this endpoint gets at most three times the bytes that came from it.
#[derive(Debug)]
pub(crate) struct Trial {
    /// Where the peer was heard.
    pub(crate) at: SocketAddr,
    /// Bytes that may still be sent there.
    credit: AtomicU64,
}

impl Trial {
    /// `bytes` came from there so far.
    pub(crate) fn new(at: SocketAddr, bytes: usize) -> Self {
        let trial = Self { at, credit: AtomicU64::new(0) };
        trial.heard(bytes);
        trial
    }

    /// An authenticated datagram came from there.
    pub(crate) fn heard(&self, bytes: usize) {
        self.credit.fetch_add((bytes as u64).saturating_mul(MAX_AMPLIFICATION), Ordering::Relaxed);
    }

    /// Whether so many bytes may be sent there; they count as sent then.
    pub(crate) fn may_send(&self, bytes: usize) -> bool {
        let pay = |credit: u64| credit.checked_sub(bytes as u64);
        self.credit.fetch_update(Ordering::Relaxed, Ordering::Relaxed, pay).is_ok()
    }
}

/// RFC 9000, section 8.1.
const MAX_AMPLIFICATION: u64 = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_times_what_came_is_sent_and_not_a_byte_more() {
        let trial = Trial::new(SocketAddr::from(([192, 0, 2, 1], 4242)), 100);
        assert!(!trial.may_send(301) && trial.may_send(299) && !trial.may_send(2) && trial.may_send(1));
        assert!(!trial.may_send(1));
        trial.heard(32);
        assert!(trial.may_send(96) && !trial.may_send(1));
    }
}

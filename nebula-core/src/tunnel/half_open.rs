//! A handshake that this node answered, until the initiator proves that it has the keys (key confirmation).

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use super::Tunnel;
use super::cipher::AeadKey;
use super::session::FIRST_COUNTER;
use crate::sync::Mutex;
use crate::tunnel::Negotiated;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// Anybody can send a first handshake message in another's name, so there may be very many of these. Each holds raw
/// keys only. The tunnel, which takes several times as much memory, is created when the first datagram for it arrives.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    /// Source of the first message, if it came directly.
    endpoint: Option<SocketAddr>,
    state: Mutex<State>,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all are in the large one; the others last for a moment")]
enum State {
    /// Nothing was received yet. The tunnel skips the counters of the tests that were sent.
    Keys { done: Negotiated, tests: u64 },
    /// The tunnel that lanes receive with, published once the initiator is confirmed.
    Tunnel(Arc<Tunnel>),
    /// The control plane gave up.
    Discarded,
}

impl HalfOpen {
    pub(crate) fn new(done: Negotiated, endpoint: Option<SocketAddr>) -> Self {
        Self { endpoint, state: Mutex::new(State::Keys { done, tests: 0 }) }
    }

    /// The one tunnel of this handshake, created by the first call; `None` if the handshake was discarded.
    pub(crate) fn tunnel(&self) -> Option<Arc<Tunnel>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let tunnel = match std::mem::replace(&mut *state, State::Discarded) {
            State::Keys { done, tests } => Arc::new(Tunnel::starting_at(done, self.endpoint, FIRST_COUNTER + tests)),
            State::Tunnel(tunnel) => tunnel,
            State::Discarded => return None,
        };
        *state = State::Tunnel(Arc::clone(&tunnel));
        Some(tunnel)
    }

    /// A test request, with a new counter on each call. The initiator's reply confirms it.
    pub(crate) fn test_request(&self) -> Option<Vec<u8>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *state {
            State::Keys { done, tests } => {
                let counter = FIRST_COUNTER + *tests;
                *tests += 1;
                let key = AeadKey::new(done.keys.cipher, &done.keys.send);
                Some(empty_test(&key, done.remote_index.0, counter))
            }
            State::Tunnel(tunnel) => {
                let counter = tunnel.session.reserve(1)?;
                Some(empty_test(&tunnel.session.send_key, tunnel.remote_index.0, counter))
            }
            State::Discarded => None,
        }
    }

    /// Like [`HalfOpen::discard`]; a lane that has the tunnel at this moment seals nothing in it either.
    pub(crate) fn stop_sealing(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let State::Tunnel(tunnel) = std::mem::replace(&mut *state, State::Discarded) {
            tunnel.session.stop_sealing();
        }
    }

    /// Erases the keys at once, even if there are other references to this.
    pub(crate) fn discard(&self) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = State::Discarded;
    }
}

fn empty_test(key: &AeadKey, index: u32, counter: u64) -> Vec<u8> {
    let header = Header { kind: MessageType::TestRequest, index, counter }.to_bytes();
    let mut datagram = Vec::with_capacity(TEST_LEN);
    datagram.extend(header);
    datagram.extend(key.seal(counter, &header, &mut []));
    datagram
}

/// Length of a test request.
pub(crate) const TEST_LEN: usize = HEADER_LEN + TAG_LEN;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::forward::testing;
    use crate::index::LocalIndex;
    use crate::tunnel::cipher::Cipher;

    fn half_open() -> HalfOpen {
        let done = testing::negotiated(LocalIndex(1), testing::verified(&["10.1.0.2/16"]), false);
        HalfOpen::new(done, None)
    }

    fn counter(datagram: &[u8]) -> u64 {
        Header::parse(datagram).unwrap().counter
    }

    #[test]
    fn no_counter_is_used_twice_whenever_the_tunnel_is_made() {
        let half_open = half_open();
        let before: Vec<_> = (0..2).map(|_| counter(&half_open.test_request().unwrap())).collect();
        let tunnel = half_open.tunnel().unwrap();
        assert!(Arc::ptr_eq(&tunnel, &half_open.tunnel().unwrap()), "there is one tunnel");
        assert_eq!((before, tunnel.session.reserve(1)), (vec![3, 4], Some(5)));
        assert_eq!(counter(&half_open.test_request().unwrap()), 6);
        assert_eq!(tunnel.session.reserve(1), Some(7));
    }

    #[test]
    fn a_test_has_the_length_that_is_accounted_for_and_opens_with_the_callers_key() {
        let mut test = half_open().test_request().unwrap();
        assert_eq!(test.len(), TEST_LEN);
        let (header, tag) = test.split_at_mut(HEADER_LEN);
        assert!(AeadKey::new(Cipher::Aes256Gcm, &[1; 32]).open(3, header, tag));
    }

    #[test]
    fn nothing_is_sealed_or_opened_once_it_is_discarded() {
        let half_open = half_open();
        half_open.discard();
        assert!(half_open.test_request().is_none() && half_open.tunnel().is_none());
    }
}

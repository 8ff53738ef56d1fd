//! The second half of a handshake between hosts that both offer it: an ML-KEM-768 exchange (FIPS 203). Traffic keys
//! are derived from its secret and from the keys of Noise, so recorded traffic stays closed when X25519 or P-256 is
//! broken.
//!
//! Both Noise messages name what their sender offers, in a field that peers without the exchange skip. The fields are
//! part of the handshake hash, so nobody on the way can remove one and have the handshake succeed. The initiator's
//! encapsulation key (message 3) and the responder's ciphertext (message 4) are sealed with keys that are used for
//! nothing else, so a responder computes ML-KEM only for a caller that has completed the Noise part. No packet is
//! sealed with keys of the Noise part alone.

use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Prk, Salt};
use aws_lc_rs::kem::{Ciphertext, DecapsulationKey, EncapsulationKey, ML_KEM_768};
use zeroize::Zeroizing;

use super::machine::{Error, message_body};
use crate::tunnel::cipher::AeadKey;
use crate::tunnel::{Negotiated, SessionKeys};
use crate::wire::header::{Header, MessageType, TAG_LEN};

/// What a message of Noise offers: a bit for each exchange that its sender knows. There is one.
pub(super) const ML_KEM_768_OFFER: u32 = 1;
/// Counters in the headers of the two messages.
const OFFER_COUNTER: u64 = 3;
const ANSWER_COUNTER: u64 = 4;
const ENCAPSULATION_KEY_LEN: usize = 1184;
const CIPHERTEXT_LEN: usize = 1088;

/// Outcome of the Noise part of a handshake.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "it is passed on at once")]
pub(crate) enum Agreed {
    /// A tunnel.
    Tunnel(Negotiated),
    /// Both sides offer ML-KEM: its messages come next.
    Exchange(Exchange),
}

impl Agreed {
    /// `hash` is that of the handshake.
    pub(super) fn new(done: Negotiated, hash: &[u8]) -> Self {
        if !done.post_quantum {
            return Self::Tunnel(done);
        }
        let mut salt = [0; 32];
        salt.copy_from_slice(hash);
        Self::Exchange(Exchange { done, hash: salt })
    }

    /// The tunnel, where there is no exchange.
    #[cfg(test)]
    pub(crate) fn tunnel(self) -> Negotiated {
        match self {
            Self::Tunnel(done) => done,
            Self::Exchange(_) => panic!("an exchange comes first"),
        }
    }

    /// What was negotiated; before the exchange its keys are of no use.
    pub(crate) fn negotiated(&self) -> &Negotiated {
        match self {
            Self::Tunnel(done) | Self::Exchange(Exchange { done, .. }) => done,
        }
    }
}

/// A handshake between the Noise part and the end of its ML-KEM exchange.
#[derive(Debug)]
pub(crate) struct Exchange {
    /// With the keys of the Noise part.
    done: Negotiated,
    /// That of the Noise part.
    hash: [u8; 32],
}

impl Exchange {
    /// The initiator's part: returns message 3, a complete datagram.
    pub(crate) fn offer(self) -> Result<(Offer, Vec<u8>), Error> {
        let failed = |_| Error::Payload("no ML-KEM key could be made");
        let key = DecapsulationKey::generate(&ML_KEM_768).map_err(failed)?;
        let public = key.encapsulation_key().and_then(|key| key.key_bytes()).map_err(failed)?;
        let message = self.seal(OFFER_COUNTER, public.as_ref());
        Ok((Offer { exchange: self, key, message: sha256(&message) }, message))
    }

    /// The responder's part: reads message 3; returns the traffic keys and message 4, a complete datagram. Not to be
    /// called again once it has accepted a message.
    pub(crate) fn answer(&self, offer: &[u8]) -> Result<(SessionKeys, Vec<u8>), Error> {
        let public = self.open(OFFER_COUNTER, ENCAPSULATION_KEY_LEN, offer)?;
        let key = EncapsulationKey::new(&ML_KEM_768, &public).map_err(|_| Error::Payload("no ML-KEM key"))?;
        let (ciphertext, secret) = key.encapsulate().map_err(|_| Error::Payload("no valid ML-KEM key"))?;
        let answer = self.seal(ANSWER_COUNTER, ciphertext.as_ref());
        Ok((self.keys(secret.as_ref(), &sha256(offer), &sha256(&answer)), answer))
    }

    /// The handshake is over, with these keys.
    pub(crate) fn complete(self, keys: SessionKeys) -> Negotiated {
        Negotiated { keys, ..self.done }
    }

    /// The traffic keys: those of the Noise part, the secret of ML-KEM and both messages, bound to the handshake.
    fn keys(&self, secret: &[u8], offer: &[u8; 32], answer: &[u8; 32]) -> SessionKeys {
        // With room for all of it: what a vector leaves behind when it grows is not erased.
        let mut input = Zeroizing::new(Vec::with_capacity(64 + secret.len()));
        input.extend_from_slice(&*self.noise_keys());
        input.extend_from_slice(secret);
        let prk = Salt::new(HKDF_SHA256, &self.hash).extract(&input);
        let [to_responder, to_initiator] = expand(&prk, &[b"nebula ml-kem-768 traffic", offer, answer]);
        let cipher = self.done.keys.cipher;
        if self.done.initiator {
            SessionKeys { cipher, send: *to_responder, receive: *to_initiator }
        } else {
            SessionKeys { cipher, send: *to_initiator, receive: *to_responder }
        }
    }

    /// The keys of the Noise part, the initiator's first.
    fn noise_keys(&self) -> Zeroizing<[u8; 64]> {
        let keys = &self.done.keys;
        let (first, second) =
            if self.done.initiator { (&keys.send, &keys.receive) } else { (&keys.receive, &keys.send) };
        let mut both = Zeroizing::new([0; 64]);
        both[..32].copy_from_slice(first);
        both[32..].copy_from_slice(second);
        both
    }

    /// The key that the message with this counter is sealed with.
    fn message_key(&self, counter: u64) -> AeadKey {
        let prk = Salt::new(HKDF_SHA256, &self.hash).extract(&*self.noise_keys());
        let [offer, answer] = expand(&prk, &[b"nebula ml-kem-768 messages"]);
        AeadKey::new(self.done.keys.cipher, if counter == OFFER_COUNTER { &offer } else { &answer })
    }

    fn seal(&self, counter: u64, body: &[u8]) -> Vec<u8> {
        let header = Header { kind: MessageType::Handshake, index: self.done.remote_index.0, counter }.to_bytes();
        let mut datagram = Vec::with_capacity(header.len() + body.len() + TAG_LEN);
        datagram.extend_from_slice(&header);
        datagram.extend_from_slice(body);
        let tag = self.message_key(counter).seal(counter, &header, &mut datagram[header.len()..]);
        datagram.extend_from_slice(&tag);
        datagram
    }

    /// The content of a message, which must have this length.
    fn open(&self, counter: u64, len: usize, datagram: &[u8]) -> Result<Vec<u8>, Error> {
        let body = message_body(datagram, self.done.local_index.0, counter)?;
        if body.len() != len + TAG_LEN {
            return Err(Error::Noise("wrong length".into()));
        }
        let mut content = body.to_vec();
        let header = &datagram[..datagram.len() - body.len()];
        if !self.message_key(counter).open(counter, header, &mut content) {
            return Err(Error::Noise("authentication failed".into()));
        }
        content.truncate(len);
        Ok(content)
    }
}

/// The initiating side, between messages 3 and 4.
pub(crate) struct Offer {
    exchange: Exchange,
    key: DecapsulationKey,
    /// Digest of message 3.
    message: [u8; 32],
}

impl Offer {
    /// What the Noise part negotiated.
    pub(crate) fn negotiated(&self) -> &Negotiated {
        &self.exchange.done
    }

    /// Reads message 4. After [`Error::Noise`] the right one may still come.
    pub(crate) fn read_answer(&self, answer: &[u8]) -> Result<SessionKeys, Error> {
        let ciphertext = self.exchange.open(ANSWER_COUNTER, CIPHERTEXT_LEN, answer)?;
        let secret = self.key.decapsulate(Ciphertext::from(&*ciphertext));
        let secret = secret.map_err(|_| Error::Payload("no ML-KEM ciphertext"))?;
        Ok(self.exchange.keys(secret.as_ref(), &self.message, &sha256(answer)))
    }

    /// The handshake is over, with the keys of [`Offer::read_answer`].
    pub(crate) fn complete(self, keys: SessionKeys) -> Negotiated {
        self.exchange.complete(keys)
    }
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Offer").field("exchange", &self.exchange).finish_non_exhaustive()
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, bytes).as_ref());
    hash
}

/// Two keys of HKDF-Expand.
fn expand(prk: &Prk, info: &[&[u8]]) -> [Zeroizing<[u8; 32]>; 2] {
    let mut output = Zeroizing::new([0; 64]);
    let filled = prk.expand(info, TwoKeys).and_then(|okm| okm.fill(&mut *output));
    filled.expect("HKDF gives up to 255 times the length of its hash");
    let mut keys = [Zeroizing::new([0; 32]), Zeroizing::new([0; 32])];
    for (key, bytes) in keys.iter_mut().zip(output.chunks_exact(32)) {
        key.copy_from_slice(bytes);
    }
    keys
}

#[derive(Debug, Clone, Copy)]
struct TwoKeys;

impl KeyType for TwoKeys {
    fn len(&self) -> usize {
        64
    }
}

#[cfg(test)]
mod tests;

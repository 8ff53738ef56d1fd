//! Proof of possession of a certificate's private key (RFC 4211 section 4.3).
//!
//! Host keys are key agreement keys and cannot sign. Instead the holder and the verifier agree on a secret (ECDH), and
//! the holder authenticates a message with it (HMAC-SHA256). Only these two can make the tag.

use aws_lc_rs::{agreement, constant_time, hmac};

use crate::{Curve, Error, PrivateKey};

/// Length of a tag in bytes.
pub const TAG_LENGTH: usize = 32;

impl PrivateKey {
    /// Makes the tag over `message` that proves possession of this key to the verifier. `verifier` is the verifier's
    /// raw public key, on the same curve.
    ///
    /// # Errors
    /// Returns an error if `verifier` is not a key on this curve.
    pub fn possession_tag(&self, verifier: &[u8], message: &[u8]) -> Result<[u8; TAG_LENGTH], Error> {
        let curve = self.curve();
        let algorithm = match curve {
            Curve::Curve25519 => &agreement::X25519,
            Curve::P256 => &agreement::ECDH_P256,
        };
        let refused = || Error::PublicKey { curve, length: verifier.len() };
        let own = agreement::PrivateKey::from_private_key(algorithm, self.secret_bytes())
            .map_err(|_| Error::KeyOutOfRange)?;
        let peer = agreement::UnparsedPublicKey::new(algorithm, verifier);
        agreement::agree(&own, peer, refused(), |secret| {
            // The agreed value is not uniformly random; a first HMAC turns it into a key (extract, RFC 5869).
            let key = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, CONTEXT), secret);
            let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key.as_ref()), message);
            tag.as_ref().try_into().map_err(|_| refused())
        })
    }

    /// Verifies that `tag` over `message` was made for this key with the private key of `holder`.
    #[must_use]
    pub fn verifies_possession(&self, holder: &[u8], message: &[u8], tag: &[u8]) -> bool {
        self.possession_tag(holder, message)
            .is_ok_and(|expected| constant_time::verify_slices_are_equal(&expected, tag).is_ok())
    }
}

const CONTEXT: &[u8] = b"nebula certificate possession v1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_the_key_is_recognised_and_nobody_else() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = || PrivateKey::generate(curve).unwrap();
            let (holder, verifier, other) = (key(), key(), key());
            let tag = holder.possession_tag(&verifier.public_key(), b"renew").unwrap();
            let is_shown = |by: &PrivateKey, message: &[u8], tag: &[u8]| {
                verifier.verifies_possession(&by.public_key(), message, tag)
            };
            assert!(is_shown(&holder, b"renew", &tag));
            assert!(!is_shown(&other, b"renew", &tag));
            assert!(!is_shown(&holder, b"renew!", &tag));
            assert!(!is_shown(&holder, b"renew", &tag[..31]));
            assert!(!is_shown(&holder, b"renew", &other.possession_tag(&verifier.public_key(), b"renew").unwrap()));
            assert!(!other.verifies_possession(&holder.public_key(), b"renew", &tag));
        }
    }

    #[test]
    fn keys_that_are_none_give_no_tag() {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        assert!(key.possession_tag(&[0; 32], b"").is_err(), "of low order");
        assert!(key.possession_tag(&[9; 31], b"").is_err());
        assert!(!key.verifies_possession(&[], b"", &[]));
        assert!(PrivateKey::generate(Curve::P256).unwrap().possession_tag(&[4; 65], b"").is_err());
    }
}

//! Signatures on both curves: Ed25519, and ECDSA P-256 with SHA-256 in DER.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, ED25519, ParsedPublicKey};
use p256::ecdsa::Signature;

use crate::Curve;

/// A public key, parsed once to verify many signatures.
#[derive(Debug, Clone)]
pub(crate) struct VerifyingKey(ParsedPublicKey);

impl VerifyingKey {
    /// Returns `None` if the bytes are not a key on the curve.
    pub(crate) fn new(curve: Curve, public_key: &[u8]) -> Option<Self> {
        let parsed = match curve {
            Curve::Curve25519 => ParsedPublicKey::new(&ED25519, public_key),
            Curve::P256 => ParsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, public_key),
        };
        parsed.ok().map(Self)
    }

    /// Whether `signature` is a valid signature of `message` by this key. As in Go, high-S signatures of P-256 are
    /// accepted.
    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        self.0.verify_sig(message, signature).is_ok()
    }
}

/// The signature in low-S form, with the smaller of s and n - s, as in issued certificates.
pub(crate) fn low_s(signature: &[u8]) -> Option<Vec<u8>> {
    Some(Signature::from_der(signature).ok()?.normalize_s().to_der().as_bytes().to_vec())
}

/// The signature with s replaced by n - s, which is equally valid but changes the certificate's fingerprint.
pub(crate) fn other_form(signature: &[u8]) -> Option<Vec<u8>> {
    let (r, s) = Signature::from_der(signature).ok()?.split_scalars();
    Some(Signature::from_scalars(r, -s).ok()?.to_der().as_bytes().to_vec())
}

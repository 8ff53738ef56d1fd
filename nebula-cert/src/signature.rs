//! Signatures of both curves: Ed25519, and ECDSA P-256 with SHA-256 in DER.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, ED25519, ParsedPublicKey};
use p256::ecdsa::Signature;

use crate::Curve;

/// A public key made ready once, to verify many signatures.
#[derive(Debug, Clone)]
pub(crate) struct VerifyingKey(ParsedPublicKey);

impl VerifyingKey {
    /// Nothing if the bytes are no key of the curve.
    pub(crate) fn new(curve: Curve, public_key: &[u8]) -> Option<Self> {
        let parsed = match curve {
            Curve::Curve25519 => ParsedPublicKey::new(&ED25519, public_key),
            Curve::P256 => ParsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, public_key),
        };
        parsed.ok().map(Self)
    }

    /// Whether `signature` is one of this key over `message`. High-S signatures of P-256 count, as in Go.
    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        self.0.verify_sig(message, signature).is_ok()
    }
}

/// The signature with the smaller of s and n - s, the form in which certificates are issued.
pub(crate) fn low_s(signature: &[u8]) -> Option<Vec<u8>> {
    Some(Signature::from_der(signature).ok()?.normalize_s().to_der().as_bytes().to_vec())
}

/// The signature with s replaced by n - s: as valid as the first, but with another fingerprint.
pub(crate) fn other_form(signature: &[u8]) -> Option<Vec<u8>> {
    let (r, s) = Signature::from_der(signature).ok()?.split_scalars();
    Some(Signature::from_scalars(r, -s).ok()?.to_der().as_bytes().to_vec())
}

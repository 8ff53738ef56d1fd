//! Signatures of both curves: Ed25519, and ECDSA P-256 with SHA-256 in DER.

use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use p256::ecdsa::Signature;

use crate::Curve;

/// Whether `signature` is one of `public_key` over `message`. High-S signatures count, as in Go.
pub(crate) fn verify(curve: Curve, public_key: &[u8], message: &[u8], signature: &[u8]) -> bool {
    match curve {
        Curve::Curve25519 => verify_ed25519(public_key, message, signature).is_some(),
        Curve::P256 => UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, public_key).verify(message, signature).is_ok(),
    }
}

/// The signature with s replaced by n - s: as valid as the first, but with another fingerprint.
pub(crate) fn other_form(signature: &[u8]) -> Option<Vec<u8>> {
    let (r, s) = Signature::from_der(signature).ok()?.split_scalars();
    Some(Signature::from_scalars(r, -s).ok()?.to_der().as_bytes().to_vec())
}

fn verify_ed25519(public_key: &[u8], message: &[u8], signature: &[u8]) -> Option<()> {
    let key = ed25519_dalek::VerifyingKey::from_bytes(public_key.try_into().ok()?).ok()?;
    let signature = ed25519_dalek::Signature::from_slice(signature).ok()?;
    // The strict form refuses some signatures that Go accepts.
    ed25519_dalek::Verifier::verify(&key, message, &signature).ok()
}

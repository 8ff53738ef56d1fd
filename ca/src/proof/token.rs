//! One-time enrolment tokens: 256 random bits shown once, kept only as their SHA-256.

use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// SHA-256 of a token. A look-up by hash leaks nothing by its timing: nobody can choose the bytes that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// Hashes a presented secret.
    #[must_use]
    pub fn of(secret: &str) -> Self {
        Self(Sha256::digest(secret.trim().as_bytes()).into())
    }

    pub(crate) fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Parses the output of [`TokenHash::to_hex`].
    pub(crate) fn from_hex(text: &str) -> Option<Self> {
        nebula_cert::hex::decode(text)?.try_into().ok().map(Self)
    }

    /// The full hash in lower-case hex.
    #[must_use]
    pub fn to_hex(&self) -> String {
        nebula_cert::hex::encode(&self.0)
    }

    pub(crate) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Short ID of the token in listings and logs; reveals nothing about the secret.
    #[must_use]
    pub fn id(&self) -> String {
        self.to_hex()[..12].to_owned()
    }
}

impl std::fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenHash({})", self.id())
    }
}

/// Generates a secret of 256 random bits, with a prefix by which secret scanners and people recognise it.
///
/// # Errors
/// Returns an error if the system provides no randomness.
pub fn generate(prefix: &str) -> Result<Zeroizing<String>, getrandom::Error> {
    let mut bytes = Zeroizing::new([0_u8; 32]);
    getrandom::fill(bytes.as_mut())?;
    let encoded = Zeroizing::new(BASE64_URL_SAFE_NO_PAD.encode(bytes.as_ref()));
    let mut secret = Zeroizing::new(String::with_capacity(prefix.len() + encoded.len()));
    secret.push_str(prefix);
    secret.push_str(&encoded);
    Ok(secret)
}

/// Prefix of enrolment tokens.
pub const ENROLMENT_PREFIX: &str = "nebula-enrol-";
/// Prefix of node tokens.
pub(crate) const NODE_PREFIX: &str = "nebula-node-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_secret_is_new_and_has_256_bits() {
        let (one, two) = (generate(ENROLMENT_PREFIX).unwrap(), generate(ENROLMENT_PREFIX).unwrap());
        assert_ne!(*one, *two);
        assert_eq!(one.len(), ENROLMENT_PREFIX.len() + 43);
    }

    #[test]
    fn a_trailing_newline_of_a_token_file_does_not_matter() {
        assert_eq!(TokenHash::of("secret\n"), TokenHash::of("secret"));
        assert_ne!(TokenHash::of("secret"), TokenHash::of("Secret"));
    }

    #[test]
    fn a_hash_survives_hex_and_nothing_else_passes_for_one() {
        let hash = TokenHash::of("secret");
        assert_eq!(TokenHash::from_hex(&hash.to_hex()), Some(hash));
        for bad in ["", "00", &"g".repeat(64), &"é".repeat(32), &"+1".repeat(32)] {
            assert_eq!(TokenHash::from_hex(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn debug_output_has_no_full_hash() {
        let shown = format!("{:?}", TokenHash::of("secret"));
        assert_eq!(shown.len(), "TokenHash()".len() + 12);
    }
}

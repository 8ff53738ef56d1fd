//! AES-256-GCM and ChaCha20-Poly1305 in place, with Nebula's nonces.

use aws_lc_rs::aead::{AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use crate::wire::header::TAG_LEN;

/// AEAD of a network; `cipher` in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cipher {
    /// `aes`.
    #[default]
    Aes256Gcm,
    /// `chachapoly`.
    ChaCha20Poly1305,
}

impl Cipher {
    /// Whether this build has it: a FIPS build has AES only.
    #[must_use]
    pub const fn is_in_build(self) -> bool {
        !cfg!(feature = "fips") || matches!(self, Self::Aes256Gcm)
    }
}

/// The key of one direction. The caller must not use a counter twice (see [`super::Session::reserve`]).
pub struct AeadKey {
    cipher: Cipher,
    key: LessSafeKey,
}

impl AeadKey {
    /// Prepares a key for use.
    #[must_use]
    pub fn new(cipher: Cipher, key: &[u8; 32]) -> Self {
        let algorithm = match cipher {
            Cipher::Aes256Gcm => &AES_256_GCM,
            Cipher::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        };
        let key = UnboundKey::new(algorithm, key).expect("both ciphers take 32 bytes");
        Self { cipher, key: LessSafeKey::new(key) }
    }

    /// Encrypts `buffer` in place and returns the tag. The nonce is `counter` in the byte order of the cipher.
    ///
    /// # Panics
    /// If `buffer` is tens of gigabytes long, the limit of the AEAD.
    #[must_use]
    pub fn seal(&self, counter: u64, aad: &[u8], buffer: &mut [u8]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        self.key
            .seal_in_place_scatter(self.nonce(counter), Aad::from(aad), buffer, &[], &mut tag)
            .expect("a datagram is far below the limit of the AEAD");
        tag
    }

    /// Decrypts `buffer` (ciphertext then tag) in place; the plaintext is its first `len - 16` bytes.
    /// Returns false, with `buffer` unspecified, if the tag is wrong.
    #[must_use]
    pub fn open(&self, counter: u64, aad: &[u8], buffer: &mut [u8]) -> bool {
        self.key.open_in_place(self.nonce(counter), Aad::from(aad), buffer).is_ok()
    }

    /// The AEAD that it is a key of.
    pub(crate) fn cipher(&self) -> Cipher {
        self.cipher
    }

    fn nonce(&self, counter: u64) -> Nonce {
        let mut nonce = [0; NONCE_LEN];
        nonce[4..].copy_from_slice(&match self.cipher {
            Cipher::Aes256Gcm => counter.to_be_bytes(),
            Cipher::ChaCha20Poly1305 => counter.to_le_bytes(),
        });
        Nonce::assume_unique_for_key(nonce)
    }
}

impl std::fmt::Debug for AeadKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AeadKey(redacted)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CIPHERS: [Cipher; 2] = [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305];

    #[test]
    fn what_one_side_seals_the_other_opens() {
        for cipher in CIPHERS {
            let key = AeadKey::new(cipher, &[7; 32]);
            let mut buffer = b"hello".to_vec();
            let tag = key.seal(3, b"header", &mut buffer);
            assert_ne!(buffer, b"hello");
            buffer.extend_from_slice(&tag);
            assert!(key.open(3, b"header", &mut buffer));
            assert_eq!(&buffer[..5], b"hello");
        }
    }

    #[test]
    fn another_counter_header_key_or_byte_fails() {
        for cipher in CIPHERS {
            let key = AeadKey::new(cipher, &[7; 32]);
            let mut sealed = b"hello".to_vec();
            let tag = key.seal(3, b"header", &mut sealed);
            sealed.extend_from_slice(&tag);
            assert!(!key.open(4, b"header", &mut sealed.clone()));
            assert!(!key.open(3, b"Header", &mut sealed.clone()));
            assert!(!AeadKey::new(cipher, &[8; 32]).open(3, b"header", &mut sealed.clone()));
            for at in 0..sealed.len() {
                let mut tampered = sealed.clone();
                tampered[at] ^= 1;
                assert!(!key.open(3, b"header", &mut tampered), "byte {at}");
            }
        }
    }

    #[test]
    fn a_tag_alone_authenticates_the_additional_data() {
        for cipher in CIPHERS {
            let key = AeadKey::new(cipher, &[7; 32]);
            let mut tag = key.seal(3, b"relayed", &mut []);
            assert!(key.open(3, b"relayed", &mut tag.clone()));
            assert!(!key.open(3, b"forged!", &mut tag));
        }
    }

    #[test]
    fn anything_shorter_than_a_tag_is_refused() {
        for cipher in CIPHERS {
            for len in 0..TAG_LEN {
                assert!(!AeadKey::new(cipher, &[7; 32]).open(3, &[], &mut vec![0; len]));
            }
        }
    }

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", AeadKey::new(Cipher::Aes256Gcm, &[7; 32])), "AeadKey(redacted)");
    }

    proptest! {
        #[test]
        fn random_bytes_never_open(counter: u64, mut bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            for cipher in CIPHERS {
                prop_assert!(!AeadKey::new(cipher, &[7; 32]).open(counter, &[], &mut bytes));
            }
        }
    }
}

//! AES-256-GCM and ChaCha20-Poly1305 in place, with Nebula's nonces.

/// AEAD of a network; `cipher` in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Cipher {
    /// `aes`.
    #[default]
    Aes256Gcm,
    /// `chachapoly`.
    ChaCha20Poly1305,
}

/// One direction's key.
pub struct AeadKey {}

impl AeadKey {
    /// Key set-up.
    #[must_use]
    pub fn new(_cipher: Cipher, _key: &[u8; 32]) -> Self {
        unimplemented!()
    }
    /// Encrypts `buffer` in place and returns the tag. Nonce by cipher from `counter`.
    #[must_use]
    pub fn seal(&self, _counter: u64, _aad: &[u8], _buffer: &mut [u8]) -> [u8; 16] {
        unimplemented!()
    }
    /// Decrypts `buffer` (ciphertext then tag) in place; the plaintext is its first `len - 16` bytes.
    /// Returns false, with `buffer` unspecified, if the tag is wrong.
    #[must_use]
    pub fn open(&self, _counter: u64, _aad: &[u8], _buffer: &mut [u8]) -> bool {
        unimplemented!()
    }
}

impl std::fmt::Debug for AeadKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AeadKey(redacted)")
    }
}

//! Private keys of hosts and CAs: zeroized on drop, never printed.

use zeroize::Zeroizing;

use crate::{Curve, Error};

/// A host's key for the handshake (X25519 or P-256 ECDH).
#[derive(Clone)]
pub struct PrivateKey {
    curve: Curve,
    secret: Zeroizing<Vec<u8>>,
}

impl PrivateKey {
    /// A new random key.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn generate(_curve: Curve) -> Result<Self, Error> {
        unimplemented!()
    }
    /// Reads `NEBULA X25519 PRIVATE KEY` or `NEBULA P256 PRIVATE KEY`.
    ///
    /// # Errors
    /// Another label, a wrong length, or a P-256 scalar out of range.
    pub fn from_pem(_pem: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// From raw bytes.
    ///
    /// # Errors
    /// A wrong length or a P-256 scalar out of range.
    pub fn from_bytes(_curve: Curve, _bytes: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// PEM text.
    #[must_use]
    pub fn to_pem(&self) -> Zeroizing<String> {
        unimplemented!()
    }
    /// Curve.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }
    /// Raw secret, for the Noise implementation.
    #[must_use]
    pub fn secret_bytes(&self) -> &[u8] {
        &self.secret
    }
    /// The public half as certificates carry it.
    #[must_use]
    pub fn public_key(&self) -> Vec<u8> {
        unimplemented!()
    }
    /// PEM text of the public half.
    #[must_use]
    pub fn public_pem(&self) -> String {
        unimplemented!()
    }
}

/// Reads a host's public key PEM into curve and raw bytes.
///
/// # Errors
/// Another label or a wrong length.
pub fn public_key_from_pem(_pem: &[u8]) -> Result<(Curve, Vec<u8>), Error> {
    unimplemented!()
}

/// A CA's key (Ed25519 or P-256 ECDSA).
#[derive(Clone)]
pub struct SigningKey {
    curve: Curve,
    secret: Zeroizing<Vec<u8>>,
}

impl SigningKey {
    /// A new random key.
    ///
    /// # Errors
    /// The system has no randomness.
    pub fn generate(_curve: Curve) -> Result<Self, Error> {
        unimplemented!()
    }
    /// Reads a plain CA key.
    ///
    /// # Errors
    /// Another label, a wrong length, or an encrypted key (use [`SigningKey::from_encrypted_pem`]).
    pub fn from_pem(_pem: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// Reads an encrypted CA key.
    ///
    /// # Errors
    /// A wrong passphrase or parameters out of bounds.
    pub fn from_encrypted_pem(_pem: &[u8], _passphrase: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// PEM text.
    #[must_use]
    pub fn to_pem(&self) -> Zeroizing<String> {
        unimplemented!()
    }
    /// Curve.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }
    /// The public half.
    #[must_use]
    pub fn public_key(&self) -> Vec<u8> {
        unimplemented!()
    }
}

impl std::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrivateKey({:?}, redacted)", self.curve)
    }
}
impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SigningKey({:?}, redacted)", self.curve)
    }
}

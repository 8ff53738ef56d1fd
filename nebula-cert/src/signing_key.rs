//! Private keys of CAs, zeroized on drop and never printed.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use ed25519_dalek::Signer as _;
use zeroize::Zeroizing;

use crate::encrypted_key::{self, PassphraseCost};
use crate::key::{SECRET_LENGTH, check_scalar, curve_of, public_point, random_scalar, random_secret};
use crate::{Curve, Error, pem, signature};

/// A CA's key (Ed25519 or P-256 ECDSA).
///
/// ```
/// use nebula_cert::{Curve, Error, PassphraseCost, SigningKey};
///
/// let key = SigningKey::generate(Curve::P256)?;
/// // So cheap to guess only in an example; PassphraseCost::default() takes 2 GiB of memory.
/// let cost = PassphraseCost { memory_kib: 64, iterations: 1, parallelism: 1 };
/// let text = key.to_encrypted_pem(b"a passphrase", cost)?;
/// assert_eq!(SigningKey::from_encrypted_pem(text.as_bytes(), b"a passphrase")?.public_key(), key.public_key());
/// assert_eq!(SigningKey::from_encrypted_pem(text.as_bytes(), b"another").unwrap_err(), Error::Passphrase);
/// assert_eq!(SigningKey::from_pem(text.as_bytes()).unwrap_err(), Error::KeyEncrypted);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
pub struct SigningKey {
    curve: Curve,
    /// In the file format: seed and public key for Ed25519, scalar for P-256.
    secret: Zeroizing<Vec<u8>>,
}

impl SigningKey {
    /// Generates a random key.
    ///
    /// # Errors
    /// Returns an error if the system provides no random bytes, or [`Error::CurveNotInBuild`].
    pub fn generate(curve: Curve) -> Result<Self, Error> {
        match curve {
            Curve::Curve25519 => Self::from_seed(curve, &*random_secret()?),
            Curve::P256 => Self::from_seed(curve, &*random_scalar()?),
        }
    }

    /// Derives the key from an Ed25519 seed or a P-256 scalar, which must be as secret as the key.
    ///
    /// # Errors
    /// Returns an error for a P-256 scalar out of range, or [`Error::CurveNotInBuild`].
    pub fn from_seed(curve: Curve, seed: &[u8; SECRET_LENGTH]) -> Result<Self, Error> {
        curve.check_build()?;
        let secret = match curve {
            Curve::Curve25519 => ed25519_dalek::SigningKey::from_bytes(seed).to_keypair_bytes().to_vec(),
            Curve::P256 => check_scalar(seed).map(|()| seed.to_vec())?,
        };
        Ok(Self { curve, secret: Zeroizing::new(secret) })
    }

    /// Reads an unencrypted CA key.
    ///
    /// # Errors
    /// Returns an error for another label, an invalid key, or an encrypted key (use
    /// [`SigningKey::from_encrypted_pem`]).
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let block = pem::first(pem)?;
        match curve_of(&block.label, plain_label) {
            Some(curve) => Self::from_bytes(curve, &block.contents),
            None if curve_of(&block.label, encrypted_label).is_some() => Err(Error::KeyEncrypted),
            None => Err(Error::NotASigningKey { label: block.label }),
        }
    }

    /// Reads an encrypted CA key.
    ///
    /// # Errors
    /// Returns an error for another label, a plain key, a wrong passphrase, or parameters out of bounds.
    pub fn from_encrypted_pem(pem: &[u8], passphrase: &[u8]) -> Result<Self, Error> {
        Self::from_encrypted_pem_within(pem, passphrase, PassphraseCost::HIGHEST)
    }

    /// Reads an encrypted CA key whose source is not trusted to choose how expensive decryption is.
    ///
    /// # Errors
    /// The same as [`SigningKey::from_encrypted_pem`], and [`Error::PassphraseCost`] if any part of the cost exceeds
    /// `limit`.
    pub fn from_encrypted_pem_within(pem: &[u8], passphrase: &[u8], limit: PassphraseCost) -> Result<Self, Error> {
        let block = pem::first(pem)?;
        match curve_of(&block.label, encrypted_label) {
            Some(curve) => Self::from_bytes(curve, &encrypted_key::decrypt(&block.contents, passphrase, limit)?),
            None if curve_of(&block.label, plain_label).is_some() => Err(Error::KeyNotEncrypted),
            None => Err(Error::NotASigningKey { label: block.label }),
        }
    }

    /// Encodes the key as PEM, unencrypted.
    #[must_use]
    pub fn to_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(pem::encode(plain_label(self.curve), &self.secret))
    }

    /// Encodes the key as PEM encrypted with a passphrase; `cost` determines how long that takes.
    ///
    /// # Errors
    /// Returns an error if `cost` is out of bounds, or if there is not enough memory for it or no random bytes.
    pub fn to_encrypted_pem(&self, passphrase: &[u8], cost: PassphraseCost) -> Result<String, Error> {
        let contents = encrypted_key::encrypt(&self.secret, passphrase, cost)?;
        Ok(pem::encode(encrypted_label(self.curve), &contents))
    }

    /// Curve of the key.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }

    /// The public key.
    #[must_use]
    pub fn public_key(&self) -> Vec<u8> {
        match self.curve {
            Curve::Curve25519 => self.ed25519().verifying_key().to_bytes().to_vec(),
            Curve::P256 => public_point(&self.secret),
        }
    }

    /// Signs a message for a certificate; P-256 signatures are in low-S form.
    pub(crate) fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        match self.curve {
            Curve::Curve25519 => Ok(self.ed25519().sign(message).to_bytes().to_vec()),
            Curve::P256 => {
                let (algorithm, public) = (&ECDSA_P256_SHA256_ASN1_SIGNING, self.public_key());
                let key = EcdsaKeyPair::from_private_key_and_public_key(algorithm, &self.secret, &public);
                let made = key.map_err(|_| Error::KeyOutOfRange)?.sign(&SystemRandom::new(), message);
                signature::low_s(made.map_err(|_| Error::SignerFault)?.as_ref()).ok_or(Error::SignerFault)
            }
        }
    }

    fn from_bytes(curve: Curve, bytes: &[u8]) -> Result<Self, Error> {
        curve.check_build()?;
        let key = Self { curve, secret: Zeroizing::new(bytes.to_vec()) };
        let expected = match curve {
            Curve::Curve25519 => ED25519_LENGTH,
            Curve::P256 => SECRET_LENGTH,
        };
        if bytes.len() != expected {
            return Err(Error::KeyLength { curve, expected, length: bytes.len() });
        }
        match curve {
            // Signatures made with the public half of another key would leak the private key.
            Curve::Curve25519 if !bytes.ends_with(&key.public_key()) => Err(Error::KeyHalves),
            Curve::Curve25519 => Ok(key),
            Curve::P256 => check_scalar(bytes).map(|()| key),
        }
    }

    fn ed25519(&self) -> ed25519_dalek::SigningKey {
        // The length was checked when the key was made; the public half is always derived from the seed.
        let mut seed = Zeroizing::new([0; ED25519_LENGTH / 2]);
        seed.iter_mut().zip(self.secret.iter()).for_each(|(to, from)| *to = *from);
        ed25519_dalek::SigningKey::from_bytes(&seed)
    }
}

fn plain_label(curve: Curve) -> &'static str {
    match curve {
        Curve::Curve25519 => "NEBULA ED25519 PRIVATE KEY",
        Curve::P256 => "NEBULA ECDSA P256 PRIVATE KEY",
    }
}

fn encrypted_label(curve: Curve) -> &'static str {
    match curve {
        Curve::Curve25519 => "NEBULA ED25519 ENCRYPTED PRIVATE KEY",
        Curve::P256 => "NEBULA ECDSA P256 ENCRYPTED PRIVATE KEY",
    }
}

const ED25519_LENGTH: usize = 64;

impl std::fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SigningKey({}, redacted)", self.curve)
    }
}

#[cfg(test)]
mod tests {
    use p256::ecdsa::Signature;

    use super::*;
    use crate::signature::VerifyingKey;

    #[test]
    fn generated_keys_read_back_from_pem() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = SigningKey::generate(curve).unwrap();
            assert_eq!(SigningKey::from_pem(key.to_pem().as_bytes()).unwrap().secret, key.secret);
        }
    }

    #[test]
    fn signatures_verify_and_p256_ones_are_low_s() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = SigningKey::generate(curve).unwrap();
            let public_key = VerifyingKey::new(curve, &key.public_key()).unwrap();
            for message in 0..20_u8 {
                let made = key.sign(&[message]).unwrap();
                assert!(public_key.verifies(&[message], &made));
                assert!(!public_key.verifies(&[message + 1], &made));
                if curve == Curve::P256 {
                    let parsed = Signature::from_der(&made).unwrap();
                    assert_eq!(parsed.normalize_s(), parsed);
                }
            }
        }
    }

    #[test]
    fn an_ed25519_key_with_a_foreign_public_half_is_refused() {
        let mut bytes = SigningKey::generate(Curve::Curve25519).unwrap().secret.to_vec();
        bytes[63] ^= 1;
        assert_eq!(SigningKey::from_bytes(Curve::Curve25519, &bytes).unwrap_err(), Error::KeyHalves);
    }

    #[test]
    fn an_encrypted_key_opens_only_with_its_passphrase() {
        let cost = PassphraseCost { memory_kib: 64, iterations: 1, parallelism: 2 };
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = SigningKey::generate(curve).unwrap();
            let text = key.to_encrypted_pem(b"secret", cost).unwrap();
            assert_eq!(SigningKey::from_encrypted_pem(text.as_bytes(), b"secret").unwrap().secret, key.secret);
            assert_eq!(SigningKey::from_encrypted_pem(text.as_bytes(), b"Secret").unwrap_err(), Error::Passphrase);
            assert_eq!(SigningKey::from_pem(text.as_bytes()).unwrap_err(), Error::KeyEncrypted);
            let plain = key.to_pem();
            assert_eq!(
                SigningKey::from_encrypted_pem(plain.as_bytes(), b"secret").unwrap_err(),
                Error::KeyNotEncrypted
            );
        }
    }
}

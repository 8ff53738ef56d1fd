//! Private keys of hosts, zeroized on drop and never printed.

use aws_lc_rs::agreement;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, ParsedPublicKey};
use zeroize::Zeroizing;

use crate::{Curve, Error, pem};

/// A host's key for the handshake (X25519 or P-256 ECDH).
///
/// ```
/// use nebula_cert::{Curve, PrivateKey, public_key_from_pem};
///
/// let key = PrivateKey::generate(Curve::Curve25519)?;
/// // Only the public half leaves the host.
/// assert_eq!(public_key_from_pem(key.public_pem().as_bytes())?, (Curve::Curve25519, key.public_key()));
/// assert_eq!(format!("{key:?}"), "PrivateKey(CURVE25519, redacted)");
/// assert_eq!(PrivateKey::from_pem(key.to_pem().as_bytes())?.secret_bytes(), key.secret_bytes());
/// # Ok::<(), nebula_cert::Error>(())
/// ```
#[derive(Clone)]
pub struct PrivateKey {
    curve: Curve,
    secret: Zeroizing<[u8; SECRET_LENGTH]>,
}

impl PrivateKey {
    /// Generates a random key.
    ///
    /// # Errors
    /// Returns an error if the system provides no random bytes, or [`Error::CurveNotInBuild`].
    pub fn generate(curve: Curve) -> Result<Self, Error> {
        curve.check_build()?;
        let secret = match curve {
            Curve::Curve25519 => random_secret()?,
            Curve::P256 => random_scalar()?,
        };
        Ok(Self { curve, secret })
    }

    /// Reads `NEBULA X25519 PRIVATE KEY` or `NEBULA P256 PRIVATE KEY`.
    ///
    /// # Errors
    /// Returns an error for another label, a wrong length, or a P-256 scalar out of range.
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let block = pem::first(pem)?;
        match curve_of(&block.label, private_label) {
            Some(curve) => Self::from_bytes(curve, &block.contents),
            None => Err(Error::NotAPrivateKey { label: block.label }),
        }
    }

    /// Builds a key from raw bytes.
    ///
    /// # Errors
    /// Returns an error for a wrong length or a P-256 scalar out of range, or [`Error::CurveNotInBuild`].
    pub fn from_bytes(curve: Curve, bytes: &[u8]) -> Result<Self, Error> {
        curve.check_build()?;
        if bytes.len() != SECRET_LENGTH {
            return Err(Error::KeyLength { curve, expected: SECRET_LENGTH, length: bytes.len() });
        }
        let mut secret = Zeroizing::new([0; SECRET_LENGTH]);
        secret.copy_from_slice(bytes);
        if curve == Curve::P256 {
            check_scalar(&*secret)?;
        }
        Ok(Self { curve, secret })
    }

    /// Encodes the key as PEM.
    #[must_use]
    pub fn to_pem(&self) -> Zeroizing<String> {
        Zeroizing::new(pem::encode(private_label(self.curve), &*self.secret))
    }

    /// Curve of the key.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }

    /// The raw secret, for the Noise implementation.
    #[must_use]
    pub fn secret_bytes(&self) -> &[u8] {
        &*self.secret
    }

    /// The public key, as certificates contain it.
    #[must_use]
    pub fn public_key(&self) -> Vec<u8> {
        match self.curve {
            Curve::Curve25519 => public_half(&agreement::X25519, &*self.secret),
            Curve::P256 => public_point(&*self.secret),
        }
    }

    /// Encodes the public key as PEM.
    #[must_use]
    pub fn public_pem(&self) -> String {
        public_key_to_pem(self.curve, &self.public_key())
    }
}

/// Reads the curve and the raw bytes of a host's public key from PEM.
///
/// # Errors
/// Returns an error for another label, a wrong length, or bytes that are not a point on the curve.
pub fn public_key_from_pem(pem: &[u8]) -> Result<(Curve, Vec<u8>), Error> {
    let block = pem::first(pem)?;
    let Some(curve) = curve_of(&block.label, public_label) else {
        return Err(Error::NotAPublicKey { label: block.label });
    };
    check_public_key(curve, &block.contents)?;
    Ok((curve, block.contents.to_vec()))
}

/// Encodes a host's public key as PEM, the reverse of [`public_key_from_pem`].
#[must_use]
pub fn public_key_to_pem(curve: Curve, public_key: &[u8]) -> String {
    pem::encode(public_label(curve), public_key)
}

/// Checks the length and, for P-256, that the bytes are an uncompressed point on the curve.
pub(crate) fn check_public_key(curve: Curve, bytes: &[u8]) -> Result<(), Error> {
    let length = bytes.len();
    let valid = length == curve.public_key_length()
        && match curve {
            Curve::Curve25519 => true,
            Curve::P256 => {
                bytes.first() == Some(&UNCOMPRESSED) && ParsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, bytes).is_ok()
            }
        };
    valid.then_some(()).ok_or(Error::PublicKey { curve, length })
}

/// First byte of a point with both coordinates (SEC 1, section 2.3.3).
const UNCOMPRESSED: u8 = 4;

/// Refuses a P-256 private key that is zero or not below the group order.
pub(crate) fn check_scalar(bytes: &[u8]) -> Result<(), Error> {
    let key = agreement::PrivateKey::from_private_key(&agreement::ECDH_P256, bytes);
    key.map(drop).map_err(|_| Error::KeyOutOfRange)
}

/// The uncompressed point of a P-256 private key, which was checked before.
pub(crate) fn public_point(secret: &[u8]) -> Vec<u8> {
    public_half(&agreement::ECDH_P256, secret)
}

fn public_half(algorithm: &'static agreement::Algorithm, secret: &[u8]) -> Vec<u8> {
    let key = agreement::PrivateKey::from_private_key(algorithm, secret);
    let public = key.ok().and_then(|key| key.compute_public_key().ok());
    public.map(|public| public.as_ref().to_vec()).unwrap_or_default()
}

pub(crate) fn random_secret() -> Result<Zeroizing<[u8; SECRET_LENGTH]>, Error> {
    let mut secret = Zeroizing::new([0; SECRET_LENGTH]);
    fill_random(&mut *secret)?;
    Ok(secret)
}

/// Draws random bytes until they are a valid P-256 scalar; one draw in 2^32 is not.
pub(crate) fn random_scalar() -> Result<Zeroizing<[u8; SECRET_LENGTH]>, Error> {
    loop {
        let secret = random_secret()?;
        if check_scalar(&*secret).is_ok() {
            return Ok(secret);
        }
    }
}

pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<(), Error> {
    if cfg!(feature = "fips") {
        return aws_lc_rs::rand::fill(bytes).map_err(|error| Error::NoRandomness(error.to_string()));
    }
    getrandom::fill(bytes).map_err(|error| Error::NoRandomness(format!("getrandom: {error}")))
}

/// Finds the curve that this label belongs to.
pub(crate) fn curve_of(label: &str, label_of: fn(Curve) -> &'static str) -> Option<Curve> {
    [Curve::Curve25519, Curve::P256].into_iter().find(|&curve| label_of(curve) == label)
}

fn private_label(curve: Curve) -> &'static str {
    match curve {
        Curve::Curve25519 => "NEBULA X25519 PRIVATE KEY",
        Curve::P256 => "NEBULA P256 PRIVATE KEY",
    }
}

fn public_label(curve: Curve) -> &'static str {
    match curve {
        Curve::Curve25519 => "NEBULA X25519 PUBLIC KEY",
        Curve::P256 => "NEBULA P256 PUBLIC KEY",
    }
}

pub(crate) const SECRET_LENGTH: usize = 32;

impl std::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrivateKey({}, redacted)", self.curve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_keys_read_back_from_pem_with_the_same_public_half() {
        for curve in [Curve::Curve25519, Curve::P256] {
            let key = PrivateKey::generate(curve).unwrap();
            let read = PrivateKey::from_pem(key.to_pem().as_bytes()).unwrap();
            assert_eq!(read.secret_bytes(), key.secret_bytes());
            assert_eq!(public_key_from_pem(key.public_pem().as_bytes()), Ok((curve, read.public_key())));
        }
    }

    #[test]
    fn p256_scalars_out_of_range_are_refused() {
        let order = [
            &[0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff][..],
            &[0xbc, 0xe6, 0xfa, 0xad, 0xa7, 0x17, 0x9e, 0x84, 0xf3, 0xb9, 0xca, 0xc2, 0xfc, 0x63, 0x25, 0x51],
        ]
        .concat();
        for bytes in [&[0; 32][..], &[0xff; 32], &order] {
            assert_eq!(PrivateKey::from_bytes(Curve::P256, bytes).unwrap_err(), Error::KeyOutOfRange);
        }
        let below = [&order[..31], &[0x50]].concat();
        assert!(PrivateKey::from_bytes(Curve::P256, &below).is_ok());
    }

    #[test]
    fn a_public_key_off_the_curve_is_refused() {
        let text = pem::encode(public_label(Curve::P256), &[4; 65]);
        assert_eq!(public_key_from_pem(text.as_bytes()), Err(Error::PublicKey { curve: Curve::P256, length: 65 }));
    }

    #[test]
    fn keys_of_another_kind_are_named_in_the_refusal() {
        let key = PrivateKey::generate(Curve::Curve25519).unwrap();
        let error = PrivateKey::from_pem(key.public_pem().as_bytes()).unwrap_err();
        assert_eq!(error, Error::NotAPrivateKey { label: "NEBULA X25519 PUBLIC KEY".into() });
    }

    #[test]
    fn debug_output_holds_no_secret() {
        let key = PrivateKey::from_bytes(Curve::Curve25519, &[0xab; 32]).unwrap();
        assert_eq!(format!("{key:?}"), "PrivateKey(CURVE25519, redacted)");
    }
}

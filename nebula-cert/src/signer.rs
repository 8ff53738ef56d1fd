//! The signing key of a CA, in memory or in a token that never reveals it.

use crate::{Curve, Error, SigningKey};

/// Signs for a CA. [`SigningKey`] holds the key in memory; a token or a remote service returns signatures only.
///
/// The returned signature is normalized to low-S form (P-256) and verified before it becomes part of a certificate.
///
/// ```
/// use nebula_cert::{Curve, Error, Signer, SigningKey, Template};
///
/// /// Stands for a service that is asked over the network.
/// struct Remote(SigningKey);
///
/// impl Signer for Remote {
///     fn curve(&self) -> Curve {
///         self.0.curve()
///     }
///     fn public_key(&self) -> Vec<u8> {
///         self.0.public_key()
///     }
///     fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
///         Signer::sign(&self.0, message)
///     }
/// }
///
/// # fn main() -> Result<(), Error> {
/// let remote = Remote(SigningKey::generate(Curve::P256)?);
/// let template = Template {
///     curve: remote.curve(),
///     ..Template::new("my network", 1_800_000_000..=1_900_000_000)
/// };
/// let ca = template.self_sign(&remote)?;
/// assert_eq!(ca.public_key(), remote.public_key());
/// # Ok(())
/// # }
/// ```
pub trait Signer {
    /// Curve of the key.
    fn curve(&self) -> Curve;

    /// The public key as certificates contain it: 32 bytes, or an uncompressed P-256 point of 65 bytes.
    fn public_key(&self) -> Vec<u8>;

    /// Signs a message of any length. Ed25519: 64 bytes. P-256: ECDSA over SHA-256 in DER, s in either form.
    ///
    /// # Errors
    /// Returns an error if the key cannot be used, for example [`Error::Signer`].
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error>;
}

impl Signer for SigningKey {
    fn curve(&self) -> Curve {
        self.curve()
    }

    fn public_key(&self) -> Vec<u8> {
        self.public_key()
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        self.sign(message)
    }
}

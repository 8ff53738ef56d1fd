//! A certificate of either version, and the types of its fields.

use std::borrow::Cow;
use std::fmt;

use aws_lc_rs::digest::{SHA256, digest};
use ipnet::IpNet;

use crate::signature::VerifyingKey;
use crate::{Error, pem, signature, v1, v2};

/// Maximum length of an encoded certificate that is read or issued, in bytes.
pub const MAX_CERTIFICATE_SIZE: usize = 65_536;

/// Seconds since the Unix epoch, the resolution of certificates.
pub type UnixTime = i64;

/// Certificate encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Version {
    /// Protobuf, one IPv4 network.
    V1,
    /// ASN.1 DER, any number of IPv4 and IPv6 networks.
    V2,
}

impl Version {
    /// 1 or 2, as `CertVersion` in the handshake payload.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::V1 => "NEBULA CERTIFICATE",
            Self::V2 => "NEBULA CERTIFICATE V2",
        }
    }
}

/// `v1` or `v2`.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}", self.number())
    }
}

/// Curve of the keys: X25519/Ed25519, or P-256 for both uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Curve {
    /// X25519 for hosts, Ed25519 for CAs.
    Curve25519,
    /// NIST P-256 for both.
    P256,
}

impl Curve {
    /// 0 or 1, as in certificates.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Curve25519 => 0,
            Self::P256 => 1,
        }
    }

    pub(crate) fn from_number(number: u64) -> Result<Self, Error> {
        match number {
            0 => Ok(Self::Curve25519),
            1 => Ok(Self::P256),
            _ => Err(Error::UnknownCurve(number)),
        }
    }

    /// `25519` or `P256`, as options of commands have it.
    #[must_use]
    pub fn flag(self) -> &'static str {
        match self {
            Self::Curve25519 => "25519",
            Self::P256 => "P256",
        }
    }

    /// The curve of keys that are made without a wish for one: that of Go Nebula, where this build has it.
    pub const USUAL: Self = if cfg!(feature = "fips") { Self::P256 } else { Self::Curve25519 };

    /// Refuses a curve that this build has no keys of.
    pub(crate) fn check_build(self) -> Result<(), Error> {
        if cfg!(feature = "fips") && self == Self::Curve25519 { Err(Error::CurveNotInBuild) } else { Ok(()) }
    }

    /// Length of a public key in bytes.
    pub(crate) fn public_key_length(self) -> usize {
        match self {
            Self::Curve25519 => 32,
            Self::P256 => 65,
        }
    }
}

/// `CURVE25519` or `P256`.
impl fmt::Display for Curve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Curve25519 => "CURVE25519",
            Self::P256 => "P256",
        })
    }
}

/// SHA-256 that identifies a certificate in blocklists and `issuer` fields; prints as lower-case hex.
///
/// ```
/// use nebula_cert::Fingerprint;
///
/// let text = "e834180872d4ddcad710db6adacd26810ed98ed98aca1069fb3f2c1b8319071a";
/// let fingerprint: Fingerprint = text.parse()?;
/// assert_eq!(fingerprint.to_string(), text);
/// # Ok::<(), nebula_cert::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// Reads an issuer field, which is absent if empty.
    pub(crate) fn from_issuer(bytes: &[u8]) -> Result<Option<Self>, Error> {
        match bytes.try_into() {
            Ok(fingerprint) => Ok(Some(Self(fingerprint))),
            Err(_) if bytes.is_empty() => Ok(None),
            Err(_) => Err(Error::IssuerLength { length: bytes.len() }),
        }
    }
}

/// A parsed certificate. Parsing checks form only; trust comes from [`crate::CaPool::verify`].
///
/// ```
/// use nebula_cert::{Certificate, Version};
///
/// let text = "\
/// -----BEGIN NEBULA CERTIFICATE V2-----
/// MIGsoEaABXdlYi0xoQcEBQoAAAEQowUMA3dlYoUEawCbgYYFASb4uYCHIEsgdJ/Q
/// 3gFKPH7Ug+w2o/6HZAXJKngsiWd0nnEWNpXlgiBuY0SZqAuFWXj7awIkNdjJevZM
/// /XOVE9UUzpNEE+RCHINA86GxG7lYDKqbeSUYYDsFoyte+qhy8WrsGVZjLEp1Q+pM
/// NWVjgVXSaZOHDnDM5HcYT0EgWxaFZwOqRFAUNXTxCQ==
/// -----END NEBULA CERTIFICATE V2-----
/// ";
/// let certificate = Certificate::from_pem(text.as_bytes())?;
/// assert_eq!((certificate.name(), certificate.version()), ("web-1", Version::V2));
/// assert_eq!(certificate.networks(), ["10.0.0.1/16".parse().unwrap()]);
/// assert!(!certificate.is_ca() && !certificate.is_expired(1_800_000_000));
/// assert_eq!(certificate.to_pem(), text);
/// # Ok::<(), nebula_cert::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    pub(crate) version: Version,
    pub(crate) curve: Curve,
    pub(crate) name: String,
    pub(crate) networks: Vec<IpNet>,
    pub(crate) unsafe_networks: Vec<IpNet>,
    pub(crate) groups: Vec<String>,
    pub(crate) is_ca: bool,
    pub(crate) not_before: UnixTime,
    pub(crate) not_after: UnixTime,
    pub(crate) issuer: Option<Fingerprint>,
    pub(crate) public_key: Vec<u8>,
    pub(crate) signature: Vec<u8>,
    /// The signed bytes for v1: the re-encoded details. For v2 the details element as received, the first part of the
    /// signed bytes.
    pub(crate) raw_details: Vec<u8>,
}

impl Certificate {
    /// Reads exactly one certificate from PEM text.
    ///
    /// # Errors
    /// Returns an error if there is no certificate, more than one, or an invalid one.
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let mut certificates = Self::bundle_from_pem(pem)?;
        match certificates.pop() {
            Some(certificate) if certificates.is_empty() => Ok(certificate),
            Some(_) => Err(Error::SeveralCertificates { count: certificates.len() + 1 }),
            None => Err(Error::NoPemBlock),
        }
    }
    /// Reads every certificate of a PEM bundle, in order.
    ///
    /// # Errors
    /// Returns an error for a wrong label, text after the last block, or an invalid certificate.
    pub fn bundle_from_pem(pem: &[u8]) -> Result<Vec<Self>, Error> {
        match Self::readable_from_pem(pem) {
            (certificates, None) => Ok(certificates),
            (_, Some(error)) => Err(error),
        }
    }
    /// Reads the certificates of a PEM bundle, in order, up to the first one that is invalid. Also returns what is
    /// wrong with it, or with the rest of the text.
    #[must_use]
    pub fn readable_from_pem(pem: &[u8]) -> (Vec<Self>, Option<Error>) {
        let (blocks, rest) = pem::readable(pem);
        let is_alone = blocks.len() == 1 && rest.is_none();
        let mut certificates = Vec::new();
        for block in blocks {
            let line = block.line;
            match Self::from_block(block) {
                Ok(certificate) => certificates.push(certificate),
                Err(reason) if is_alone => return (certificates, Some(reason)),
                // With several blocks the error names the block.
                Err(reason) => return (certificates, Some(Error::InBlock { line, reason: Box::new(reason) })),
            }
        }
        (certificates, rest)
    }

    /// Encodes the certificate as PEM, with the label of its version.
    #[must_use]
    pub fn to_pem(&self) -> String {
        pem::encode(self.version.label(), &self.to_bytes())
    }
    /// Reads the binary form inside a PEM block.
    ///
    /// # Errors
    /// Returns an error for any violation of the format.
    pub fn from_bytes(version: Version, bytes: &[u8]) -> Result<Self, Error> {
        match version {
            Version::V1 => v1::decode(bytes, None),
            Version::V2 => v2::decode(bytes, None),
        }
    }
    /// Encodes the binary form inside a PEM block.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        match self.version {
            Version::V1 => v1::encode(self),
            Version::V2 => v2::encode(self),
        }
    }
    /// Rebuilds a peer's certificate from a handshake, which carries the key (and for v2 the curve) outside the
    /// certificate.
    ///
    /// # Errors
    /// Returns an error if the bytes contain a key or name another curve, or for any violation of the format.
    pub fn from_handshake(version: Version, curve: Curve, public_key: &[u8], bytes: &[u8]) -> Result<Self, Error> {
        match version {
            Version::V1 => v1::decode(bytes, Some((curve, public_key))),
            Version::V2 => v2::decode(bytes, Some((curve, public_key))),
        }
    }

    /// Encodes the form that is sent in a handshake, without the public key.
    #[must_use]
    pub fn to_handshake(&self) -> Vec<u8> {
        match self.version {
            Version::V1 => v1::encode_for_handshake(self),
            Version::V2 => v2::encode_for_handshake(self),
        }
    }
    /// Version of the encoding.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }
    /// Curve of the public key.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.curve
    }
    /// Name, not necessarily unique.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Overlay addresses with their prefix lengths, host bits included.
    #[must_use]
    pub fn networks(&self) -> &[IpNet] {
        &self.networks
    }
    /// Networks that the host routes for.
    #[must_use]
    pub fn unsafe_networks(&self) -> &[IpNet] {
        &self.unsafe_networks
    }
    /// Groups the firewall matches on.
    #[must_use]
    pub fn groups(&self) -> &[String] {
        &self.groups
    }
    /// Whether it is a CA and may sign others.
    #[must_use]
    pub fn is_ca(&self) -> bool {
        self.is_ca
    }
    /// First second of validity.
    #[must_use]
    pub fn not_before(&self) -> UnixTime {
        self.not_before
    }
    /// Last second of validity.
    #[must_use]
    pub fn not_after(&self) -> UnixTime {
        self.not_after
    }
    /// Fingerprint of the signing CA; `None` if it is self-signed.
    #[must_use]
    pub fn issuer(&self) -> Option<Fingerprint> {
        self.issuer
    }
    /// X25519/Ed25519 (32 bytes) or uncompressed P-256 point (65 bytes).
    #[must_use]
    pub fn public_key(&self) -> &[u8] {
        &self.public_key
    }
    /// Raw signature.
    #[must_use]
    pub fn signature(&self) -> &[u8] {
        &self.signature
    }
    /// Fingerprint of this certificate, as in blocklists.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint_with(&self.signature)
    }
    /// Whether `at` is before or after the validity period, whose first and last seconds are both valid.
    #[must_use]
    pub fn is_expired(&self, at: UnixTime) -> bool {
        self.not_before > at || self.not_after < at
    }

    fn from_block(block: pem::Block) -> Result<Self, Error> {
        match [Version::V1, Version::V2].into_iter().find(|version| version.label() == block.label) {
            Some(version) => Self::from_bytes(version, &block.contents),
            None => Err(Error::NotACertificate { label: block.label }),
        }
    }

    /// The bytes that the signature covers.
    pub(crate) fn signed_bytes(&self) -> Cow<'_, [u8]> {
        match self.version {
            Version::V1 => Cow::Borrowed(&self.raw_details),
            Version::V2 => Cow::Owned(v2::signed_bytes(self)),
        }
    }

    /// Whether its signature verifies with `key`.
    pub(crate) fn is_signed_by(&self, key: &VerifyingKey) -> bool {
        key.verifies(&self.signed_bytes(), &self.signature)
    }

    /// For P-256 only: the fingerprint of this certificate with the other, equally valid, form of its signature. A
    /// blocklist for releases of Go Nebula before 1.10.3 needs both.
    #[must_use]
    pub fn alternate_fingerprint(&self) -> Option<Fingerprint> {
        match self.curve {
            Curve::Curve25519 => None,
            Curve::P256 => signature::other_form(&self.signature).map(|other| self.fingerprint_with(&other)),
        }
    }

    /// Checks the contents. The same rules apply to reading and signing.
    pub(crate) fn validate(&self) -> Result<(), Error> {
        let expected = self.curve.public_key_length();
        match self.public_key.len() {
            0 => return Err(Error::PublicKeyMissing),
            length if length != expected => return Err(Error::PublicKey { curve: self.curve, length }),
            _ => {}
        }
        if !self.is_ca && self.networks.is_empty() {
            return Err(Error::NoNetworks { name: self.name.clone() });
        }
        match self.version {
            Version::V1 => v1::validate(self),
            Version::V2 => v2::validate(self),
        }
    }

    fn fingerprint_with(&self, signature: &[u8]) -> Fingerprint {
        let hashed = match self.version {
            Version::V1 => v1::encode_with(self, signature),
            Version::V2 => [&*self.signed_bytes(), signature].concat(),
        };
        let mut fingerprint = [0; 32];
        fingerprint.copy_from_slice(digest(&SHA256, &hashed).as_ref());
        Fingerprint(fingerprint)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::hex::encode(&self.0))
    }
}
impl std::str::FromStr for Fingerprint {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let invalid = || Error::FingerprintText(text.chars().take(80).collect());
        let bytes = if text.len() == 64 { crate::hex::decode(text) } else { None };
        bytes.and_then(|bytes| bytes.try_into().ok()).map(Self).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_reads_what_it_prints_in_either_case() {
        let fingerprint = Fingerprint(std::array::from_fn(|at| at as u8 * 8));
        assert_eq!(fingerprint.to_string().parse(), Ok(fingerprint));
        assert_eq!(fingerprint.to_string().to_uppercase().parse(), Ok(fingerprint));
    }

    #[test]
    fn a_bad_block_of_a_bundle_is_named_by_its_line() {
        let bundle = [Version::V1, Version::V2].map(|version| pem::encode(version.label(), b"")).concat();
        let empty = |version| Error::Empty { version };
        let refused = Error::InBlock { line: 1, reason: Box::new(empty(Version::V1)) };
        assert_eq!(Certificate::bundle_from_pem(bundle.as_bytes()), Err(refused));
        let alone = pem::encode(Version::V2.label(), b"");
        assert_eq!(Certificate::bundle_from_pem(alone.as_bytes()), Err(empty(Version::V2)));
    }

    #[test]
    fn text_that_is_not_64_hex_digits_is_no_fingerprint() {
        for text in ["", "00", &"g".repeat(64), &"é".repeat(32), &"0".repeat(65)] {
            assert!(matches!(text.parse::<Fingerprint>(), Err(Error::FingerprintText(_))), "{text}");
        }
    }
}

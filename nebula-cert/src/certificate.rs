//! A certificate of either version, as its callers see it.

use ipnet::IpNet;

use crate::Error;

/// Seconds since the Unix epoch; certificates have no finer time.
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
    /// 1 or 2, as in `CertVersion` of the handshake payload.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::V1 => 1,
            Self::V2 => 2,
        }
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

/// SHA-256 that names a certificate in blocklists and `issuer` fields; prints as lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u8; 32]);

/// A parsed certificate. Parsing checks form only; trust comes from [`crate::CaPool::verify`].
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
    /// The bytes the signature covers first: v1 details as re-encoded, v2 details element as received.
    pub(crate) raw_details: Vec<u8>,
}

impl Certificate {
    /// Reads exactly one certificate from PEM text.
    ///
    /// # Errors
    /// No certificate, more than one, or an invalid one.
    pub fn from_pem(_pem: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// Reads every certificate of a PEM bundle, in order.
    ///
    /// # Errors
    /// A wrong label, junk after the last block, or an invalid certificate.
    pub fn bundle_from_pem(_pem: &[u8]) -> Result<Vec<Self>, Error> {
        unimplemented!()
    }
    /// PEM text with the label of the version.
    #[must_use]
    pub fn to_pem(&self) -> String {
        unimplemented!()
    }
    /// Reads the binary form inside a PEM block.
    ///
    /// # Errors
    /// Any violation of the format.
    pub fn from_bytes(_version: Version, _bytes: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// The binary form inside a PEM block.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        unimplemented!()
    }
    /// Rebuilds a peer's certificate from the handshake: the key (and for v2 the curve) travel outside of it.
    ///
    /// # Errors
    /// A key inside the bytes, another curve, or any violation of the format.
    pub fn from_handshake(_version: Version, _curve: Curve, _public_key: &[u8], _bytes: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// The bytes sent inside a handshake: without the public key.
    #[must_use]
    pub fn to_handshake(&self) -> Vec<u8> {
        unimplemented!()
    }
    /// Encoding.
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
    /// Overlay addresses with their prefix lengths; host bits kept.
    #[must_use]
    pub fn networks(&self) -> &[IpNet] {
        &self.networks
    }
    /// Networks behind the host.
    #[must_use]
    pub fn unsafe_networks(&self) -> &[IpNet] {
        &self.unsafe_networks
    }
    /// Groups the firewall matches on.
    #[must_use]
    pub fn groups(&self) -> &[String] {
        &self.groups
    }
    /// Whether it may sign others.
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
    /// Fingerprint of the signing CA; none in a self-signed one.
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
    /// Name of this certificate in blocklists.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        unimplemented!()
    }
    /// Whether it is not valid at `at` (both ends inclusive).
    #[must_use]
    pub fn is_expired(&self, at: UnixTime) -> bool {
        self.not_before > at || self.not_after < at
    }
}

impl std::fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}
impl std::fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}
impl std::str::FromStr for Fingerprint {
    type Err = Error;
    fn from_str(_text: &str) -> Result<Self, Error> {
        unimplemented!()
    }
}

//! One variant per reason a certificate or key is refused.

use std::path::PathBuf;

use ipnet::IpNet;

use crate::timestamp::rfc3339;
use crate::{Curve, Fingerprint, UnixTime, Version};

/// Why a certificate, key or trust store was refused. Names from certificates appear quoted and escaped in messages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    // Files and PEM text.
    /// A file cannot be read.
    #[error("unable to read {role} file {}: {reason}", path.display())]
    Unreadable {
        /// What the file is for, for example `pki.cert`.
        role: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's error message.
        reason: String,
    },
    /// A file was read but its contents are wrong.
    #[error("error while unmarshaling {role} {}: {reason}", path.display())]
    InFile {
        /// What the file is for, for example `pki.cert`.
        role: &'static str,
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Box<Self>,
    },
    /// The input is longer than any real file.
    #[error("input of {length} bytes is longer than the limit of {limit} bytes")]
    InputTooLong {
        /// Length of the input in bytes.
        length: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
    /// No `-----BEGIN` line.
    #[error("input did not contain a valid PEM encoded block")]
    NoPemBlock,
    /// A block cannot be parsed.
    #[error("input did not contain a valid PEM encoded block: line {line}: {what}")]
    PemMalformed {
        /// Line of its BEGIN, counted from 1.
        line: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// There is text after the last block, perhaps a block whose BEGIN line is damaged.
    #[error("input did not contain a valid PEM encoded block: line {line}: unexpected text after the last block")]
    PemTrailingText {
        /// Line of the text, counted from 1.
        line: usize,
    },
    /// One block of several is wrong.
    #[error("block at line {line}: {reason}")]
    InBlock {
        /// Line of its BEGIN, counted from 1.
        line: usize,
        /// What is wrong with it.
        reason: Box<Self>,
    },
    /// Exactly one certificate was expected.
    #[error("expected one certificate, found {count}")]
    SeveralCertificates {
        /// How many there were.
        count: usize,
    },

    // PEM labels.
    /// The block is not a certificate.
    #[error("bytes did not contain a proper certificate banner: found {label:?}, expected NEBULA CERTIFICATE [V2]")]
    NotACertificate {
        /// Label found.
        label: String,
    },
    /// The block is not a host's private key.
    #[error(
        "bytes did not contain a proper private key banner: found {label:?}, expected NEBULA X25519 PRIVATE KEY or \
         NEBULA P256 PRIVATE KEY"
    )]
    NotAPrivateKey {
        /// Label found.
        label: String,
    },
    /// The block is not a host's public key.
    #[error(
        "bytes did not contain a proper public key banner: found {label:?}, expected NEBULA X25519 PUBLIC KEY or \
         NEBULA P256 PUBLIC KEY"
    )]
    NotAPublicKey {
        /// Label found.
        label: String,
    },
    /// The block is not a CA's private key.
    #[error(
        "bytes did not contain a proper Ed25519/ECDSA private key banner: found {label:?}, expected a NEBULA ED25519 \
         or NEBULA ECDSA P256 [ENCRYPTED] PRIVATE KEY"
    )]
    NotASigningKey {
        /// Label found.
        label: String,
    },
    /// The key is encrypted and needs a passphrase.
    #[error("private key must be decrypted: it is protected by a passphrase")]
    KeyEncrypted,
    /// A passphrase was given, but the key is not encrypted.
    #[error("private key is not encrypted: no passphrase is needed to read it")]
    KeyNotEncrypted,

    // Certificate format.
    /// The certificate has no bytes.
    #[error("{version} certificate is empty")]
    Empty {
        /// Encoding expected.
        version: Version,
    },
    /// The certificate is longer than [`crate::MAX_CERTIFICATE_SIZE`].
    #[error("{version} certificate of {length} bytes is longer than the limit of {limit} bytes")]
    TooLong {
        /// Encoding.
        version: Version,
        /// Length of the input in bytes.
        length: usize,
        /// Maximum length in bytes.
        limit: usize,
    },
    /// The bytes are not valid in the encoding of their version.
    #[error("{version} certificate has a bad wire format: {what}")]
    Malformed {
        /// Encoding.
        version: Version,
        /// Which part is invalid.
        what: &'static str,
    },
    /// v1: the details message is missing.
    #[error("encoded Details was nil: the v1 certificate holds no details")]
    DetailsMissing,
    /// v1: addresses and masks must come in pairs.
    #[error("encoded {field} should be in pairs, an odd number was found")]
    OddNumbers {
        /// `IPs` or `Subnets`.
        field: &'static str,
    },
    /// v2: the name is empty or too long.
    #[error("v2 certificate name must be 1 to 253 bytes long, this one has {length}")]
    NameLength {
        /// Length of the name in bytes.
        length: usize,
    },
    /// v2: a group name is empty.
    #[error("v2 certificate has an empty group name")]
    EmptyGroup,
    /// The curve number is not defined.
    #[error("unknown curve number {0}")]
    UnknownCurve(u64),
    /// There is no public key.
    #[error("invalid public key: the certificate holds none")]
    PublicKeyMissing,
    /// The public key has the wrong length or is not a point on the curve.
    #[error("invalid public key: {length} bytes are not a {curve} key")]
    PublicKey {
        /// Expected curve.
        curve: Curve,
        /// Length found, in bytes.
        length: usize,
    },
    /// A certificate in a handshake contains its public key, which the handshake carries separately.
    #[error("certificate in a handshake had a public key present")]
    PublicKeyPresent,
    /// The certificate is for another curve than the one in use.
    #[error("certificate curve {found} does not match {expected}")]
    Curve {
        /// Curve of the certificate.
        found: Curve,
        /// Expected curve.
        expected: Curve,
    },
    /// The issuer is not a SHA-256.
    #[error("issuer fingerprint has {length} bytes instead of 32")]
    IssuerLength {
        /// Length found, in bytes.
        length: usize,
    },
    /// The text is not 64 hexadecimal digits.
    #[error("{0:?} is not a certificate fingerprint: 64 hexadecimal digits expected")]
    FingerprintText(String),

    // Certificate contents.
    /// A host certificate has no network.
    #[error("non-CA certificates must contain at least one network: {name:?} has none")]
    NoNetworks {
        /// Name in the certificate.
        name: String,
    },
    /// v1 certificates are issued with one network only.
    #[error("v1 certificates can only have a single ipv4 address: {name:?} has {count} networks")]
    V1NetworkCount {
        /// Name in the certificate.
        name: String,
        /// Number of networks.
        count: usize,
    },
    /// A prefix length exceeds the address length.
    #[error("invalid network: prefix length {length} for an address of {bits} bits")]
    PrefixLength {
        /// Length found.
        length: u8,
        /// Length of the address in bits.
        bits: u8,
    },
    /// A network has the address 0.0.0.0 or ::.
    #[error("non-CA certificates must not use the zero address as a network: {network}")]
    UnspecifiedNetwork {
        /// The network.
        network: IpNet,
    },
    /// v1 cannot hold IPv6 networks.
    #[error("v1 certificates can only contain ipv4 addresses, have {network}")]
    Ipv6InV1 {
        /// The network.
        network: IpNet,
    },
    /// IPv4-mapped networks (`::ffff:a.b.c.d`) are ambiguous and not allowed.
    #[error("4in6 networks are not allowed: {network}")]
    MappedNetwork {
        /// The network.
        network: IpNet,
    },
    /// v2: a network appears twice.
    #[error("duplicate network detected: {network}")]
    DuplicateNetwork {
        /// The network.
        network: IpNet,
    },
    /// v2: an unsafe network has no address of its family, so traffic for it could not be answered.
    #[error("{} unsafe networks require an {} address assignment: {network}", family(network), family(network))]
    UnsafeNetworkFamily {
        /// The unsafe network.
        network: IpNet,
    },

    // Trust.
    /// The certificate is on the blocklist.
    #[error("certificate is in the block list: {name:?}, fingerprint {fingerprint}")]
    Blocked {
        /// Name in the certificate.
        name: String,
        /// The fingerprint that matched.
        fingerprint: Fingerprint,
    },
    /// The certificate names no issuer: it is self-signed or damaged.
    #[error("no issuer in certificate: {name:?}")]
    NoIssuer {
        /// Name in the certificate.
        name: String,
    },
    /// The certificate was issued by a CA that is not trusted.
    #[error("could not find ca for the certificate: {name:?} was issued by {issuer}, which is not trusted here")]
    UnknownCa {
        /// Name in the certificate.
        name: String,
        /// Fingerprint of its issuer.
        issuer: Fingerprint,
    },
    /// The certificate and its issuer have different curves.
    #[error("certificate curve does not match CA: {name:?} is {certificate}, its CA {ca}")]
    CaCurve {
        /// Name in the certificate.
        name: String,
        /// Curve of the certificate.
        certificate: Curve,
        /// Curve of the CA.
        ca: Curve,
    },
    /// The issuer is outside its validity period.
    #[error(
        "root certificate {}: {ca:?} is valid from {} to {}, the time is {}",
        state(*at, *not_before), rfc3339(*not_before), rfc3339(*not_after), rfc3339(*at)
    )]
    CaExpired {
        /// Name of the CA.
        ca: String,
        /// Its first valid second.
        not_before: UnixTime,
        /// Its last valid second.
        not_after: UnixTime,
        /// The time of the check.
        at: UnixTime,
    },
    /// The certificate is outside its validity period.
    #[error(
        "certificate {}: {name:?} is valid from {} to {}, the time is {}",
        state(*at, *not_before), rfc3339(*not_before), rfc3339(*not_after), rfc3339(*at)
    )]
    Expired {
        /// Name in the certificate.
        name: String,
        /// Its first valid second.
        not_before: UnixTime,
        /// Its last valid second.
        not_after: UnixTime,
        /// The time of the check.
        at: UnixTime,
    },
    /// The certificate was altered, or not signed by the CA it names.
    #[error("certificate signature did not match: {name:?}, checked with the key of CA {ca:?}")]
    Signature {
        /// Name in the certificate.
        name: String,
        /// Name of the CA.
        ca: String,
    },
    /// The certificate expires after its CA.
    #[error("certificate expires after signing certificate: {} is after {}", rfc3339(*not_after), rfc3339(*ca))]
    ExpiresAfterCa {
        /// Last valid second of the certificate.
        not_after: UnixTime,
        /// Last valid second of the CA.
        ca: UnixTime,
    },
    /// The certificate is valid before its CA.
    #[error(
        "certificate is valid before the signing certificate: {} is before {}", rfc3339(*not_before), rfc3339(*ca)
    )]
    ValidBeforeCa {
        /// First valid second of the certificate.
        not_before: UnixTime,
        /// First valid second of the CA.
        ca: UnixTime,
    },
    /// The CA is not allowed to assign this group.
    #[error("certificate contained a group not present on the signing ca: {}", .group.escape_debug())]
    GroupNotInCa {
        /// The group.
        group: String,
    },
    /// The CA is not allowed to assign this network.
    #[error("certificate contained a network assignment outside the limitations of the signing ca: {network}")]
    NetworkNotInCa {
        /// The network.
        network: IpNet,
    },
    /// The CA is not allowed to assign this unsafe network.
    #[error("certificate contained an unsafe network assignment outside the limitations of the signing ca: {network}")]
    UnsafeNetworkNotInCa {
        /// The network.
        network: IpNet,
    },
    /// A certificate among the CAs is not a CA.
    #[error("{name:?}: certificate is not a CA")]
    NotACa {
        /// Name in the certificate.
        name: String,
    },
    /// A CA certificate is not signed with its own key.
    #[error("{name:?}: certificate is not self-signed")]
    NotSelfSigned {
        /// Name in the certificate.
        name: String,
    },

    // Keys.
    /// A private key has the wrong length.
    #[error("key was not {expected} bytes, is invalid {curve} private key: it has {length}")]
    KeyLength {
        /// Expected curve.
        curve: Curve,
        /// Expected length in bytes.
        expected: usize,
        /// Length found, in bytes.
        length: usize,
    },
    /// A P-256 scalar is zero or not below the group order.
    #[error("private key is not a valid P256 scalar")]
    KeyOutOfRange,
    /// A FIPS build is asked for a key of X25519 or Ed25519.
    #[error("this is a FIPS build, which works with P256 keys only: make the CA and its hosts with -curve P256")]
    CurveNotInBuild,
    /// A FIPS build is asked for a passphrase.
    #[error(
        "this is a FIPS build, which derives no key from a passphrase (Argon2 is not approved): keep the CA's key \
         unencrypted where nobody else reads it, or in a hardware token"
    )]
    PassphraseNotInBuild,
    /// The public half stored in an Ed25519 key does not match its private half.
    #[error("private key is damaged: its two halves do not belong together")]
    KeyHalves,
    /// The system provides no random bytes.
    #[error("the system has no randomness for a new key: {0}")]
    NoRandomness(String),
    /// The passphrase is wrong or the file is damaged; the two cannot be told apart.
    #[error("invalid passphrase or corrupt private key")]
    Passphrase,
    /// An encrypted key file is malformed.
    #[error("encrypted private key has a bad format: {0}")]
    EncryptedKeyFormat(&'static str),
    /// The cipher is not AES-256-GCM.
    #[error("unsupported encryption algorithm: {0:?}, only AES-256-GCM is known")]
    EncryptionAlgorithm(String),
    /// The Argon2 parameters are too low, or too high to be computed in reasonable memory and time.
    #[error(
        "argon2 parameters out of bounds: memory {memory_kib} KiB, iterations {iterations}, parallelism {parallelism}"
    )]
    PassphraseCost {
        /// Memory in KiB.
        memory_kib: u32,
        /// Passes over the memory.
        iterations: u32,
        /// Lanes.
        parallelism: u32,
    },
    /// Argon2 needs more memory than is available.
    #[error("not enough memory to derive the key from the passphrase: {memory_kib} KiB needed")]
    OutOfMemory {
        /// Memory in KiB.
        memory_kib: u32,
    },

    // A node's own certificates.
    /// There is neither a v1 nor a v2 certificate.
    #[error("no certificates given")]
    NoCertificates,
    /// The private key does not belong to the certificate.
    #[error("private key is not a pair with public key in nebula cert: {name:?}")]
    KeyMismatch {
        /// Name in the certificate.
        name: String,
    },
    /// A host's own certificate must not be a CA.
    #[error("host certificate is a CA certificate: {name:?}")]
    IsCa {
        /// Name in the certificate.
        name: String,
    },
    /// A host's own certificate has no network.
    #[error("no networks encoded in certificate: {name:?}")]
    HostWithoutNetworks {
        /// Name in the certificate.
        name: String,
    },
    /// There is more than one certificate of a version.
    #[error("{version} certificate already found in pki.cert: {name:?} is the second")]
    SecondOfVersion {
        /// Version of both.
        version: Version,
        /// Name in the second.
        name: String,
    },
    /// The two versions have different keys.
    #[error("v1 and v2 public keys are not the same")]
    VersionsDifferInKey,
    /// The two versions have different curves.
    #[error("v1 and v2 curves are not the same: {v1} and {v2}")]
    VersionsDifferInCurve {
        /// Curve of the v1 certificate.
        v1: Curve,
        /// Curve of the v2 certificate.
        v2: Curve,
    },
    /// The two versions have different first networks.
    #[error("v1 and v2 networks are not the same: {v1} and {v2}")]
    VersionsDifferInNetwork {
        /// First network of the v1 certificate.
        v1: IpNet,
        /// First network of the v2 certificate.
        v2: IpNet,
    },

    // Signing.
    /// The signing key does not match the CA certificate.
    #[error("refusing to sign, root certificate does not match private key: {ca:?}")]
    CaKeyMismatch {
        /// Name of the CA.
        ca: String,
    },
    /// A signer, such as a hardware token, failed.
    #[error("the signing key cannot be used: {reason}")]
    Signer {
        /// The signer's error message.
        reason: String,
    },
    /// A signer returned a signature that does not verify with its key.
    #[error("the signing key made a signature that does not verify with its own public key")]
    SignerFault,
    /// The validity period ends before it begins.
    #[error("certificate would never be valid: {} is before {}", rfc3339(*not_after), rfc3339(*not_before))]
    NeverValid {
        /// First valid second.
        not_before: UnixTime,
        /// Last valid second.
        not_after: UnixTime,
    },
}

fn family(network: &IpNet) -> &'static str {
    match network {
        IpNet::V4(_) => "IPv4",
        IpNet::V6(_) => "IPv6",
    }
}

/// What is wrong with a certificate that is outside its validity period at `at`.
fn state(at: UnixTime, not_before: UnixTime) -> &'static str {
    if at < not_before { "is not valid yet" } else { "is expired" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_that_is_not_valid_yet_is_not_called_expired_and_the_clock_is_named() {
        let text = |at| {
            let (name, not_before, not_after) = ("db".to_owned(), 1_000_000_000, 1_000_000_100);
            let of_ca = Error::CaExpired { ca: name.clone(), not_before, not_after, at }.to_string();
            (Error::Expired { name, not_before, not_after, at }.to_string(), of_ca)
        };
        let (early, early_ca) = text(0);
        assert!(early.starts_with("certificate is not valid yet: \"db\" is valid from 2001-09-09T"), "{early}");
        assert!(early.contains("the time is 1970-01-01T"), "{early}");
        assert!(early_ca.starts_with("root certificate is not valid yet: \"db\""), "{early_ca}");
        let (late, late_ca) = text(2_000_000_000);
        assert!(
            late.starts_with("certificate is expired: ") && late_ca.starts_with("root certificate is expired: "),
            "{late}"
        );
    }
}

//! One variant per reason a certificate or key is refused.

use std::path::PathBuf;

use ipnet::IpNet;

use crate::timestamp::rfc3339;
use crate::{Curve, Fingerprint, UnixTime, Version};

/// Why a certificate, key or trust store was refused. Names from certificates are quoted and escaped.
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
        /// What the system said.
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
    /// More text than any real file has.
    #[error("input of {length} bytes is longer than the limit of {limit} bytes")]
    InputTooLong {
        /// Bytes given.
        length: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// No `-----BEGIN` line.
    #[error("input did not contain a valid PEM encoded block")]
    NoPemBlock,
    /// A block that cannot be read.
    #[error("input did not contain a valid PEM encoded block: line {line}: {what}")]
    PemMalformed {
        /// Line of its BEGIN, from 1.
        line: usize,
        /// The fault.
        what: &'static str,
    },
    /// Text after the last block; perhaps a block whose BEGIN line is damaged.
    #[error("input did not contain a valid PEM encoded block: line {line}: unexpected text after the last block")]
    PemTrailingText {
        /// Line of the text, from 1.
        line: usize,
    },
    /// One block of several is wrong.
    #[error("block at line {line}: {reason}")]
    InBlock {
        /// Line of its BEGIN, from 1.
        line: usize,
        /// What is wrong with it.
        reason: Box<Self>,
    },
    /// Exactly one certificate was wanted.
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
    /// A passphrase is needed.
    #[error("private key must be decrypted: it is protected by a passphrase")]
    KeyEncrypted,
    /// A passphrase was given but the key is plain.
    #[error("private key is not encrypted: no passphrase is needed to read it")]
    KeyNotEncrypted,

    // Certificate format.
    /// No bytes at all.
    #[error("{version} certificate is empty")]
    Empty {
        /// Encoding expected.
        version: Version,
    },
    /// More bytes than a handshake can carry.
    #[error("{version} certificate of {length} bytes is longer than the limit of {limit} bytes")]
    TooLong {
        /// Encoding.
        version: Version,
        /// Bytes given.
        length: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// The bytes are not the encoding they claim to be.
    #[error("{version} certificate has a bad wire format: {what}")]
    Malformed {
        /// Encoding.
        version: Version,
        /// Where it broke.
        what: &'static str,
    },
    /// v1: no details message.
    #[error("encoded Details was nil: the v1 certificate holds no details")]
    DetailsMissing,
    /// v1: addresses and masks come in pairs.
    #[error("encoded {field} should be in pairs, an odd number was found")]
    OddNumbers {
        /// `IPs` or `Subnets`.
        field: &'static str,
    },
    /// A name that is empty or too long for v2.
    #[error("v2 certificate name must be 1 to 253 bytes long, this one has {length}")]
    NameLength {
        /// Bytes of the name.
        length: usize,
    },
    /// v2 groups cannot be empty.
    #[error("v2 certificate has an empty group name")]
    EmptyGroup,
    /// A curve number nobody defined.
    #[error("unknown curve number {0}")]
    UnknownCurve(u64),
    /// No public key.
    #[error("invalid public key: the certificate holds none")]
    PublicKeyMissing,
    /// A public key of the wrong size, or not a point of the curve.
    #[error("invalid public key: {length} bytes are not a {curve} key")]
    PublicKey {
        /// Curve it should be of.
        curve: Curve,
        /// Bytes found.
        length: usize,
    },
    /// A handshake must not repeat the key inside the certificate.
    #[error("certificate in a handshake had a public key present")]
    PublicKeyPresent,
    /// A certificate for another curve than the one in use.
    #[error("certificate curve {found} does not match {expected}")]
    Curve {
        /// Curve of the certificate.
        found: Curve,
        /// Curve wanted.
        expected: Curve,
    },
    /// An issuer that is not a SHA-256.
    #[error("issuer fingerprint has {length} bytes instead of 32")]
    IssuerLength {
        /// Bytes found.
        length: usize,
    },
    /// Not 64 hexadecimal digits.
    #[error("{0:?} is not a certificate fingerprint: 64 hexadecimal digits expected")]
    FingerprintText(String),

    // Certificate contents.
    /// A host needs an address.
    #[error("non-CA certificates must contain at least one network: {name:?} has none")]
    NoNetworks {
        /// Name in the certificate.
        name: String,
    },
    /// v1 is issued with one network.
    #[error("v1 certificates can only have a single ipv4 address: {name:?} has {count} networks")]
    V1NetworkCount {
        /// Name in the certificate.
        name: String,
        /// Networks given.
        count: usize,
    },
    /// A prefix length beyond the address length.
    #[error("invalid network: prefix length {length} for an address of {bits} bits")]
    PrefixLength {
        /// Length found.
        length: u8,
        /// Bits of the address.
        bits: u8,
    },
    /// 0.0.0.0 or :: as own address.
    #[error("non-CA certificates must not use the zero address as a network: {network}")]
    UnspecifiedNetwork {
        /// The network.
        network: IpNet,
    },
    /// v1 has no room for IPv6.
    #[error("v1 certificates can only contain ipv4 addresses, have {network}")]
    Ipv6InV1 {
        /// The network.
        network: IpNet,
    },
    /// `::ffff:a.b.c.d` is ambiguous.
    #[error("4in6 networks are not allowed: {network}")]
    MappedNetwork {
        /// The network.
        network: IpNet,
    },
    /// v2: the same network twice.
    #[error("duplicate network detected: {network}")]
    DuplicateNetwork {
        /// The network.
        network: IpNet,
    },
    /// v2: traffic of that family could not be answered.
    #[error("{} unsafe networks require an {} address assignment: {network}", family(network), family(network))]
    UnsafeNetworkFamily {
        /// The unsafe network.
        network: IpNet,
    },

    // Trust.
    /// On the blocklist.
    #[error("certificate is in the block list: {name:?}, fingerprint {fingerprint}")]
    Blocked {
        /// Name in the certificate.
        name: String,
        /// The fingerprint that matched.
        fingerprint: Fingerprint,
    },
    /// Self-signed or damaged.
    #[error("no issuer in certificate: {name:?}")]
    NoIssuer {
        /// Name in the certificate.
        name: String,
    },
    /// Signed by somebody not trusted.
    #[error("could not find ca for the certificate: {name:?} was issued by {issuer}, which is not trusted here")]
    UnknownCa {
        /// Name in the certificate.
        name: String,
        /// Fingerprint of its issuer.
        issuer: Fingerprint,
    },
    /// Issuer and certificate are of different curves.
    #[error("certificate curve does not match CA: {name:?} is {certificate}, its CA {ca}")]
    CaCurve {
        /// Name in the certificate.
        name: String,
        /// Curve of the certificate.
        certificate: Curve,
        /// Curve of the CA.
        ca: Curve,
    },
    /// The issuer is outside its validity.
    #[error(
        "root certificate is expired: {ca:?} is valid from {} to {}, the time is {}",
        rfc3339(*not_before), rfc3339(*not_after), rfc3339(*at)
    )]
    CaExpired {
        /// Name of the CA.
        ca: String,
        /// Its first valid second.
        not_before: UnixTime,
        /// Its last valid second.
        not_after: UnixTime,
        /// When it was checked.
        at: UnixTime,
    },
    /// The certificate is outside its validity.
    #[error(
        "certificate is expired: {name:?} is valid from {} to {}, the time is {}",
        rfc3339(*not_before), rfc3339(*not_after), rfc3339(*at)
    )]
    Expired {
        /// Name in the certificate.
        name: String,
        /// Its first valid second.
        not_before: UnixTime,
        /// Its last valid second.
        not_after: UnixTime,
        /// When it was checked.
        at: UnixTime,
    },
    /// Altered, or not signed by the CA it names.
    #[error("certificate signature did not match: {name:?}, checked with the key of CA {ca:?}")]
    Signature {
        /// Name in the certificate.
        name: String,
        /// Name of the CA.
        ca: String,
    },
    /// Valid longer than its CA.
    #[error("certificate expires after signing certificate: {} is after {}", rfc3339(*not_after), rfc3339(*ca))]
    ExpiresAfterCa {
        /// Last second of the certificate.
        not_after: UnixTime,
        /// Last second of the CA.
        ca: UnixTime,
    },
    /// Valid earlier than its CA.
    #[error(
        "certificate is valid before the signing certificate: {} is before {}", rfc3339(*not_before), rfc3339(*ca)
    )]
    ValidBeforeCa {
        /// First second of the certificate.
        not_before: UnixTime,
        /// First second of the CA.
        ca: UnixTime,
    },
    /// The CA may not give that group.
    #[error("certificate contained a group not present on the signing ca: {}", .group.escape_debug())]
    GroupNotInCa {
        /// The group.
        group: String,
    },
    /// The CA may not give that address.
    #[error("certificate contained a network assignment outside the limitations of the signing ca: {network}")]
    NetworkNotInCa {
        /// The network.
        network: IpNet,
    },
    /// The CA may not give that unsafe network.
    #[error("certificate contained an unsafe network assignment outside the limitations of the signing ca: {network}")]
    UnsafeNetworkNotInCa {
        /// The network.
        network: IpNet,
    },
    /// A host certificate among the CAs.
    #[error("{name:?}: certificate is not a CA")]
    NotACa {
        /// Name in the certificate.
        name: String,
    },
    /// CAs must be signed with their own key.
    #[error("{name:?}: certificate is not self-signed")]
    NotSelfSigned {
        /// Name in the certificate.
        name: String,
    },

    // Keys.
    /// A private key of the wrong size.
    #[error("key was not {expected} bytes, is invalid {curve} private key: it has {length}")]
    KeyLength {
        /// Curve it should be of.
        curve: Curve,
        /// Bytes wanted.
        expected: usize,
        /// Bytes found.
        length: usize,
    },
    /// A P-256 scalar of zero or not below the group order.
    #[error("private key is not a valid P256 scalar")]
    KeyOutOfRange,
    /// The public half stored in an Ed25519 key is not that of its private half.
    #[error("private key is damaged: its two halves do not belong together")]
    KeyHalves,
    /// The system gave no random bytes.
    #[error("the system has no randomness for a new key: {0}")]
    NoRandomness(String),
    /// Wrong passphrase, or the file is damaged; the two are indistinguishable.
    #[error("invalid passphrase or corrupt private key")]
    Passphrase,
    /// An encrypted key file that is not well-formed.
    #[error("encrypted private key has a bad format: {0}")]
    EncryptedKeyFormat(&'static str),
    /// Another cipher than AES-256-GCM.
    #[error("unsupported encryption algorithm: {0:?}, only AES-256-GCM is known")]
    EncryptionAlgorithm(String),
    /// Argon2 parameters that are zero, or would take all memory or forever.
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
    /// Argon2 wants more memory than there is.
    #[error("not enough memory to derive the key from the passphrase: {memory_kib} KiB needed")]
    OutOfMemory {
        /// Memory in KiB.
        memory_kib: u32,
    },

    // A node's own certificates.
    /// Neither a v1 nor a v2 certificate.
    #[error("no certificates given")]
    NoCertificates,
    /// The key belongs to another certificate.
    #[error("private key is not a pair with public key in nebula cert: {name:?}")]
    KeyMismatch {
        /// Name in the certificate.
        name: String,
    },
    /// A host must not use a CA as its own certificate.
    #[error("host certificate is a CA certificate: {name:?}")]
    IsCa {
        /// Name in the certificate.
        name: String,
    },
    /// A host certificate without address.
    #[error("no networks encoded in certificate: {name:?}")]
    HostWithoutNetworks {
        /// Name in the certificate.
        name: String,
    },
    /// At most one certificate per version.
    #[error("{version} certificate already found in pki.cert: {name:?} is the second")]
    SecondOfVersion {
        /// Version of both.
        version: Version,
        /// Name in the second.
        name: String,
    },
    /// The two versions disagree about the key.
    #[error("v1 and v2 public keys are not the same")]
    VersionsDifferInKey,
    /// The two versions disagree about the curve.
    #[error("v1 and v2 curves are not the same: {v1} and {v2}")]
    VersionsDifferInCurve {
        /// Curve of the v1 certificate.
        v1: Curve,
        /// Curve of the v2 certificate.
        v2: Curve,
    },
    /// The two versions disagree about the first network.
    #[error("v1 and v2 networks are not the same: {v1} and {v2}")]
    VersionsDifferInNetwork {
        /// First network of the v1 certificate.
        v1: IpNet,
        /// First network of the v2 certificate.
        v2: IpNet,
    },

    // Signing.
    /// The signing key is not that of the CA certificate.
    #[error("refusing to sign, root certificate does not match private key: {ca:?}")]
    CaKeyMismatch {
        /// Name of the CA.
        ca: String,
    },
    /// A signer that is not in memory cannot be used.
    #[error("the signing key cannot be used: {reason}")]
    Signer {
        /// What it said.
        reason: String,
    },
    /// A signer returned something that is no signature of its key.
    #[error("the signing key made a signature that does not verify with its own public key")]
    SignerFault,
    /// Ends before it begins.
    #[error("certificate would never be valid: {} is before {}", rfc3339(*not_after), rfc3339(*not_before))]
    NeverValid {
        /// First second.
        not_before: UnixTime,
        /// Last second.
        not_after: UnixTime,
    },
}

fn family(network: &IpNet) -> &'static str {
    match network {
        IpNet::V4(_) => "IPv4",
        IpNet::V6(_) => "IPv6",
    }
}

//! Nebula certificates: read, verify and sign version 1 (protobuf) and version 2 (ASN.1 DER) certificates.
//!
//! The library never reads the clock and opens no socket, except in `listener`, which is behind a feature. A
//! [`VerifiedCertificate`] can only come from [`CaPool::verify`], so code that takes one cannot forget the check.
//!
//! Main types: [`Certificate`] (parsed, not yet trusted), [`CaPool`] (the CAs to trust), [`Identity`] (a node's own
//! certificates and key), [`Template`] (what to sign), [`Signer`] (a CA's key: a [`SigningKey`] in memory, or one that
//! is kept elsewhere). Parsing accepts exactly what Go Nebula accepts and re-encodes byte for byte; issuing is
//! stricter. The feature `pkcs11` adds CA keys in hardware tokens.
//!
//! The `nebula-cert` tool accepts the command lines of the Go tool and produces the same files, exit codes and JSON. A
//! test runs both side by side; these are the differences, all intended:
//!
//! | Case | Here | In Go 1.11 |
//! | --- | --- | --- |
//! | a key, public key or QR code replaces a file that others can read | the file becomes private | it stays readable |
//! | leftover words, such as `-groups a, b -duration 1h` | an error | ignored, together with every flag after them |
//! | `sign -networks ,` | `-networks is required` | refused while signing |
//! | `print` of a file that is damaged after its first certificate | prints nothing | prints what comes before |
//! | `verify` with an empty `-crt` | an error: nothing was verified | success |
//! | `verify` with an empty `-ca` | an error about the file | an unknown issuer |
//! | `verify` of an expired or self-signed certificate | names it in one line | prints all of its JSON |
//! | `-pkcs11` that matches several tokens, or none | an error that names them | the first slot |
//! | `sign -pkcs11` with a certificate that does not match the key | refused | signs what nobody can verify |
//! | `-pkcs11` with an Ed25519 key | a CA like any other | only P-256 |
//! | JSON of names with control, invisible or bidirectional characters | an escape (`\u` and four digits) for each | only some of them |
//! | messages | begin as in Go and add details; an unknown flag is named once | |
//!
//! ```
//! use nebula_cert::{CaPool, Curve, PrivateKey, SigningKey, Template};
//!
//! # fn main() -> Result<(), nebula_cert::Error> {
//! let now = 1_800_000_000; // seconds since 1970; the caller brings the clock
//! let template = Template::new("my network", now..=now + 365 * 86_400);
//!
//! // A CA signs itself; its certificate is what every node trusts.
//! let ca_key = SigningKey::generate(Curve::Curve25519)?;
//! let ca = template.clone().self_sign(&ca_key)?;
//!
//! // A host makes its own key; only the public half travels to the CA.
//! let host_key = PrivateKey::generate(Curve::Curve25519)?;
//! let host = Template {
//!     name: "web-1".into(),
//!     networks: vec!["10.0.0.1/16".parse().unwrap()],
//!     groups: vec!["web".into()],
//!     not_after: now + 86_400,
//!     public_key: host_key.public_key(),
//!     ..template
//! }
//! .sign(&ca, &ca_key)?;
//!
//! // Anyone who trusts the CA can verify the host, from PEM text or from a handshake.
//! let pool = CaPool::from_pem(ca.to_pem().as_bytes())?;
//! let verified = pool.verify(host, now + 60)?;
//! assert_eq!(verified.name(), "web-1");
//! assert_eq!(verified.issuer_name(), "my network");
//! # Ok(())
//! # }
//! ```

#![deny(missing_docs)]

mod ca_pool;
mod causes;
mod certificate;
#[cfg(feature = "client")]
pub mod client;
pub mod directory;
#[cfg(unix)]
pub mod durable;
mod encrypted_key;
mod error;
mod go_duration;
pub mod hex;
mod identity;
pub mod issuance;
mod join;
mod json;
mod key;
#[cfg(all(feature = "listener", target_os = "linux"))]
pub mod listener;
mod pem;
// The parts that need no token are tested in every build.
#[cfg(any(feature = "pkcs11", test))]
#[cfg_attr(not(feature = "pkcs11"), allow(dead_code, unused_imports))]
pub mod pkcs11;
mod possession;
mod prefix;
pub mod protobuf;
pub mod revocation;
mod sign;
mod signature;
mod signer;
mod signing_key;
pub mod text;
mod timestamp;
mod v1;
mod v2;
mod visible;

pub use ca_pool::{CaPool, VerifiedCertificate};
pub use causes::with_causes;
pub use certificate::{Certificate, Curve, Fingerprint, MAX_CERTIFICATE_SIZE, UnixTime, Version};
pub use encrypted_key::PassphraseCost;
pub use error::Error;
pub use go_duration::GoDuration;
pub use identity::Identity;
pub use join::{HostKey, HostKeyError, JoinToken, JoinTokenError};
pub use json::go_json;
pub use key::{PrivateKey, public_key_from_pem, public_key_to_pem};
pub use possession::TAG_LENGTH;
pub use prefix::prefix;
pub use sign::Template;
pub use signer::Signer;
pub use signing_key::SigningKey;
pub use timestamp::{civil_date, rfc3339};
pub use visible::{VisibleLines, is_visible, json_line, visible, visible_json};

/// What the programs print below their version: nothing, or that this is a FIPS build. No build has been validated.
pub const BUILD_NOTE: &str = if cfg!(feature = "fips") {
    "Cryptography: the FIPS module of AWS-LC, with P256, AES-GCM and SHA-256 only (not validated)\n"
} else {
    ""
};

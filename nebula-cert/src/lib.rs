//! Nebula certificates: read, verify and sign version 1 (protobuf) and version 2 (ASN.1 DER) certificates.
//!
//! The library never asks the time and opens no socket. [`VerifiedCertificate`] can only come from
//! [`CaPool::verify`], so code that takes one cannot forget the check.

mod ca_pool;
mod certificate;
mod error;
mod identity;
pub mod issuance;
mod key;
mod pem;
mod sign;
mod v1;
mod v2;

pub use ca_pool::{CaPool, VerifiedCertificate};
pub use certificate::{Certificate, Curve, Fingerprint, UnixTime, Version};
pub use error::Error;
pub use identity::Identity;
pub use key::{PrivateKey, SigningKey, public_key_from_pem};
pub use sign::Template;

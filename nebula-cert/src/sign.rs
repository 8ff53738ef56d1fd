//! Issue certificates under a CA's constraints.

use ipnet::IpNet;

use crate::{Certificate, Curve, Error, SigningKey, UnixTime, Version};

/// What a certificate to be signed shall say.
#[derive(Debug, Clone)]
pub struct Template {
    /// Encoding.
    pub version: Version,
    /// Curve of `public_key`; must be the CA's.
    pub curve: Curve,
    /// Name.
    pub name: String,
    /// Overlay addresses.
    pub networks: Vec<IpNet>,
    /// Networks behind the host.
    pub unsafe_networks: Vec<IpNet>,
    /// Groups.
    pub groups: Vec<String>,
    /// First second of validity.
    pub not_before: UnixTime,
    /// Last second of validity.
    pub not_after: UnixTime,
    /// The host's (or, self-signed, the CA's) public key.
    pub public_key: Vec<u8>,
}

impl Template {
    /// Signs for a host, after checking the constraints of the CA.
    ///
    /// # Errors
    /// The constraint that was violated.
    pub fn sign(self, _ca: &Certificate, _key: &SigningKey) -> Result<Certificate, Error> {
        unimplemented!()
    }
    /// Signs itself as a CA; `public_key` is taken from `key`.
    ///
    /// # Errors
    /// Invalid contents.
    pub fn self_sign(self, _key: &SigningKey) -> Result<Certificate, Error> {
        unimplemented!()
    }
}

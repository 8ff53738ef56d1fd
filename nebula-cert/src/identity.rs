//! A credential: certificates proved to match their private key.

use std::path::Path;
use std::sync::Arc;

use ipnet::IpNet;

use crate::{Certificate, Curve, Error, PrivateKey, UnixTime, Version};

/// What a node proves itself with: a v1 certificate, a v2 certificate or both, and the key of both. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Identity {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    v1: Option<Certificate>,
    v2: Option<Certificate>,
    key: PrivateKey,
}

impl Identity {
    /// Checks that the key matches, that no certificate is a CA, that each has a network, and that two versions agree
    /// in key, curve and first network.
    ///
    /// # Errors
    /// The first of these that fails.
    pub fn new(_certificates: Vec<Certificate>, _key: PrivateKey) -> Result<Self, Error> {
        unimplemented!()
    }
    /// From PEM text.
    ///
    /// # Errors
    /// As [`Identity::new`], or bad PEM.
    pub fn from_pem(_certificates: &[u8], _key: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// From files.
    ///
    /// # Errors
    /// As [`Identity::new`], or an unreadable file (named in the error).
    pub fn read(_certificates: impl AsRef<Path>, _key: impl AsRef<Path>) -> Result<Self, Error> {
        unimplemented!()
    }
    /// The certificate of that version.
    #[must_use]
    pub fn certificate(&self, version: Version) -> Option<&Certificate> {
        match version {
            Version::V1 => self.inner.v1.as_ref(),
            Version::V2 => self.inner.v2.as_ref(),
        }
    }
    /// The certificate that defines this node's addresses: v2 if there is one.
    #[must_use]
    pub fn primary(&self) -> &Certificate {
        unimplemented!()
    }
    /// Networks of [`Identity::primary`].
    #[must_use]
    pub fn networks(&self) -> &[IpNet] {
        self.primary().networks()
    }
    /// Curve of the key.
    #[must_use]
    pub fn curve(&self) -> Curve {
        self.inner.key.curve()
    }
    /// The key.
    #[must_use]
    pub fn private_key(&self) -> &PrivateKey {
        &self.inner.key
    }
    /// Whether every certificate is valid at `at`.
    #[must_use]
    pub fn is_expired(&self, at: UnixTime) -> bool {
        self.primary().is_expired(at)
    }
}

//! Trusted roots and blocklist; the only source of [`VerifiedCertificate`].

use std::sync::Arc;

use crate::{Certificate, Error, Fingerprint, UnixTime};

/// Trusted CA certificates and blocked fingerprints.
#[derive(Debug, Clone, Default)]
pub struct CaPool {}

/// A certificate that a [`CaPool`] accepted, with what the firewall needs to know of its issuer. Cheap to clone.
#[derive(Debug, Clone)]
pub struct VerifiedCertificate {
    certificate: Arc<Certificate>,
    issuer: Fingerprint,
    issuer_name: Arc<str>,
}

impl CaPool {
    /// An empty pool: trusts nobody.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// Reads a PEM bundle of CA certificates. Expired ones are kept (verification then says "root expired").
    ///
    /// # Errors
    /// No certificate at all, one that is not a CA, or one whose own signature is wrong.
    pub fn from_pem(_pem: &[u8]) -> Result<Self, Error> {
        unimplemented!()
    }
    /// Adds one CA.
    ///
    /// # Errors
    /// As [`CaPool::from_pem`].
    pub fn add(&mut self, _ca: Certificate) -> Result<(), Error> {
        unimplemented!()
    }
    /// Blocks a certificate by fingerprint (for P-256: both signature forms are recognised).
    pub fn block(&mut self, _fingerprint: Fingerprint) {
        unimplemented!()
    }
    /// CA certificates, in order of their fingerprints.
    pub fn certificates(&self) -> impl Iterator<Item = &Certificate> {
        std::iter::empty()
    }
    /// Full verification at `at` seconds since the epoch.
    ///
    /// # Errors
    /// The first reason of refusal, in the order Go Nebula checks them.
    pub fn verify(&self, _certificate: Certificate, _at: UnixTime) -> Result<VerifiedCertificate, Error> {
        unimplemented!()
    }
    /// Cheap check of a live peer: blocklist, issuer still trusted, times. No signature.
    ///
    /// # Errors
    /// As [`CaPool::verify`].
    pub fn recheck(&self, _certificate: &VerifiedCertificate, _at: UnixTime) -> Result<(), Error> {
        unimplemented!()
    }
}

impl VerifiedCertificate {
    /// Fingerprint of the CA that vouches for it (`ca_sha` in firewall rules).
    #[must_use]
    pub fn issuer_fingerprint(&self) -> Fingerprint {
        self.issuer
    }
    /// Name of that CA (`ca_name` in firewall rules).
    #[must_use]
    pub fn issuer_name(&self) -> &str {
        &self.issuer_name
    }
}

impl std::ops::Deref for VerifiedCertificate {
    type Target = Certificate;
    fn deref(&self) -> &Certificate {
        &self.certificate
    }
}

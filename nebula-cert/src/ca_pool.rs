//! The pool of trusted CAs and blocked certificates, the only source of [`VerifiedCertificate`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ipnet::IpNet;

use crate::signature::VerifyingKey;
use crate::{Certificate, Error, Fingerprint, UnixTime};

/// Trusted CA certificates and blocked fingerprints.
///
/// ```
/// use nebula_cert::{CaPool, Certificate, Error};
///
/// let mut pool = CaPool::from_pem(b"\
/// -----BEGIN NEBULA CERTIFICATE V2-----
/// MH+gGYAHZXhhbXBsZYQB/4UEawCbgYYFASb4uYGCIOOYappZ4I4nOYqWwps1/rRn
/// 6CW1FpcQa/TFXJ+gdJp0g0B5dWwQMGahl+dBdTrkZd/HABNKC7zXxeOpGnZ5SoiL
/// hGhrjtEAttN2dq/rVGu21Z9LcePGc8L0gs9Ctkc/xgMG
/// -----END NEBULA CERTIFICATE V2-----
/// ")?;
/// let host = Certificate::from_pem(b"\
/// -----BEGIN NEBULA CERTIFICATE V2-----
/// MIGsoEaABXdlYi0xoQcEBQoAAAEQowUMA3dlYoUEawCbgYYFASb4uYCHIEsgdJ/Q
/// 3gFKPH7Ug+w2o/6HZAXJKngsiWd0nnEWNpXlgiBuY0SZqAuFWXj7awIkNdjJevZM
/// /XOVE9UUzpNEE+RCHINA86GxG7lYDKqbeSUYYDsFoyte+qhy8WrsGVZjLEp1Q+pM
/// NWVjgVXSaZOHDnDM5HcYT0EgWxaFZwOqRFAUNXTxCQ==
/// -----END NEBULA CERTIFICATE V2-----
/// ")?;
/// let verified = pool.verify(host.clone(), 1_800_000_000)?;
/// assert_eq!((verified.name(), verified.issuer_name()), ("web-1", "example"));
///
/// pool.block(verified.fingerprint());
/// assert!(matches!(pool.verify(host, 1_800_000_000), Err(Error::Blocked { .. })));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct CaPool {
    authorities: BTreeMap<Fingerprint, Authority>,
    blocked: BTreeSet<Fingerprint>,
}

/// Equal pools accept the same certificates. Authorities are compared by fingerprint.
impl PartialEq for CaPool {
    fn eq(&self, other: &Self) -> bool {
        self.authorities.keys().eq(other.authorities.keys()) && self.blocked == other.blocked
    }
}

impl Eq for CaPool {}

#[derive(Debug, Clone)]
struct Authority {
    certificate: Arc<Certificate>,
    key: VerifyingKey,
    name: Arc<str>,
}

/// A certificate that a [`CaPool`] accepted, with what the firewall needs to know about its issuer. Cheap to clone.
///
/// It dereferences to the [`Certificate`] inside, and only [`CaPool::verify`] can make one:
///
/// ```
/// use nebula_cert::VerifiedCertificate;
///
/// /// The caller has checked the peer: it had nothing else to pass.
/// fn may_deploy(peer: &VerifiedCertificate) -> bool {
///     peer.issuer_name() == "example" && peer.groups().iter().any(|group| group == "deploy")
/// }
/// ```
#[derive(Debug, Clone)]
pub struct VerifiedCertificate {
    certificate: Arc<Certificate>,
    fingerprint: Fingerprint,
    /// For P-256, the fingerprint with the other form of the signature, which a blocklist may name instead.
    alternate_fingerprint: Option<Fingerprint>,
    issuer: Fingerprint,
    issuer_name: Arc<str>,
}

impl CaPool {
    /// An empty pool, which trusts nobody.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads a PEM bundle of CA certificates. Expired ones are kept, so that verification can report
    /// [`Error::CaExpired`].
    ///
    /// # Errors
    /// Returns an error if there is no certificate, one is not a CA, or one is not correctly self-signed, or
    /// [`Error::CurveNotInBuild`].
    pub fn from_pem(pem: &[u8]) -> Result<Self, Error> {
        let mut pool = Self::new();
        Certificate::bundle_from_pem(pem)?.into_iter().try_for_each(|ca| pool.add(ca))?;
        Ok(pool)
    }

    /// Adds one CA.
    ///
    /// # Errors
    /// The same as [`CaPool::from_pem`].
    pub fn add(&mut self, ca: Certificate) -> Result<(), Error> {
        if !ca.is_ca() {
            return Err(Error::NotACa { name: ca.name().to_owned() });
        }
        ca.curve().check_build()?;
        let key = VerifyingKey::new(ca.curve(), ca.public_key()).filter(|key| ca.is_signed_by(key));
        let key = key.ok_or_else(|| Error::NotSelfSigned { name: ca.name().to_owned() })?;
        let name = Arc::from(ca.name());
        self.authorities.insert(ca.fingerprint(), Authority { certificate: Arc::new(ca), key, name });
        Ok(())
    }

    /// Blocks a certificate by fingerprint. For P-256, the fingerprint of either form of the signature blocks it.
    pub fn block(&mut self, fingerprint: Fingerprint) {
        self.blocked.insert(fingerprint);
    }

    /// Whether a fingerprint is blocked.
    #[must_use]
    pub fn is_blocked(&self, fingerprint: Fingerprint) -> bool {
        self.blocked.contains(&fingerprint)
    }

    /// The CA certificates, sorted by fingerprint.
    pub fn certificates(&self) -> impl Iterator<Item = &Certificate> {
        self.authorities.values().map(|authority| &*authority.certificate)
    }

    /// Verifies a certificate fully, at `at` seconds since the epoch.
    ///
    /// # Errors
    /// Returns the first reason to refuse it, in the order in which Go Nebula checks.
    pub fn verify(&self, certificate: Certificate, at: UnixTime) -> Result<VerifiedCertificate, Error> {
        let fingerprint = certificate.fingerprint();
        let (issuer, authority) = self.check(&certificate, fingerprint, at)?;
        let ca = &authority.certificate;
        if !certificate.is_signed_by(&authority.key) {
            return Err(Error::Signature { name: certificate.name().to_owned(), ca: ca.name().to_owned() });
        }
        check_constraints(ca, &certificate)?;
        let alternate_fingerprint = certificate.alternate_fingerprint();
        self.check_alternate(&certificate, alternate_fingerprint)?;
        let issuer_name = Arc::clone(&authority.name);
        let certificate = Arc::new(certificate);
        Ok(VerifiedCertificate { certificate, fingerprint, alternate_fingerprint, issuer, issuer_name })
    }

    /// Like [`CaPool::verify`]. If the certificate equals `known`, whose signature was verified before, only what may
    /// have changed since then is checked.
    ///
    /// # Errors
    /// The same as [`CaPool::verify`].
    pub fn verify_known(
        &self,
        certificate: Certificate,
        known: Option<&VerifiedCertificate>,
        at: UnixTime,
    ) -> Result<VerifiedCertificate, Error> {
        match known.filter(|known| *known.certificate == certificate) {
            Some(known) => self.recheck(known, at).map(|()| known.clone()),
            None => self.verify(certificate, at),
        }
    }

    /// Cheaply rechecks the certificate of a live peer: the blocklist, whether the issuer is still trusted, and the
    /// validity periods, but not the signature.
    ///
    /// # Errors
    /// The same as [`CaPool::verify`].
    pub fn recheck(&self, certificate: &VerifiedCertificate, at: UnixTime) -> Result<(), Error> {
        self.check_alternate(certificate, certificate.alternate_fingerprint)?;
        self.check(certificate, certificate.fingerprint, at).map(drop)
    }

    fn check(
        &self,
        certificate: &Certificate,
        fingerprint: Fingerprint,
        at: UnixTime,
    ) -> Result<(Fingerprint, &Authority), Error> {
        let name = || certificate.name().to_owned();
        if self.is_blocked(fingerprint) {
            return Err(Error::Blocked { name: name(), fingerprint });
        }
        let issuer = certificate.issuer().ok_or_else(|| Error::NoIssuer { name: name() })?;
        let authority = self.authorities.get(&issuer).ok_or_else(|| Error::UnknownCa { name: name(), issuer })?;
        let ca = &authority.certificate;
        if ca.curve() != certificate.curve() {
            return Err(Error::CaCurve { name: name(), certificate: certificate.curve(), ca: ca.curve() });
        }
        if ca.is_expired(at) {
            let (not_before, not_after) = (ca.not_before(), ca.not_after());
            return Err(Error::CaExpired { ca: ca.name().to_owned(), not_before, not_after, at });
        }
        if certificate.is_expired(at) {
            let (not_before, not_after) = (certificate.not_before(), certificate.not_after());
            return Err(Error::Expired { name: name(), not_before, not_after, at });
        }
        Ok((issuer, authority))
    }

    fn check_alternate(&self, certificate: &Certificate, alternate: Option<Fingerprint>) -> Result<(), Error> {
        match alternate.filter(|&fingerprint| self.is_blocked(fingerprint)) {
            Some(fingerprint) => Err(Error::Blocked { name: certificate.name().to_owned(), fingerprint }),
            None => Ok(()),
        }
    }
}

/// Checks a certificate against the constraints in its CA's certificate. An empty list is no constraint.
pub(crate) fn check_constraints(ca: &Certificate, certificate: &Certificate) -> Result<(), Error> {
    if certificate.not_after() > ca.not_after() {
        return Err(Error::ExpiresAfterCa { not_after: certificate.not_after(), ca: ca.not_after() });
    }
    if certificate.not_before() < ca.not_before() {
        return Err(Error::ValidBeforeCa { not_before: certificate.not_before(), ca: ca.not_before() });
    }
    if let Some(group) =
        certificate.groups().iter().find(|group| !ca.groups().is_empty() && !ca.groups().contains(group))
    {
        return Err(Error::GroupNotInCa { group: group.clone() });
    }
    if let Some(network) = first_outside(ca.networks(), certificate.networks()) {
        return Err(Error::NetworkNotInCa { network });
    }
    match first_outside(ca.unsafe_networks(), certificate.unsafe_networks()) {
        Some(network) => Err(Error::UnsafeNetworkNotInCa { network }),
        None => Ok(()),
    }
}

fn first_outside(limits: &[IpNet], networks: &[IpNet]) -> Option<IpNet> {
    let inside = |network: &&IpNet| {
        limits.iter().any(|limit| limit.contains(&network.addr()) && limit.prefix_len() <= network.prefix_len())
    };
    networks.iter().find(|network| !limits.is_empty() && !inside(network)).copied()
}

impl VerifiedCertificate {
    /// Fingerprint of this certificate, computed once.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Fingerprint of the CA that signed it (`ca_sha` in firewall rules).
    #[must_use]
    pub fn issuer_fingerprint(&self) -> Fingerprint {
        self.issuer
    }

    /// Name of the CA that signed it (`ca_name` in firewall rules).
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

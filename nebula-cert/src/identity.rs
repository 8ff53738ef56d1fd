//! A node's identity: its certificates, checked to match their private key.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use ipnet::IpNet;
use zeroize::Zeroizing;

use crate::{Certificate, Curve, Error, PrivateKey, UnixTime, Version, pem};

/// What a node authenticates with: a v1 certificate, a v2 certificate or both, and their private key. Cheap to clone.
///
/// ```
/// use nebula_cert::{Curve, Error, Identity, PrivateKey, SigningKey, Template};
///
/// let (ca_key, key) = (SigningKey::generate(Curve::P256)?, PrivateKey::generate(Curve::P256)?);
/// let template = Template {
///     curve: Curve::P256,
///     networks: vec!["10.0.0.1/16".parse().unwrap()],
///     public_key: key.public_key(),
///     ..Template::new("web-1", 1_800_000_000..=1_900_000_000)
/// };
/// let ca = template.clone().self_sign(&ca_key)?;
/// let host = template.sign(&ca, &ca_key)?;
///
/// let identity = Identity::new(vec![host.clone()], key)?;
/// assert_eq!(identity.networks(), ["10.0.0.1/16".parse().unwrap()]);
/// let other = PrivateKey::generate(Curve::P256)?;
/// assert!(matches!(Identity::new(vec![host], other), Err(Error::KeyMismatch { .. })));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Identity {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    primary: Certificate,
    /// The v1 certificate that accompanies a v2 one.
    secondary: Option<Certificate>,
    key: PrivateKey,
}

impl Identity {
    /// Checks that the key matches, that no certificate is a CA, that each has a network, and that two versions have
    /// the same key, curve and first network.
    ///
    /// # Errors
    /// Returns the first of these checks that fails.
    pub fn new(certificates: Vec<Certificate>, key: PrivateKey) -> Result<Self, Error> {
        let (mut v1, mut v2) = (None, None);
        for certificate in certificates {
            check_host(&certificate)?;
            let version = certificate.version();
            let slot = match version {
                Version::V1 => &mut v1,
                Version::V2 => &mut v2,
            };
            if slot.is_some() {
                return Err(Error::SecondOfVersion { version, name: certificate.name().to_owned() });
            }
            *slot = Some(certificate);
        }
        let (primary, secondary) = match (v1, v2) {
            (None, None) => return Err(Error::NoCertificates),
            (Some(only), None) | (None, Some(only)) => (only, None),
            (Some(v1), Some(v2)) => {
                check_pair(&v1, &v2)?;
                (v2, Some(v1))
            }
        };
        // Checked last, so that certificates of two different hosts are reported as such. Checking one certificate is
        // enough, because a pair has the same key.
        if primary.curve() != key.curve() || primary.public_key() != key.public_key() {
            return Err(Error::KeyMismatch { name: primary.name().to_owned() });
        }
        Ok(Self { inner: Arc::new(Inner { primary, secondary, key }) })
    }

    /// Builds an identity from PEM text.
    ///
    /// # Errors
    /// The same as [`Identity::new`], or invalid PEM.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, Error> {
        Self::new(Certificate::bundle_from_pem(certificates)?, PrivateKey::from_pem(key)?)
    }
    /// Reads an identity from files.
    ///
    /// # Errors
    /// The same as [`Identity::new`], or an unreadable file, which the error names.
    pub fn read(certificates: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, Error> {
        let (certificates, key) = (certificates.as_ref(), key.as_ref());
        let in_file = |role, path: &Path| {
            let path = path.to_owned();
            move |reason| Error::InFile { role, path, reason: Box::new(reason) }
        };
        let text = read_bounded("pki.key", key)?;
        let key = PrivateKey::from_pem(&text).map_err(in_file("pki.key", key))?;
        let text = read_bounded("pki.cert", certificates)?;
        let parsed = Certificate::bundle_from_pem(&text).map_err(in_file("pki.cert", certificates))?;
        Self::new(parsed, key)
    }
    /// The certificate of this version, if there is one.
    #[must_use]
    pub fn certificate(&self, version: Version) -> Option<&Certificate> {
        self.certificates().find(|certificate| certificate.version() == version)
    }
    /// The certificate that defines this node's addresses: the v2 one if there is one.
    #[must_use]
    pub fn primary(&self) -> &Certificate {
        &self.inner.primary
    }

    /// All certificates, the primary one first.
    pub fn certificates(&self) -> impl Iterator<Item = &Certificate> {
        std::iter::once(&self.inner.primary).chain(&self.inner.secondary)
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
    /// Whether any of the certificates is not valid at `at`.
    #[must_use]
    pub fn is_expired(&self, at: UnixTime) -> bool {
        self.certificates().any(|certificate| certificate.is_expired(at))
    }
}

fn check_host(certificate: &Certificate) -> Result<(), Error> {
    let name = || certificate.name().to_owned();
    if certificate.networks().is_empty() {
        return Err(Error::HostWithoutNetworks { name: name() });
    }
    if certificate.is_ca() {
        return Err(Error::IsCa { name: name() });
    }
    Ok(())
}

fn check_pair(v1: &Certificate, v2: &Certificate) -> Result<(), Error> {
    if v1.curve() != v2.curve() {
        return Err(Error::VersionsDifferInCurve { v1: v1.curve(), v2: v2.curve() });
    }
    if v1.public_key() != v2.public_key() {
        return Err(Error::VersionsDifferInKey);
    }
    match (v1.networks().first(), v2.networks().first()) {
        (Some(&v1), Some(&v2)) if v1 != v2 => Err(Error::VersionsDifferInNetwork { v1, v2 }),
        _ => Ok(()),
    }
}

fn read_bounded(role: &'static str, path: &Path) -> Result<Zeroizing<Vec<u8>>, Error> {
    // One byte more than the PEM reader accepts, so that it reports files that are too long.
    let limit = pem::MAX_INPUT as u64 + 1;
    let mut text = Zeroizing::new(Vec::new());
    std::fs::File::open(path)
        .and_then(|file| file.take(limit).read_to_end(&mut text))
        .map_err(|error| Error::Unreadable { role, path: path.to_owned(), reason: error.to_string() })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SigningKey, Template};

    struct Site {
        ca: Certificate,
        ca_key: SigningKey,
        key: PrivateKey,
    }

    impl Site {
        fn new() -> Self {
            let ca_key = SigningKey::generate(Curve::Curve25519).unwrap();
            let key = PrivateKey::generate(Curve::Curve25519).unwrap();
            let ca = Self::template(Version::V2, "10.0.0.0/8", vec![]).self_sign(&ca_key).unwrap();
            Self { ca, ca_key, key }
        }

        fn template(version: Version, network: &str, public_key: Vec<u8>) -> Template {
            Template { version, networks: vec![network.parse().unwrap()], public_key, ..Template::new("host", 0..=100) }
        }

        fn issue(&self, version: Version, network: &str) -> Certificate {
            Self::template(version, network, self.key.public_key()).sign(&self.ca, &self.ca_key).unwrap()
        }

        fn refusal(&self, certificates: Vec<Certificate>) -> Error {
            Identity::new(certificates, self.key.clone()).unwrap_err()
        }
    }

    #[test]
    fn a_node_with_both_versions_takes_its_addresses_from_v2() {
        let site = Site::new();
        let certificates = vec![site.issue(Version::V1, "10.0.0.1/8"), site.issue(Version::V2, "10.0.0.1/8")];
        let identity = Identity::new(certificates, site.key.clone()).unwrap();
        assert_eq!(identity.primary().version(), Version::V2);
        assert_eq!(identity.certificate(Version::V1).unwrap().version(), Version::V1);
        assert!(!identity.is_expired(100));
        assert!(identity.is_expired(101));
    }

    #[test]
    fn certificates_that_cannot_be_a_nodes_own_are_refused_with_the_reason() {
        let site = Site::new();
        let (v1, v2) = (site.issue(Version::V1, "10.0.0.1/8"), site.issue(Version::V2, "10.0.0.1/8"));
        assert_eq!(site.refusal(vec![]), Error::NoCertificates);
        assert_eq!(site.refusal(vec![site.ca.clone()]), Error::IsCa { name: "host".into() });
        let second = Error::SecondOfVersion { version: Version::V2, name: "host".into() };
        assert_eq!(site.refusal(vec![v2.clone(), v1.clone(), v2.clone()]), second);
        let moved = site.issue(Version::V2, "10.0.0.2/8");
        assert!(matches!(site.refusal(vec![v1.clone(), moved]), Error::VersionsDifferInNetwork { .. }));
        let other = Site::new();
        assert_eq!(other.refusal(vec![v2.clone()]), Error::KeyMismatch { name: "host".into() });
        let foreign = other.issue(Version::V2, "10.0.0.1/8");
        assert_eq!(site.refusal(vec![v1, foreign]), Error::VersionsDifferInKey);
    }

    #[test]
    fn an_unreadable_or_damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (certificate, key) = (folder.path().join("host.crt"), folder.path().join("host.key"));
        let site = Site::new();
        std::fs::write(&key, &**site.key.to_pem()).unwrap();
        let error = Identity::read(&certificate, &key).unwrap_err();
        assert!(matches!(&error, Error::Unreadable { path, .. } if *path == certificate), "{error}");
        std::fs::write(&certificate, &**site.key.to_pem()).unwrap();
        let error = Identity::read(&certificate, &key).unwrap_err().to_string();
        assert!(error.contains("host.crt: bytes did not contain a proper certificate banner"), "{error}");
        std::fs::write(&certificate, site.issue(Version::V2, "10.0.0.1/8").to_pem()).unwrap();
        assert_eq!(Identity::read(&certificate, &key).unwrap().networks(), ["10.0.0.1/8".parse().unwrap()]);
    }
}

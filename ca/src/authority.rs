//! The signing CA: its certificate, its key, and the bundle of CAs to trust.

use ipnet::IpNet;
use nebula_cert::{CaPool, Certificate, Curve, Signer, SigningKey, Template, UnixTime, Version, is_visible};

use crate::{
    directory::{CA_CERTIFICATE, CA_KEY, Directory, FileError},
    refusal::Refusal,
};

/// A CA certificate with its key.
pub(crate) struct Authority {
    certificate: Certificate,
    key: Box<dyn Signer + Send + Sync>,
    bundle: String,
}

/// Contents of a certificate to sign.
#[derive(Debug, Clone)]
pub(crate) struct Grant {
    pub(crate) name: String,
    pub(crate) networks: Vec<IpNet>,
    pub(crate) unsafe_networks: Vec<IpNet>,
    pub(crate) groups: Vec<String>,
    /// Life in seconds.
    pub(crate) life: i64,
}

/// Why the CA cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// `ca.crt` is not a CA bundle.
    #[error("ca.crt is not a bundle of Nebula CA certificates: {0}")]
    Certificate(nebula_cert::Error),
    /// `ca.key` is not a CA key.
    #[error("ca.key is not a Nebula CA key: {0}")]
    Key(nebula_cert::Error),
    /// The key is encrypted and there is no passphrase.
    #[error("ca.key is encrypted; put its passphrase into the environment variable {PASSPHRASE}")]
    NoPassphrase,
    /// The key is encrypted and the passphrase is wrong.
    #[error("ca.key cannot be decrypted with the passphrase in {PASSPHRASE}: {0}")]
    WrongPassphrase(nebula_cert::Error),
    /// The key is in a token and cannot be used.
    #[error("ca.key is a PKCS#11 URI: {0}")]
    Token(String),
    /// Key and certificate do not belong together.
    #[error("ca.key belongs to none of the certificates in ca.crt; the two files must be of one CA")]
    Mismatch,
}

impl Authority {
    /// Reads certificate and key, the latter plain, encrypted, or the PKCS#11 URI of a key in a token.
    pub(crate) fn read(directory: &Directory, passphrase: Option<&str>) -> Result<Self, AuthorityError> {
        let (bundle, certificates) = read_bundle(directory)?;
        let pem = directory.read(CA_KEY)?;
        let key: Box<dyn Signer + Send + Sync> = if pem.starts_with("pkcs11:") {
            open_token(pem.trim_end())?
        } else if pem.contains(" ENCRYPTED ") {
            let passphrase = passphrase.ok_or(AuthorityError::NoPassphrase)?;
            let key = SigningKey::from_encrypted_pem(pem.as_bytes(), passphrase.as_bytes());
            Box::new(key.map_err(AuthorityError::WrongPassphrase)?)
        } else {
            Box::new(SigningKey::from_pem(pem.as_bytes()).map_err(AuthorityError::Key)?)
        };
        let public_key = key.public_key();
        let is_ours = |certificate: &Certificate| {
            certificate.curve() == key.curve() && certificate.public_key() == public_key.as_slice()
        };
        let certificate = certificates.into_iter().find(is_ours).ok_or(AuthorityError::Mismatch)?;
        Ok(Self { certificate, key, bundle })
    }

    pub(crate) fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// PEM of all trusted CAs.
    pub(crate) fn bundle(&self) -> &str {
        &self.bundle
    }

    /// Last second of a certificate with that life signed at `now`, never after the CA's own.
    pub(crate) fn end_of_life(&self, life: i64, now: UnixTime) -> UnixTime {
        now.saturating_add(life).min(self.certificate.not_after())
    }

    /// Returns an error if the CA certificate itself is not valid at `now`.
    pub(crate) fn check_validity(&self, now: UnixTime) -> Result<(), Refusal> {
        let ca = &self.certificate;
        if ca.is_expired(now) {
            let (from, to) = (nebula_cert::rfc3339(ca.not_before()), nebula_cert::rfc3339(ca.not_after()));
            return Err(Refusal::CaExpired(format!("valid from {from} to {to}")));
        }
        Ok(())
    }

    /// Signs a certificate for a public key of the CA's curve.
    pub(crate) fn sign(&self, grant: &Grant, public_key: Vec<u8>, now: UnixTime) -> Result<Certificate, Refusal> {
        self.check_validity(now)?;
        let ca = &self.certificate;
        let template = Template {
            version: ca.version(),
            curve: ca.curve(),
            name: grant.name.clone(),
            networks: grant.networks.clone(),
            unsafe_networks: grant.unsafe_networks.clone(),
            groups: grant.groups.clone(),
            not_before: now.saturating_sub(CLOCK_SKEW).max(ca.not_before()),
            not_after: self.end_of_life(grant.life, now),
            public_key,
        };
        template.sign(ca, &*self.key).map_err(Refusal::CaConstraint)
    }
}

/// Opens a key that stays in its token.
#[cfg(feature = "pkcs11")]
fn open_token(uri: &str) -> Result<Box<dyn Signer + Send + Sync>, AuthorityError> {
    use nebula_cert::pkcs11::{TokenKey, Uri};

    let key = uri.parse::<Uri>().and_then(|uri| TokenKey::open(&uri));
    Ok(Box::new(key.map_err(|error| AuthorityError::Token(error.to_string()))?))
}

#[cfg(not(feature = "pkcs11"))]
fn open_token(_uri: &str) -> Result<Box<dyn Signer + Send + Sync>, AuthorityError> {
    let build = "this build cannot load the module of a token; docs/hosts.md says how to make one that can";
    Err(AuthorityError::Token(build.to_owned()))
}

/// Reads the bundle of trusted CAs, without the key.
pub(crate) fn read_bundle(directory: &Directory) -> Result<(String, Vec<Certificate>), AuthorityError> {
    let bundle = directory.read(CA_CERTIFICATE)?;
    // The pool checks that each certificate is a CA with a valid signature.
    CaPool::from_pem(bundle.as_bytes()).map_err(AuthorityError::Certificate)?;
    let certificates = Certificate::bundle_from_pem(bundle.as_bytes()).map_err(AuthorityError::Certificate)?;
    Ok((bundle.to_string(), certificates))
}

/// The curve that the CA signs for.
///
/// # Errors
/// Returns an error if its certificate cannot be read.
pub fn ca_curve(directory: &Directory) -> Result<Curve, AuthorityError> {
    // They are of one kind: a rollover makes the next CA like the present one.
    Ok(read_bundle(directory)?.1.first().map_or(Curve::USUAL, Certificate::curve))
}

/// What no CA of the service can sign.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrantError {
    #[error("the name must have 1 to 253 characters")]
    Name,
    #[error("name and groups must not contain control characters, or others that are not seen")]
    Invisible,
    #[error("at least one network is needed, for example 10.42.0.1/16")]
    NoNetwork,
    #[error("there is no CA certificate")]
    NoCa,
    #[error("this CA is of version 1: exactly one network, and IPv4 only")]
    Version1,
    #[error("{0} is in none of the networks the CA certificate allows")]
    Network(IpNet),
    #[error("{0:?} is not one of the groups the CA certificate allows")]
    Group(String),
}

/// Refuses a grant that none of the CAs could ever sign, so that no token is created for it.
pub(crate) fn check_grant(grant: &Grant, authorities: &[Certificate]) -> Result<(), GrantError> {
    if grant.name.is_empty() || grant.name.len() > crate::policy::MAX_NAME_BYTES {
        return Err(GrantError::Name);
    }
    if !grant.name.chars().chain(grant.groups.iter().flat_map(|group| group.chars())).all(is_visible) {
        return Err(GrantError::Invisible);
    }
    if grant.networks.is_empty() {
        return Err(GrantError::NoNetwork);
    }
    let mut verdict = Err(GrantError::NoCa);
    for ca in authorities {
        verdict = check_constraints(grant, ca);
        if verdict.is_ok() {
            break;
        }
    }
    verdict
}

fn check_constraints(grant: &Grant, ca: &Certificate) -> Result<(), GrantError> {
    let is_v4 = |network: &IpNet| network.addr().is_ipv4();
    let is_v1 = ca.version() == Version::V1;
    if is_v1 && !(grant.networks.len() == 1 && grant.networks.iter().chain(&grant.unsafe_networks).all(is_v4)) {
        return Err(GrantError::Version1);
    }
    // An empty list in the CA certificate means no constraint.
    let all_within = |inner: &[IpNet], outer: &[IpNet]| -> Result<(), GrantError> {
        match inner.iter().find(|inner| !outer.is_empty() && !outer.iter().any(|outer| outer.trunc().contains(*inner)))
        {
            Some(network) => Err(GrantError::Network(*network)),
            None => Ok(()),
        }
    };
    all_within(&grant.networks, ca.networks())?;
    all_within(&grant.unsafe_networks, ca.unsafe_networks())?;
    match grant.groups.iter().find(|group| !ca.groups().is_empty() && !ca.groups().contains(group)) {
        Some(group) => Err(GrantError::Group(group.clone())),
        None => Ok(()),
    }
}

/// Environment variable with the passphrase of an encrypted CA key.
pub const PASSPHRASE: &str = "NEBULA_CA_PASSPHRASE";

/// Clocks of hosts differ by seconds; a new certificate must be valid at once at every peer.
const CLOCK_SKEW: i64 = 60;

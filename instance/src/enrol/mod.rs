//! A host gets its certificate from the CA service with a one-time token, and renews it (enrolment).
//!
//! The key is on the disk before the CA is asked: whatever is interrupted can be run again with the same token, which
//! stays good for the key it was first used with. Of the CA, its URL and TLS certificate are remembered.

mod files;
pub mod up;

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cert::issuance::Reply;
use nebula_cert::{Curve, JoinToken, PrivateKey, UnixTime};
use nebula_cni_plugin::launch::CaAccess;
use zeroize::Zeroizing;

pub use self::files::Files;
use self::files::failed;
use crate::ca_client::pinned::{self, PinError};
use crate::ca_client::{self, CaClient, Issued, Prover};
use crate::linux::netns::NamespaceExecutor;

/// What was issued, for the user.
#[derive(Debug)]
pub struct Enrolled {
    /// Name in the certificate.
    pub name: String,
    /// Overlay networks.
    pub networks: Vec<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Last second of validity.
    pub not_after: UnixTime,
    /// Where the files are.
    pub folder: PathBuf,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file cannot be read or written.
    #[error("cannot {verb} {}: {source}", path.display())]
    File {
        /// What was tried.
        verb: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Something is there already.
    #[error("refusing to overwrite {}: remove it to enrol this host anew", .0.display())]
    Exists(PathBuf),
    /// The key that an earlier run left is no key.
    #[error("{}: {cause}; remove it and enrol again", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: nebula_cert::Error,
    },
    /// `enrolment.json` is not one.
    #[error("{}: {cause}; remove it and give -ca-url and -tls-ca again", path.display())]
    Enrolment {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: String,
    },
    /// There is no certificate to renew.
    #[error("nothing to renew: {0}")]
    Nothing(nebula_cert::Error),
    /// The service takes no certificate as a proof.
    #[error("the CA service renews no certificates: enrol this host anew with another token")]
    NoRenewal,
    /// Peers know the host by its addresses.
    #[error("the CA service gave a certificate with other addresses; the present one stays")]
    OtherNetworks,
    /// The service is not the one that the join token is for.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// From the CA.
    #[error(transparent)]
    Ca(#[from] ca_client::Error),
}

/// Writes the files of a host that shows the one-time token in the token file of `access`.
///
/// # Errors
/// The folder already has a certificate, a file fails, or the CA refuses.
pub fn enrol(access: &CaAccess, files: &Files, curve: Curve, now: UnixTime) -> Result<Enrolled, Error> {
    first(access, files, &Prover::Host, &[curve], now)
}

/// As [`enrol`], at the service of a join token, once that showed that it is the one.
///
/// # Errors
/// As [`enrol`]; or somebody else answers, who is told nothing.
pub fn join(token: &JoinToken, files: &Files, now: UnixTime) -> Result<Enrolled, Error> {
    if files.certificate().exists() {
        return Err(Error::Exists(files.certificate()));
    }
    let certificate = pinned::certificate(token, REQUEST_TIMEOUT)?;
    files.make_folder()?;
    files.write(&files.tls(), certificate.as_bytes(), 0o644)?;
    // From here on only the holder of the pinned key is spoken to: a certificate is trusted by its key.
    let prover = Prover::Invited(token.secret().clone());
    first(&files.access(token), files, &prover, &[Curve::Curve25519, Curve::P256], now)
}

/// Asks for a certificate of the first of `curves` that the CA signs for.
fn first(
    access: &CaAccess,
    files: &Files,
    prover: &Prover,
    curves: &[Curve],
    now: UnixTime,
) -> Result<Enrolled, Error> {
    files.make_folder()?;
    if files.certificate().exists() {
        return Err(Error::Exists(files.certificate()));
    }
    let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
    let mut outcome = Err(Error::NoRenewal);
    for curve in curves {
        let key = match read_key(&files.key())? {
            Some(key) if key.curve() == *curve || curves.len() == 1 => key,
            // Of the other curve there can be no certificate of this CA.
            _ => {
                let made = PrivateKey::generate(*curve);
                let key = made.map_err(|cause| Error::Key { path: files.key(), cause })?;
                files.write(&files.key(), key.to_pem().as_bytes(), 0o600)?;
                key
            }
        };
        outcome = client.request_for(key, prover, REQUEST_TIMEOUT, now).map_err(Error::Ca);
        if !matches!(&outcome, Err(Error::Ca(ca_client::Error::Denied { code, .. })) if code == "wrong_curve") {
            break;
        }
    }
    let (issued, reply) = outcome?;
    files.remember(access)?;
    write_trust(files, &issued, &reply)?;
    files.write(&files.certificate(), reply.certificate.as_bytes(), 0o644)?;
    Ok(Enrolled::new(&issued, files.folder()))
}

/// Renews the certificate if no more than a third of its life is left or `always`, at the service that is remembered if
/// `access` is none. `None`: it is too early.
///
/// # Errors
/// There is no certificate, a file fails, or the CA refuses; then the present files stay.
pub fn renew(access: Option<CaAccess>, files: &Files, always: bool, now: UnixTime) -> Result<Option<Enrolled>, Error> {
    files.complete()?;
    if !always && !is_due(files, now)? {
        return Ok(None);
    }
    let access = access.map_or_else(|| files.remembered(), Ok)?;
    let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
    let issued = renew_by(&client, files, REQUEST_TIMEOUT, now)?;
    files.remember(&access)?;
    Ok(Some(Enrolled::new(&issued, files.folder())))
}

/// Whether no more than a third of the life of the certificate is left.
///
/// # Errors
/// There is no certificate.
pub fn is_due(files: &Files, now: UnixTime) -> Result<bool, Error> {
    files.complete()?;
    let identity = files.identity()?;
    let present = identity.primary();
    let (life, left) = (present.not_after() - present.not_before(), present.not_after() - now);
    Ok(left <= life / 3)
}

/// Replaces key, certificate and trust by those of a new key, with the present certificate as the proof.
///
/// # Errors
/// There is no certificate, a file fails, or the CA refuses; then the present files stay.
pub fn renew_by(client: &CaClient, files: &Files, within: Duration, now: UnixTime) -> Result<Issued, Error> {
    // Programs take turns, and the second one finds what the first one wrote.
    let _alone = files.lock()?;
    files.complete()?;
    let identity = files.identity()?;
    let answer = client.trust(None, Duration::ZERO, within)?;
    let renewal_key = answer.news.and_then(|news| news.renewal_key).ok_or(Error::NoRenewal)?;
    let made = PrivateKey::generate(identity.curve());
    let key = made.map_err(|cause| Error::Key { path: files.next_key(), cause })?;
    let pem = key.to_pem();
    let networks = identity.networks().to_vec();
    let prover = Prover::Holder { identity: Box::new(identity), renewal_key };
    let (issued, reply) = client.request_for(key, &prover, within, now)?;
    if issued.identity.networks() != networks {
        return Err(Error::OtherNetworks);
    }
    files.write(&files.next_key(), pem.as_bytes(), 0o600)?;
    write_trust(files, &issued, &reply)?;
    files.write(&files.certificate(), reply.certificate.as_bytes(), 0o644)?;
    std::fs::rename(files.next_key(), files.key()).map_err(failed("write", &files.key()))?;
    Ok(issued)
}

fn write_trust(files: &Files, issued: &Issued, reply: &Reply) -> Result<bool, Error> {
    let networks = issued.identity.networks();
    files.write_trust(&reply.ca, reply.blocklist.clone(), reply.lighthouses.clone(), networks)
}

/// The key that an earlier run left.
fn read_key(path: &Path) -> Result<Option<PrivateKey>, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path)(error)),
    };
    let mut pem = Zeroizing::new(Vec::with_capacity(MAX_KEY_BYTES));
    file.take(MAX_KEY_BYTES as u64).read_to_end(&mut pem).map_err(failed("read", path))?;
    PrivateKey::from_pem(&pem).map(Some).map_err(|cause| Error::Key { path: path.to_owned(), cause })
}

impl Enrolled {
    fn new(issued: &Issued, folder: &Path) -> Self {
        let certificate = issued.identity.primary();
        Self {
            name: certificate.name().to_owned(),
            networks: certificate.networks().iter().map(ToString::to_string).collect(),
            groups: certificate.groups().to_vec(),
            not_after: certificate.not_after(),
            folder: folder.to_owned(),
        }
    }
}

const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_KEY_BYTES: usize = 4096;

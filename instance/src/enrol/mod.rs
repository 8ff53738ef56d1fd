//! Enrolment: a host gets its certificate from the CA service with a one-time token, and renews it later.
//!
//! The key is on disk before the request is sent, so an interrupted enrolment can be run again: the token remains valid
//! for the key it was first used with. The CA's URL and TLS certificate are saved for renewals.

pub mod event;
mod files;
pub mod follow;
pub mod kubernetes;
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

/// A summary of the issued certificate, for the user.
#[derive(Debug)]
pub struct Enrolled {
    /// Name in the certificate.
    pub name: String,
    /// Overlay addresses with their prefix lengths.
    pub networks: Vec<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Last second of validity.
    pub not_after: UnixTime,
    /// Where the files are.
    pub folder: PathBuf,
}

/// Why enrolment or renewal failed.
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
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The host already has a certificate.
    #[error("refusing to overwrite {}: remove it to enrol this host again", .0.display())]
    Exists(PathBuf),
    /// The key file left by an earlier run is invalid.
    #[error("{}: {cause}; remove it and enrol again", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: nebula_cert::Error,
    },
    /// `enrolment.json` is invalid.
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
    /// The service does not accept a certificate as proof.
    #[error("the CA service renews no certificates: enrol this host again with another token")]
    NoRenewal,
    /// The new certificate has other addresses, by which peers know this host.
    #[error("the CA service gave a certificate with other addresses; the present one stays")]
    OtherNetworks,
    /// The service could not be verified against the join token.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// The request to the CA failed.
    #[error(transparent)]
    Ca(#[from] ca_client::Error),
}

/// Enrols this host with the one-time token in the token file of `access`, and writes its files.
///
/// # Errors
/// Returns an error if the folder already has a certificate, a file cannot be read or written, or the CA refuses.
pub fn enrol(access: &CaAccess, files: &Files, curve: Curve, now: UnixTime) -> Result<Enrolled, Error> {
    first(access, files, &Prover::Host, &[curve], now)
}

/// Like [`enrol`], at the service of a join token, once that service has proven to hold the pinned key.
///
/// # Errors
/// Fails like [`enrol`], or if another service answers; nothing is sent to that one.
pub fn join(token: &JoinToken, files: &Files, now: UnixTime) -> Result<Enrolled, Error> {
    if files.certificate().exists() {
        return Err(Error::Exists(files.certificate()));
    }
    let certificate = pinned::certificate(token, REQUEST_TIMEOUT)?;
    files.make_folder()?;
    files.write(&files.tls(), certificate.as_bytes(), 0o644)?;
    // From here on, only the holder of the pinned key is talked to: clients trust this certificate, which only that key
    // can use.
    let prover = Prover::Invited(token.secret().clone());
    first(&files.access(token), files, &prover, &[Curve::Curve25519, Curve::P256], now)
}

/// Requests a certificate for the first of `curves` that the CA signs for.
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
    issue(access, files, prover, curves, now, || files.remember(access))
}

/// Requests a certificate for the key in the folder, or a new one. `remember` notes the service for renewals.
fn issue(
    access: &CaAccess,
    files: &Files,
    prover: &Prover,
    curves: &[Curve],
    now: UnixTime,
    remember: impl FnOnce() -> Result<(), Error>,
) -> Result<Enrolled, Error> {
    let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
    let mut outcome = Err(Error::NoRenewal);
    for curve in curves {
        let key = match read_key(&files.key())? {
            Some(key) if key.curve() == *curve || curves.len() == 1 => key,
            // This CA cannot have issued a certificate for a key of the other curve.
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
    remember()?;
    write_trust(files, &issued, &reply)?;
    files.write(&files.certificate(), reply.certificate.as_bytes(), 0o644)?;
    Ok(Enrolled::new(&issued, files.folder()))
}

/// Renews the certificate if at most a third of its lifetime is left, or if `always`. Without `access`, uses the saved
/// CA service. Returns `None` if it is too early.
///
/// # Errors
/// Returns an error if there is no certificate, a file cannot be read or written, or the CA refuses; the present files
/// are kept then.
pub fn renew(access: Option<CaAccess>, files: &Files, always: bool, now: UnixTime) -> Result<Option<Enrolled>, Error> {
    files.complete()?;
    if !always && !is_due(files, now)? {
        return Ok(None);
    }
    let access = access.map_or_else(|| files.remembered(), Ok)?;
    let client = CaClient::new(access.clone(), NamespaceExecutor::Here);
    let issued = renew_by(&client, files, REQUEST_TIMEOUT, now)?;
    if files.workload()?.is_none() {
        files.remember(&access)?;
    }
    Ok(Some(Enrolled::new(&issued, files.folder())))
}

/// Whether at most a third of the certificate's lifetime is left.
///
/// # Errors
/// Returns an error if there is no certificate.
pub fn is_due(files: &Files, now: UnixTime) -> Result<bool, Error> {
    files.complete()?;
    let identity = files.identity()?;
    let present = identity.primary();
    let (life, left) = (present.not_after() - present.not_before(), present.not_after() - now);
    Ok(left <= life / 3)
}

/// Replaces key, certificate and trust. The proof of identity for the new key is the present certificate, or the token of
/// a pod that enrolled with one.
///
/// # Errors
/// Returns an error if there is no certificate, a file cannot be read or written, or the CA refuses; the present files
/// are kept then.
pub fn renew_by(client: &CaClient, files: &Files, within: Duration, now: UnixTime) -> Result<Issued, Error> {
    // Programs take turns, and each reads what the previous one wrote.
    let _alone = files.lock()?;
    files.complete()?;
    let identity = files.identity()?;
    let made = PrivateKey::generate(identity.curve());
    let key = made.map_err(|cause| Error::Key { path: files.next_key(), cause })?;
    let pem = key.to_pem();
    let networks = identity.networks().to_vec();
    let prover = match files.workload()? {
        Some(workload) => workload.prover(),
        None => {
            let answer = client.trust(None, Duration::ZERO, within)?;
            let renewal_key = answer.news.and_then(|news| news.renewal_key).ok_or(Error::NoRenewal)?;
            Prover::Holder { identity: Box::new(identity), renewal_key }
        }
    };
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

/// Reads the key left by an earlier run, if any.
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

//! `nebula-enrol`: a host gets its certificate from the CA service with a one-time token (enrolment).
//!
//! The key is on the disk before the CA is asked: whatever is interrupted can be run again with the same token, which
//! stays good for the key it was first used with.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cert::{Curve, Identity, PrivateKey, UnixTime};
use nebula_cni_plugin::launch::CaAccess;
use zeroize::Zeroizing;

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
    /// There is no certificate to renew.
    #[error("nothing to renew: {0}")]
    Nothing(nebula_cert::Error),
    /// The service takes no certificate as a proof.
    #[error("the CA service renews no certificates: enrol this host anew with another token")]
    NoRenewal,
    /// From the CA.
    #[error(transparent)]
    Ca(#[from] ca_client::Error),
}

/// Writes `host.key`, `host.crt` and `ca.crt` into `folder`.
///
/// # Errors
/// The folder already has a certificate, a file fails, or the CA refuses.
pub fn enrol(access: CaAccess, folder: &Path, curve: Curve, now: UnixTime) -> Result<Enrolled, Error> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed("make", folder))?;
    let [key_path, certificate_path, ca_path] = ["host.key", "host.crt", "ca.crt"].map(|name| folder.join(name));
    if certificate_path.exists() {
        return Err(Error::Exists(certificate_path));
    }
    let key = match File::open(&key_path) {
        Ok(file) => {
            let mut pem = Zeroizing::new(Vec::with_capacity(MAX_KEY_BYTES));
            file.take(MAX_KEY_BYTES as u64).read_to_end(&mut pem).map_err(failed("read", &key_path))?;
            PrivateKey::from_pem(&pem).map_err(|cause| Error::Key { path: key_path.clone(), cause })?
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let key = PrivateKey::generate(curve).map_err(|cause| Error::Key { path: key_path.clone(), cause })?;
            write(&key_path, key.to_pem().as_bytes(), 0o600).map_err(failed("write", &key_path))?;
            key
        }
        Err(error) => return Err(failed("read", &key_path)(error)),
    };
    let (issued, reply) =
        CaClient::new(access, NamespaceExecutor::Here).request_for(key, &Prover::Host, REQUEST_TIMEOUT, now)?;
    write(&ca_path, reply.ca.as_bytes(), 0o644).map_err(failed("write", &ca_path))?;
    write(&certificate_path, reply.certificate.as_bytes(), 0o644).map_err(failed("write", &certificate_path))?;
    Ok(Enrolled::new(&issued, folder))
}

/// Replaces `host.key`, `host.crt` and `ca.crt` in `folder` by those of a new key, with the present certificate as the
/// proof, if no more than a third of its life is left or `always`. `None`: it is too early.
///
/// # Errors
/// There is no certificate, a file fails, or the CA refuses; then the present files stay.
pub fn renew(access: CaAccess, folder: &Path, always: bool, now: UnixTime) -> Result<Option<Enrolled>, Error> {
    let [key_path, certificate_path, ca_path] = ["host.key", "host.crt", "ca.crt"].map(|name| folder.join(name));
    let next_key = folder.join("host.key.next");
    // An earlier run was interrupted between the two files of a pair.
    if Identity::read(&certificate_path, &next_key).is_ok() {
        std::fs::rename(&next_key, &key_path).map_err(failed("write", &key_path))?;
    }
    let identity = Identity::read(&certificate_path, &key_path).map_err(Error::Nothing)?;
    let present = identity.primary();
    let (life, left) = (present.not_after() - present.not_before(), present.not_after() - now);
    if !always && left > life / 3 {
        return Ok(None);
    }
    let client = CaClient::new(access, NamespaceExecutor::Here);
    let answer = client.trust(None, REQUEST_TIMEOUT)?;
    let renewal_key = answer.news.and_then(|news| news.renewal_key).ok_or(Error::NoRenewal)?;
    let key = PrivateKey::generate(identity.curve()).map_err(|cause| Error::Key { path: next_key.clone(), cause })?;
    let pem = key.to_pem();
    let prover = Prover::Holder { identity: Box::new(identity), renewal_key };
    let (issued, reply) = client.request_for(key, &prover, REQUEST_TIMEOUT, now)?;
    write(&next_key, pem.as_bytes(), 0o600).map_err(failed("write", &next_key))?;
    write(&ca_path, reply.ca.as_bytes(), 0o644).map_err(failed("write", &ca_path))?;
    write(&certificate_path, reply.certificate.as_bytes(), 0o644).map_err(failed("write", &certificate_path))?;
    std::fs::rename(&next_key, &key_path).map_err(failed("write", &key_path))?;
    Ok(Some(Enrolled::new(&issued, folder)))
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

fn failed(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { verb, path, source }
}

/// Atomic: written to a temporary file, then renamed.
fn write(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&beside)?;
    // One that an interrupted run left, or somebody else, has another mode.
    file.set_permissions(Permissions::from_mode(mode))?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
const MAX_KEY_BYTES: usize = 4096;

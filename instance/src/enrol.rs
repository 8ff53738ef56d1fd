//! `nebula-enrol`: a host gets its certificate from the CA service with a one-time token (enrolment).
//!
//! The key is on the disk before the CA is asked: whatever is interrupted can be run again with the same token, which stays
//! good for the key it was first used with.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cert::{Curve, PrivateKey, UnixTime};
use nebula_cni_plugin::launch::CaAccess;
use zeroize::Zeroizing;

use crate::ca_client::{self, CaClient, Prover};
use crate::netns::Namespace;

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
    /// From the CA.
    #[error(transparent)]
    Ca(#[from] ca_client::Error),
}

/// Writes `host.key`, `host.crt` and `ca.crt` into `folder`.
///
/// # Errors
/// The folder already has a certificate, a file fails, or the CA refuses.
pub fn enrol(access: CaAccess, folder: &Path, curve: Curve, now: UnixTime) -> Result<Enrolled, Error> {
    let failed = |verb, path: &Path| {
        let path = path.to_owned();
        move |source| Error::File { verb, path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed("make", folder))?;
    let [key_path, certificate_path, ca_path] = ["host.key", "host.crt", "ca.crt"].map(|name| folder.join(name));
    if certificate_path.exists() {
        return Err(Error::Exists(certificate_path));
    }
    let key = match File::open(&key_path) {
        Ok(file) => {
            let mut pem = Zeroizing::new(Vec::with_capacity(LONGEST_KEY));
            file.take(LONGEST_KEY as u64).read_to_end(&mut pem).map_err(failed("read", &key_path))?;
            PrivateKey::from_pem(&pem).map_err(|cause| Error::Key { path: key_path.clone(), cause })?
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let key = PrivateKey::generate(curve).map_err(|cause| Error::Key { path: key_path.clone(), cause })?;
            write(&key_path, key.to_pem().as_bytes(), 0o600).map_err(failed("write", &key_path))?;
            key
        }
        Err(error) => return Err(failed("read", &key_path)(error)),
    };
    let (issued, reply) = CaClient::new(access, Namespace::Own).request_for(key, &Prover::Host, WITHIN, now)?;
    write(&ca_path, reply.ca.as_bytes(), 0o644).map_err(failed("write", &ca_path))?;
    write(&certificate_path, reply.certificate.as_bytes(), 0o644).map_err(failed("write", &certificate_path))?;
    let certificate = issued.identity.primary();
    Ok(Enrolled {
        name: certificate.name().to_owned(),
        networks: certificate.networks().iter().map(ToString::to_string).collect(),
        groups: certificate.groups().to_vec(),
        not_after: certificate.not_after(),
        folder: folder.to_owned(),
    })
}

/// Complete or not there: written beside, then renamed.
fn write(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

const WITHIN: Duration = Duration::from_secs(15);
const LONGEST_KEY: usize = 4096;

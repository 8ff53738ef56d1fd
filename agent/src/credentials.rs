//! The agent's token and the TLS roots of the CA, copied from the agent's volumes to where instances read them. The
//! files are in `/run`: nothing of them outlives the node's next start, or the uninstallation.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nebula_cert::client;

use crate::config::{AGENT_DIR, STATE_DIR, TLS_CA_FILE, TOKEN_FILE};
use crate::durable;
use crate::host_root::HostRoot;
use crate::readiness::Standing;

/// Where the agent's volumes are mounted.
#[derive(Debug, Clone)]
pub struct Volumes {
    /// Projected service-account token.
    pub token: PathBuf,
    /// `tls.crt` of the ConfigMap `nebula-trust`.
    pub tls_ca: PathBuf,
}

impl Volumes {
    /// Default of `--token-file`.
    pub const TOKEN: &str = "/var/run/secrets/nebula-ca/token";
    /// Default of `--trust-file`.
    pub const TLS_CA: &str = "/var/run/nebula-trust/tls.crt";

    /// The directories in which changes show. The kubelet replaces a link named `..data` in them.
    #[must_use]
    pub fn directories(&self) -> Vec<PathBuf> {
        [&self.token, &self.tls_ca].iter().filter_map(|path| path.parent()).map(Path::to_owned).collect()
    }
}

/// Why the credentials are not in place.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CredentialError {
    /// A file is missing or empty.
    #[error("cannot read {what} at {path}: {source}")]
    Unreadable {
        /// What it holds.
        what: &'static str,
        /// Where it is expected.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A copy cannot be written.
    #[error("cannot write {path}: {source}")]
    Unwritable {
        /// Which copy.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Copies what changed. A file that cannot be used never replaces a copy that can. Blocks.
///
/// # Errors
/// Returns the first failure, after both files were tried.
pub fn refresh(volumes: &Volumes, host: &HostRoot) -> Result<(), CredentialError> {
    make_directories(host)?;
    // Only the directory is resolved: a link in place of a copy is replaced, not followed.
    let dir = host.resolve(Path::new(AGENT_DIR));
    let target = |path: &str| dir.join(Path::new(path).file_name().unwrap_or_default());
    let token = copy("the agent's token", &volumes.token, &target(TOKEN_FILE), 0o600, is_token);
    let roots = copy("the TLS roots of the CA", &volumes.tls_ca, &target(TLS_CA_FILE), 0o644, is_pem);
    token.and(roots)
}

/// How the credentials stand after [`refresh`].
#[must_use]
pub fn standing(outcome: &Result<(), CredentialError>, volumes: &Volumes) -> Standing {
    match outcome {
        Ok(()) => Standing::good(format!("token and TLS roots are in {AGENT_DIR}")),
        Err(error @ CredentialError::Unreadable { path, .. }) => {
            Standing::bad(error.to_string()).advice(if *path == volumes.tls_ca {
                "the CA writes the ConfigMap nebula-trust when it starts: is nebula-ca running?"
            } else {
                "the agent's pod needs a projected volume with a token for the audience nebula-ca"
            })
        }
        Err(error @ CredentialError::Unwritable { .. }) => {
            Standing::bad(error.to_string()).advice("the agent must run as root, with the node's /run mounted writable")
        }
    }
}

fn make_directories(host: &HostRoot) -> Result<(), CredentialError> {
    for (path, mode) in [(STATE_DIR, 0o700), (AGENT_DIR, 0o700)] {
        let path = host.resolve(Path::new(path));
        if !path.is_dir() {
            let made = fs::DirBuilder::new().recursive(true).mode(mode).create(&path);
            made.map_err(|source| CredentialError::Unwritable { path, source })?;
        }
    }
    Ok(())
}

fn copy(
    what: &'static str,
    from: &Path,
    to: &Path,
    mode: u32,
    is_good: fn(&[u8]) -> Result<(), String>,
) -> Result<(), CredentialError> {
    let unreadable = |source| CredentialError::Unreadable { what, path: from.to_owned(), source };
    let bytes = durable::read_bounded(from, MAX_BYTES).map_err(unreadable)?;
    is_good(&bytes).map_err(|why| unreadable(io::Error::new(io::ErrorKind::InvalidData, why)))?;
    let is_there = fs::symlink_metadata(to).is_ok_and(|found| found.is_file() && found.mode() & 0o7777 == mode)
        && durable::read_bounded(to, MAX_BYTES).is_ok_and(|old| old == bytes);
    if is_there {
        return Ok(());
    }
    if let Some(dir) = to.parent() {
        durable::remove_stale(dir, |name| to.file_name().is_some_and(|file| file == name));
    }
    let written = durable::replace(to, mode, &mut bytes.as_slice(), |_| Ok(()));
    written.map_err(|source| CredentialError::Unwritable { path: to.to_owned(), source })
}

fn is_token(bytes: &[u8]) -> Result<(), String> {
    let text = bytes.trim_ascii();
    if text.is_empty() {
        Err("it is empty".to_owned())
    } else if text.iter().all(u8::is_ascii_graphic) {
        Ok(())
    } else {
        Err("it is no token".to_owned())
    }
}

fn is_pem(bytes: &[u8]) -> Result<(), String> {
    client::roots(bytes).map(drop).map_err(|error| error.to_string())
}

const MAX_BYTES: u64 = 256 << 10;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const PEM: &str = "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n";

    struct Fixture {
        dir: tempfile::TempDir,
        volumes: Volumes,
        host: HostRoot,
    }

    /// Volumes as the kubelet makes them: files are links through `..data`, which is replaced by rename.
    fn fixture() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("host")).unwrap();
        let volume = dir.path().join("volume");
        fs::create_dir(&volume).unwrap();
        for name in ["token", "tls.crt"] {
            symlink(format!("..data/{name}"), volume.join(name)).unwrap();
        }
        let fixture = Fixture {
            volumes: Volumes { token: volume.join("token"), tls_ca: volume.join("tls.crt") },
            host: HostRoot::new(Some(dir.path().join("host"))),
            dir,
        };
        fixture.publish("one", "first-token", PEM);
        fixture
    }

    impl Fixture {
        fn publish(&self, generation: &str, token: &str, pem: &str) {
            let volume = self.dir.path().join("volume");
            let data = volume.join(format!("..{generation}"));
            fs::create_dir(&data).unwrap();
            fs::write(data.join("token"), token).unwrap();
            fs::write(data.join("tls.crt"), pem).unwrap();
            symlink(format!("..{generation}"), volume.join("..data_tmp")).unwrap();
            fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
        }

        fn copies(&self) -> (String, String) {
            let read = |path: &str| fs::read_to_string(self.host.resolve(Path::new(path))).unwrap();
            (read(TOKEN_FILE), read(TLS_CA_FILE))
        }
    }

    #[test]
    fn copies_follow_each_rotation_and_only_root_reads_the_token() {
        let fixture = fixture();
        refresh(&fixture.volumes, &fixture.host).unwrap();
        assert_eq!(fixture.copies(), ("first-token".to_owned(), PEM.to_owned()));
        let mode = |path: &str| fs::metadata(fixture.host.resolve(Path::new(path))).unwrap().mode() & 0o7777;
        assert_eq!((mode(TOKEN_FILE), mode(TLS_CA_FILE), mode(STATE_DIR)), (0o600, 0o644, 0o700));
        fixture.publish("two", "second-token", PEM);
        refresh(&fixture.volumes, &fixture.host).unwrap();
        assert_eq!(fixture.copies().0, "second-token");
    }

    #[test]
    fn what_cannot_be_used_replaces_nothing_and_is_told() {
        let fixture = fixture();
        refresh(&fixture.volumes, &fixture.host).unwrap();
        let key = "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n";
        for (number, (token, pem)) in
            [("", PEM), ("two lines\nof it", PEM), ("new", ""), ("new", "{}"), ("new", key)].iter().enumerate()
        {
            fixture.publish(&format!("bad{number}"), token, pem);
            let outcome = refresh(&fixture.volumes, &fixture.host);
            let standing = standing(&outcome, &fixture.volumes);
            assert!(!standing.ok && !standing.advice.is_empty(), "{token} {pem}");
            assert!(!standing.reason.contains("two lines"), "the token is in the message");
            assert_eq!(fixture.copies().1, PEM);
        }
    }

    #[test]
    fn a_copy_that_somebody_changed_is_put_back() {
        let fixture = fixture();
        refresh(&fixture.volumes, &fixture.host).unwrap();
        let copy = fixture.host.resolve(Path::new(TOKEN_FILE));
        fs::remove_file(&copy).unwrap();
        symlink("/etc/passwd", &copy).unwrap();
        refresh(&fixture.volumes, &fixture.host).unwrap();
        assert!(fs::symlink_metadata(&copy).unwrap().is_file());
        assert_eq!(fixture.copies().0, "first-token");
    }
}

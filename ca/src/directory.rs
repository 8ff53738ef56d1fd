//! The service's directory: the names of its files, and how secrets are written and read.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use nebula_cert::durable;
use zeroize::Zeroizing;

/// A directory with everything one CA service needs.
#[derive(Debug, Clone)]
pub struct Directory(PathBuf);

/// A file of the directory cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {}", path.display())]
pub struct FileError {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

impl FileError {
    pub(crate) fn other(verb: &'static str, path: PathBuf, problem: &str) -> Self {
        Self { verb, path, source: io::Error::other(problem.to_owned()) }
    }
}

impl Directory {
    /// The directory at `path`; nothing is read yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Path of one file.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Whether a file exists; a dangling link counts.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.file(name).symlink_metadata().is_ok()
    }

    /// Reads a text file; the memory is wiped afterwards, since most of these files are secret.
    ///
    /// # Errors
    /// Returns an error if it is not readable, no Unicode, or absurdly long.
    pub fn read(&self, name: &str) -> Result<Zeroizing<String>, FileError> {
        let path = self.file(name);
        let failed = |source| FileError { verb: "read", path: path.clone(), source };
        let length = fs::metadata(&path).map_err(failed)?.len();
        if length > MAX_FILE_BYTES {
            return Err(failed(io::Error::other(format!("it has {length} bytes, more than any valid one"))));
        }
        let file = fs::File::open(&path).map_err(failed)?;
        nebula_cert::text::read(file, usize::try_from(length).unwrap_or_default() + 1).map_err(failed)
    }

    /// Creates the directory, accessible to its owner only, unless it exists.
    ///
    /// # Errors
    /// Returns an error if it cannot be created.
    pub fn make(&self) -> Result<(), FileError> {
        use std::os::unix::fs::DirBuilderExt;
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(|source| FileError { verb: "make directory", path: self.0.clone(), source })
    }

    /// Writes a file that does not exist yet, and syncs it to disk.
    ///
    /// # Errors
    /// Returns an error if it exists or cannot be written.
    pub fn write_new(&self, name: &str, text: &str, mode: u32) -> Result<(), FileError> {
        let path = self.file(name);
        let write = || {
            let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&path)?;
            hand_over(&file, &path)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()
        };
        write().map_err(|source| FileError { verb: "write", path: path.clone(), source })
    }

    /// Replaces a file atomically: readers see the old text or the new one.
    ///
    /// # Errors
    /// Returns an error if it cannot be written.
    pub fn replace(&self, name: &str, text: &str, mode: u32) -> Result<(), FileError> {
        let path = self.file(name);
        let own = |new: &Path| {
            let file = fs::File::open(new)?;
            hand_over(&file, new)?;
            file.sync_all()
        };
        let written = durable::replace_alone(&path, mode, &mut text.as_bytes(), own);
        written.map_err(|source| FileError { verb: "write", path, source })
    }

    /// Renames a file, replacing any file that has the new name.
    ///
    /// # Errors
    /// Returns an error if the file cannot be renamed.
    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), FileError> {
        let rename = || {
            fs::rename(self.file(from), self.file(to))?;
            fs::File::open(&self.0)?.sync_all()
        };
        rename().map_err(|source| FileError { verb: "rename", path: self.file(from), source })
    }

    /// Removes a file if it exists.
    ///
    /// # Errors
    /// Returns an error if it exists and cannot be removed.
    pub(crate) fn remove(&self, name: &str) -> Result<(), FileError> {
        match fs::remove_file(self.file(name)) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(FileError { verb: "remove", path: self.file(name), source })
            }
            _ => Ok(()),
        }
    }

    /// Makes the secrets in this directory private again where this process owns them: Kubernetes makes them readable
    /// to the group of a volume (`fsGroup`) on each mount. Returns those that others can still read. Group members may
    /// do so if this process reads them as a group member itself (a Secret that Kubernetes mounted).
    pub(crate) fn protect_secrets(&self) -> Vec<PathBuf> {
        let own = fs::metadata("/proc/self").map(|process| process.uid()).ok();
        let is_exposed = |path: &PathBuf| {
            let Ok(found) = fs::metadata(path) else { return false };
            let is_own = own == Some(found.uid());
            let exposing = if is_own { 0o077 } else { 0o037 };
            let is_private = || is_own && fs::set_permissions(path, fs::Permissions::from_mode(0o600)).is_ok();
            found.mode() & exposing != 0 && !is_private()
        };
        let secrets = [CA_KEY, TLS_KEY, NODE_TOKEN, RENEWAL_KEY, NEXT_KEY, PREVIOUS_KEY, DATABASE, STORE];
        secrets.into_iter().map(|name| self.file(name)).filter(is_exposed).collect()
    }
}

/// Gives a file that root created to the owner of its directory: commands are run as root, but the service may run as
/// another user, who must be able to read it.
pub(crate) fn hand_over(file: &fs::File, path: &Path) -> io::Result<()> {
    let (made, Some(directory)) = (file.metadata()?, path.parent()) else { return Ok(()) };
    let directory = fs::metadata(directory)?;
    if made.uid() != 0 || directory.uid() == 0 {
        return Ok(());
    }
    fchown(file, Some(directory.uid()), Some(directory.gid()))
}

/// CA certificates in PEM; the one that matches [`CA_KEY`] signs, all are handed out as trusted.
pub(crate) const CA_CERTIFICATE: &str = "ca.crt";
/// Key of the signing CA.
pub(crate) const CA_KEY: &str = "ca.key";
/// Key of the CA that signs next; exists during a rollover.
pub(crate) const NEXT_KEY: &str = "next.key";
/// Key of the CA that signed before; exists until a rollover is finished.
pub(crate) const PREVIOUS_KEY: &str = "previous.key";
/// TLS certificate chain of the service; clients trust it.
pub(crate) const TLS_CERTIFICATE: &str = "tls.crt";
/// TLS key of the service.
pub(crate) const TLS_KEY: &str = "tls.key";
/// Secret of the node proof.
pub(crate) const NODE_TOKEN: &str = "node.token";
/// Key with which holders of certificates prove possession.
pub(crate) const RENEWAL_KEY: &str = "renewal.key";
/// The policy.
pub(crate) const POLICY: &str = "policy.jsonc";
/// The ledger.
pub(crate) const STORE: &str = "store.redb";
/// How to reach the PostgreSQL server that holds the ledger instead; a URL or `key=value` pairs.
pub(crate) const DATABASE: &str = "database.url";
/// One JSON line per request that was answered or refused.
pub(crate) const AUDIT_LOG: &str = "audit.log";
/// Socket through which commands reach a running service.
pub(crate) const CONTROL_SOCKET: &str = "control.sock";

const MAX_FILE_BYTES: u64 = 4 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_saved_as_utf_16_is_read_and_other_bytes_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::new(folder.path());
        let saved = |bytes: &[u8]| {
            fs::write(folder.path().join(POLICY), bytes).unwrap();
            directory.read(POLICY)
        };
        let marked = "\u{feff}{\"a\": \"Gr\u{f6}\u{df}e\"}";
        let wide: Vec<u8> = marked.encode_utf16().flat_map(u16::to_le_bytes).collect();
        for bytes in [marked.as_bytes(), &wide] {
            assert_eq!(*saved(bytes).unwrap(), marked[3..]);
        }
        let error = nebula_cert::with_causes(&saved(b"{} // Gr\xf6\xdfe").unwrap_err());
        assert!(error.contains(POLICY) && error.contains("(byte 9): save it as UTF-8"), "{error}");
    }
}

//! Checks a program before it becomes the daemon: only root and the user of the daemon may be able to write it.

use std::ffi::OsStr;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use aws_lc_rs::digest::{Context, SHA256};
use nebula_cert::hex;

/// A checked program, held open: what is started is what was checked.
#[derive(Debug)]
pub(crate) struct Program {
    file: File,
    /// Where it was found.
    pub(crate) path: PathBuf,
}

/// Why a program does not become the daemon.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unfit {
    #[error("{0} is no absolute path")]
    Relative(PathBuf),
    #[error("cannot read {path}: {cause}")]
    Unreadable { path: PathBuf, cause: String },
    #[error("{0} is no file that can be executed")]
    NotExecutable(PathBuf),
    #[error("{0} belongs to another user, who could change it: give it to root")]
    Foreign(PathBuf),
    #[error("others may write {0}: take that right from them (chmod go-w)")]
    Writable(PathBuf),
    #[error("the SHA-256 of {path} is {found}, and {wanted} was asked for")]
    OtherDigest { path: PathBuf, found: String, wanted: String },
}

impl Program {
    /// Checks the program at `path`, which may be a link. `digest` is its SHA-256 in hexadecimal digits.
    ///
    /// # Errors
    /// Returns an error if it is not fit to be started by root.
    pub(crate) fn open(path: &Path, digest: Option<&str>) -> Result<Self, Unfit> {
        if !path.is_absolute() {
            return Err(Unfit::Relative(path.to_owned()));
        }
        let unreadable =
            |error: io::Error| Unfit::Unreadable { path: path.to_owned(), cause: error.kind().to_string() };
        let path = path.canonicalize().map_err(unreadable)?;
        // A pipe would wait for somebody who writes.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path).map_err(unreadable)?;
        let found = file.metadata().map_err(unreadable)?;
        if !found.is_file() || found.permissions().mode() & 0o111 == 0 {
            return Err(Unfit::NotExecutable(path));
        }
        check_owner(&path, &found)?;
        for folder in path.ancestors().skip(1) {
            check_owner(folder, &folder.metadata().map_err(unreadable)?)?;
        }
        let program = Self { file, path };
        digest.map_or(Ok(()), |wanted| program.check_digest(wanted))?;
        Ok(program)
    }

    /// Where the file was from which this process was started: after an update of a package there is another one.
    ///
    /// # Errors
    /// Returns an error if that is not known.
    pub(crate) fn usual() -> Result<PathBuf, Unfit> {
        let own = std::env::current_exe().map_err(|error| Unfit::Unreadable {
            path: PathBuf::from("/proc/self/exe"),
            cause: error.kind().to_string(),
        })?;
        let name = own.as_os_str().as_encoded_bytes();
        let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
        Ok(PathBuf::from(OsStr::from_bytes(name)))
    }

    /// The program that this process runs, also if its file was replaced since.
    pub(crate) fn of_this_process() -> io::Result<Self> {
        Ok(Self { file: File::open("/proc/self/exe")?, path: std::env::current_exe()? })
    }

    /// A path that a child of this process can execute.
    pub(super) fn executable(&self) -> String {
        format!("/proc/self/fd/{}", self.file.as_raw_fd())
    }

    fn check_digest(&self, wanted: &str) -> Result<(), Unfit> {
        let unreadable =
            |error: io::Error| Unfit::Unreadable { path: self.path.clone(), cause: error.kind().to_string() };
        let (mut context, mut chunk, mut file) = (Context::new(&SHA256), vec![0; 1 << 16], &self.file);
        loop {
            match file.read(&mut chunk).map_err(unreadable)? {
                0 => break,
                read => context.update(&chunk[..read]),
            }
        }
        let found = hex::encode(context.finish().as_ref());
        if found == wanted.to_ascii_lowercase() {
            return Ok(());
        }
        Err(Unfit::OtherDigest { path: self.path.clone(), found, wanted: wanted.to_owned() })
    }
}

/// Whether only root and the user of this process may change what is there. In a folder with the sticky bit others may
/// add files, and not replace these.
fn check_owner(path: &Path, found: &Metadata) -> Result<(), Unfit> {
    if ![0, nix::unistd::geteuid().as_raw()].contains(&found.uid()) {
        return Err(Unfit::Foreign(path.to_owned()));
    }
    let mode = found.permissions().mode();
    let is_sticky = found.is_dir() && mode & 0o1000 != 0;
    if mode & 0o022 != 0 && !is_sticky { Err(Unfit::Writable(path.to_owned())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_a_program_that_others_cannot_change_is_taken_and_only_the_one_that_was_meant() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("nebula");
        write(&path, "#!/bin/sh\n").unwrap();
        let with = |mode| {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Program::open(&path, None).map(|_| ()).map_err(|unfit| unfit.to_string())
        };
        assert!(with(0o755).is_ok());
        assert!(with(0o644).unwrap_err().contains("executed"));
        assert!(with(0o775).unwrap_err().contains("chmod"));
        assert!(with(0o757).unwrap_err().contains("chmod"));
        with(0o755).unwrap();
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert_eq!(Program::open(&link, None).unwrap().path, path.canonicalize().unwrap());
        // sha256sum of its content.
        let digest = "a8076d3d28d21e02012b20eaf7dbf75409a6277134439025f282e368e3305abf";
        assert!(Program::open(&path, Some(&digest.to_uppercase())).is_ok());
        let other = Program::open(&path, Some(&digest.replace('a', "b"))).unwrap_err();
        assert!(matches!(&other, Unfit::OtherDigest { found, .. } if found == digest), "{other}");
        assert!(matches!(Program::open(Path::new("nebula"), None), Err(Unfit::Relative(_))));
        assert!(matches!(Program::open(folder.path(), None), Err(Unfit::NotExecutable(_))));
        assert!(matches!(Program::open(&path.join("x"), None), Err(Unfit::Unreadable { .. })));
        let shared = folder.path().canonicalize().unwrap();
        set_permissions(&shared, Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(Program::open(&path, None), Err(Unfit::Writable(at)) if at == shared));
        set_permissions(folder.path(), Permissions::from_mode(0o1777)).unwrap();
        assert!(Program::open(&path, None).is_ok());
    }

    #[test]
    fn the_running_program_can_be_started_again_after_its_file_was_replaced() {
        let program = Program::of_this_process().unwrap();
        let said = std::process::Command::new(program.executable()).arg("--list").output().unwrap();
        assert!(said.status.success() && String::from_utf8_lossy(&said.stdout).contains(": test"));
    }
}

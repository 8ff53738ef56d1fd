//! The programs that instances run. Each lies beside the installed one under a name that says what it contains, as long
//! as an attachment names it: an instance that dies starts again with the program that it ran, and one that is given up
//! goes back to its own, whatever was installed meanwhile.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::attachment::record::{self, Found, Record};

/// What a program contains: the SHA-256 in hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

/// A text that is no SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a SHA-256 in hexadecimal digits")]
pub struct NoDigest;

impl TryFrom<String> for Digest {
    type Error = NoDigest;

    /// It becomes a part of a path, so nothing else may be in it.
    fn try_from(text: String) -> Result<Self, NoDigest> {
        let is_hash = text.len() == DIGITS && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if is_hash { Ok(Self(text)) } else { Err(NoDigest) }
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Digest {
    fn of(file: &mut File) -> io::Result<Self> {
        file.rewind()?;
        let (mut hash, mut chunk) = (Sha256::new(), vec![0; CHUNK]);
        let mut file = file.take(MAX_PROGRAM);
        loop {
            match file.read(&mut chunk)? {
                0 => break,
                read => hash.update(&chunk[..read]),
            }
        }
        Ok(Self(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()))
    }
}

/// Where the program with this digest is, if it is kept beside the installed one.
#[must_use]
pub fn path_of(installed: &Path, digest: &Digest) -> PathBuf {
    installed.with_file_name(format!("{}{digest}", prefix(installed)))
}

/// Keeps the installed program, also when another one takes its place, and returns its digest. It is read only if it
/// was not kept yet: a kept program is a hard link.
///
/// # Errors
/// Says why it is unfit to be started as root, or cannot be kept.
pub fn keep_installed(installed: &Path) -> Result<Digest, String> {
    check(installed)?;
    keep(installed, installed).map_err(|error| format!("cannot keep {}: {error}", installed.display()))
}

/// Keeps the program that process `pid` runs, also if its file was replaced or removed, and returns its digest.
///
/// # Errors
/// Says why it is unfit to be started as root, or cannot be kept.
pub fn keep_running(pid: i32, installed: &Path) -> Result<Digest, String> {
    let failed = |error: io::Error| format!("cannot keep the program of process {pid}: {error}");
    let running = PathBuf::from(format!("/proc/{pid}/exe"));
    // A process can execute only what its sandbox lets it, and this is started as root.
    if !is_ours(&fs::metadata(&running).map_err(failed)?) {
        return Err(format!("the program of process {pid} belongs to another user, or others may write it"));
    }
    keep(&running, installed).map_err(failed)
}

/// Keeps the copy that an earlier release made of the program that was replaced last on this node.
///
/// # Errors
/// Says why it is unfit to be started as root, or cannot be kept; there may be none.
pub fn keep_previous(installed: &Path) -> Result<Digest, String> {
    let previous = previous_of(installed);
    check(&previous)?;
    keep(&previous, installed).map_err(|error| format!("cannot keep {}: {error}", previous.display()))
}

/// The program with this digest, if it is there and fit to be started as root.
#[must_use]
pub fn kept(installed: &Path, digest: &Digest) -> Option<PathBuf> {
    let path = path_of(installed, digest);
    let is_file = fs::symlink_metadata(&path).is_ok_and(|found| found.is_file());
    (is_file && check(&path).is_ok()).then_some(path)
}

/// Whether a program is there that only root and the user of this process can change.
///
/// # Errors
/// Says what is wrong.
pub fn check(program: &Path) -> Result<(), String> {
    let shown = program.display();
    let program = program.canonicalize().map_err(|error| format!("cannot use {shown}: {error}"))?;
    let mut of_program = None;
    for path in program.ancestors() {
        let found = path.metadata().map_err(|error| format!("cannot use {shown}: {error}"))?;
        if !is_ours(&found) {
            return Err(format!("{} belongs to another user, or others may write it", path.display()));
        }
        of_program.get_or_insert(found);
    }
    match of_program {
        Some(found) if found.is_file() && found.mode() & 0o111 != 0 => Ok(()),
        _ => Err(format!("{shown} is no program")),
    }
}

/// Removes kept programs that no attachment names any more and no process runs, in the folders of the programs that
/// attachments have, and in `folder`.
pub fn sweep(state_dir: &Path, folder: Option<&Path>, now: SystemTime) {
    if fs::read_dir(state_dir).is_err() {
        return;
    }
    let mut named = BTreeSet::new();
    let mut installed: BTreeSet<PathBuf> = folder.map(|folder| folder.join(INSTANCE)).into_iter().collect();
    let mut previous = BTreeSet::new();
    for path in record::paths(state_dir) {
        match Record::load(&path) {
            Ok(Found::Record(record)) => {
                installed.insert(record.installed());
                if record.previous.is_none() {
                    previous.insert(previous_of(&record.installed()));
                }
                named.extend([record.program, record.previous].into_iter().flatten());
            }
            // It may name any.
            Ok(Found::Foreign(_)) | Err(_) => return,
            Ok(_) => {}
        }
    }
    for installed in installed {
        let current = fs::metadata(&installed).ok();
        for (digest, path) in all_beside(&installed) {
            let Ok(found) = fs::symlink_metadata(&path) else { continue };
            let is_current = current.as_ref().is_some_and(|current| id(current) == id(&found));
            // Its record may be about to be written.
            let is_new = now < SystemTime::UNIX_EPOCH + Duration::from_secs(found.ctime().max(0) as u64) + NAMED_WITHIN;
            if !is_current && !is_new && !named.contains(&digest) && !is_running(&path) {
                let _ = fs::remove_file(path);
            }
        }
        let of_earlier_release = previous_of(&installed);
        if !previous.contains(&of_earlier_release) {
            let _ = fs::remove_file(of_earlier_release);
        }
    }
}

/// Removes all programs that are kept beside the installed one.
///
/// # Errors
/// Returns the file system's first error.
pub fn remove_all(installed: &Path) -> io::Result<()> {
    let all = all_beside(installed).map(|(_, path)| path).chain([previous_of(installed)]);
    all.map(|path| match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    })
    .fold(Ok(()), io::Result::and)
}

/// Where an earlier release kept a copy of the program that was replaced last on this node.
fn previous_of(installed: &Path) -> PathBuf {
    installed.with_file_name(format!("{}{PREVIOUS}", prefix(installed)))
}

/// The installed program, for the one of a record, which an earlier release may have replaced by the previous one.
#[must_use]
pub fn installed_of(recorded: &Path) -> PathBuf {
    let name = recorded.file_name().unwrap_or_default().to_string_lossy();
    let installed = name.strip_prefix('.').and_then(|name| name.strip_suffix(PREVIOUS)?.strip_suffix('.'));
    installed.map_or_else(|| recorded.to_owned(), |name| recorded.with_file_name(name))
}

/// Whether a process runs it, of an attachment in another state directory: then the kernel lets nobody write it.
fn is_running(program: &Path) -> bool {
    let opened = File::options().write(true).open(program);
    opened.is_err_and(|error| error.kind() == io::ErrorKind::ExecutableFileBusy)
}

/// Keeps the program at `source` beside the installed one.
fn keep(source: &Path, installed: &Path) -> io::Result<Digest> {
    let mut from = File::options().read(true).custom_flags(nix::libc::O_NONBLOCK).open(source)?;
    let found = from.metadata()?;
    if !found.is_file() || found.len() > MAX_PROGRAM {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no program of ours"));
    }
    let is_it = |path: &Path| fs::symlink_metadata(path).is_ok_and(|kept| id(&kept) == id(&found));
    if let Some((digest, _)) = all_beside(installed).find(|(_, path)| is_it(path)) {
        return Ok(digest);
    }
    let digest = Digest::of(&mut from)?;
    let path = path_of(installed, &digest);
    let is_there = kept(installed, &digest).and_then(|path| fs::metadata(path).ok());
    let new = temporary(installed);
    // A process of the same number that was killed.
    let _ = fs::remove_file(&new);
    let placed = match link(&from, &new) {
        // From now on the installed one is found by its inode.
        Ok(()) => fs::rename(&new, &path),
        // Its file was removed, or the file system has no links.
        Err(_) if is_there.is_some_and(|kept| kept.len() == found.len()) => Ok(()),
        Err(_) => copy(&mut from, &new).and_then(|()| fs::rename(&new, &path)),
    };
    placed.inspect_err(|_| drop(fs::remove_file(&new)))?;
    Ok(digest)
}

/// The file itself, and not what is at its path by now.
fn link(file: &File, path: &Path) -> io::Result<()> {
    let itself = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    Ok(linkat(AT_FDCWD, &itself, AT_FDCWD, path, AtFlags::AT_SYMLINK_FOLLOW)?)
}

fn copy(from: &mut File, path: &Path) -> io::Result<()> {
    let mut to = File::options().write(true).create_new(true).mode(0o700).open(path)?;
    from.rewind()?;
    io::copy(from, &mut to)?;
    to.set_permissions(fs::Permissions::from_mode(0o755))?;
    to.sync_all()
}

/// Programs that are kept beside the installed one.
fn all_beside(installed: &Path) -> impl Iterator<Item = (Digest, PathBuf)> {
    let prefix = prefix(installed);
    let entries = installed.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let name = entry.file_name().into_string().ok()?;
        Some((Digest::try_from(name.strip_prefix(&prefix)?.to_owned()).ok()?, entry.path()))
    })
}

fn prefix(installed: &Path) -> String {
    format!(".{}.", installed.file_name().unwrap_or_default().to_string_lossy())
}

/// The agent removes what is left of such a file, as of its own, if this process is killed.
fn temporary(installed: &Path) -> PathBuf {
    installed.with_file_name(format!("{}tmp-{}-kept", prefix(installed), std::process::id()))
}

fn is_ours(found: &Metadata) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    // In a folder with the sticky bit others may add files, and not replace this one.
    let others_may_write = found.mode() & 0o022 != 0 && !(found.is_dir() && found.mode() & 0o1000 != 0);
    [0, own].contains(&found.uid()) && !others_may_write
}

fn id(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// File name of the installed program.
pub const INSTANCE: &str = "nebula-cni-instance";
const PREVIOUS: &str = "previous";
const DIGITS: usize = 64;
const CHUNK: usize = 64 << 10;
/// More than any program of ours has, also with debug information.
const MAX_PROGRAM: u64 = 512 << 20;
/// Between keeping a program and the record that names it: an ADD or an upgrade takes less.
const NAMED_WITHIN: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    fn place(folder: &tempfile::TempDir, bytes: &[u8]) -> PathBuf {
        let (new, installed) = (folder.path().join("new"), folder.path().join(INSTANCE));
        fs::write(&new, bytes).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&new, &installed).unwrap();
        installed
    }

    fn count(folder: &tempfile::TempDir) -> usize {
        fs::read_dir(folder.path()).unwrap().count()
    }

    #[test]
    fn a_program_that_others_may_change_is_not_started() {
        let folder = tempfile::tempdir().unwrap();
        let program = place(&folder, b"program");
        let with = |mode| {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            check(&program).and_then(|()| keep_installed(&program)).map(drop)
        };
        assert_eq!(with(0o755), Ok(()));
        assert!(with(0o644).unwrap_err().contains("no program"));
        assert!(with(0o777).unwrap_err().contains("others may write"));
        let digest = Digest::of(&mut File::open(&program).unwrap()).unwrap();
        assert!(kept(&program, &digest).is_none(), "it is the same file");
        with(0o755).unwrap();
        assert!(kept(&program, &digest).is_some());
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(check(&program).is_err() && kept(&program, &digest).is_none());
        assert!(check(&folder.path().join("none")).is_err());
        // A link to somewhere else in its place.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_file(path_of(&program, &digest)).unwrap();
        std::os::unix::fs::symlink("/bin/true", path_of(&program, &digest)).unwrap();
        assert!(kept(&program, &digest).is_none());
    }

    #[test]
    fn each_of_three_programs_is_kept_once_by_what_it_contains() {
        let folder = tempfile::tempdir().unwrap();
        let contents: [&[u8]; 3] = [b"one", b"two", b"three"];
        let digests = contents.map(|bytes| {
            let installed = place(&folder, bytes);
            let digest = keep_installed(&installed).unwrap();
            assert_eq!(keep_installed(&installed).unwrap(), digest, "and not read again");
            digest
        });
        let installed = folder.path().join(INSTANCE);
        assert_eq!(count(&folder), 4);
        for (digest, bytes) in digests.iter().zip(contents) {
            assert_eq!(fs::read(kept(&installed, digest).unwrap()).unwrap(), bytes);
        }
        // The same contents in another file are the same program, which is found at once from then on.
        let again = place(&folder, b"one");
        assert_eq!(keep_installed(&again).unwrap(), digests[0]);
        let inode = |path: &Path| fs::metadata(path).unwrap().ino();
        assert_eq!((count(&folder), inode(&path_of(&again, &digests[0]))), (4, inode(&again)));
    }

    #[test]
    fn the_program_of_a_process_is_kept_also_when_its_file_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let program = place(&folder, &fs::read("/bin/sleep").unwrap());
        let mut child = std::process::Command::new(&program).arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        fs::remove_file(&program).unwrap();
        let digest = keep_running(pid, &program).unwrap();
        let path = kept(&program, &digest).unwrap();
        assert_eq!(fs::read(&path).unwrap(), fs::read("/bin/sleep").unwrap());
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o755);
        let first = path.metadata().unwrap();
        assert_eq!((keep_running(pid, &program).unwrap(), count(&folder)), (digest, 1));
        assert_eq!(id(&path.metadata().unwrap()), id(&first), "made once");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(keep_running(pid, &program).is_err());
    }

    #[test]
    fn what_no_record_names_is_removed_after_a_while_but_for_the_installed_one() {
        let folder = tempfile::tempdir().unwrap();
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(state.path().join("net")).unwrap();
        let digests: Vec<_> = ["a", "b", "c", "d"]
            .map(|text| keep_installed(&place(&folder, text.as_bytes())).unwrap())
            .into_iter()
            .collect();
        let installed = folder.path().join(INSTANCE);
        fs::write(previous_of(&installed), "of an earlier release").unwrap();
        let text = format!(
            r#"{{"version":1,"state":"running","network":"net","container_id":"c","ifname":"eth0",
            "netns":"/run/netns/x","netns_id":[4,9],"pod":{{"namespace":"a","name":"b","uid":"c"}},
            "pod_address":"10.0.0.7","device":"nebula0","process":null,"status_socket":"/x",
            "instance":"{}","program":"{}","previous":"{}"}}"#,
            installed.display(),
            digests[1],
            digests[2],
        );
        let record = state.path().join("net/c-eth0.json");
        fs::write(&record, &text).unwrap();
        let there = || digests.iter().map(|digest| kept(&installed, digest).is_some()).collect::<Vec<_>>();
        let made = fs::metadata(path_of(&installed, &digests[3])).unwrap().ctime();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(made.try_into().unwrap());
        sweep(state.path(), None, now);
        assert_eq!(there(), [true; 4], "a record may be about to name it");
        let later = now + NAMED_WITHIN + Duration::from_secs(2);
        // One that this release cannot read may name any.
        let foreign = state.path().join("net/d-eth0.json");
        fs::write(&foreign, r#"{"version":2}"#).unwrap();
        sweep(state.path(), None, later);
        assert_eq!(there(), [true; 4]);
        fs::remove_file(foreign).unwrap();
        sweep(state.path(), None, later);
        assert_eq!(there(), [false, true, true, true]);
        assert!(!previous_of(&installed).exists(), "each pod has one of its own");
        fs::remove_file(record).unwrap();
        sweep(state.path(), Some(folder.path()), later);
        assert_eq!((there(), count(&folder)), (vec![false, false, false, true], 2));
        remove_all(&installed).unwrap();
        assert_eq!(count(&folder), 1);
    }

    #[test]
    fn a_digest_is_nothing_but_hexadecimal_digits() {
        let good = "0f".repeat(32);
        assert!(Digest::try_from(good.clone()).is_ok());
        for bad in ["", "../../x", &good[1..], &good.to_uppercase(), &format!("{}/", &good[1..])] {
            assert!(Digest::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_previous_program_of_an_earlier_release_lies_beside_the_installed_one() {
        let installed = Path::new("/opt/cni/bin/nebula-cni-instance");
        let previous = previous_of(installed);
        assert_eq!(previous, Path::new("/opt/cni/bin/.nebula-cni-instance.previous"));
        assert_eq!((installed_of(&previous), installed_of(installed)), (installed.to_owned(), installed.to_owned()));
    }
}

//! The programs that a container runtime calls, installed on the node and kept as they are in the agent's image.

use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::config::{INSTANCE, PLUGIN};
use crate::durable;
use crate::host_root::HostRoot;
use crate::process;
use crate::readiness::Standing;

/// The agent's copies of the programs, and what it knows about the installed ones.
#[derive(Debug)]
pub(crate) struct Programs {
    source: PathBuf,
    /// State of each installed file when it was last found equal to the agent's copy.
    known: Vec<(PathBuf, Stamp)>,
    swept: Vec<PathBuf>,
}

/// Why a program is not installed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum InstallError {
    /// The agent's image is not complete.
    #[error("cannot read {path} of the agent's image: {source}")]
    Source {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It cannot be written, or does not run there.
    #[error("cannot install {path}: {source}")]
    Target {
        /// Which file, as the agent sees it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Stamp([i64; 7]);

impl Stamp {
    fn of(found: &Metadata) -> Self {
        let mode = i64::from(found.mode());
        let (made, changed) = ((found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec()));
        Self([found.ino().cast_signed(), found.size().cast_signed(), mode, made.0, made.1, changed.0, changed.1])
    }
}

impl Programs {
    /// `source` is the directory that holds the agent's copies.
    #[must_use]
    pub(crate) fn new(source: PathBuf) -> Self {
        Self { source, known: Vec::new(), swept: Vec::new() }
    }

    /// Installs what is missing or differs in each of these directories. Blocks. Returns how many files were written.
    ///
    /// # Errors
    /// Returns the first failure, after everything was tried.
    pub(crate) fn install(&mut self, directories: &[PathBuf]) -> Result<usize, InstallError> {
        let mut outcome = Ok(0);
        for directory in directories {
            // The instance first: a plugin without it refuses every pod.
            for name in [INSTANCE, PLUGIN] {
                match (self.install_one(name, directory), &mut outcome) {
                    (Ok(written), Ok(count)) => *count += usize::from(written),
                    (Err(error), Ok(_)) => outcome = Err(error),
                    (_, Err(_)) => {}
                }
            }
        }
        outcome
    }

    fn install_one(&mut self, name: &str, directory: &Path) -> Result<bool, InstallError> {
        let (source, path) = (self.source.join(name), directory.join(name));
        let unreadable = |error| InstallError::Source { path: source.clone(), source: error };
        let failed = |error| InstallError::Target { path: path.clone(), source: error };
        if !self.swept.iter().any(|swept| swept == directory) {
            durable::remove_stale(directory, |name| [INSTANCE, PLUGIN].contains(&name));
            self.swept.push(directory.to_owned());
        }
        // Not followed: a link to somewhere else is not our program.
        let found = fs::symlink_metadata(&path).ok();
        let stamp = found.as_ref().map(Stamp::of);
        if stamp.is_some() && self.known.iter().any(|(known, at)| *known == path && Some(at) == stamp.as_ref()) {
            return Ok(false);
        }
        let is_file = found.is_some_and(|found| found.is_file() && found.mode() & 0o7777 == MODE);
        if is_file && same_content(&source, &path).map_err(unreadable)? {
            // From before the comparison: what is changed meanwhile, or right after the file was replaced, is seen at
            // the next look.
            self.known.retain(|(known, _)| *known != path);
            self.known.extend(stamp.map(|stamp| (path, stamp)));
            return Ok(false);
        }
        fs::DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(failed)?;
        let mut content = File::open(&source).map_err(unreadable)?;
        durable::replace(&path, MODE, &mut content, |new| runs(name, new)).map_err(failed)?;
        Ok(true)
    }
}

/// How the programs stand after an attempt to install them.
#[must_use]
pub(crate) fn standing(outcome: &Result<usize, InstallError>, directories: &[PathBuf], host: &HostRoot) -> Standing {
    let list = directories.iter().map(|dir| of_node(dir, host)).collect::<Vec<_>>().join(", ");
    match outcome {
        Ok(_) => Standing::good(format!("{PLUGIN} and {INSTANCE} are in {list}")),
        Err(error) => {
            let kind = match error {
                InstallError::Source { .. } => None,
                InstallError::Target { source, .. } => Some(source.kind()),
            };
            let advice = match kind {
                None => "the image of the agent is damaged, or the agent was started outside of it",
                Some(io::ErrorKind::ReadOnlyFilesystem) => {
                    "this directory is read-only on this node: let the runtime look for plugins in a writable one \
                     (containerd: bin_dir or bin_dirs, CRI-O: plugin_dirs), and name it in \"binDirs\""
                }
                Some(io::ErrorKind::PermissionDenied) => {
                    "the agent must run as root with the node's directories mounted writable; a file system mounted \
                     noexec cannot hold plugins"
                }
                Some(io::ErrorKind::StorageFull) => "make room on this file system of the node",
                Some(_) => "see docs/agent.md, \"Programs\"",
            };
            Standing::bad(error.to_string()).advice(advice)
        }
    }
}

/// A directory as the node names it, for messages.
fn of_node(path: &Path, host: &HostRoot) -> String {
    let inside = host.path().and_then(|root| path.strip_prefix(root).ok());
    inside.map_or_else(|| path.display().to_string(), |inside| format!("/{}", inside.display()))
}

/// Runs a program before it takes its place: a damaged one, or a directory that is mounted `noexec`, is found out
/// here and not by the next pod.
fn runs(name: &str, program: &Path) -> io::Result<()> {
    let mut command = Command::new(program);
    command.env_clear();
    if name != PLUGIN {
        let ended = process::run(command.arg("--version"), b"", CHECK_TIMEOUT)?;
        return if ended.status.success() { Ok(()) } else { Err(bad_program(&ended.stderr)) };
    }
    let ended = process::run(command.env("CNI_COMMAND", "VERSION"), br#"{"cniVersion":"1.0.0"}"#, CHECK_TIMEOUT)?;
    let reply: Value = serde_json::from_str(&ended.stdout).map_err(|_| bad_program(&ended.stderr))?;
    let is_plugin = reply["supportedVersions"].as_array().is_some_and(|list| list.iter().any(|v| v == "1.0.0"));
    if ended.status.success() && is_plugin { Ok(()) } else { Err(bad_program(&ended.stderr)) }
}

fn bad_program(said: &str) -> io::Error {
    io::Error::other(format!("it does not run: {said}"))
}

/// Whether two files have the same bytes. An error is about the first one; if the second cannot be read, it differs.
fn same_content(source: &Path, installed: &Path) -> io::Result<bool> {
    let mut source = File::open(source)?;
    let Ok(mut installed) = File::open(installed) else { return Ok(false) };
    if installed.metadata().map(|found| found.len()).ok() != Some(source.metadata()?.len()) {
        return Ok(false);
    }
    let (mut ours, mut theirs) = (vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let read = read_full(&mut source, &mut ours)?;
        let Ok(other) = read_full(&mut installed, &mut theirs) else { return Ok(false) };
        if ours[..read] != theirs[..other] {
            return Ok(false);
        }
        if read == 0 {
            return Ok(true);
        }
    }
}

fn read_full(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}

const MODE: u32 = 0o755;
const CHUNK: usize = 64 << 10;
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    const GOOD: &str = "#!/bin/sh\necho '{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"1.0.0\"]}'\n";

    struct Node {
        _dir: tempfile::TempDir,
        image: PathBuf,
        bin: PathBuf,
        programs: Programs,
    }

    fn node() -> Node {
        let dir = tempfile::tempdir().unwrap();
        let (image, bin) = (dir.path().join("image"), dir.path().join("opt/cni/bin"));
        fs::create_dir(&image).unwrap();
        for name in [PLUGIN, INSTANCE] {
            fs::write(image.join(name), GOOD).unwrap();
        }
        let programs = Programs::new(image.clone());
        Node { _dir: dir, image, bin, programs }
    }

    impl Node {
        fn install(&mut self) -> Result<usize, InstallError> {
            self.programs.install(std::slice::from_ref(&self.bin))
        }

        fn is_complete(&self) -> bool {
            let mut names: Vec<_> = fs::read_dir(&self.bin).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names == [INSTANCE, PLUGIN]
                && [PLUGIN, INSTANCE].iter().all(|name| {
                    let path = self.bin.join(name);
                    let found = fs::symlink_metadata(&path).unwrap();
                    found.is_file() && found.mode() & 0o7777 == 0o755 && fs::read(&path).unwrap() == GOOD.as_bytes()
                })
        }
    }

    #[test]
    fn programs_are_put_back_whatever_happened_to_them() {
        let mut node = node();
        assert_eq!(node.install().unwrap(), 2);
        assert!(node.is_complete());
        // A stamp taken after the file was replaced could be that of a change in between.
        assert!(node.programs.known.is_empty(), "not trusted before it was compared");
        assert_eq!(node.install().unwrap(), 0, "nothing to do");
        assert_eq!(node.programs.known.len(), 2);
        let path = node.bin.join(PLUGIN);
        for harm in [
            &(|| fs::remove_file(&path).unwrap()) as &dyn Fn(),
            &|| fs::write(&path, GOOD.replace("1.0.0", "9.9.9")).unwrap(),
            &|| fs::write(&path, "").unwrap(),
            &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap(),
            &|| fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap(),
            &|| {
                fs::remove_file(&path).unwrap();
                symlink("/bin/true", &path).unwrap();
            },
        ] {
            harm();
            assert_eq!(node.install().unwrap(), 1);
            assert!(node.is_complete());
        }
    }

    #[test]
    fn a_running_program_keeps_its_file() {
        let mut node = node();
        node.install().unwrap();
        let old = File::open(node.bin.join(PLUGIN)).unwrap();
        fs::write(node.image.join(PLUGIN), format!("{GOOD}# new\n")).unwrap();
        let mut next = Programs::new(node.image.clone());
        assert_eq!(next.install(std::slice::from_ref(&node.bin)).unwrap(), 1);
        assert_eq!(io::read_to_string(&old).unwrap(), GOOD);
        assert_eq!(old.metadata().unwrap().nlink(), 0, "replaced by rename");
    }

    #[test]
    fn a_damaged_program_never_takes_the_place_of_one_that_runs() {
        let mut node = node();
        node.install().unwrap();
        for bad in ["", "#!/bin/sh\nexit 1\n", "#!/bin/sh\necho no\n", "#!/no/such/shell\n", "#!/bin/sh\necho '{}'\n"] {
            fs::write(node.image.join(PLUGIN), bad).unwrap();
            let mut next = Programs::new(node.image.clone());
            let outcome = next.install(std::slice::from_ref(&node.bin));
            let standing = standing(&outcome, std::slice::from_ref(&node.bin), &HostRoot::default());
            assert!(!standing.ok && standing.reason.contains(PLUGIN), "{standing:?}");
            assert!(node.is_complete());
        }
    }

    #[test]
    fn leftovers_of_a_killed_agent_are_removed() {
        let mut node = node();
        fs::create_dir_all(&node.bin).unwrap();
        fs::write(node.bin.join(format!(".{PLUGIN}.tmp-1-0")), "half").unwrap();
        node.install().unwrap();
        assert!(node.is_complete());
    }

    #[test]
    fn a_directory_that_cannot_be_written_gets_a_hint_and_the_others_their_programs() {
        let mut node = node();
        let blocked = node.image.join(PLUGIN);
        let directories = [blocked.join("bin"), node.bin.clone()];
        let outcome = node.programs.install(&directories);
        assert!(outcome.is_err());
        assert!(node.is_complete());
        let read_only =
            InstallError::Target { path: "/host/x".into(), source: io::ErrorKind::ReadOnlyFilesystem.into() };
        let host = HostRoot::new(Some("/host".into()));
        let standing = standing(&Err(read_only), &["/host/opt/cni/bin".into()], &host);
        assert!(standing.advice.contains("binDirs"), "{standing:?}");
    }
}

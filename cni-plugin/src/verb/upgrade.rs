//! Replaces the instance of a running pod by another program while its connections go on: the installed one, or the one
//! before.
//!
//! The new instance takes over the device, the sockets, the certificate and the connections from the old one, which
//! goes on until the new one is ready, whatever that does. If the new one ends after it took over, the program of
//! before takes over from the old instance again.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::clock::Deadline;
use nebula_cni_contract::instance_status::{InstanceState, Status};
use serde::{Deserialize, Serialize};

use crate::attachment::lock::Lock;
use crate::attachment::record::{Files, Found, Record, State};
use crate::host::Host;
use crate::reply::{Error, code};
use crate::supervisor::{Known, Launch, StartFailure};

/// The program that is to take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The one that new pods get.
    Installed,
    /// The one that was replaced last on this node.
    Previous,
}

/// What became of the instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgraded {
    /// Whether another process serves now; `false`: it runs that program already.
    pub upgraded: bool,
    /// The process that serves.
    pub pid: i32,
    /// Its release, if it is known.
    pub version: Option<String>,
}

/// Has another program take over from the instance of an attachment.
///
/// # Errors
/// Code 3 if there is no such attachment. In all other cases but the last, the instance goes on with the program that
/// it had: code 11 if the pod cannot be handed over now, code 101 if its instance does not answer, code 105 if the
/// new program does not take over, or is not fit to be started. Code 120 if none serves, and one is started again.
pub fn run(files: &Files, target: Target, host: &Host<'_>) -> Result<Upgraded, Error> {
    let _lock = Lock::acquire(files, host.clock, Deadline::after(host.clock, LOCKED_WITHIN))?;
    let record = load(files)?;
    let pod = format!("pod {}/{}", record.target.pod.namespace, record.target.pod.name);
    let named = |code, why: String| Error::new(code, format!("{pod}: {why}"));
    let unreachable = |why: String| named(code::INSTANCE_UNREACHABLE, format!("its instance does not answer: {why}"));
    let unfit = |why: String| named(code::INSTANCE_FAILED, why);
    let installed = installed_of(&record.instance);
    let program = match target {
        Target::Installed => installed.clone(),
        Target::Previous => previous_of(&installed),
    };
    let wanted = check(&program).map_err(unfit)?;
    let mut upgrade = Upgrade { files, record, pod: &pod, host };
    let status = match upgrade.answer(|_| true) {
        Ok(status) => status,
        // It is dead, or might as well be: nothing is lost by the program before.
        Err(_) if target == Target::Previous => {
            return upgrade.start_again(&program).map_err(|why| named(code::INSTANCE_LOST, why));
        }
        Err(error) => return Err(unreachable(error.to_string())),
    };
    let pid = status.pid.ok_or_else(|| unreachable("it does not say which process it is".to_owned()))?;
    let running = running(pid).map_err(|error| unreachable(error.to_string()))?;
    if wanted == id(&running) {
        return Ok(Upgraded { upgraded: false, pid, version: status.version });
    }
    let record = &upgrade.record;
    if record.state != State::Running || status.state != InstanceState::Running {
        let why = format!("its instance is {}, and has nothing to hand over", status.state.word());
        return Err(named(code::TRY_AGAIN, why));
    }
    upgrade.keep_only(pid, ENDS_WITHIN).map_err(|why| named(code::TRY_AGAIN, why))?;
    let back = match target {
        Target::Installed => {
            keep(pid, &running, &previous_of(&installed))
                .map_err(|error| unfit(format!("cannot keep a copy of the program that it runs: {error}")))?;
            previous_of(&installed)
        }
        Target::Previous => installed,
    };
    match upgrade.attempt(pid, &program) {
        Ok((pid, version)) => Ok(Upgraded { upgraded: true, pid, version }),
        Err(failure) => Err(upgrade.recover(pid, &back, &failure)),
    }
}

struct Upgrade<'a> {
    files: &'a Files,
    record: Box<Record>,
    pod: &'a str,
    host: &'a Host<'a>,
}

impl Upgrade<'_> {
    /// Has `program` take over from process `old`; returns the new process and its release.
    fn attempt(&mut self, old: i32, program: &Path) -> Result<(i32, Option<String>), String> {
        let Self { files, record, pod, host } = self;
        let supervisor = host.supervisor(record.supervisor);
        let (netns, memory_limit, before) = (record.target.netns.clone(), record.memory_limit, record.process);
        let launch = Launch {
            instance: program,
            files,
            netns: &netns,
            description: &format!("Nebula tunnel of {pod}"),
            budget: TAKES_OVER_WITHIN,
            memory_limit,
            replaces: Some(old),
        };
        let mut started = |process| match process {
            Some(_) => {
                (record.process, record.predecessor) = (process, before);
                record.save(files)
            }
            None => Ok(()),
        };
        let deadline = Deadline::after(host.clock, TAKES_OVER_WITHIN);
        let ready = supervisor.start(&launch, host.clock, deadline, &mut started).map_err(|failure| said(&failure));
        // Until the old process is gone, either may answer.
        let of_another = |status: &Status| status.pid.is_some_and(|pid| pid != old);
        let serving = ready.and_then(|()| match self.answer(of_another) {
            Ok(Status { pid: Some(pid), version, .. }) => Ok((pid, version)),
            Ok(_) | Err(_) => Err(UNKNOWN.to_owned()),
        });
        let serves = serving.as_ref().map_or(old, |(pid, _)| *pid);
        // The new process must be gone before anybody else takes over from the old one.
        let alone = self.keep_only(serves, if serving.is_ok() { ENDS_WITHIN } else { Duration::ZERO });
        if serving.is_ok() {
            self.record.instance = program.to_owned();
        }
        let saved = self.record.save(self.files).map_err(|error| format!("cannot write the record: {error}"));
        // If these fail, the next call does it.
        if let (Ok(_), Err(why)) = (&serving, alone.and(saved)) {
            eprintln!("nebula-cni-plugin: {pod}: {why}", pod = self.pod);
        }
        serving
    }

    /// The status of the instance, once it is as `wanted`.
    fn answer(&self, wanted: impl Fn(&Status) -> bool) -> io::Result<Status> {
        let deadline = Deadline::after(self.host.clock, ANSWERS_WITHIN);
        loop {
            match Status::ask(&self.record.status_socket) {
                Ok(status) if wanted(&status) => return Ok(status),
                Ok(_) if deadline.is_over(self.host.clock) => return Err(io::ErrorKind::TimedOut.into()),
                Err(error) if deadline.is_over(self.host.clock) => return Err(error),
                _ => self.host.clock.sleep(ASK_AGAIN),
            }
        }
    }

    /// Waits until process `pid` is the only one, and notes it.
    fn keep_only(&mut self, pid: i32, patience: Duration) -> Result<(), String> {
        let processes = self.record.processes();
        let supervisor = self.host.supervisor(self.record.supervisor);
        supervisor.keep_only(self.files, pid, processes, patience, self.host.clock)?;
        self.record.process = processes.into_iter().flatten().find(|process| process.pid == pid);
        self.record.predecessor = None;
        Ok(())
    }

    /// After an attempt that failed: whoever serves goes on. If nobody does, the program of before, at `back`, takes
    /// over from process `old`, or is started.
    fn recover(&mut self, old: i32, back: &Path, failure: &str) -> Error {
        let Self { pod, .. } = *self;
        let still = Status::ask(&self.record.status_socket).ok().filter(|status| status.pid == Some(old));
        match still {
            Some(status) if status.state == InstanceState::Running => {
                let msg = format!("{pod}: its instance goes on with the program that it had");
                Error::new(code::INSTANCE_FAILED, msg).details(failure.to_owned())
            }
            Some(_) if self.attempt(old, back).is_ok() => {
                let msg = format!("{pod}: the program of before has taken over again");
                Error::new(code::INSTANCE_FAILED, msg).details(format!("the other one took over and ended: {failure}"))
            }
            _ => {
                let msg = format!("{pod}: neither program served, and its connections are lost");
                let now = match self.start_again(back) {
                    Ok(_) => "the program of before was started".to_owned(),
                    Err(why) => format!("the program of before cannot be started either: {why}"),
                };
                Error::new(code::INSTANCE_LOST, msg).details(format!("{failure}; {now}"))
            }
        }
    }

    /// Starts `program` in place of an instance that is dead or does not answer.
    fn start_again(&mut self, program: &Path) -> Result<Upgraded, String> {
        let Self { files, record, host, .. } = self;
        let supervisor = host.supervisor(record.supervisor);
        supervisor.stop(files, Known::Recorded(record.processes()), host.clock)?;
        let (netns, memory_limit) = (record.target.netns.clone(), record.memory_limit);
        record.instance = program.to_owned();
        let launch = Launch {
            instance: program,
            files,
            netns: &netns,
            description: &format!("Nebula tunnel of {}", self.pod),
            budget: TAKES_OVER_WITHIN,
            memory_limit,
            replaces: None,
        };
        let mut started = |process| {
            (record.process, record.predecessor) = (process, None);
            record.save(files)
        };
        supervisor.restart(&launch, host.clock, &mut started).map_err(|failure| said(&failure))?;
        let Status { pid, version, .. } =
            self.answer(|status| status.pid.is_some()).map_err(|error| format!("it does not answer: {error}"))?;
        Ok(Upgraded { upgraded: true, pid: pid.unwrap_or_default(), version })
    }
}

fn load(files: &Files) -> Result<Box<Record>, Error> {
    let path = files.record();
    match Record::load(&path) {
        Ok(Found::Record(record)) => Ok(record),
        Ok(Found::Nothing) => Err(Error::new(code::UNKNOWN_CONTAINER, format!("no record {}", path.display()))),
        Ok(Found::Garbage(why)) => Err(Error::new(code::IO, format!("record {}: {why}", path.display()))),
        Err(error) => Err(Error::new(code::IO, format!("cannot read {}: {error}", path.display()))),
    }
}

fn said(failure: &StartFailure) -> String {
    match failure {
        StartFailure::Ended { said, .. } | StartFailure::Deadline { said } if !said.is_empty() => {
            format!("{failure}: {said}")
        }
        failure => failure.to_string(),
    }
}

/// The program that process `pid` runs, also if its file was replaced or removed.
fn running(pid: i32) -> io::Result<Metadata> {
    fs::metadata(format!("/proc/{pid}/exe"))
}

fn id(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Where a copy of the program is that was replaced last.
#[must_use]
pub fn previous_of(installed: &Path) -> PathBuf {
    let name = installed.file_name().unwrap_or_default().to_string_lossy();
    installed.with_file_name(format!(".{name}.{PREVIOUS}"))
}

/// The installed program, for the recorded one, which may be the previous.
fn installed_of(recorded: &Path) -> PathBuf {
    let name = recorded.file_name().unwrap_or_default().to_string_lossy();
    let installed = name.strip_prefix('.').and_then(|name| name.strip_suffix(PREVIOUS)?.strip_suffix('.'));
    installed.map_or_else(|| recorded.to_owned(), |name| recorded.with_file_name(name))
}

/// Whether a program is there that only root and the user of this process can change; returns which file it is.
fn check(program: &Path) -> Result<(u64, u64), String> {
    let own = nix::unistd::geteuid().as_raw();
    let shown = program.display();
    let program = program.canonicalize().map_err(|error| format!("cannot use {shown}: {error}"))?;
    let mut of_program = None;
    for path in program.ancestors() {
        let found = path.metadata().map_err(|error| format!("cannot use {shown}: {error}"))?;
        // In a folder with the sticky bit others may add files, and not replace this one.
        let others_may_write = found.mode() & 0o022 != 0 && !(found.is_dir() && found.mode() & 0o1000 != 0);
        if ![0, own].contains(&found.uid()) || others_may_write {
            return Err(format!("{} belongs to another user, or others may write it", path.display()));
        }
        of_program.get_or_insert(found);
    }
    match of_program {
        Some(found) if found.is_file() && found.mode() & 0o111 != 0 => Ok(id(&found)),
        _ => Err(format!("{shown} is no program")),
    }
}

/// Keeps a copy of the program that process `pid` runs, at `path`.
fn keep(pid: i32, running: &Metadata, path: &Path) -> io::Result<()> {
    let mut from = File::open(format!("/proc/{pid}/exe"))?;
    let is_there = fs::metadata(path).is_ok_and(|found| id(&found) == id(running));
    if is_there || is_copy(&mut from, path) {
        return Ok(());
    }
    // The agent removes what is left of such a file if this process is killed.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let new = path.with_file_name(format!(".{}.tmp-{}", name.trim_start_matches('.'), std::process::id()));
    let written = File::options().write(true).create_new(true).mode(0o700).open(&new).and_then(|mut to| {
        io::Seek::rewind(&mut from)?;
        io::copy(&mut from, &mut to)?;
        to.set_permissions(fs::Permissions::from_mode(0o755))?;
        to.sync_all()
    });
    let placed = written.and_then(|()| fs::rename(&new, path));
    placed.inspect_err(|_| drop(fs::remove_file(&new)))
}

fn is_copy(from: &mut File, path: &Path) -> bool {
    use io::Read as _;
    let Ok(mut there) = File::open(path) else { return false };
    let length = |file: &File| file.metadata().map(|found| found.len()).ok();
    if length(from) != length(&there) {
        return false;
    }
    let (mut ours, mut theirs) = (vec![0; CHUNK], vec![0; CHUNK]);
    loop {
        let Ok(read) = from.read(&mut ours) else { return false };
        if read == 0 {
            return true;
        }
        if there.read_exact(&mut theirs[..read]).is_err() || ours[..read] != theirs[..read] {
            return false;
        }
    }
}

const PREVIOUS: &str = "previous";
const UNKNOWN: &str = "it said that it serves, and the old one answers";
const CHUNK: usize = 64 << 10;
const LOCKED_WITHIN: Duration = Duration::from_secs(2);
// It takes some milliseconds. A program that hangs is given up within the ten seconds that the old instance waits.
const TAKES_OVER_WITHIN: Duration = Duration::from_secs(8);
// An old instance that has handed over.
const ENDS_WITHIN: Duration = Duration::from_secs(2);
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_previous_program_lies_beside_the_installed_one() {
        let installed = Path::new("/opt/cni/bin/nebula-cni-instance");
        let previous = previous_of(installed);
        assert_eq!(previous, Path::new("/opt/cni/bin/.nebula-cni-instance.previous"));
        assert_eq!(installed_of(&previous), installed);
        assert_eq!(installed_of(installed), installed);
    }

    #[test]
    fn a_program_that_others_may_change_is_not_started() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("instance");
        fs::copy("/bin/true", &program).unwrap();
        let with = |mode| {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
            check(&program).map(drop)
        };
        assert_eq!(with(0o755), Ok(()));
        assert!(with(0o644).unwrap_err().contains("no program"));
        assert!(with(0o777).unwrap_err().contains("others may write"));
        with(0o755).unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        assert!(check(&program).is_err());
        assert!(check(&folder.path().join("none")).is_err());
    }

    #[test]
    fn a_copy_of_a_running_program_is_kept_and_made_once() {
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join(".instance.previous");
        let pid = i32::try_from(std::process::id()).unwrap();
        let own = running(pid).unwrap();
        fs::write(&copy, "of an earlier version").unwrap();
        keep(pid, &own, &copy).unwrap();
        let first = fs::metadata(&copy).unwrap();
        assert_eq!(fs::read(&copy).unwrap(), fs::read("/proc/self/exe").unwrap());
        assert_eq!(first.mode() & 0o7777, 0o755);
        keep(pid, &own, &copy).unwrap();
        assert_eq!(id(&fs::metadata(&copy).unwrap()), id(&first));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

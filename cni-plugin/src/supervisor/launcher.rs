//! The moment between the plugin and the instance: the plugin's own binary, run once more, waits until it is recorded,
//! leaves the runtime's session and becomes the instance. Its process number is the instance's.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::{Mode, umask};
use nix::unistd::setsid;

use super::log;

/// First argument of a launcher. Runtimes call plugins without arguments.
pub const VERB: &str = "launch-instance";

/// Control groups as one argument; their names hold no colon.
pub(super) fn joined(groups: &[PathBuf]) -> OsString {
    groups.iter().map(|group| group.as_os_str()).collect::<Vec<_>>().join(OsStr::new(":"))
}

/// Becomes the instance. `arguments` follow [`VERB`]: control groups ("" for none), why its memory is not limited (""
/// if it is), program, its arguments. Returns only on failure, or (without error) when the plugin died before it let us
/// go.
///
/// # Errors
/// What could not be done.
pub fn run(arguments: &[OsString]) -> Result<(), String> {
    let [groups, unlimited, program, rest @ ..] = arguments else {
        return Err("launcher: too few arguments".to_owned());
    };
    let mut go = [0];
    if io::stdin().read_exact(&mut go).is_err() {
        return Ok(());
    }
    setsid().map_err(|e| format!("cannot leave the session of the runtime: {}", e.desc()))?;
    umask(Mode::from_bits_truncate(0o077));
    limit_log().map_err(|e| format!("cannot limit the log: {}", e.desc()))?;
    for group in groups.as_bytes().split(|byte| *byte == b':').filter(|group| !group.is_empty()) {
        let group = Path::new(OsStr::from_bytes(group));
        // Version 1 has it, and takes a single thread without waiting for all others of the machine.
        let tasks = group.join("tasks");
        let members = if tasks.exists() { tasks } else { group.join("cgroup.procs") };
        if let Err(e) = fs::write(members, "0") {
            eprintln!("stays in the runtime's control group: {}: {e}", group.display());
        }
    }
    if !unlimited.is_empty() {
        eprintln!("the memory of this instance is not limited: {}", unlimited.display());
    }
    let error = Command::new(program).args(rest).stdin(Stdio::null()).exec();
    Err(format!("cannot run {}: {error}", program.display()))
}

// With the signal blocked, a write beyond the limit is an error to the writer and not its end.
fn limit_log() -> nix::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block()?;
    setrlimit(Resource::RLIMIT_FSIZE, log::MAX, log::MAX)
}

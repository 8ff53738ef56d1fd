//! The launcher: the plugin's own binary, started again, waits until its process is recorded, leaves the runtime's
//! session and then becomes the instance by exec, keeping its process id.

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

/// First argument that makes this program a launcher. Runtimes call plugins without arguments.
pub const VERB: &str = "launch-instance";

/// Joins control groups into one argument; their names contain no colon.
pub(super) fn joined(groups: &[PathBuf]) -> OsString {
    groups.iter().map(|group| group.as_os_str()).collect::<Vec<_>>().join(OsStr::new(":"))
}

/// Becomes the instance. `arguments` are those after [`VERB`]: control groups ("" for none), the reason why memory is
/// not limited ("" if there is none), the program, and its arguments. Returns only on failure, or without error if the
/// plugin died before it released us.
///
/// # Errors
/// Returns a message that says which step failed.
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
    // Else it is the runtime's, which is ended last of all.
    if let Err(e) = fs::write("/proc/self/oom_score_adj", super::OOM_SCORE_ADJUST.to_string()) {
        eprintln!("keeps the runtime's place in the order in which the kernel ends processes: {e}");
    }
    limit_log().map_err(|e| format!("cannot limit the log: setrlimit(RLIMIT_FSIZE): {}", e.desc()))?;
    for group in groups.as_bytes().split(|byte| *byte == b':').filter(|group| !group.is_empty()) {
        let group = Path::new(OsStr::from_bytes(group));
        // Version 1 has `tasks`, which moves a single thread without taking the lock shared by all threads on the
        // machine.
        let tasks = group.join("tasks");
        let members = if tasks.exists() { tasks } else { group.join("cgroup.procs") };
        if let Err(e) = fs::write(members, "0") {
            eprintln!("stays in the control group of its caller: cannot join {}: {e}", group.display());
        }
    }
    if !unlimited.is_empty() {
        eprintln!("the memory of this instance is not limited: {}", unlimited.display());
    }
    let error = Command::new(program).args(rest).stdin(Stdio::null()).exec();
    Err(format!("cannot run {}: {error}", program.display()))
}

// With SIGXFSZ blocked, a write beyond the limit fails instead of killing the writer.
fn limit_log() -> nix::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block()?;
    setrlimit(Resource::RLIMIT_FSIZE, log::MAX, log::MAX)
}

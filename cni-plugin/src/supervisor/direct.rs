//! Supervision without a service manager: the instance in its own session and control group, adopted by init when the
//! plugin ends.

use std::env;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::notify::NotifySocket;
use super::process::{self, Process};
use super::{StartFailure, Supervisor, cgroup, launcher};
use crate::host::{Clock, Deadline};
use crate::record::Files;

/// Starts instances as processes of its own making.
#[derive(Debug)]
pub struct Direct {
    launcher: PathBuf,
}

impl Direct {
    /// With this binary itself as the launcher.
    #[must_use]
    pub fn new() -> Self {
        // Still the running binary when an upgrade has replaced the file.
        Self { launcher: PathBuf::from("/proc/self/exe") }
    }
}

impl Default for Direct {
    fn default() -> Self {
        Self::new()
    }
}

impl Supervisor for Direct {
    fn start(
        &self,
        instance: &Path,
        files: &Files,
        clock: &dyn Clock,
        deadline: Deadline,
        started: &mut dyn FnMut(Process) -> io::Result<()>,
    ) -> Result<(), StartFailure> {
        let socket = NotifySocket::bind(&files.notify_socket()).map_err(StartFailure::Spawn)?;
        let mut child = self.spawn(instance, files).map_err(StartFailure::Spawn)?;
        release(&mut child, started)?;
        wait_until_ready(&mut child, &socket, files, clock, deadline)
    }

    fn is_alive(&self, process: Process) -> bool {
        process.is_alive()
    }

    fn find(&self, files: &Files) -> Vec<Process> {
        process::with_arguments(LAUNCH, &files.launch())
    }

    fn stop(&self, process: Process, clock: &dyn Clock) -> Result<(), String> {
        process.stop(clock)
    }

    fn clean_up(&self, files: &Files, clock: &dyn Clock) {
        // A process that just ended leaves its group a moment later.
        let deadline = Deadline::after(clock, Duration::from_millis(200));
        while !cgroup::remove(files.key()) && !deadline.is_over(clock) {
            clock.sleep(POLL);
        }
    }
}

impl Direct {
    fn spawn(&self, instance: &Path, files: &Files) -> io::Result<Child> {
        let log = OpenOptions::new().append(true).create(true).mode(0o600).open(files.log())?;
        // The environment and the directory are the runtime's own and none of the instance's business.
        Command::new(&self.launcher)
            .arg(launcher::VERB)
            .arg(cgroup::create(files.key()).unwrap_or_default())
            .arg(instance)
            .arg(LAUNCH)
            .arg(files.launch())
            .env_clear()
            .envs(env::var_os("PATH").map(|path| ("PATH", path)))
            .env("NOTIFY_SOCKET", files.notify_socket())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
    }
}

// Until the byte arrives the launcher waits; if the plugin dies first, the launcher ends.
fn release(child: &mut Child, started: &mut dyn FnMut(Process) -> io::Result<()>) -> Result<(), StartFailure> {
    let gate = child.stdin.take();
    let recorded = Process::with_pid(pid_of(child))
        .ok_or_else(|| io::Error::other("it has ended at once"))
        .and_then(&mut *started);
    if let Err(e) = recorded {
        drop(gate);
        let _ = child.kill();
        let _ = child.wait();
        return Err(StartFailure::Record(e));
    }
    // A launcher that is gone shows in the wait that follows.
    let _ = gate.map(|mut gate| gate.write_all(b"\n"));
    Ok(())
}

fn wait_until_ready(
    child: &mut Child,
    socket: &NotifySocket,
    files: &Files,
    clock: &dyn Clock,
    deadline: Deadline,
) -> Result<(), StartFailure> {
    let pid = pid_of(child);
    let mut last_status = None;
    loop {
        let ended = child.try_wait().map_err(StartFailure::Spawn)?;
        // First the exit, then the socket: what it said before it ended is in there by now.
        let patience = if ended.is_some() { Duration::ZERO } else { POLL.min(deadline.left(clock)) };
        while let Some(notification) = socket.receive(pid, patience).map_err(StartFailure::Spawn)? {
            last_status = notification.status.or(last_status);
            if notification.ready && ended.is_none() {
                return Ok(());
            }
        }
        if let Some(status) = ended {
            return Err(StartFailure::Ended {
                status: status.to_string(),
                said: last_words(last_status, &files.log()),
            });
        }
        if deadline.is_over(clock) {
            return Err(StartFailure::Deadline {
                said: last_status.or_else(|| last_line(&files.log())).unwrap_or_default(),
            });
        }
    }
}

/// The status, and the last line of the log if that says something else: a crash has no status.
fn last_words(status: Option<String>, log: &Path) -> String {
    let line = last_line(log).filter(|line| status.as_ref().is_none_or(|status| !line.contains(status)));
    status.into_iter().chain(line).collect::<Vec<_>>().join("; ")
}

fn pid_of(child: &Child) -> i32 {
    i32::try_from(child.id()).unwrap_or_default()
}

/// The last line of a log that is not empty, from its last bytes only.
fn last_line(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL))).ok()?;
    let mut tail = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut tail).ok()?;
    let text = String::from_utf8_lossy(&tail);
    text.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(str::to_owned)
}

const LAUNCH: &str = "--launch";
const LOG_TAIL: u64 = 4096;
const POLL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_log_is_the_last_that_says_something() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert_eq!(last_line(&path), None);
        std::fs::write(&path, "").unwrap();
        assert_eq!(last_line(&path), None);
        std::fs::write(&path, format!("{}\nfirst\n  last \n\n", "x".repeat(10_000))).unwrap();
        assert_eq!(last_line(&path).as_deref(), Some("last"));
    }
}

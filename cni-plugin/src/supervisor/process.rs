//! Processes, identified so that a later one with the same process id is not mistaken for them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

/// A process id with the start time of the process, in clock ticks since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: i32,
    /// Start time, field 22 of /proc/PID/stat.
    pub start_time: u64,
}

impl Process {
    /// The process that currently has this id.
    #[must_use]
    pub fn with_pid(pid: i32) -> Option<Self> {
        Some(Self { pid, start_time: stat(pid)?.start_time })
    }

    /// Whether it is running. A zombie is not, though its last threads may hold files open for a while.
    #[must_use]
    pub fn is_alive(self) -> bool {
        self.stat().is_some_and(|stat| !stat.is_zombie())
    }

    /// Whether it has ended with all of its threads, so that everything it held is released. A zombie with no other
    /// threads only waits for its parent.
    #[must_use]
    pub fn is_gone(self) -> bool {
        self.stat().is_none_or(|stat| stat.is_zombie() && stat.threads <= 1)
    }

    fn stat(self) -> Option<Stat> {
        stat(self.pid).filter(|stat| stat.start_time == self.start_time)
    }

    /// Sends SIGHUP.
    ///
    /// # Errors
    /// Returns an error if it does not run.
    pub fn hang_up(self) -> Result<(), String> {
        if !self.is_alive() {
            return Err(format!("process {} does not run", self.pid));
        }
        kill(Pid::from_raw(self.pid), Signal::SIGHUP).map_err(|e| format!("process {}: {}", self.pid, e.desc()))
    }

    /// Waits until it has ended; sends SIGKILL if it does not within `patience`.
    ///
    /// # Errors
    /// Returns an error if it is still running.
    pub fn await_end(self, patience: Duration, clock: &dyn Clock) -> Result<(), String> {
        self.wait(patience, clock);
        if !self.is_gone() {
            let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
            self.wait(SIGKILL_TIMEOUT, clock);
        }
        if self.is_gone() { Ok(()) } else { Err(format!("process {} still runs", self.pid)) }
    }

    fn wait(self, patience: Duration, clock: &dyn Clock) {
        let deadline = Deadline::after(clock, patience);
        while !self.is_gone() && !deadline.is_over(clock) {
            clock.sleep(EXIT_POLL_INTERVAL);
        }
    }

    /// Sends SIGTERM, then SIGKILL.
    ///
    /// # Errors
    /// Returns an error if it is still running.
    pub fn stop(self, clock: &dyn Clock) -> Result<(), String> {
        let mut refused = String::new();
        for (signal, patience) in [(Signal::SIGTERM, SIGTERM_TIMEOUT), (Signal::SIGKILL, SIGKILL_TIMEOUT)] {
            if self.is_gone() {
                return Ok(());
            }
            if let Err(e) = kill(Pid::from_raw(self.pid), signal) {
                refused = format!(": {signal} failed: {}", e.desc());
            }
            self.wait(patience, clock);
        }
        if self.is_gone() { Ok(()) } else { Err(format!("process {} still runs{refused}", self.pid)) }
    }
}

/// Finds the running processes that have `option` followed by `value` among their arguments.
#[must_use]
pub fn with_arguments(option: &str, value: &Path) -> Vec<Process> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let is_ours = |pid: &i32| {
        let Ok(arguments) = fs::read(format!("/proc/{pid}/cmdline")) else { return false };
        let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
        arguments.windows(2).any(|pair| pair[0] == option.as_bytes() && pair[1] == value.as_os_str().as_bytes())
    };
    pids.filter(is_ours).filter_map(Process::with_pid).filter(|process| process.is_alive()).collect()
}

/// The values that running processes have behind `option` among their arguments.
#[must_use]
pub fn arguments_behind(option: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let value = |pid: i32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let mut arguments = arguments.split(|byte| *byte == 0);
        arguments.find(|argument| *argument == option.as_bytes())?;
        Some(PathBuf::from(OsStr::from_bytes(arguments.next()?)))
    };
    pids.filter_map(value).collect()
}

/// The fields of /proc/PID/stat that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    state: char,
    threads: u32,
    start_time: u64,
}

impl Stat {
    fn is_zombie(self) -> bool {
        "ZX".contains(self.state)
    }
}

fn stat(pid: i32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

// The line is "PID (NAME) STATE ...". The name may contain spaces and parentheses, so count the fields from its end.
fn parse_stat(line: &str) -> Option<Stat> {
    let mut fields = line.get(line.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let threads = fields.nth(16)?.parse().ok()?;
    Some(Stat { state, threads, start_time: fields.nth(1)?.parse().ok()? })
}

const SIGTERM_TIMEOUT: Duration = Duration::from_secs(2);
// A killed process cannot refuse, but it ends only when its tun device is gone, and the kernel removes those of a
// node one after another: a hundred at once take tens of seconds on a busy node. Kubelets wait for two minutes.
const SIGKILL_TIMEOUT: Duration = Duration::from_secs(60);
// Short, because a runtime is waiting and one check takes only some twenty microseconds.
const EXIT_POLL_INTERVAL: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use nebula_cni_contract::clock::SystemClock;

    #[test]
    fn the_start_time_is_found_behind_any_process_name() {
        let tail = "S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        let stat = Stat { state: 'S', threads: 17, start_time: 4711 };
        assert_eq!(parse_stat(&format!("9 (a b) c) {tail}")), Some(stat));
        for bad in ["", "9 (x", "9 (x)", "9 (x) S 1"] {
            assert_eq!(parse_stat(bad), None);
        }
    }

    #[test]
    fn a_process_is_stopped_and_another_with_its_number_is_not_touched() {
        let mut child = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().unwrap();
        let process = Process::with_pid(child.id() as i32).unwrap();
        let earlier = Process { start_time: process.start_time - 1, ..process };
        assert!(process.is_alive() && !earlier.is_alive());
        earlier.stop(&SystemClock).unwrap();
        assert!(process.is_alive());
        process.stop(&SystemClock).unwrap();
        assert!(!process.is_alive() && process.is_gone(), "a zombie without threads counts as gone");
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_ignores_sigterm_is_killed() {
        let script = "trap '' TERM; echo ready; while :; do sleep 1; done";
        let mut child = Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
        let process = Process::with_pid(child.id() as i32).unwrap();
        process.stop(&SystemClock).unwrap();
        assert!(!process.is_alive());
        child.wait().unwrap();
    }

    #[test]
    fn a_process_is_found_by_its_arguments() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "echo ready; read x", "--launch"])
            .arg(dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The arguments become visible in /proc a moment after `spawn` returns.
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        let found = with_arguments("--launch", dir.path());
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.iter().map(|p| p.pid).collect::<Vec<_>>(), [child.id() as i32]);
        assert_eq!(with_arguments("--launch", dir.path()), []);
    }
}

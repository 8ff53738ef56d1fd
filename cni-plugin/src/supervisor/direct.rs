//! Supervision without a service manager: the instance runs in its own session and control group, and init adopts it
//! when the plugin exits.

use std::env;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, PipeWriter, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::clock::{Clock, Deadline};

use super::child::{Child, Program};
use super::heir::Heir;
use super::notify::NotifySocket;
use super::process::{self, Process};
use super::{
    Known, LAUNCH_OPTION, Launch, StartFailure, Supervisor, TAKE_OVER_OPTION, TOO_MUCH_MEMORY, cgroup, launcher, log,
    read_status,
};
use crate::attachment::files::Files;

/// Starts instances as child processes.
#[derive(Debug)]
pub struct Direct {
    launcher: PathBuf,
}

impl Direct {
    /// Uses this binary as the launcher.
    #[must_use]
    pub fn new() -> Self {
        // This is still the running binary after an upgrade has replaced the file.
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
        launch: &Launch<'_>,
        clock: &dyn Clock,
        deadline: Deadline,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure> {
        let socket = launch.files.notify_socket();
        let socket = NotifySocket::bind(&socket).map_err(StartFailure::Spawn)?;
        let (mut child, gate) = self.spawn(launch, true).map_err(StartFailure::Spawn)?;
        release(&mut child, gate, started)?;
        wait_until_ready(&mut child, &socket, launch.files, clock, deadline)
    }

    fn restart(
        &self,
        launch: &Launch<'_>,
        _: &dyn Clock,
        started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
    ) -> Result<(), StartFailure> {
        let (mut child, gate) = self.spawn(launch, false).map_err(StartFailure::Spawn)?;
        release(&mut child, gate, started)
    }

    fn reload(&self, _: &Files, process: Option<Process>, _: &dyn Clock) -> Result<(), String> {
        process.ok_or_else(|| "no instance was started".to_owned())?.hang_up()
    }

    fn is_alive(&self, files: &Files, process: Option<Process>, _: &dyn Clock) -> bool {
        log::cut(&files.log());
        process.is_some_and(Process::is_alive)
    }

    fn keep_only(
        &self,
        _: &Files,
        pid: i32,
        processes: [Option<Process>; 2],
        patience: Duration,
        clock: &dyn Clock,
    ) -> Result<(), String> {
        let others = processes.into_iter().flatten().filter(|process| process.pid != pid);
        // All of them, even if one fails.
        others.map(|process| process.await_end(patience, clock)).fold(Ok(()), Result::and)
    }

    fn stop(&self, files: &Files, known: Known, clock: &dyn Clock) -> Result<(), String> {
        let processes = match known {
            Known::Recorded(processes) => processes.into_iter().flatten().collect(),
            Known::Nothing => process::with_arguments(LAUNCH_OPTION, &files.launch()),
        };
        let is_awaited = processes.iter().any(|process| !process.is_gone());
        // Without an heir, stopping still works but takes longer.
        let _heir = is_awaited.then(|| Heir::start(&self.launcher, &files.device_socket()));
        // Stops all of them, even if one fails.
        let ends: Vec<Result<(), String>> = processes.into_iter().map(|process| process.stop(clock)).collect();
        ends.into_iter().collect()
    }

    fn clean_up(&self, files: &Files, clock: &dyn Clock) {
        // A process that has just ended leaves its group a moment later.
        let deadline = Deadline::after(clock, Duration::from_millis(200));
        while !cgroup::remove(files.key()) && !deadline.is_over(clock) {
            clock.sleep(LEAVES_WITHIN);
        }
    }

    fn restarts_by_itself(&self) -> bool {
        false
    }

    fn why_ended(&self, files: &Files, _: &dyn Clock) -> Option<String> {
        (cgroup::memory_kills(files.key()) > 0).then(|| TOO_MUCH_MEMORY.to_owned())
    }
}

impl Direct {
    /// The launcher, and what it waits for.
    fn spawn(&self, launch: &Launch<'_>, somebody_waits: bool) -> io::Result<(Child, PipeWriter)> {
        let files = launch.files;
        let (log, output) = (log::open(&files.log())?, File::options().write(true).open("/dev/null")?);
        let (gate, opener) = io::pipe()?;
        let groups = cgroup::create(files.key(), launch.memory_limit);
        let unlimited = groups.unlimited.clone().unwrap_or_default();
        let (contract, notify, path) = (files.launch(), files.notify_socket(), env::var_os("PATH"));
        // The instance must not inherit the environment and the working directory of the runtime.
        let notify = somebody_waits.then_some(("NOTIFY_SOCKET", notify.as_os_str()));
        let environment: Vec<_> = path.iter().map(|path| ("PATH", path.as_os_str())).chain(notify).collect();
        let replaces = launch.replaces.map(|pid| pid.to_string());
        let mut last = vec![OsStr::new(LAUNCH_OPTION), contract.as_os_str()];
        last.extend(replaces.iter().flat_map(|pid| [OsStr::new(TAKE_OVER_OPTION), OsStr::new(pid)]));
        let start = |joins: &[PathBuf], group: Option<&File>| {
            let joins = launcher::joined(joins);
            let name = self.launcher.as_os_str();
            let words = [name, launcher::VERB.as_ref(), &joins, unlimited.as_ref(), launch.instance.as_os_str()];
            let arguments = [&words[..], &last].concat();
            let program = Program::new(&self.launcher, &arguments, &environment)?;
            program.start(group, [gate.as_fd(), output.as_fd(), log.as_fd()])
        };
        let group = groups.unified.as_ref().and_then(|folder| File::open(folder).ok());
        let made_there = group.and_then(|group| start(&groups.others(), Some(&group)).ok());
        let child = made_there.map_or_else(|| start(&groups.folders, None), Ok)?;
        Ok((child, opener))
    }
}

// The launcher waits for one byte on its stdin; if the plugin dies first, the launcher exits.
fn release(
    child: &mut Child,
    mut gate: PipeWriter,
    started: &mut dyn FnMut(Option<Process>) -> io::Result<()>,
) -> Result<(), StartFailure> {
    let recorded = Process::with_pid(child.pid())
        .ok_or_else(|| io::Error::other("it has ended at once"))
        .and_then(|process| started(Some(process)));
    if let Err(e) = recorded {
        child.kill();
        return Err(StartFailure::Record(e));
    }
    // If the launcher is gone, the wait for readiness that follows reports it.
    let _ = gate.write_all(b"\n");
    Ok(())
}

fn wait_until_ready(
    child: &mut Child,
    socket: &NotifySocket,
    files: &Files,
    clock: &dyn Clock,
    deadline: Deadline,
) -> Result<(), StartFailure> {
    let pid = child.pid();
    let mut last_status = None;
    loop {
        let ended = child.try_wait().map_err(StartFailure::Spawn)?;
        // Check for the exit before reading the socket, so that notifications sent before the exit are not missed.
        let patience = if ended.is_some() { Duration::ZERO } else { READY_POLL_INTERVAL.min(deadline.left(clock)) };
        while let Some(notification) = socket.receive(pid, patience).map_err(StartFailure::Spawn)? {
            last_status = notification.status.or(last_status);
            if notification.ready && ended.is_none() {
                return Ok(());
            }
        }
        if let Some(status) = ended {
            let (error, text) = last_status.map(read_status).unzip();
            let said = last_words(text, &files.log());
            return Err(StartFailure::Ended { status: status.to_string(), error: error.flatten(), said });
        }
        if deadline.is_over(clock) {
            return Err(StartFailure::Deadline {
                said: last_status
                    .map(|status| read_status(status).1)
                    .or_else(|| log::last_line(&files.log()))
                    .unwrap_or_default(),
            });
        }
    }
}

/// The status, and the last line of the log if that says something else, since a crash leaves no status.
fn last_words(status: Option<String>, log: &Path) -> String {
    let line = log::last_line(log).filter(|line| status.as_ref().is_none_or(|status| !line.contains(status)));
    status.into_iter().chain(line).collect::<Vec<_>>().join("; ")
}

const READY_POLL_INTERVAL: Duration = Duration::from_millis(10);
const LEAVES_WITHIN: Duration = Duration::from_millis(1);

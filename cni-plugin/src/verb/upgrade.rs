//! Replaces the program of a running pod's instance while its connections go on: by the installed one, or by the one
//! that it had before.
//!
//! The new instance takes over the device, the sockets, the certificate and the connections from the old one, which
//! goes on until the new one is ready, whatever that does. If the new one ends after it took over, the old program
//! takes over from the old instance again.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nebula_cni_contract::clock::Deadline;
use nebula_cni_contract::instance_status::{InstanceState, Status};
use serde::{Deserialize, Serialize};

use crate::attachment::files::Files;
use crate::attachment::lock::Lock;
use crate::attachment::record::{Record, State};
use crate::host::Host;
use crate::programs::{self, Digest};
use crate::reply::{Error, code};
use crate::supervisor::{Known, Launch, StartFailure, Supervisor, is_instance};

/// The program that is to take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The one that new pods get.
    Installed,
    /// The one that this instance had before.
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
/// Code 3 if there is no such attachment, code 5 if its record cannot be read. The old instance goes on with code 11
/// (the attachment cannot be upgraded now), code 101 (its instance does not answer) and code 105 (the new program is
/// unfit or did not take over). With code 121 the new instance took over and ended, and the old program has taken over
/// again. With code 120 no instance served, and the old program was started.
pub fn run(files: &Files, target: Target, host: &Host<'_>) -> Result<Upgraded, Error> {
    let _lock = Lock::acquire(files, host.clock, Deadline::after(host.clock, LOCKED_WITHIN))?;
    let record = Record::of(files)?;
    let pod = format!("pod {}/{}", record.target.pod.namespace, record.target.pod.name);
    let named = |code, why: String| Error::new(code, format!("{pod}: {why}"));
    let unreachable = |why: String| named(code::INSTANCE_UNREACHABLE, format!("its instance does not answer: {why}"));
    let unfit = |why: String| named(code::INSTANCE_FAILED, why);
    if record.state != State::Running {
        return Err(named(code::TRY_AGAIN, "it is being set up".to_owned()));
    }
    let installed = record.installed();
    let wanted = match target {
        Target::Installed => programs::keep_installed(&installed).map(|digest| Program::kept(&installed, digest)),
        Target::Previous => Program::previous(&record),
    };
    let wanted = wanted.map_err(unfit)?;
    // Whoever asks for the previous one has seen this one fail, and has waited.
    let (answers_within, takes_over_within) = match target {
        Target::Installed => (ANSWERS_WITHIN, TAKES_OVER_WITHIN),
        Target::Previous => (Duration::from_secs(1), Duration::from_secs(2)),
    };
    let mut upgrade = Upgrade { files, record, pod: &pod, host };
    let (pid, status) = match upgrade.answer_within(answers_within, |_| true) {
        Ok(answer) => answer,
        // It is dead or hangs, so the previous program can only do better.
        Err(_) if target == Target::Previous => return upgrade.replace(&wanted),
        Err(error) => return Err(unreachable(error.to_string())),
    };
    let running = programs::keep_running(pid, &installed).map_err(unfit)?;
    if wanted.digest == running {
        return Ok(Upgraded { upgraded: false, pid, version: status.version });
    }
    if status.state != InstanceState::Running {
        // Nothing goes through its tunnel, so there is nothing to hand over.
        if target == Target::Previous {
            return upgrade.replace(&wanted);
        }
        let why = format!("its instance is {}, and has nothing to hand over", status.state.word());
        return Err(named(code::TRY_AGAIN, why));
    }
    upgrade.keep_only(pid, ENDS_WITHIN).map_err(|why| named(code::TRY_AGAIN, why))?;
    let back = Program::kept(&installed, running);
    // Already now: whoever finds what is left of an upgrade whose plugin was killed can go back.
    let before = match target {
        Target::Installed => upgrade.record.previous.replace(back.digest.clone()),
        Target::Previous => None,
    };
    match upgrade.attempt(pid, &wanted, takes_over_within) {
        Ok((pid, version)) => Ok(Upgraded { upgraded: true, pid, version }),
        // One that is faulty may be unable to hand over, too.
        Err(_) if target == Target::Previous => upgrade.replace(&wanted),
        Err(failure) => {
            upgrade.record.previous = before;
            let error = upgrade.recover(pid, &back, &failure);
            upgrade.note();
            Err(error)
        }
    }
}

/// Ends what an upgrade left whose plugin was killed: of two instances the one that answers stays, or none.
///
/// # Errors
/// Returns an error if another one is still running, or the record cannot be written.
pub(super) fn tidy_up(record: &mut Box<Record>, files: &Files, host: &Host<'_>) -> Result<(), String> {
    let mut upgrade = Upgrade { files, record: record.clone(), pod: "", host };
    match upgrade.answer(|_| true) {
        Ok((pid, _)) => {
            upgrade.keep_only(pid, ENDS_WITHIN)?;
            // Either of the two programs.
            upgrade.record.program = programs::keep_running(pid, &upgrade.record.installed()).ok();
        }
        // The reconciliation starts another one.
        Err(_) => {
            let supervisor = host.supervisor(upgrade.record.supervisor);
            supervisor.stop(files, Known::Recorded(upgrade.record.processes()), host.clock)?;
        }
    }
    *record = upgrade.record;
    record.is_upgrading = false;
    record.save(files).map_err(|error| format!("cannot write its record: {error}"))
}

/// A program to start.
struct Program {
    path: PathBuf,
    digest: Digest,
}

impl Program {
    fn kept(installed: &Path, digest: Digest) -> Self {
        Self { path: programs::path_of(installed, &digest), digest }
    }

    /// The one that this instance had before the present one.
    fn previous(record: &Record) -> Result<Self, String> {
        let installed = record.installed();
        let Some(digest) = &record.previous else {
            return Ok(Self::kept(&installed, programs::keep_previous(&installed)?));
        };
        match programs::kept(&installed, digest) {
            Some(path) => Ok(Self { path, digest: digest.clone() }),
            None => Err(format!("the program that it had before is gone, or unfit to be started: {digest}")),
        }
    }
}

impl Record {
    /// Notes which program the instance runs.
    fn runs(&mut self, program: &Program) {
        self.instance = self.installed();
        self.program = Some(program.digest.clone());
    }
}

struct Upgrade<'a> {
    files: &'a Files,
    record: Box<Record>,
    pod: &'a str,
    host: &'a Host<'a>,
}

impl Upgrade<'_> {
    /// Writes the record. What it says now is true without it, too, after the next look.
    fn note(&self) {
        if let Err(error) = self.record.save(self.files) {
            eprintln!("nebula-cni-plugin: {pod}: cannot write the record: {error}", pod = self.pod);
        }
    }

    /// Has `program` take over from process `old` in this time; returns the new process and its release.
    fn attempt(&mut self, old: i32, program: &Program, within: Duration) -> Result<(i32, Option<String>), String> {
        let before = self.record.process;
        self.record.is_upgrading = true;
        self.record.save(self.files).map_err(|error| format!("cannot write the record: {error}"))?;
        let deadline = Deadline::after(self.host.clock, within);
        let ready = self.launch(&program.path, Some(old), |supervisor, launch, record| {
            let mut started = |process| match process {
                Some(_) => {
                    (record.process, record.predecessor) = (process, before);
                    record.save(launch.files)
                }
                None => Ok(()),
            };
            supervisor.start(launch, self.host.clock, deadline, &mut started)
        });
        // Until the old process is gone, either may answer.
        let serving = ready.and_then(|()| {
            let answer = self.answer(|pid| pid != old);
            answer.map_err(|error| format!("it said that it serves, and then did not answer: {error}"))
        });
        let serves = serving.as_ref().map_or(old, |(pid, _)| *pid);
        // The new process must be gone before another one takes over from the old one.
        let alone = self.keep_only(serves, if serving.is_ok() { ENDS_WITHIN } else { Duration::ZERO });
        if serving.is_ok() {
            self.record.runs(program);
        }
        // What could not be ended now is ended by the next look at this attachment.
        self.record.is_upgrading = alone.is_err();
        let saved = self.record.save(self.files).map_err(|error| format!("cannot write the record: {error}"));
        if let (Ok(_), Err(why)) = (&serving, alone.and(saved)) {
            eprintln!("nebula-cni-plugin: {pod}: {why}", pod = self.pod);
        }
        serving.map(|(pid, status)| (pid, status.version))
    }

    /// Starts `program` in place of an instance that is dead, hangs, or carries nothing.
    fn replace(&mut self, program: &Program) -> Result<Upgraded, Error> {
        self.start_again(program).map_err(|why| Error::new(code::INSTANCE_LOST, format!("{}: {why}", self.pod)))
    }

    fn start_again(&mut self, program: &Program) -> Result<Upgraded, String> {
        let supervisor = self.host.supervisor(self.record.supervisor);
        supervisor.stop(self.files, Known::Recorded(self.record.processes()), self.host.clock)?;
        self.record.runs(program);
        self.launch(&program.path, None, |supervisor, launch, record| {
            let mut started = |process| {
                (record.process, record.predecessor, record.is_upgrading) = (process, None, false);
                record.save(launch.files)
            };
            supervisor.restart(launch, self.host.clock, &mut started)
        })?;
        let (pid, status) = self.answer(|_| true).map_err(|error| format!("it does not answer: {error}"))?;
        Ok(Upgraded { upgraded: true, pid, version: status.version })
    }

    /// Has `start` launch `program`, which takes over from process `replaces` if there is one.
    fn launch(
        &mut self,
        program: &Path,
        replaces: Option<i32>,
        start: impl FnOnce(&dyn Supervisor, &Launch<'_>, &mut Record) -> Result<(), StartFailure>,
    ) -> Result<(), String> {
        let Self { files, record, pod, host } = self;
        let netns = record.target.netns.clone();
        let launch = Launch {
            instance: program,
            files,
            netns: &netns,
            description: &format!("Nebula tunnel of {pod}"),
            budget: TAKES_OVER_WITHIN,
            memory_limit: record.memory_limit,
            replaces,
        };
        start(host.supervisor(record.supervisor), &launch, record).map_err(|failure| said(&failure))
    }

    fn answer(&self, wanted: impl Fn(i32) -> bool) -> io::Result<(i32, Status)> {
        self.answer_within(ANSWERS_WITHIN, wanted)
    }

    /// The process and the status of the instance, once a process of this attachment answers that is `wanted`.
    fn answer_within(&self, patience: Duration, wanted: impl Fn(i32) -> bool) -> io::Result<(i32, Status)> {
        let deadline = Deadline::after(self.host.clock, patience);
        loop {
            let foreign = match Status::ask(&self.record.status_socket) {
                Ok(status) => match status.pid {
                    // What an instance says of itself proves nothing: its program is copied, and started as root.
                    Some(pid) if wanted(pid) && is_instance(&self.record, self.files, pid) => return Ok((pid, status)),
                    _ => io::Error::other("another process answers in its place"),
                },
                Err(error) => error,
            };
            if deadline.is_over(self.host.clock) {
                return Err(foreign);
            }
            self.host.clock.sleep(ASK_AGAIN);
        }
    }

    /// The status of the old instance, process `old`, once it knows that the new one has ended; `None` if it is gone.
    fn settled(&self, old: i32) -> Option<Status> {
        let deadline = Deadline::after(self.host.clock, ANSWERS_WITHIN);
        loop {
            let status = Status::ask(&self.record.status_socket).ok().filter(|status| status.pid == Some(old))?;
            if !status.is_handing_over || deadline.is_over(self.host.clock) {
                return Some(status);
            }
            self.host.clock.sleep(ASK_AGAIN);
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

    /// After an attempt that failed: if the old instance, process `old`, has stopped, its program, at `back`, takes
    /// over from it or is started.
    fn recover(&mut self, old: i32, back: &Program, failure: &str) -> Error {
        let pod = self.pod;
        match self.settled(old) {
            Some(status) if status.state == InstanceState::Running => {
                let msg = format!("{pod}: its instance goes on with the program that it had");
                Error::new(code::INSTANCE_FAILED, msg).details(failure.to_owned())
            }
            Some(_) if self.attempt(old, back, TAKES_OVER_WITHIN).is_ok() => {
                let msg =
                    format!("{pod}: the new instance took over and ended, and the old program has taken over again");
                Error::new(code::INSTANCE_ROLLED_BACK, msg).details(failure.to_owned())
            }
            _ => {
                let msg = format!("{pod}: neither program served, and its connections are lost");
                let now = match self.start_again(back) {
                    Ok(_) => "the old program was started".to_owned(),
                    Err(why) => format!("the old program cannot be started either: {why}"),
                };
                Error::new(code::INSTANCE_LOST, msg).details(format!("{failure}; {now}"))
            }
        }
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

const LOCKED_WITHIN: Duration = Duration::from_secs(2);
// It takes some milliseconds. A program that hangs is given up within the ten seconds that the old instance waits.
const TAKES_OVER_WITHIN: Duration = Duration::from_secs(8);
// An old instance that has handed over.
const ENDS_WITHIN: Duration = Duration::from_secs(2);
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(2);

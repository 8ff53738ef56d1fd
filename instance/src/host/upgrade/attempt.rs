//! `nebula ctl upgrade` in the daemon: starts another program, hands over to it, and ends once that one serves.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock};

use nebula_core::handover::State;
use nebula_core::io::Handle;
use nebula_linux::descriptors::{MAX_FILES, Passed};
use nebula_linux::{errno, notify};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::program::{Program, Unfit};
use crate::handover::channel::{Channel, memory_file, write_state};
use crate::handover::new;
use crate::handover::old::{self, Ended, Offer, Source};
use crate::host::control::SocketFiles;
use crate::host::documents::Upgraded;

/// What another process needs to go on in the place of this one.
#[derive(Debug)]
pub(crate) struct Upgrade {
    handle: Handle,
    /// Device and sockets.
    kept: Vec<Passed>,
    /// Of the control sockets. The new process creates them again.
    files: SocketFiles,
    /// One upgrade at a time.
    turn: Mutex<()>,
    outcome: OnceLock<Outcome>,
    /// The process that serves now. It sees the end of this one by the channel, and opens its listeners then.
    successor: OnceLock<Successor>,
    /// The driver has ended, and another process configures the device.
    has_stopped: AtomicBool,
    /// Number of the new process until it serves.
    pending: AtomicI32,
    /// Readable once this process is to end.
    end: EventFd,
}

/// How this process ends after it handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Another process serves.
    Succeeded,
    /// None does: the service manager has to start one.
    Failed,
}

/// Why the daemon is not replaced. It goes on as if nothing had been asked.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Unfit(#[from] Unfit),
    #[error("another upgrade is under way")]
    Busy,
    #[error("the node is ending")]
    Ending,
    #[error("cannot start {path}: {cause}")]
    NotStarted { path: String, cause: String },
    #[error("{path}: {cause}")]
    NotTaken { path: String, cause: old::Failure },
    #[error("cannot hand over: {0}")]
    Io(String),
    #[error("with more than {} routines a daemon cannot hand over: restart it", MAX_FILES / 2)]
    TooManyFiles,
    #[error("{0}. Nothing serves until whoever supervises this daemon starts it again")]
    Lost(String),
}

/// The new process, ended on drop unless it took over.
#[derive(Debug)]
struct Successor {
    child: Option<Child>,
    channel: Channel,
    path: String,
}

impl Upgrade {
    /// # Errors
    /// Returns an error if there is no descriptor left.
    pub(crate) fn new(handle: Handle, kept: Vec<Passed>, files: SocketFiles) -> io::Result<Self> {
        let end = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        Ok(Self {
            handle,
            kept,
            files,
            turn: Mutex::default(),
            outcome: OnceLock::new(),
            successor: OnceLock::new(),
            has_stopped: AtomicBool::new(false),
            pending: AtomicI32::new(0),
            end,
        })
    }

    /// How this process ended serving, if it did.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        self.outcome.get().copied()
    }

    /// Whether the driver has ended, so that nothing of this process may change the device any more.
    pub(crate) fn has_stopped(&self) -> bool {
        self.has_stopped.load(Ordering::Relaxed)
    }

    /// Ends the new process if it does not serve yet, because this one is to end: it would take over otherwise.
    pub(crate) fn give_up(&self) {
        let pending = self.pending.load(Ordering::Relaxed);
        if pending > 0 && !self.has_stopped() {
            let _ = kill(Pid::from_raw(pending), Signal::SIGKILL);
        }
    }

    /// Has this process end if it has stopped serving. Called when whoever asked for the upgrade has the answer.
    pub(crate) fn finish(&self) {
        if self.outcome().is_some() {
            // Fails only when the counter is full, and then it is readable.
            let _ = self.end.write(1);
        }
    }

    /// Replaces this process by `program`. If that one dies after it took over, the program of this process takes over
    /// from it.
    ///
    /// # Errors
    /// Returns an error if the daemon goes on itself; or [`Failure::Lost`] if none does.
    pub(crate) fn run(&self, program: &Program) -> Result<Upgraded, Failure> {
        let _turn = self.turn.try_lock().map_err(|_| Failure::Busy)?;
        if self.outcome().is_some() {
            return Err(Failure::Ending);
        }
        if self.kept.len() >= MAX_FILES {
            return Err(Failure::TooManyFiles);
        }
        let offered = self.handle.offer().ok_or(Failure::Ending)?;
        let (peers, flows) = (offered.peers(), offered.flows());
        tracing::info!(program = %program.path.display(), peers, flows, "Handing over to another program");
        let offer = offer_file(&offered).map_err(|error| Failure::Io(errno::text(&error)))?;
        let done = match self.attempt(program, &offer, Source::Running(self.handle.clone())) {
            Ok((pid, Ended::TookOver { version })) => Ok((pid, version, None)),
            Ok((_, Ended::Died(state))) => self.roll_back(program, state),
            Err(failure) => Err(failure),
        };
        match done {
            Ok((pid, version, rolled_back)) => {
                let _ = self.outcome.set(Outcome::Succeeded);
                tracing::info!(pid, version, "Handed over");
                Ok(Upgraded { pid, version, peers, flows, rolled_back })
            }
            Err(failure) => {
                if matches!(failure, Failure::Lost(_)) {
                    let _ = self.outcome.set(Outcome::Failed);
                }
                tracing::error!(error = %failure, "Did not hand over");
                Err(failure)
            }
        }
    }

    /// Has the program of this process take over from `dead`.
    fn roll_back(&self, dead: &Program, mut state: State) -> Result<(u32, String, Option<String>), Failure> {
        let why = format!("{} took over and then ended", dead.path.display());
        tracing::error!("{why}; the old program takes over again");
        // Nobody knows what the dead process has opened with them.
        state.forget_keys();
        let lost = |cause: String| Failure::Lost(format!("{why}, and so did the old program: {cause}"));
        let program = Program::of_this_process().map_err(|error| lost(errno::text(&error)))?;
        let offer = offer_file(&state).map_err(|error| lost(errno::text(&error)))?;
        match self.attempt(&program, &offer, Source::Stopped(state)) {
            Ok((pid, Ended::TookOver { version })) => Ok((pid, version, Some(why))),
            Ok((_, Ended::Died(_))) => Err(lost("it ended".to_owned())),
            Err(failure) => Err(lost(failure.to_string())),
        }
    }

    /// Has `program` take over, and returns its process. `offer` is a file with the state as far as the new process may
    /// see it before the commit.
    fn attempt(&self, program: &Program, offer: &File, source: Source) -> Result<(u32, Ended), Failure> {
        let committed = memory_file().map_err(|error| Failure::Io(errno::text(&error)))?;
        let mut successor = Successor::start(program)?;
        self.pending.store(successor.pid(), Ordering::Relaxed);
        let _pending = Pending(&self.pending);
        let Successor { child, channel, path } = &mut successor;
        let pid = child.as_ref().map_or(0, Child::id);
        let offer = Offer { channel, files: &self.kept, state: offer, committed };
        let ended = offer.make(&mut Daemon { upgrade: self, source: Some(source), child });
        let ended = ended.map_err(|cause| match cause {
            old::Failure::Ending => Failure::Ending,
            old::Failure::Lost(cause) => Failure::Lost(cause),
            cause => Failure::NotTaken { path: path.clone(), cause },
        })?;
        if matches!(ended, Ended::TookOver { .. }) {
            *child = None;
            notify::main_process(pid);
            let _ = self.successor.set(successor);
        }
        Ok((pid, ended))
    }
}

/// This daemon in an attempt to hand over.
struct Daemon<'a> {
    upgrade: &'a Upgrade,
    source: Option<Source>,
    child: &'a mut Option<Child>,
}

impl old::Process for Daemon<'_> {
    fn stop(&mut self) -> Result<State, old::Failure> {
        let state = self.source.take().ok_or(old::Failure::Restless)?.stop()?;
        self.upgrade.has_stopped.store(true, Ordering::Relaxed);
        // Before the new process makes its own.
        self.upgrade.files.remove();
        Ok(state)
    }

    fn end_new(&mut self) {
        end(self.child);
    }
}

impl Successor {
    /// Starts `program` with the arguments of this process, and one end of a channel as its standard input.
    fn start(program: &Program) -> Result<Self, Failure> {
        let path = program.path.display().to_string();
        let failed = |error: io::Error| Failure::NotStarted { path: path.clone(), cause: errno::text(&error) };
        let (channel, theirs) = Channel::pair().map_err(failed)?;
        let mut arguments = std::env::args_os();
        let mut command = Command::new(program.executable());
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        command.args(arguments).stdin(Stdio::from(theirs)).env(new::VARIABLE, "stdin");
        for passed in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(passed);
        }
        let child = command.spawn().map_err(failed)?;
        Ok(Self { child: Some(child), channel, path })
    }

    fn pid(&self) -> i32 {
        self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok()).unwrap_or_default()
    }
}

/// A file with a state.
fn offer_file(state: &State) -> io::Result<File> {
    let mut file = memory_file()?;
    write_state(&mut file, state)?;
    Ok(file)
}

/// Ends a process, and returns when it is gone.
fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Forgets the number of the new process when the attempt is over.
struct Pending<'a>(&'a AtomicI32);

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

impl AsFd for Upgrade {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

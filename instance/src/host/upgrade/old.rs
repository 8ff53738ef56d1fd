//! The old process: starts the new one, offers what it has, and ends once that one has taken over.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock};

use nebula_core::handover::State;
use nebula_core::handover::commit::{Old, OldStep, ToNew, ToOld};
use nebula_core::io::Handle;
use nebula_linux::descriptors::{MAX_FILES, Passed};
use nebula_linux::{errno, notify};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::channel::{Channel, Letter, Received, erase_state, write_state};
use super::program::{Program, Unfit};
use super::takeover;
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
    #[error("{0} ended before it was ready; the log says why")]
    Ended(String),
    #[error("{path} was not ready in time, and was ended")]
    Late { path: String },
    #[error("{path} refused: {cause}")]
    Refused { path: String, cause: String },
    #[error("cannot hand over: {0}")]
    Io(String),
    #[error("with more than {} routines a daemon cannot hand over: restart it", MAX_FILES / 2)]
    TooManyFiles,
    #[error("the threads of this daemon did not pause; it goes on")]
    Restless,
    #[error("{0}. Nothing serves until whoever supervises this daemon starts it again")]
    Lost(String),
}

/// Where the state comes from.
enum Source<'a> {
    Running(&'a Handle),
    /// The driver has ended. No keys are in it.
    Stopped(State),
}

/// The new process, ended on drop unless it took over.
#[derive(Debug)]
struct Successor {
    child: Option<Child>,
    channel: Channel,
    path: String,
}

/// How an attempt ended, once the old process has stopped.
enum Ended {
    /// The new process serves.
    TookOver { pid: u32, version: String },
    /// The old one has stopped, and the new one is dead.
    Died(State),
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
        let offer = write_state(&offered).map_err(|error| Failure::Io(errno::text(&error)))?;
        let done = match self.attempt(program, &offer, Source::Running(&self.handle)) {
            Ok(Ended::TookOver { pid, version }) => Ok((pid, version, None)),
            Ok(Ended::Died(state)) => self.roll_back(program, state),
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
        tracing::error!("{why}; the program of before takes over again");
        // Nobody knows what the dead process has opened with them.
        state.forget_keys();
        let lost = |cause: String| Failure::Lost(format!("{why}, and so did the program of before: {cause}"));
        let program = Program::of_this_process().map_err(|error| lost(errno::text(&error)))?;
        let offer = write_state(&state).map_err(|error| lost(errno::text(&error)))?;
        match self.attempt(&program, &offer, Source::Stopped(state)) {
            Ok(Ended::TookOver { pid, version }) => Ok((pid, version, Some(why))),
            Ok(Ended::Died(_)) => Err(lost("it ended".to_owned())),
            Err(failure) => Err(lost(failure.to_string())),
        }
    }

    /// Has `program` take over. `offer` is a file with the state as far as the new process may see it before the
    /// commit.
    fn attempt(&self, program: &Program, offer: &File, source: Source<'_>) -> Result<Ended, Failure> {
        let mut successor = Successor::start(program)?;
        self.pending.store(successor.pid(), Ordering::Relaxed);
        let _pending = Pending(&self.pending);
        let mut files: Vec<_> = self.kept.iter().map(|kept| (kept.name.as_str(), kept.file.as_fd())).collect();
        files.push((takeover::STATE, offer.as_fd()));
        let mut old = Old::default();
        let mut source = Some(source);
        let mut committed: Option<Committed> = None;
        let mut version = String::new();
        let (mut cause, mut is_confirmed) = (None, false);
        let mut step = old.offer();
        loop {
            match step {
                OldStep::Nothing => {}
                OldStep::Send(word @ ToNew::Offer(_)) => {
                    successor.send(word, &files).map_err(|error| Failure::Io(errno::text(&error)))?;
                }
                OldStep::Send(word @ ToNew::Commit(_)) => {
                    // A new process that does not read any more is found dead in the next turn.
                    let state = committed.as_ref().map(|committed| (takeover::STATE, committed.file.as_fd()));
                    let _ = successor.send(word, state.as_slice());
                }
                OldStep::Send(word @ ToNew::Withdraw(_)) => drop(successor.send(word, &[])),
                OldStep::HandOver(word) => {
                    let made = source.take().ok_or(Failure::Restless)?.state()?;
                    self.has_stopped.store(true, Ordering::Relaxed);
                    // Before the new process makes its own.
                    self.files.remove();
                    let done = committed.insert(made);
                    let _ = successor.send(word, &[(takeover::STATE, done.file.as_fd())]);
                }
                OldStep::End => break,
            }
            if old.serves() && old.wait().is_none() {
                let path = successor.path.clone();
                return Err(cause.unwrap_or(Failure::Late { path }));
            }
            step = match successor.channel.receive(old.wait()) {
                Ok(Received::Nothing) => old.elapsed(),
                Ok(Received::Letter(letter)) => {
                    if let (Some(ToOld::Refuse(_)), text) = (word(&letter), &letter.text) {
                        cause = Some(Failure::Refused { path: successor.path.clone(), cause: text.clone() });
                    } else if let Some(ToOld::Ready(_)) = word(&letter) {
                        version.clone_from(&letter.text);
                    }
                    let step = word(&letter).map_or(OldStep::Nothing, |word| old.handle(word));
                    // Nothing else that the new process says ends this one.
                    is_confirmed = step == OldStep::End;
                    step
                }
                // Whoever closed the channel, or writes nonsense, is ended: then its death is certain.
                Ok(Received::Ended) | Err(_) => {
                    cause.get_or_insert_with(|| Failure::Ended(successor.path.clone()));
                    successor.end();
                    old.new_died()
                }
            };
        }
        let Some(Committed { mut file, state }) = committed else { return Err(Failure::Restless) };
        // A new process that hangs may go on later, so it is killed.
        let pid = successor.leave(is_confirmed);
        if let Err(error) = erase_state(&mut file) {
            tracing::warn!(error = errno::text(&error), "The keys that were handed over were not erased from memory");
        }
        match pid {
            Some(pid) => {
                notify::main_process(pid);
                let _ = self.successor.set(successor);
                Ok(Ended::TookOver { pid, version })
            }
            None => Ok(Ended::Died(state)),
        }
    }
}

/// What goes with a commit.
struct Committed {
    file: File,
    state: State,
}

impl Source<'_> {
    fn state(self) -> Result<Committed, Failure> {
        let state = match self {
            Self::Running(handle) => {
                handle.hand_over().ok_or_else(|| handle.offer().map_or(Failure::Ending, |_| Failure::Restless))?
            }
            Self::Stopped(state) => state,
        };
        // The driver has ended, so it cannot go on.
        let file = write_state(&state).map_err(|error| Failure::Lost(errno::text(&error)))?;
        Ok(Committed { file, state })
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
        command.args(arguments).stdin(Stdio::from(theirs)).env(takeover::VARIABLE, "stdin");
        for passed in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(passed);
        }
        let child = command.spawn().map_err(failed)?;
        Ok(Self { child: Some(child), channel, path })
    }

    fn send(&self, word: ToNew, files: &[(&str, BorrowedFd<'_>)]) -> io::Result<()> {
        let word = match word {
            ToNew::Offer(number) => (takeover::OFFER, number),
            ToNew::Commit(number) => (takeover::COMMIT, number),
            ToNew::Withdraw(number) => (takeover::WITHDRAW, number),
        };
        self.channel.send(word, "", files)
    }

    fn pid(&self) -> i32 {
        self.child.as_ref().and_then(|child| i32::try_from(child.id()).ok()).unwrap_or_default()
    }

    /// Leaves the process alone if it serves, and returns its number; otherwise ends it.
    fn leave(&mut self, serves: bool) -> Option<u32> {
        if !serves {
            self.end();
        }
        self.child.take().map(|child| child.id())
    }

    /// Ends the process, and returns when it is gone.
    fn end(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
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
        self.end();
    }
}

impl AsFd for Upgrade {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.end.as_fd()
    }
}

fn word(letter: &Letter) -> Option<ToOld> {
    match letter.word.as_str() {
        takeover::READY => Some(ToOld::Ready(letter.number)),
        takeover::REFUSE => Some(ToOld::Refuse(letter.number)),
        takeover::CONFIRM => Some(ToOld::Confirm(letter.number)),
        _ => None,
    }
}

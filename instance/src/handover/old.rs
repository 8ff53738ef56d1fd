//! The old process: offers what it has, and stops once another process can go on.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use nebula_core::handover::State;
use nebula_core::handover::commit::{Old, OldStep, ToNew, ToOld};
use nebula_core::io::Handle;
use nebula_linux::descriptors::{MAX_FILES, Passed};
use nebula_linux::errno;

use super::channel::{Channel, Letter, Received, erase_state, write_state};
use super::new;

/// Why nothing was handed over. The node goes on as if nothing had been asked, except after [`Failure::Lost`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error("it ended before it was ready; the log says why")]
    Ended,
    #[error("it was not ready in time, and was ended")]
    Late,
    #[error("it refused: {0}")]
    Refused(String),
    #[error("the node is ending")]
    Ending,
    #[error("there are more than {MAX_FILES} descriptors")]
    TooManyFiles,
    #[error("the threads of the node did not pause; it goes on")]
    Restless,
    #[error("{0}")]
    Io(String),
    #[error("the node has stopped, and nothing could be handed over: {0}")]
    Lost(String),
}

/// How an attempt ended, once the old process has stopped.
pub(crate) enum Ended {
    /// The new process serves.
    TookOver { version: String },
    /// The old one has stopped, and the new one does not serve.
    Died(State),
}

/// Where the state comes from.
pub(crate) enum Source {
    Running(Handle),
    /// The driver has ended. No keys are in it.
    Stopped(State),
}

/// What an attempt asks of its process.
pub(crate) trait Process {
    /// Stops the node, for good, and returns what it hands over.
    fn stop(&mut self) -> Result<State, Failure>;

    /// Ends the new process, if this one can, and returns when it is gone.
    fn end_new(&mut self);
}

/// What the process at the other end of `channel` is offered.
pub(crate) struct Offer<'a> {
    pub(crate) channel: &'a Channel,
    /// Device, sockets and the like.
    pub(crate) files: &'a [Passed],
    /// The state as far as the new process may see it before the commit.
    pub(crate) state: &'a File,
    /// An empty file in memory, for the state of the commit.
    pub(crate) committed: File,
}

impl Source {
    /// Stops the node if it runs.
    pub(crate) fn stop(self) -> Result<State, Failure> {
        match self {
            Self::Running(handle) => {
                handle.hand_over().ok_or_else(|| handle.offer().map_or(Failure::Ending, |_| Failure::Restless))
            }
            Self::Stopped(state) => Ok(state),
        }
    }
}

impl Offer<'_> {
    /// Has the process at the other end take over.
    pub(crate) fn make(mut self, process: &mut impl Process) -> Result<Ended, Failure> {
        if self.files.len() >= MAX_FILES {
            return Err(Failure::TooManyFiles);
        }
        let mut files: Vec<_> = self.files.iter().map(|kept| (kept.name.as_str(), kept.file.as_fd())).collect();
        files.push((new::STATE, self.state.as_fd()));
        let mut old = Old::default();
        let mut committed = None;
        let mut version = String::new();
        let (mut cause, mut is_confirmed) = (None, false);
        let mut step = old.offer();
        loop {
            match step {
                OldStep::Nothing => {}
                // A new process that does not read any more is found dead in the next turn.
                OldStep::Send(word @ ToNew::Offer(_)) => drop(self.send(word, &files)),
                OldStep::Send(word @ ToNew::Commit(_)) => {
                    drop(self.send(word, &[(new::STATE, self.committed.as_fd())]))
                }
                OldStep::Send(word @ ToNew::Withdraw(_)) => drop(self.send(word, &[])),
                OldStep::HandOver(word) => {
                    let stopped = process.stop().inspect_err(|_| self.withdraw(word));
                    let state = committed.insert(stopped?);
                    // The node has stopped, so it cannot go on.
                    write_state(&mut self.committed, state).map_err(|error| Failure::Lost(errno::text(&error)))?;
                    let _ = self.send(word, &[(new::STATE, self.committed.as_fd())]);
                }
                OldStep::End => break,
            }
            if old.serves() && old.wait().is_none() {
                return Err(cause.unwrap_or(Failure::Late));
            }
            step = match self.channel.receive(old.wait()) {
                Ok(Received::Nothing) => old.elapsed(),
                Ok(Received::Letter(letter)) => {
                    if let (Some(ToOld::Refuse(_)), text) = (word(&letter), &letter.text) {
                        cause = Some(Failure::Refused(text.clone()));
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
                    cause.get_or_insert(Failure::Ended);
                    process.end_new();
                    old.new_died()
                }
            };
        }
        let Some(state) = committed else { return Err(Failure::Restless) };
        if !is_confirmed {
            // A new process that hangs may go on later.
            process.end_new();
        }
        if let Err(error) = erase_state(&mut self.committed) {
            tracing::warn!(error = errno::text(&error), "The keys that were handed over were not erased from memory");
        }
        Ok(if is_confirmed { Ended::TookOver { version } } else { Ended::Died(state) })
    }

    /// Takes back an offer whose commit would have been `word`.
    fn withdraw(&self, word: ToNew) {
        if let ToNew::Commit(number) = word {
            let _ = self.send(ToNew::Withdraw(number), &[]);
        }
    }

    fn send(&self, word: ToNew, files: &[(&str, BorrowedFd<'_>)]) -> io::Result<()> {
        let word = match word {
            ToNew::Offer(number) => (new::OFFER, number),
            ToNew::Commit(number) => (new::COMMIT, number),
            ToNew::Withdraw(number) => (new::WITHDRAW, number),
        };
        self.channel.send(word, "", files)
    }
}

fn word(letter: &Letter) -> Option<ToOld> {
    match letter.word.as_str() {
        new::READY => Some(ToOld::Ready(letter.number)),
        new::REFUSE => Some(ToOld::Refuse(letter.number)),
        new::CONFIRM => Some(ToOld::Confirm(letter.number)),
        _ => None,
    }
}

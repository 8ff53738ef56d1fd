//! The new process: prepares with what the old one offers, and takes over once that one has committed.

use std::env;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use nebula_core::handover::State;
use nebula_core::handover::commit::{New, NewStep, ToNew, ToOld};
use nebula_linux::clock::now;
use nebula_linux::descriptors::Passed;
use nebula_linux::errno;
use nix::sys::socket::{SockType, getsockopt, sockopt};
use nix::unistd::{Pid, getppid};

use super::channel::{Channel, Letter, Received, read_state};

/// A process from which this one may take over.
#[derive(Debug)]
pub(crate) struct Takeover {
    channel: Channel,
    old: Parent,
    new: New,
    /// Without keys.
    offered: Option<State>,
}

/// Where the old process has stopped and this one goes on.
#[derive(Debug)]
pub(crate) struct Committed {
    state: Option<State>,
    channel: Channel,
    old: Parent,
    confirmation: Option<u64>,
}

/// The old process, which started this one.
#[derive(Debug, Clone, Copy)]
struct Parent(Pid);

impl Parent {
    /// Waits until the process is gone, which closes the channel some moments before its last files.
    fn await_end(self) {
        let end = now() + ENDS_WITHIN;
        while getppid() == self.0 && now() < end {
            sleep(Duration::from_millis(1));
        }
    }
}

/// Why this process does not take over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{VARIABLE} is set, and standard input is not from a daemon of the same user")]
    Foreign,
    #[error("the old process offers nothing")]
    NoOffer,
    #[error("the old process goes on")]
    Withdrawn,
    #[error("the hand-over failed: {0}")]
    Io(String),
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(errno::text(&error))
    }
}

impl Takeover {
    /// The process that started this one to take over, if one did. Takes its end of the channel off standard input.
    ///
    /// # Errors
    /// Returns an error if standard input is something else.
    pub(crate) fn find() -> Result<Option<Self>, Error> {
        if env::var_os(VARIABLE).is_none() {
            return Ok(None);
        }
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        // Of whoever made the socket pair.
        let peer = getsockopt(&input, sockopt::PeerCredentials).map_err(|_| Error::Foreign)?;
        let kind = getsockopt(&input, sockopt::SockType).map_err(|_| Error::Foreign)?;
        if kind != SockType::SeqPacket || peer.uid() != nix::unistd::geteuid().as_raw() {
            return Err(Error::Foreign);
        }
        let old = Parent(Pid::from_raw(peer.pid()));
        let nothing = std::fs::File::open("/dev/null")?;
        nix::unistd::dup2_stdin(&nothing).map_err(io::Error::from)?;
        Ok(Some(Self { channel: Channel::new(input), old, new: New::default(), offered: None }))
    }

    /// Waits for the offer, and returns the device and the sockets.
    ///
    /// # Errors
    /// Returns an error if there is none that this release understands.
    pub(crate) fn offer(&mut self) -> Result<Vec<Passed>, Error> {
        let (step, letter) = self.turn()?;
        let (NewStep::Prepare, Some(letter)) = (step, letter) else { return Err(Error::NoOffer) };
        let (state, passed): (Vec<_>, Vec<_>) = letter.files.into_iter().partition(|passed| passed.name == STATE);
        self.offered = state.into_iter().next().map(|passed| self.read(passed.file)).transpose()?;
        Ok(passed)
    }

    fn read(&mut self, file: OwnedFd) -> Result<State, Error> {
        read_state(file).inspect_err(|error| self.refuse(&errno::text(error))).map_err(Error::from)
    }

    /// Tells the old process why this one cannot take over.
    pub(crate) fn refuse(&mut self, why: &str) {
        if let NewStep::Send(word) = self.new.prepared(false) {
            let _ = self.say(word, why);
        }
    }

    /// Says that everything is prepared, and waits until the old process has stopped.
    ///
    /// # Errors
    /// Returns an error if that one goes on.
    pub(crate) fn commit(mut self) -> Result<Committed, Error> {
        tracing::info!("Ready to take over");
        let mut step = self.new.prepared(true);
        let mut letter = None;
        loop {
            match step {
                NewStep::Send(word) => drop(self.say(word, env!("CARGO_PKG_VERSION"))),
                NewStep::TakeOver(ToOld::Confirm(number)) => {
                    let file = letter.and_then(|letter: Letter| letter.files.into_iter().next());
                    let state = file.map(|passed| read_state(passed.file)).transpose()?;
                    return Ok(Committed { state, channel: self.channel, old: self.old, confirmation: Some(number) });
                }
                NewStep::Succeed => {
                    let Self { offered, channel, old, .. } = self;
                    return Ok(Committed { state: offered, channel, old, confirmation: None });
                }
                NewStep::End => return Err(Error::Withdrawn),
                NewStep::Nothing | NewStep::Prepare | NewStep::TakeOver(_) => {}
            }
            (step, letter) = self.turn()?;
        }
    }

    /// Waits for what comes next.
    fn turn(&mut self) -> Result<(NewStep, Option<Letter>), Error> {
        Ok(match self.channel.receive(self.new.wait())? {
            Received::Nothing => (self.new.elapsed(), None),
            Received::Ended => {
                self.old.await_end();
                (self.new.old_died(), None)
            }
            Received::Letter(letter) => {
                let step = word(&letter).map_or(NewStep::Nothing, |word| self.new.handle(word));
                (step, Some(letter))
            }
        })
    }

    fn say(&self, word: ToOld, text: &str) -> io::Result<()> {
        let word = match word {
            ToOld::Ready(number) => (READY, number),
            ToOld::Refuse(number) => (REFUSE, number),
            ToOld::Confirm(number) => (CONFIRM, number),
        };
        self.channel.send(word, text, &[])
    }
}

impl Committed {
    /// Takes the state out.
    pub(crate) fn take_state(mut self) -> (Self, Option<State>) {
        let state = self.state.take();
        (self, state)
    }

    /// Tells the old process that this one serves, and waits until it has ended: it still holds the ports of listeners.
    pub(crate) fn confirm(self) {
        let Some(number) = self.confirmation else { return };
        // The old one may be dead by now.
        let _ = self.channel.send((CONFIRM, number), "", &[]);
        let end = now() + ENDS_WITHIN;
        loop {
            let left = end.saturating_duration_since(now());
            match self.channel.receive(Some(left)) {
                // It has not heard the confirmation yet.
                Ok(Received::Letter(_)) if !left.is_zero() => {}
                Ok(Received::Ended) => return self.old.await_end(),
                _ => return,
            }
        }
    }
}

fn word(letter: &Letter) -> Option<ToNew> {
    match letter.word.as_str() {
        OFFER => Some(ToNew::Offer(letter.number)),
        COMMIT => Some(ToNew::Commit(letter.number)),
        WITHDRAW => Some(ToNew::Withdraw(letter.number)),
        _ => None,
    }
}

// It answers who asked for the upgrade, and has nothing else to do.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// Says that standard input is one end of a channel.
pub(super) const VARIABLE: &str = "NEBULA_HANDOVER";
/// Name of the descriptor with the state.
pub(super) const STATE: &str = "state";
pub(super) const OFFER: &str = "offer";
pub(super) const COMMIT: &str = "commit";
pub(super) const WITHDRAW: &str = "withdraw";
pub(super) const READY: &str = "ready";
pub(super) const REFUSE: &str = "refuse";
pub(super) const CONFIRM: &str = "confirm";

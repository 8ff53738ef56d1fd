//! The new process: prepares with what the old one offers, and takes over once that one has committed.

use std::env;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nebula_core::handover::State;
use nebula_core::handover::commit::{New, NewStep, ToNew, ToOld};
use nebula_linux::clock::now;
use nebula_linux::descriptors::Passed;
use nebula_linux::errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SockType, getsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::channel::{Channel, Letter, Received, memory_file, read_state};

/// A process from which this one may take over.
#[derive(Debug)]
pub(crate) struct Takeover {
    channel: Channel,
    old: OldProcess,
    new: New,
    /// Without keys.
    offered: Option<State>,
}

/// Where the old process has stopped and this one goes on.
#[derive(Debug)]
pub(crate) struct Committed {
    state: Option<State>,
    channel: Channel,
    old: OldProcess,
    confirmation: Option<u64>,
}

/// The old process (a pidfd).
#[derive(Debug)]
struct OldProcess(OwnedFd);

impl OldProcess {
    fn with_pid(pid: i32) -> io::Result<Self> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    /// Waits until all of its threads are gone, and with them its last files. The channel is closed some moments
    /// before. Returns whether it is so.
    fn await_end(&self) -> bool {
        let timeout = PollTimeout::try_from(ENDS_WITHIN).unwrap_or(PollTimeout::MAX);
        poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout) == Ok(1)
    }
}

/// Why this process does not take over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("what calls itself the old process is one of another user, or none at all")]
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
        let old = OldProcess::with_pid(peer.pid())?;
        let nothing = std::fs::File::open("/dev/null")?;
        nix::unistd::dup2_stdin(&nothing).map_err(io::Error::from)?;
        Ok(Some(Self { channel: Channel::of(input), old, new: New::default(), offered: None }))
    }

    /// Process `pid`, which listens at `path` for its successor; `None` if nobody does. It gets two files for its
    /// state, because it may make none.
    ///
    /// # Errors
    /// Returns an error if the listener was not made by a process of this user, which the old one had at its start.
    pub(crate) fn at(path: &Path, pid: i32) -> Result<Option<Self>, Error> {
        let Some(channel) = Channel::connect(path)? else { return Ok(None) };
        if channel.peer()?.uid() != nix::unistd::geteuid().as_raw() {
            return Err(Error::Foreign);
        }
        // The kernel knows only who made the listener, which may be an instance long ago.
        let old = match OldProcess::with_pid(pid) {
            // Its last threads hold the listener for a moment.
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(None),
            old => old?,
        };
        let files = [memory_file()?, memory_file()?];
        channel.send((GREETING, 0), env!("CARGO_PKG_VERSION"), &files.each_ref().map(|file| (STATE, file.as_fd())))?;
        Ok(Some(Self { channel, old, new: New::default(), offered: None }))
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
        let mut letter: Option<Letter> = None;
        loop {
            match step {
                NewStep::Send(word) => drop(self.say(word, env!("CARGO_PKG_VERSION"))),
                NewStep::TakeOver(ToOld::Confirm(number)) => {
                    let file = letter.and_then(|letter| letter.files.into_iter().next());
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
            Received::Ended if self.old.await_end() => (self.new.old_died(), None),
            // It gave up, and goes on.
            Received::Ended => (NewStep::End, None),
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

    /// Tells the old process that this one serves, once it has served for a moment: if the first packets end it, the
    /// old one takes over again, with what it knew.
    pub(crate) fn confirm(&self) {
        if let Some(number) = self.confirmation {
            // Nothing is to come but the end of the old process.
            let _ = self.channel.receive(Some(SERVES_FOR));
            // It may be dead by now.
            let _ = self.channel.send((CONFIRM, number), "", &[]);
        }
    }

    /// Waits until the old process has ended: it still holds the ports of listeners.
    pub(crate) fn await_end(self) {
        if self.confirmation.is_none() {
            return;
        }
        let end = now() + ENDS_WITHIN;
        loop {
            let left = end.saturating_duration_since(now());
            match self.channel.receive(Some(left)) {
                // It has not heard the confirmation yet.
                Ok(Received::Letter(_)) if !left.is_zero() => {}
                Ok(Received::Ended) => {
                    self.old.await_end();
                    return;
                }
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

/// Data threads start and receive within it, and an upgrade takes longer anyway.
const SERVES_FOR: Duration = Duration::from_millis(100);
/// It answers who asked for the upgrade, and has nothing else to do.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// Says that standard input is one end of a channel.
pub(crate) const VARIABLE: &str = "NEBULA_HANDOVER";
/// Name of the descriptor with the state.
pub(crate) const STATE: &str = "state";
/// First word of a process that connected to the old one.
pub(crate) const GREETING: &str = "greeting";
pub(crate) const OFFER: &str = "offer";
pub(crate) const COMMIT: &str = "commit";
pub(crate) const WITHDRAW: &str = "withdraw";
pub(crate) const READY: &str = "ready";
pub(crate) const REFUSE: &str = "refuse";
pub(crate) const CONFIRM: &str = "confirm";

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;

    use super::*;
    use crate::handover::old::{Ended, Failure, Offer, Process};

    /// The recorded offer of the first release.
    const OFFER: &[u8] = include_bytes!("../../../tests/vectors/handover/version-1.0");
    /// Where its versions are: behind the first field, of 15 bytes.
    const MAJOR: usize = 18;

    struct Node;

    impl Process for Node {
        fn stop(&mut self) -> Result<State, Failure> {
            Ok(State::decode(OFFER).unwrap())
        }

        fn end_new(&mut self) {}
    }

    /// Has a process offer this to another one, which also says a word that only a later release knows. Returns what
    /// the old one and the new one end with.
    fn hand_over(offer: &[u8]) -> (Result<Ended, Failure>, Result<Committed, Error>) {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut state = memory_file().unwrap();
        state.write_all(offer).unwrap();
        let old = thread::spawn(move || {
            let committed = memory_file().unwrap();
            Offer { channel: &ours, files: &[], state: &state, committed }.make(&mut Node)
        });
        let old_process = OldProcess::with_pid(std::process::id().try_into().unwrap()).unwrap();
        let mut new = Takeover { channel: Channel::of(theirs), old: old_process, new: New::default(), offered: None };
        new.channel.send(("of_next_year", 1), "", &[]).unwrap();
        let taken = new.offer().map(drop).and_then(|()| new.commit()).inspect(Committed::confirm);
        (old.join().unwrap(), taken)
    }

    #[test]
    fn an_offer_of_the_release_before_or_after_is_taken_over() {
        let mut later = OFFER.to_vec();
        // A field that only that release knows.
        later.extend([0x28, 7]);
        for offer in [OFFER, &later] {
            let (old, new) = hand_over(offer);
            assert!(matches!(old, Ok(Ended::TookOver { version }) if version == env!("CARGO_PKG_VERSION")));
            assert!(new.unwrap().take_state().1.is_some());
        }
    }

    #[test]
    fn an_offer_that_is_too_new_is_refused_with_a_sentence_and_the_old_process_goes_on() {
        let mut newer = OFFER.to_vec();
        assert_eq!(newer[MAJOR - 1..=MAJOR], [0x10, 1]);
        newer[MAJOR] = 2;
        let (old, new) = hand_over(&newer);
        let Err(Failure::Refused(why)) = old else { panic!("it did not go on") };
        assert!(why.contains("has version 2, and this release understands version 1 only"), "{why}");
        assert!(new.is_err());
    }
}

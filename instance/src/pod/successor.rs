//! The instance that takes over from this one, with the pod's certificate, device, sockets and connections: the plugin
//! starts it, as root, and it connects to the socket on which this one listens.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use nebula_core::handover::State;
use nebula_linux::descriptors::Passed;
use nebula_linux::errno;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::sys::stat::{Mode, umask};

use crate::handover::channel::{Channel, Received, write_state};
use crate::handover::new;
use crate::handover::old::{self, Ended, Failure, Offer, Source};
use crate::pod::capture::VerdictCounters;
use crate::pod::predecessor::listener;

/// The socket on which an instance waits for its successor (seqpacket).
#[derive(Debug)]
pub(crate) struct SuccessorSocket {
    listener: UnixListener,
    /// The user who started this instance: root, where instances have users of their own.
    starter: u32,
}

impl SuccessorSocket {
    /// Listens at `path` (mode 0600), in place of a socket that an earlier instance left there.
    ///
    /// # Errors
    /// Returns an error if the socket cannot be created.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        // If a chmod after bind set the mode, anybody could connect in between.
        let before = umask(Mode::from_bits_truncate(0o177));
        let bound = bind(listener.as_raw_fd(), &UnixAddr::new(path)?);
        umask(before);
        bound?;
        listen(&listener, Backlog::new(1)?)?;
        Self::of(listener)
    }

    /// The socket of the previous instance.
    ///
    /// # Errors
    /// Returns an error if it is no listener for successors.
    pub(crate) fn of(socket: OwnedFd) -> io::Result<Self> {
        let listener = listener(socket, SockType::SeqPacket)?;
        Ok(Self { listener, starter: nix::unistd::geteuid().as_raw() })
    }

    /// Accepts a process that wants to take over, if there is one. Only the user who also started this instance may.
    ///
    /// # Errors
    /// Returns an error if the connection cannot be accepted.
    pub(crate) fn admit(&self) -> io::Result<Option<Channel>> {
        let end = match self.listener.accept() {
            Ok((end, _)) => end,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        };
        let channel = Channel::of(end.into());
        let peer = channel.peer()?;
        if peer.uid() != self.starter {
            tracing::warn!(user = peer.uid(), pid = peer.pid(), "A process of another user wants to take over");
            return Ok(None);
        }
        Ok(Some(channel))
    }
}

impl AsFd for SuccessorSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// How an attempt ended.
pub(crate) enum Outcome {
    /// Another instance serves.
    TookOver { version: String },
    /// Nothing has changed.
    GoesOn(Failure),
    /// This instance has stopped, and no other serves. Another one may take over from it.
    Stopped(State),
    /// As before, and nothing is left to hand over.
    Lost(String),
}

/// Hands over to the process at the other end of `channel`, with these descriptors and what policies said so far.
pub(crate) fn hand_over(
    channel: &Channel,
    source: Source,
    files: &[Passed],
    verdicts: Option<&VerdictCounters>,
) -> Outcome {
    let mut instance = Instance { source: Some(source), verdicts, has_stopped: false };
    let made = instance.offer(channel, files);
    let Instance { source, has_stopped, .. } = instance;
    match (made, source) {
        (Ok(Ended::TookOver { version }), _) => Outcome::TookOver { version },
        (Ok(Ended::Died(mut state)), _) => {
            // Nobody knows what the dead process has opened with them.
            state.forget_keys();
            Outcome::Stopped(state)
        }
        (Err(_), Some(Source::Stopped(state))) => Outcome::Stopped(state),
        (Err(failure), _) if has_stopped => Outcome::Lost(failure.to_string()),
        (Err(failure), _) => Outcome::GoesOn(failure),
    }
}

/// This instance in an attempt to hand over.
struct Instance<'a> {
    source: Option<Source>,
    verdicts: Option<&'a VerdictCounters>,
    has_stopped: bool,
}

impl Instance<'_> {
    /// The state with what this program has counted.
    fn complete(&self, mut state: State) -> State {
        if let Some(verdicts) = self.verdicts
            && let Err(error) = state.attach(verdicts.to_document())
        {
            tracing::warn!(%error, "The next instance counts the verdicts of policies from 0");
        }
        state
    }

    fn offer(&mut self, channel: &Channel, files: &[Passed]) -> Result<Ended, Failure> {
        let failed = |error: io::Error| Failure::Io(errno::text(&error));
        // This instance is confined and can make no files, so its successor brings them along.
        let mut brought = match channel.receive(Some(GREETING_WITHIN)).map_err(failed)? {
            Received::Letter(letter) if letter.word == new::GREETING => letter.files.into_iter(),
            _ => return Err(Failure::Ended),
        };
        let mut file = || brought.next().map(|passed| File::from(passed.file)).ok_or(Failure::Ended);
        let (mut offer, committed) = (file()?, file()?);
        match &self.source {
            Some(Source::Running(handle)) => {
                let state = self.complete(handle.offer().ok_or(Failure::Ending)?);
                tracing::info!(peers = state.peers(), flows = state.flows(), "Handing over to another instance");
                write_state(&mut offer, &state)
            }
            Some(Source::Stopped(state)) => write_state(&mut offer, state),
            None => return Err(Failure::Ending),
        }
        .map_err(failed)?;
        Offer { channel, files, state: &offer, committed }.make(self)
    }
}

impl old::Process for Instance<'_> {
    fn stop(&mut self) -> Result<State, Failure> {
        let state = self.source.take().ok_or(Failure::Restless)?.stop()?;
        self.has_stopped = true;
        Ok(self.complete(state))
    }

    /// The plugin, which started it, does that before another one asks.
    fn end_new(&mut self) {}
}

// It connects and greets at once.
const GREETING_WITHIN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_who_started_an_instance_reaches_it_and_nobody_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pod.successor");
        std::fs::write(&path, "left over").unwrap();
        let socket = SuccessorSocket::open(&path).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600);
        assert!(socket.admit().unwrap().is_none(), "nobody is there");
        let channel = Channel::connect(&path).unwrap().unwrap();
        let admitted = socket.admit().unwrap().unwrap();
        channel.send((new::GREETING, 0), "0.1.0", &[]).unwrap();
        assert!(matches!(admitted.receive(None).unwrap(), Received::Letter(letter) if letter.word == new::GREETING));
        let of_another = SuccessorSocket { starter: nix::unistd::geteuid().as_raw() + 1, ..socket };
        let _channel = Channel::connect(&path).unwrap().unwrap();
        assert!(of_another.admit().unwrap().is_none());
        drop(of_another);
        assert!(Channel::connect(&path).unwrap().is_none(), "nobody listens");
    }

    #[test]
    fn who_greets_without_files_for_the_state_or_not_at_all_gets_nothing() {
        let (ours, theirs) = Channel::pair().unwrap();
        let theirs = Channel::of(theirs);
        let mut instance = Instance { source: None, verdicts: None, has_stopped: false };
        for word in [new::GREETING, new::READY, "nonsense"] {
            theirs.send((word, 0), "", &[]).unwrap();
            assert!(matches!(instance.offer(&ours, &[]), Err(Failure::Ended)));
        }
        drop(theirs);
        assert!(matches!(instance.offer(&ours, &[]), Err(Failure::Ended)));
    }
}

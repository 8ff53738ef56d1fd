//! The connection between the old and the new process: two ends of a socket that no other process has. Descriptors
//! travel with its datagrams, and the state of the node in a file that is in memory only.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use nebula_core::handover::{MAX_DOCUMENT, State};
use nebula_linux::descriptors::{self, Passed};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, UnixCredentials, connect, getsockopt, socket, socketpair, sockopt,
};
use zeroize::Zeroizing;

/// One end. It can be written as long as a process holds the other end.
#[derive(Debug)]
pub(crate) struct Channel(OwnedFd);

/// A message with the descriptors that go along.
#[derive(Debug)]
pub(crate) struct Letter {
    /// What it is: a word of the commit.
    pub(crate) word: String,
    /// Number of the offer.
    pub(crate) number: u64,
    /// A text for people.
    pub(crate) text: String,
    pub(crate) files: Vec<Passed>,
}

#[derive(Debug)]
pub(crate) enum Received {
    Letter(Letter),
    /// Nothing came in time.
    Nothing,
    /// No process holds the other end.
    Ended,
}

impl Channel {
    /// Both ends, which no other program inherits.
    pub(crate) fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self(ours), theirs))
    }

    /// One end of a connection that exists.
    pub(crate) fn of(end: OwnedFd) -> Self {
        Self(end)
    }

    /// A channel to the process that listens at `path`; `None` if none does.
    pub(crate) fn connect(path: &Path) -> io::Result<Option<Self>> {
        let end = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
        match connect(end.as_raw_fd(), &UnixAddr::new(path)?) {
            Ok(()) => Ok(Some(Self(end))),
            Err(Errno::ENOENT | Errno::ECONNREFUSED) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The process at the other end: the one that made it, or that listens.
    pub(crate) fn peer(&self) -> io::Result<UnixCredentials> {
        Ok(getsockopt(&self.0, sockopt::PeerCredentials)?)
    }

    pub(crate) fn send(
        &self,
        (word, number): (&str, u64),
        text: &str,
        files: &[(&str, BorrowedFd<'_>)],
    ) -> io::Result<()> {
        let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MAX_TEXT_CHARS).collect();
        let mut message = format!("{word} {number} {text}");
        for (name, _) in files {
            message.push('\n');
            message.push_str(name);
        }
        let files: Vec<_> = files.iter().map(|(_, file)| *file).collect();
        descriptors::send(&self.0, message.as_bytes(), &files)
    }

    /// Waits for a message; `None`: without a limit.
    pub(crate) fn receive(&self, within: Option<Duration>) -> io::Result<Received> {
        // Rounded up: an early end would only be another wait.
        let timeout = within.map_or(PollTimeout::NONE, |within| {
            PollTimeout::try_from(within + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) | Err(Errno::EINTR) => return Ok(Received::Nothing),
            Ok(_) => {}
            Err(errno) => return Err(errno.into()),
        }
        let malformed = || io::Error::new(io::ErrorKind::InvalidData, "a message of the hand-over is malformed");
        let mut bytes = vec![0; MAX_MESSAGE_BYTES];
        let (length, files) = match descriptors::receive(&self.0, &mut bytes) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(Received::Ended),
            other => other?,
        };
        if length == 0 {
            return Ok(Received::Ended);
        }
        let text = str::from_utf8(&bytes[..length]).map_err(|_| malformed())?;
        read(text, files).map(Received::Letter).ok_or_else(malformed)
    }
}

fn read(message: &str, files: Vec<OwnedFd>) -> Option<Letter> {
    let mut lines = message.split('\n');
    let mut words = lines.next()?.splitn(3, ' ');
    let (word, number) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
    let text = words.next().unwrap_or_default().to_owned();
    let names: Vec<_> = lines.map(str::to_owned).collect();
    let is_whole = names.len() == files.len();
    let files = names.into_iter().zip(files).map(|(name, file)| Passed { name, file }).collect();
    is_whole.then_some(Letter { word, number, text, files })
}

/// A file in memory, without a name.
pub(crate) fn memory_file() -> io::Result<File> {
    Ok(File::from(memfd_create(c"nebula-handover", MFdFlags::MFD_CLOEXEC)?))
}

/// Writes the state of a node to an empty file.
pub(crate) fn write_state(file: &mut File, state: &State) -> io::Result<()> {
    let document = state.encode().map_err(io::Error::other)?;
    file.write_all(&document)
}

/// Reads such a file.
pub(crate) fn read_state(file: OwnedFd) -> io::Result<State> {
    let mut file = File::from(file);
    file.seek(SeekFrom::Start(0))?;
    let mut document = Zeroizing::new(Vec::with_capacity(file.metadata()?.len().min(MAX_DOCUMENT as u64) as usize));
    file.take(MAX_DOCUMENT as u64 + 1).read_to_end(&mut document)?;
    State::decode(&document).map_err(io::Error::other)
}

/// Erases such a file, whoever holds it.
pub(crate) fn erase_state(file: &mut File) -> io::Result<()> {
    let mut left = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(0))?;
    let zeros = [0; 4096];
    while left > 0 {
        let some = left.min(zeros.len() as u64);
        file.write_all(&zeros[..some as usize])?;
        left -= some;
    }
    Ok(())
}

const MAX_TEXT_CHARS: usize = 1000;
// A text, and the names of the descriptors.
const MAX_MESSAGE_BYTES: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Option<Duration> = Some(Duration::from_millis(10));

    fn letter(channel: &Channel) -> Letter {
        match channel.receive(Some(Duration::from_secs(10))).unwrap() {
            Received::Letter(letter) => letter,
            other => panic!("{other:?}"),
        }
    }

    fn pair() -> (Channel, Channel) {
        let (ours, theirs) = Channel::pair().unwrap();
        (ours, Channel::of(theirs))
    }

    #[test]
    fn words_and_descriptors_arrive_and_the_end_of_the_other_process_is_seen() {
        let (ours, theirs) = pair();
        assert!(matches!(theirs.receive(SHORT).unwrap(), Received::Nothing));
        let mut file = File::from(memfd_create(c"x", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(b"content").unwrap();
        let many: Vec<_> = (0..descriptors::MAX_FILES).map(|_| ("tun", file.as_fd())).collect();
        ours.send(("offer", 7), "two\nlines", &many).unwrap();
        ours.send(("withdraw", 7), "", &[]).unwrap();
        let offer = letter(&theirs);
        assert_eq!((offer.word.as_str(), offer.number, offer.text.as_str()), ("offer", 7, "two lines"));
        assert!(offer.files.len() == descriptors::MAX_FILES && offer.files.iter().all(|passed| passed.name == "tun"));
        let mut content = String::new();
        let mut received = File::from(offer.files.into_iter().next().unwrap().file);
        received.seek(SeekFrom::Start(0)).unwrap();
        received.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
        assert_eq!((letter(&theirs).word, letter_text(&ours, &theirs)), ("withdraw".to_owned(), String::new()));
        drop(ours);
        assert!(matches!(theirs.receive(None).unwrap(), Received::Ended));
        assert!(theirs.send(("ready", 1), "", &[]).is_err());
    }

    fn letter_text(ours: &Channel, theirs: &Channel) -> String {
        ours.send(("confirm", 1), "", &[]).unwrap();
        letter(theirs).text
    }

    #[test]
    fn a_malformed_message_is_an_error() {
        let (ours, theirs) = pair();
        for message in ["", " ", "offer", "offer x", "offer 1\ntun", "offer -1 "] {
            descriptors::send(&ours.0, message.as_bytes(), &[]).unwrap();
            if message.is_empty() {
                assert!(matches!(theirs.receive(SHORT).unwrap(), Received::Ended));
            } else {
                assert!(theirs.receive(SHORT).is_err(), "{message:?}");
            }
        }
    }

    #[test]
    fn an_erased_state_is_zeros_for_everybody_who_holds_it() {
        let mut file = File::from(memfd_create(c"x", MFdFlags::MFD_CLOEXEC).unwrap());
        file.write_all(&vec![7; 10_000]).unwrap();
        let mut other = file.try_clone().unwrap();
        erase_state(&mut file).unwrap();
        let mut content = Vec::new();
        other.seek(SeekFrom::Start(0)).unwrap();
        other.read_to_end(&mut content).unwrap();
        assert_eq!(content, vec![0; 10_000]);
        assert!(read_state(other.into()).is_err(), "this is no state");
    }
}

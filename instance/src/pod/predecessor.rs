//! The instance from which this one takes over: what it hands over, and when.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use nebula_core::handover::State;
use nebula_linux::descriptors::Passed;
use nebula_linux::errno;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockType, SockaddrLike, SockaddrStorage, getsockname, getsockopt, sockopt};

use crate::handover::new::{Committed, Takeover};
use crate::pod::error::Error;

/// The descriptors of an instance that go over to the next one, by what they are. An instance without a predecessor has
/// none.
#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    /// All queues of the device.
    pub(crate) tun: Option<Vec<OwnedFd>>,
    /// All sockets of the tunnel's port.
    pub(crate) udp: Option<Vec<OwnedFd>>,
    /// Listener for clients of the status.
    pub(crate) status: Option<OwnedFd>,
    /// Listener for the next instance.
    pub(crate) successor: Option<OwnedFd>,
    /// The locked launch file.
    pub(crate) lock: Option<OwnedFd>,
    /// The certificate and its key, in memory.
    pub(crate) identity: Option<OwnedFd>,
    /// Listener for the pod's init container, in the flow that has one.
    pub(crate) init: Option<OwnedFd>,
}

impl Descriptors {
    /// As they are sent.
    pub(crate) fn named(self) -> Vec<Passed> {
        let Self { tun, udp, status, successor, lock, identity, init } = self;
        let many = [(TUN, tun), (UDP, udp)].into_iter();
        let many = many.flat_map(|(name, files)| files.into_iter().flatten().map(move |file| (name, file)));
        let single = [(STATUS, status), (SUCCESSOR, successor), (LOCK, lock), (IDENTITY, identity), (INIT, init)];
        let single = single.into_iter().filter_map(|(name, file)| Some((name, file?)));
        many.chain(single).map(|(name, file)| Passed { name: name.to_owned(), file }).collect()
    }

    /// Sorts what was sent.
    fn of(passed: Vec<Passed>) -> io::Result<Self> {
        let (mut sorted, mut tun, mut udp) = (Self::default(), Vec::new(), Vec::new());
        for Passed { name, file } in passed {
            match name.as_str() {
                TUN => tun.push(file),
                UDP => udp.push(file),
                STATUS => sorted.status = Some(file),
                SUCCESSOR => sorted.successor = Some(file),
                LOCK => sorted.lock = Some(file),
                IDENTITY => sorted.identity = Some(file),
                INIT => sorted.init = Some(file),
                // Of a later release.
                _ => {}
            }
        }
        let Self { status, successor, lock, identity, .. } = &sorted;
        for (name, file) in [(STATUS, status), (SUCCESSOR, successor), (LOCK, lock), (IDENTITY, identity)] {
            if file.is_none() {
                return Err(io::Error::other(format!("it hands over no descriptor named {name}")));
            }
        }
        Ok(Self { tun: Some(tun), udp: Some(udp), ..sorted })
    }
}

/// A running instance of this pod, which goes on until this one is ready.
#[derive(Debug)]
pub(crate) struct Predecessor(Takeover);

impl Predecessor {
    /// The instance that listens at `socket`, and its descriptors; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if another process listens there, or it does not offer what this one needs.
    pub(crate) fn find(socket: &Path, pid: i32) -> Result<Option<(Self, Descriptors)>, Error> {
        let failed = |cause: String| Error::set_up(WHAT, cause);
        let Some(mut takeover) = Takeover::at(socket, pid).map_err(|error| failed(error.to_string()))? else {
            return Ok(None);
        };
        let passed = takeover.offer().map_err(|error| failed(error.to_string()))?;
        let mut predecessor = Self(takeover);
        let descriptors = Descriptors::of(passed).map_err(|error| predecessor.refuse(&error))?;
        Ok(Some((predecessor, descriptors)))
    }

    /// Tells it why this instance cannot take over.
    pub(crate) fn refuse(&mut self, error: &io::Error) -> Error {
        let why = errno::text(error);
        self.0.refuse(&why);
        Error::set_up(WHAT, why)
    }

    /// Says that this instance is ready, and waits until the other one has stopped. Returns what it handed over.
    ///
    /// # Errors
    /// Returns an error if that one goes on.
    pub(crate) fn commit(self) -> Result<(Committed, Option<State>), Error> {
        let committed = self.0.commit().map_err(|error| Error::set_up(WHAT, error.to_string()))?;
        Ok(committed.take_state())
    }
}

/// A listener of the previous instance.
///
/// # Errors
/// Returns an error if it is anything but a listening Unix socket of this type: a connection in its place would never
/// be readable in the way of one, or be served as if somebody had connected.
pub(crate) fn listener(file: OwnedFd, wanted: SockType) -> io::Result<UnixListener> {
    let other = |_| io::Error::other("what it hands over as a listener is none");
    let address = getsockname::<SockaddrStorage>(file.as_raw_fd()).map_err(other)?;
    let kind = getsockopt(&file, sockopt::SockType).map_err(other)?;
    let listens = getsockopt(&file, sockopt::AcceptConn).map_err(other)?;
    if address.family() != Some(AddressFamily::Unix) || kind != wanted || !listens {
        return Err(other(Errno::ENOTSOCK));
    }
    let listener = UnixListener::from(file);
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Whether two descriptors are of the same file.
pub(crate) fn is_same_file(one: &impl AsFd, other: &impl AsFd) -> io::Result<bool> {
    let [one, other] = [nix::sys::stat::fstat(one)?, nix::sys::stat::fstat(other)?];
    Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

const WHAT: &str = "cannot take over from the previous instance";
const TUN: &str = "tun";
const UDP: &str = "udp";
const STATUS: &str = "status";
const SUCCESSOR: &str = "successor";
const LOCK: &str = "lock";
const IDENTITY: &str = "identity";
const INIT: &str = "init";

#[cfg(test)]
mod tests {
    use nix::sys::socket::{Backlog, SockFlag, UnixAddr, bind, listen, socket};

    use super::*;

    fn file() -> OwnedFd {
        tempfile::tempfile().unwrap().into()
    }

    #[test]
    fn descriptors_are_found_by_name_and_all_but_one_are_needed() {
        let given = || Descriptors {
            tun: Some(vec![file(), file()]),
            udp: Some(vec![file()]),
            status: Some(file()),
            successor: Some(file()),
            lock: Some(file()),
            identity: Some(file()),
            init: None,
        };
        let of_a_later_release = Passed { name: "more".to_owned(), file: file() };
        let passed = given().named().into_iter().chain([of_a_later_release]).collect();
        let Descriptors { tun, udp, init, .. } = Descriptors::of(passed).unwrap();
        assert_eq!((tun.unwrap().len(), udp.unwrap().len(), init.is_none()), (2, 1, true));
        for name in [STATUS, SUCCESSOR, LOCK, IDENTITY] {
            let passed = given().named().into_iter().filter(|passed| passed.name != name).collect();
            assert!(Descriptors::of(passed).unwrap_err().to_string().ends_with(name));
        }
    }

    #[test]
    fn what_is_handed_over_as_a_listener_must_be_one_of_that_type() {
        let folder = tempfile::tempdir().unwrap();
        let stream = UnixListener::bind(folder.path().join("stream")).unwrap();
        let bound = |kind| {
            let new = socket(AddressFamily::Unix, kind, SockFlag::SOCK_CLOEXEC, None).unwrap();
            bind(new.as_raw_fd(), &UnixAddr::new(&folder.path().join(format!("{kind:?}"))).unwrap()).unwrap();
            new
        };
        let packets = bound(SockType::SeqPacket);
        listen(&packets, Backlog::new(1).unwrap()).unwrap();
        assert!(listener(stream.try_clone().unwrap().into(), SockType::Stream).is_ok());
        assert!(listener(packets.try_clone().unwrap(), SockType::SeqPacket).is_ok());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        for (file, wanted) in [
            (OwnedFd::from(stream), SockType::SeqPacket),
            (packets, SockType::Stream),
            (bound(SockType::Stream), SockType::Stream),
            (std::os::unix::net::UnixStream::pair().unwrap().0.into(), SockType::Stream),
            (bound(SockType::Datagram), SockType::Datagram),
            (tcp.into(), SockType::Stream),
            (file(), SockType::Stream),
            (std::fs::File::open("/dev/null").unwrap().into(), SockType::SeqPacket),
        ] {
            assert!(listener(file, wanted).unwrap_err().to_string().contains("is none"), "{wanted:?}");
        }
    }

    #[test]
    fn the_same_file_is_known_by_any_of_its_descriptors() {
        let one = file();
        assert!(is_same_file(&one, &one.try_clone().unwrap()).unwrap());
        assert!(!is_same_file(&one, &file()).unwrap());
    }
}

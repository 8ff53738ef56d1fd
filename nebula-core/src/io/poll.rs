//! Waits for descriptors, and wakes waiting threads.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

use crate::io::Error;

/// Which of two descriptors is readable or has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ready {
    pub(super) first: bool,
    pub(super) second: bool,
}

/// Waits until one of two descriptors can be read or has failed, at most `timeout` (`None`: no limit).
pub(super) fn readable(first: impl AsFd, second: impl AsFd, timeout: Option<Duration>) -> Result<Ready, Errno> {
    let [first, second] = any_readable([first.as_fd(), second.as_fd()], timeout)?;
    Ok(Ready { first, second })
}

/// Waits until one of the descriptors can be read or has failed, at most `timeout` (`None`: no limit). Returns which
/// ones.
pub(super) fn any_readable<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    timeout: Option<Duration>,
) -> Result<[bool; N], Errno> {
    let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
    match ppoll(&mut fds, timeout.map(TimeSpec::from_duration), None) {
        Ok(_) => Ok(fds.map(|fd| fd.any().unwrap_or(true))),
        Err(Errno::EINTR) => Ok([false; N]),
        Err(errno) => Err(errno),
    }
}

/// Waits until `fd` can be written, at most `timeout`.
pub(super) fn writable_within(fd: impl AsFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    matches!(ppoll(&mut fds, Some(TimeSpec::from_duration(timeout)), None), Ok(1))
}

/// A wake-up that any thread raises and the waiting thread lowers.
#[derive(Debug)]
pub(super) struct Wake {
    event: EventFd,
    // Loom models do not see system calls; this makes them explore every order of these, too.
    #[cfg(all(test, loom))]
    order: crate::sync::atomic::AtomicBool,
}

impl Wake {
    pub(super) fn new() -> Result<Self, Error> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| Error::io("cannot make an eventfd", errno))?;
        Ok(Self {
            event,
            #[cfg(all(test, loom))]
            order: crate::sync::atomic::AtomicBool::new(false),
        })
    }

    pub(super) fn raise(&self) {
        self.in_order();
        // Fails only when the counter is at its limit, and then the reader is awake already.
        let _ = self.event.write(1);
    }

    pub(super) fn lower(&self) {
        self.in_order();
        // Fails if it is lowered already.
        let _ = self.event.read();
    }

    pub(super) fn in_order(&self) {
        #[cfg(all(test, loom))]
        self.order.swap(true, crate::sync::atomic::Ordering::SeqCst);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

//! Threads that serve a socket until whoever started them lets go.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Held by whoever started the thread; its end ends the thread.
#[derive(Debug)]
pub(crate) struct Running {
    _stop: UnixStream,
}

/// The thread's side.
#[derive(Debug)]
pub(crate) struct Stopped(UnixStream);

pub(crate) fn pair() -> io::Result<(Running, Stopped)> {
    let (stop, stopped) = UnixStream::pair()?;
    Ok((Running { _stop: stop }, Stopped(stopped)))
}

impl Stopped {
    /// Waits. `true`: there is something on `socket`; `false`: it is over.
    pub(crate) fn not_before(&self, socket: &impl AsFd) -> bool {
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN), PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        loop {
            match poll(&mut fds, PollTimeout::NONE) {
                Err(nix::errno::Errno::EINTR) => {}
                Err(_) => return false,
                Ok(_) => return fds[1].revents().is_none_or(|events| events.is_empty()),
            }
        }
    }
}

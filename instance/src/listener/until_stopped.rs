//! Server threads that end when their handle is dropped.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread::{Builder, JoinHandle};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The handle of a server thread. Dropping it stops the thread and joins it, so what the thread owned is closed and its
/// address can be bound again. The thread must not wait for the owner of this handle.
#[derive(Debug)]
pub(crate) struct Running {
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's end of the handle.
#[derive(Debug)]
pub(crate) struct Stopped(UnixStream);

/// Starts a thread, which must end once [`Stopped::wait_for`] returns `false`.
pub(crate) fn spawn(name: &str, body: impl FnOnce(Stopped) + Send + 'static) -> io::Result<Running> {
    let (stop, stopped) = UnixStream::pair()?;
    let thread = Builder::new().name(name.to_owned()).spawn(move || body(Stopped(stopped)))?;
    Ok(Running { stop: Some(stop), thread: Some(thread) })
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Stopped {
    /// For a thread that runs an executor: a socket that becomes readable when the handle is dropped.
    pub(crate) fn into_async(self) -> io::Result<tokio::net::UnixStream> {
        self.0.set_nonblocking(true)?;
        tokio::net::UnixStream::from_std(self.0)
    }

    /// Waits until `socket` is readable (`true`) or the handle is dropped (`false`).
    pub(crate) fn wait_for(&self, socket: &impl AsFd) -> bool {
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

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_address_is_free_when_the_server_is_gone() {
        let mut address = "127.0.0.1:0".parse().unwrap();
        for _ in 0..200 {
            let socket = UdpSocket::bind(address).unwrap();
            address = socket.local_addr().unwrap();
            let running = spawn("test", move |stopped| while stopped.wait_for(&socket) {}).unwrap();
            drop(running);
        }
    }
}

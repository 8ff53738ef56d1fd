//! UDP sockets of programs without an async runtime.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::{Timed, wait_within};
use crate::{Datagram, UdpSocket};

/// A [`UdpSocket`] that waits on the caller's thread. Any number of threads may use it at the same time.
///
/// ```no_run
/// # fn run(net: &nebula_net::BlockingNet) -> std::io::Result<()> {
/// let socket = net.bind_udp(53)?;
/// let mut buffer = [0; 1500];
/// let (len, from) = socket.recv_from(&mut buffer)?;
/// socket.send_to(&buffer[..len], from)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BlockingUdpSocket(Arc<Timed<UdpSocket>>);

impl BlockingUdpSocket {
    pub(super) fn new(socket: UdpSocket) -> Self {
        Self(Timed::new(socket))
    }

    /// The socket once more, for another thread. Its port is free when all are dropped.
    ///
    /// # Errors
    /// Never; that of the standard library can fail.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(Arc::clone(&self.0)))
    }

    /// The socket itself, for what needs no waiting.
    #[must_use]
    pub fn socket(&self) -> &UdpSocket {
        &self.0.socket
    }

    /// See [`UdpSocket::local_addr`].
    ///
    /// # Errors
    /// As there.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.socket.local_addr()
    }

    /// How long to wait for a datagram; as [`set_read_timeout`](super::BlockingStream::set_read_timeout).
    ///
    /// # Errors
    /// As there.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.read.set(timeout)
    }

    /// How long to wait for room to send; as [`set_read_timeout`](super::BlockingStream::set_read_timeout).
    ///
    /// # Errors
    /// As there.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.write.set(timeout)
    }

    /// See [`UdpSocket::send_to`].
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) after the timeout.
    pub fn send_to(&self, payload: &[u8], remote: SocketAddr) -> io::Result<usize> {
        wait_within(self.0.socket.send_to(payload, remote), self.0.write.get())
    }

    /// See [`UdpSocket::recv_from`].
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) after the timeout.
    pub fn recv_from(&self, out: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        wait_within(self.0.socket.recv_from(out), self.0.read.get())
    }

    /// See [`UdpSocket::recv`], and [`UdpSocket::peer_certificate`].
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) after the timeout.
    pub fn recv(&self) -> io::Result<Datagram> {
        wait_within(self.0.socket.recv(), self.0.read.get())
    }
}

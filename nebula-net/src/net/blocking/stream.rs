//! Streams of programs without an async runtime.

use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::VerifiedCertificate;

use super::{Timed, wait_within};
use crate::TcpStream;
use crate::tcp::Keepalive;

/// A [`TcpStream`] that waits on the caller's thread. Any number of threads may use it at the same time, by way of
/// references or [`BlockingStream::try_clone`].
///
/// ```no_run
/// # fn run(net: &nebula_net::BlockingNet) -> std::io::Result<()> {
/// use std::io::{Read, Write};
/// use std::time::{Duration, Instant};
///
/// let mut stream = net.dial("10.42.0.1:7")?;
/// stream.set_read_timeout(Some(Duration::from_secs(5)))?;
/// let mut writer = stream.try_clone()?;
/// std::thread::spawn(move || writer.write_all(b"hello"));
/// let mut answer = [0; 5];
/// stream.read_exact(&mut answer)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BlockingStream(Arc<Timed<TcpStream>>);

impl BlockingStream {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self(Timed::new(stream))
    }

    /// The stream once more, for another thread. It ends when all are dropped.
    ///
    /// # Errors
    /// Never; that of the standard library can fail.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(Arc::clone(&self.0)))
    }

    /// See [`TcpStream::peer_certificate`].
    #[must_use]
    pub fn peer_certificate(&self) -> Option<VerifiedCertificate> {
        self.0.socket.peer_certificate()
    }

    /// See [`TcpStream::peer_addr`].
    ///
    /// # Errors
    /// As there.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.socket.peer_addr()
    }

    /// See [`TcpStream::local_addr`].
    ///
    /// # Errors
    /// As there.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.socket.local_addr()
    }

    /// How long a read waits, of this stream and its clones; then it fails with
    /// [`WouldBlock`](io::ErrorKind::WouldBlock), and the stream goes on. `None`: for ever.
    ///
    /// # Errors
    /// Returns [`InvalidInput`](io::ErrorKind::InvalidInput) for zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.read.set(timeout)
    }

    /// How long a write waits for room; as [`BlockingStream::set_read_timeout`].
    ///
    /// # Errors
    /// As there.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.write.set(timeout)
    }

    /// See [`TcpStream::peek`].
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) after the timeout for reads.
    pub fn peek(&self, out: &mut [u8]) -> io::Result<usize> {
        wait_within(self.0.socket.peek(out), self.0.read.get())
    }

    /// See [`TcpStream::set_nodelay`].
    pub fn set_nodelay(&self, no_delay: bool) {
        self.0.socket.set_nodelay(no_delay);
    }

    /// See [`TcpStream::set_keepalive`].
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) {
        self.0.socket.set_keepalive(keepalive);
    }

    /// See [`TcpStream::set_user_timeout`].
    pub fn set_user_timeout(&self, timeout: Option<Duration>) {
        self.0.socket.set_user_timeout(timeout);
    }

    /// Closes the sending side after everything that was written.
    pub fn shutdown(&self) {
        self.0.socket.shut_down();
    }
}

impl Read for &BlockingStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        wait_within(self.0.socket.read_shared(out), self.0.read.get())
    }
}

impl Write for &BlockingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        wait_within(self.0.socket.write_shared(bytes), self.0.write.get())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for BlockingStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        (&*self).read(out)
    }
}

impl Write for BlockingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

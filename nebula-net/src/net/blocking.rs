//! The same for programs without an async runtime.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use nebula_cert::VerifiedCertificate;

use super::{Net, TcpListener, TcpStream};
use crate::tcp::Keepalive;

/// A [`Net`] on a thread of its own, from [`Builder::start_blocking`](crate::Builder::start_blocking). Cheap to clone.
#[derive(Debug, Clone)]
pub struct BlockingNet {
    net: Net,
    runtime: tokio::runtime::Handle,
}

impl BlockingNet {
    pub(crate) fn new(net: Net, runtime: tokio::runtime::Handle) -> Self {
        Self { net, runtime }
    }

    /// The node itself, for what needs no waiting.
    #[must_use]
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// See [`Net::dial`].
    ///
    /// # Errors
    /// As there.
    pub fn dial(&self, target: &str) -> io::Result<BlockingStream> {
        let _inside = self.runtime.enter();
        wait(self.net.dial(target)).map(BlockingStream)
    }

    /// See [`Net::dial_timeout`].
    ///
    /// # Errors
    /// As there.
    pub fn dial_timeout(&self, target: &str, limit: Duration) -> io::Result<BlockingStream> {
        let _inside = self.runtime.enter();
        wait(self.net.dial_timeout(target, limit)).map(BlockingStream)
    }

    /// See [`Net::listen`].
    ///
    /// # Errors
    /// As there.
    pub fn listen(&self, port: u16) -> io::Result<BlockingListener> {
        self.net.listen(port).map(BlockingListener)
    }

    /// See [`Net::up_timeout`].
    ///
    /// # Errors
    /// As there.
    pub fn up_timeout(&self, peer: IpAddr, limit: Duration) -> io::Result<VerifiedCertificate> {
        let _inside = self.runtime.enter();
        wait(self.net.up_timeout(peer, limit))
    }

    /// See [`Net::up`].
    ///
    /// # Errors
    /// As there.
    pub fn up(&self, peer: IpAddr) -> io::Result<VerifiedCertificate> {
        let _inside = self.runtime.enter();
        wait(self.net.up(peer))
    }
}

/// A [`TcpListener`] that waits on the caller's thread. Any number of threads may wait at the same time.
#[derive(Debug)]
pub struct BlockingListener(TcpListener);

impl BlockingListener {
    /// See [`TcpListener::accept`].
    ///
    /// # Errors
    /// As there.
    pub fn accept(&self) -> io::Result<BlockingStream> {
        wait(self.0.accept()).map(BlockingStream)
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.0.port()
    }
}

/// A [`TcpStream`] that waits on the caller's thread. Any number of threads may use it at the same time, by way of references.
#[derive(Debug)]
pub struct BlockingStream(TcpStream);

impl BlockingStream {
    /// See [`TcpStream::peer_certificate`].
    #[must_use]
    pub fn peer_certificate(&self) -> Option<VerifiedCertificate> {
        self.0.peer_certificate()
    }

    /// See [`TcpStream::peer_addr`].
    ///
    /// # Errors
    /// As there.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.0.peer_addr()
    }

    /// See [`TcpStream::set_keepalive`].
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) {
        self.0.set_keepalive(keepalive);
    }

    /// See [`TcpStream::set_user_timeout`].
    pub fn set_user_timeout(&self, timeout: Option<Duration>) {
        self.0.set_user_timeout(timeout);
    }

    /// Closes the sending side after everything that was written.
    pub fn shutdown(&self) {
        self.0.shut_down();
    }
}

impl Read for &BlockingStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        wait(self.0.read_shared(out))
    }
}

impl Write for &BlockingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        wait(self.0.write_shared(bytes))
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

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits on this thread.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => return result,
            Poll::Pending => std::thread::park(),
        }
    }
}

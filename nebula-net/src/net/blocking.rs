//! The same for programs without an async runtime.

mod stream;
mod udp;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use nebula_cert::VerifiedCertificate;

pub use self::stream::BlockingStream;
pub use self::udp::BlockingUdpSocket;
use super::{Net, TcpListener, clock};

/// A [`Net`] on a thread of its own, from [`Builder::start_blocking`](crate::Builder::start_blocking). Cheap to clone.
///
/// ```no_run
/// # fn run(config: nebula_net::Config) -> Result<(), Box<dyn std::error::Error>> {
/// use std::io::Write;
///
/// let net = nebula_net::Net::builder(config).start_blocking()?;
/// for mut stream in net.listen(7)?.incoming() {
///     std::thread::spawn(move || stream.write_all(b"hello over Nebula\n"));
/// }
/// # Ok(())
/// # }
/// ```
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
        wait(self.net.dial(target)).map(BlockingStream::new)
    }

    /// See [`Net::dial_timeout`].
    ///
    /// # Errors
    /// As there.
    pub fn dial_timeout(&self, target: &str, limit: Duration) -> io::Result<BlockingStream> {
        let _inside = self.runtime.enter();
        wait(self.net.dial_timeout(target, limit)).map(BlockingStream::new)
    }

    /// See [`Net::listen`].
    ///
    /// # Errors
    /// As there.
    pub fn listen(&self, port: u16) -> io::Result<BlockingListener> {
        self.net.listen(port).map(BlockingListener)
    }

    /// See [`Net::listen_at`].
    ///
    /// # Errors
    /// As there.
    pub fn listen_at(&self, address: SocketAddr) -> io::Result<BlockingListener> {
        self.net.listen_at(address).map(BlockingListener)
    }

    /// See [`Net::bind_udp`].
    ///
    /// # Errors
    /// As there.
    pub fn bind_udp(&self, port: u16) -> io::Result<BlockingUdpSocket> {
        self.net.bind_udp(port).map(BlockingUdpSocket::new)
    }

    /// See [`Net::bind_udp_at`].
    ///
    /// # Errors
    /// As there.
    pub fn bind_udp_at(&self, address: SocketAddr) -> io::Result<BlockingUdpSocket> {
        self.net.bind_udp_at(address).map(BlockingUdpSocket::new)
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
    pub fn accept(&self) -> io::Result<(BlockingStream, SocketAddr)> {
        let (stream, from) = wait(self.0.accept())?;
        Ok((BlockingStream::new(stream), from))
    }

    /// Like [`BlockingListener::accept`], with a time limit.
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) if nobody connects in time.
    pub fn accept_timeout(&self, limit: Duration) -> io::Result<(BlockingStream, SocketAddr)> {
        let (stream, from) = wait_within(self.0.accept(), Some(limit))?;
        Ok((BlockingStream::new(stream), from))
    }

    /// Connections as they come, until the node is closed.
    pub fn incoming(&self) -> impl Iterator<Item = BlockingStream> {
        std::iter::from_fn(|| self.accept().ok().map(|(stream, _)| stream))
    }

    /// See [`TcpListener::local_addr`].
    ///
    /// # Errors
    /// As there.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.0.port()
    }
}

/// How long to wait; for ever without one.
#[derive(Debug, Default)]
struct Timeout(Mutex<Option<Duration>>);

impl Timeout {
    fn get(&self) -> Option<Duration> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, timeout: Option<Duration>) -> io::Result<()> {
        // As in the standard library, where zero would mean for ever.
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a timeout of zero"));
        }
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
        Ok(())
    }
}

/// What is used by blocking calls, with their timeouts; all clones have the same.
#[derive(Debug)]
struct Timed<T> {
    socket: T,
    read: Timeout,
    write: Timeout,
}

impl<T> Timed<T> {
    fn new(socket: T) -> Arc<Self> {
        Arc::new(Self { socket, read: Timeout::default(), write: Timeout::default() })
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits on this thread.
fn wait<T>(future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    wait_within(future, None)
}

/// Waits on this thread for so long at most.
fn wait_within<T>(future: impl Future<Output = io::Result<T>>, limit: Option<Duration>) -> io::Result<T> {
    let until = limit.and_then(|limit| clock::now().checked_add(limit));
    poll_until(future, until).unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
}

/// `None` if the future has no result by then.
fn poll_until<T>(future: impl Future<Output = T>, until: Option<Instant>) -> Option<T> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
            return Some(result);
        }
        match until.map(|until| until.saturating_duration_since(clock::now())) {
            None => std::thread::park(),
            Some(left) if left.is_zero() => return None,
            Some(left) => std::thread::park_timeout(left),
        }
    }
}

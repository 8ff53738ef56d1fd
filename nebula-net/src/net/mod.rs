//! A node for async programs: [`Net`] dials and listens, [`TcpStream`] reads and writes.

mod blocking;
mod builder;
mod clock;
mod dial;
mod driver;
mod halves;
mod names;
mod rest;
mod socket;
mod stream;
mod udp;
mod waiting;

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nebula_cert::VerifiedCertificate;
use nebula_core::{Config, Engine, Event, Node, Output, Part};
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::timeout;

pub use self::blocking::{BlockingListener, BlockingNet, BlockingStream, BlockingUdpSocket};
pub use self::builder::{Builder, StartError};
pub use self::dial::Unreached;
use self::driver::{Shared, Work};
pub use self::halves::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
pub use self::stream::{TcpListener, TcpStream};
pub use self::udp::{Datagram, UdpSocket};
use self::waiting::wait_for;
use crate::stack::{Counters, Stack};

/// A node of the overlay inside this program. Cheap to clone; all clones are the same node.
///
/// The node ends once the program has dropped all clones, streams, listeners and sockets: what was written is
/// delivered, for a few seconds at most, and peers are told that the node is gone. [`Net::close`] ends it at once.
/// Whatever is asked of a node that has ended fails with [`NotConnected`](io::ErrorKind::NotConnected).
///
/// ```no_run
/// # async fn run(config: nebula_net::Config) -> Result<(), Box<dyn std::error::Error>> {
/// use nebula_net::Net;
///
/// let net = Net::builder(config).start()?;
/// let peer = net.up("10.42.0.1".parse()?).await?;
/// println!("there is a tunnel to {}", peer.name());
/// let (stream, listener, socket) = (net.dial("10.42.0.1:7").await?, net.listen(7)?, net.bind_udp(53)?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Net {
    inner: Arc<Inner>,
}

/// What keeps the node alive.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    work: mpsc::UnboundedSender<Work>,
    /// Overlay addresses of the lighthouses, and the port of their DNS.
    lighthouses: Vec<IpAddr>,
    dns_port: u16,
}

/// How long [`Net::up`] and [`Net::dial`] wait for a tunnel or an answer.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);

impl Net {
    /// Begins a node with this configuration.
    pub fn builder(config: Config) -> Builder {
        Builder::new(config)
    }

    pub(crate) fn new(
        shared: Arc<Shared>,
        work: mpsc::UnboundedSender<Work>,
        lighthouses: Vec<IpAddr>,
        dns_port: u16,
    ) -> Self {
        Self { inner: Arc::new(Inner { shared, work, lighthouses, dns_port }) }
    }

    /// The node's overlay addresses.
    #[must_use]
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.inner.shared.with(|stack, _| stack.addresses().to_vec())
    }

    /// Connects to `HOST:PORT`, where the host is an overlay address, the name in the certificate of a peer with a
    /// tunnel, or a name that the DNS of a lighthouse knows. The peer's certificate is known when this returns.
    ///
    /// # Errors
    /// Returns an error if the name is unknown, there is no way to the peer, or it refuses or does not answer within
    /// 30 seconds. Its source is an [`Unreached`], which tells what the node knows about the cause.
    pub async fn dial(&self, target: &str) -> io::Result<TcpStream> {
        self.dial_timeout(target, DIAL_TIMEOUT).await
    }

    /// Like [`Net::dial`], with a time limit.
    ///
    /// # Errors
    /// As [`Net::dial`].
    pub async fn dial_timeout(&self, target: &str, limit: Duration) -> io::Result<TcpStream> {
        let until = clock::now() + limit;
        let remote = timeout(limit, self.resolve(target)).await.map_err(|_| crate::tcp::Error::TimedOut)??;
        self.dial_address_timeout(remote, until.saturating_duration_since(clock::now())).await
    }

    /// Like [`Net::dial`], without names.
    ///
    /// # Errors
    /// As [`Net::dial`].
    pub async fn dial_address(&self, remote: SocketAddr) -> io::Result<TcpStream> {
        self.dial_address_timeout(remote, DIAL_TIMEOUT).await
    }

    /// Like [`Net::dial_timeout`], without names.
    ///
    /// # Errors
    /// As [`Net::dial`].
    pub async fn dial_address_timeout(&self, remote: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
        let id = self.inner.shared.with(|stack, now| stack.connect(now, remote))?;
        let stream = TcpStream::new(Arc::clone(&self.inner), id);
        let local = stream.local_addr()?.ip();
        let opened = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_open(id, waiter),
            |stack, ticket| stack.leave_write(id, ticket),
        );
        let error = match timeout(limit, opened).await {
            Ok(Ok(())) => return Ok(stream),
            Ok(Err(error)) => error,
            Err(_) => crate::tcp::Error::TimedOut,
        };
        let ask = self.with_engine(move |engine, now| {
            (dial::why(engine.node(), now, (local, remote), error), engine.timeout(now))
        });
        Err(ask.await?.into())
    }

    /// Listens on a port of all overlay addresses; 0 for any free one.
    ///
    /// # Errors
    /// Returns an error if the port is taken.
    pub fn listen(&self, port: u16) -> io::Result<TcpListener> {
        TcpListener::new(Arc::clone(&self.inner), None, port)
    }

    /// Listens on a port of one overlay address; the unspecified address stands for all.
    ///
    /// # Errors
    /// Returns [`AddrInUse`](io::ErrorKind::AddrInUse) if the port is taken, and
    /// [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the address is not the node's.
    pub fn listen_at(&self, address: SocketAddr) -> io::Result<TcpListener> {
        TcpListener::new(Arc::clone(&self.inner), one_or_all(address), address.port())
    }

    /// Opens a UDP port on all overlay addresses; 0 for any free one.
    ///
    /// # Errors
    /// Returns an error if the port is taken.
    pub fn bind_udp(&self, port: u16) -> io::Result<UdpSocket> {
        UdpSocket::new(Arc::clone(&self.inner), None, port)
    }

    /// Opens a UDP port on one overlay address; the unspecified address stands for all.
    ///
    /// # Errors
    /// As [`Net::listen_at`].
    pub fn bind_udp_at(&self, address: SocketAddr) -> io::Result<UdpSocket> {
        UdpSocket::new(Arc::clone(&self.inner), one_or_all(address), address.port())
    }

    /// What the transport layer had to do because peers asked for much.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.inner.shared.with(|stack, _| stack.counters())
    }

    /// Waits until there is a tunnel to a peer, and starts a handshake if there is none. Returns the peer's
    /// certificate.
    ///
    /// # Errors
    /// Returns an error if nobody answers within 30 seconds, with an [`Unreached`] as its source.
    pub async fn up(&self, peer: IpAddr) -> io::Result<VerifiedCertificate> {
        self.up_timeout(peer, DIAL_TIMEOUT).await
    }

    /// Like [`Net::up`], with a time limit.
    ///
    /// # Errors
    /// As [`Net::up`].
    pub async fn up_timeout(&self, peer: IpAddr, limit: Duration) -> io::Result<VerifiedCertificate> {
        let mut events = self.events();
        let ask = || {
            self.with_engine(move |engine, now| match engine.certificate(peer) {
                Some(found) => (Some(found), engine.timeout(now)),
                None => (None, engine.connect(now, peer)),
            })
        };
        let wait = async {
            loop {
                if let Some(certificate) = ask().await? {
                    return Ok(Some(certificate));
                }
                match events.recv().await {
                    Ok(Event::HandshakeTimedOut { peer: lost, .. }) if lost == peer => return Ok(None),
                    Err(broadcast::error::RecvError::Closed) => return Err(ended()),
                    _ => {}
                }
            }
        };
        if let Some(certificate) = timeout(limit, wait).await.unwrap_or(Ok(None))? {
            return Ok(certificate);
        }
        let ask = self.with_engine(move |engine, now| {
            let cause = dial::no_tunnel(engine.node(), now, peer);
            (cause, engine.timeout(now))
        });
        Err(ask.await?.into())
    }

    /// What happens in the control plane from now on. A receiver that falls behind loses the oldest events and is
    /// told how many.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.inner.shared.subscribe()
    }

    /// Calls the control plane: to reload the configuration, to close tunnels, to look into it.
    ///
    /// # Errors
    /// Returns an error if the node has ended.
    pub async fn control<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Node) -> T + Send + 'static,
    ) -> io::Result<T> {
        self.with_engine(move |engine, now| engine.control(now, work)).await
    }

    /// Edits the configuration while the node runs, and returns the parts that changed; settings that only a new
    /// start can change stay as they were.
    ///
    /// # Errors
    /// Returns an error of the kind [`InvalidInput`](io::ErrorKind::InvalidInput) whose source is a [`StartError`],
    /// and changes nothing, if a node would not start with that configuration; another error if the node has ended.
    pub async fn reconfigure(&self, change: impl FnOnce(&mut Config) + Send + 'static) -> io::Result<Vec<Part>> {
        let edited = self.with_engine(move |engine, now| {
            let mut refused = None;
            let edit = |config: &mut Config| {
                let before = config.clone();
                change(config);
                if let Err(error) = builder::check(config) {
                    (*config, refused) = (before, Some(error));
                }
            };
            let (parts, output) = engine.control(now, |node| node.reconfigure(now, edit));
            (refused.map_or(Ok(parts), Err), output)
        });
        edited.await?.map_err(|refused| io::Error::new(io::ErrorKind::InvalidInput, refused))
    }

    async fn with_engine<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Engine, Instant) -> (T, Output<'_>) + Send + 'static,
    ) -> io::Result<T> {
        let (sender, receiver) = oneshot::channel();
        let work: Work = Box::new(move |engine, now| {
            let (result, output) = work(engine, now);
            // Whoever asked may have given up.
            let _ = sender.send(result);
            output
        });
        self.inner.work.send(work).map_err(|_| ended())?;
        receiver.await.map_err(|_| ended())
    }

    /// Ends the node, for all clones: connections with a reset, listeners and sockets with an error, and peers are
    /// told. What is tried later fails with [`NotConnected`](io::ErrorKind::NotConnected). [`Net::closed`] waits
    /// until it has ended.
    pub fn close(&self) {
        self.inner.shared.with(|stack, now| stack.shut(now));
        self.inner.shared.wake();
    }

    /// Waits until the node has ended: because it was closed, or its runtime ended, or a closure of the program
    /// panicked in it.
    pub async fn closed(&self) {
        self.inner.shared.ended().await;
    }

    /// Waits until no connection has anything to deliver: peers have all that was written, and both sides have closed.
    pub async fn wait_idle(&self) {
        wait_for(&self.inner.shared, |stack, _, waiter| stack.poll_idle(waiter), Stack::leave_idle).await;
    }
}

fn ended() -> io::Error {
    crate::tcp::Error::NodeEnded.into()
}

/// The address to bind to; `None` for all of them.
fn one_or_all(address: SocketAddr) -> Option<IpAddr> {
    Some(address.ip()).filter(|address| !address.is_unspecified())
}

/// Where a socket is that has one address, or all: then it is unspecified, in a family that the node has.
fn bound_at(inner: &Inner, address: Option<IpAddr>, port: u16) -> SocketAddr {
    let any = || {
        let has_v4 = inner.shared.with(|stack, _| stack.addresses().iter().any(IpAddr::is_ipv4));
        if has_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
    };
    SocketAddr::new(address.unwrap_or_else(any), port)
}

/// Why a port cannot be opened.
fn not_bound(stack: &Stack, address: Option<IpAddr>) -> io::Error {
    if stack.is_shut() {
        return ended();
    }
    let is_own = address.is_none_or(|address| stack.addresses().contains(&address));
    if is_own { io::ErrorKind::AddrInUse.into() } else { io::ErrorKind::AddrNotAvailable.into() }
}

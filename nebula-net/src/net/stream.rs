//! TCP streams and listeners of async programs.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use nebula_cert::VerifiedCertificate;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::waiting::wait_for;
use super::{Inner, bound_at, ended, not_bound};
use crate::stack::{Flow, Id};
use crate::tcp::{Error, Keepalive};

/// A TCP connection over the overlay. Dropping it closes it: what was written is still delivered, unless something
/// that arrived was not read; then the peer gets a reset. Its functions are those of tokio's `TcpStream`.
///
/// ```no_run
/// # async fn run(net: nebula_net::Net) -> std::io::Result<()> {
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// let stream = net.dial("10.42.0.1:7").await?;
/// println!("connected to {}", stream.peer_addr()?);
/// let (mut reader, mut writer) = stream.into_split();
/// tokio::spawn(async move { writer.write_all(b"hello").await });
/// let mut answer = Vec::new();
/// reader.read_to_end(&mut answer).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TcpStream {
    inner: Arc<Inner>,
    id: Id,
    resets: AtomicBool,
}

impl TcpStream {
    pub(crate) fn new(inner: Arc<Inner>, id: Id) -> Self {
        Self { inner, id, resets: AtomicBool::new(false) }
    }

    /// The verified certificate of the peer. `None` if the address is in a network behind another node, whose
    /// certificate does not name the host.
    #[must_use]
    pub fn peer_certificate(&self) -> Option<VerifiedCertificate> {
        self.inner.shared.with(|stack, _| stack.certificate(self.id))
    }

    /// Overlay address and port of the peer.
    ///
    /// # Errors
    /// Returns an error if the connection does not exist any more.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.flow().map(|flow| flow.remote)
    }

    /// Overlay address and port of this side.
    ///
    /// # Errors
    /// As [`TcpStream::peer_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.flow().map(|flow| flow.local)
    }

    fn flow(&self) -> io::Result<Flow> {
        self.inner.shared.with(|stack, _| stack.flow(self.id)).ok_or_else(ended)
    }

    /// Bytes that were written and the peer has not acknowledged yet; 0 once the stream has failed.
    #[must_use]
    pub fn unsent(&self) -> usize {
        self.inner.shared.with(|stack, _| stack.unsent(self.id))
    }

    /// Ends the stream with a reset: the peer is told that it is not complete, and what was written and is on its way
    /// may be lost.
    pub fn reset(self) {
        self.set_reset_on_drop(true);
    }

    /// Whether dropping the stream is [`TcpStream::reset`], so that a task that is cancelled or fails does not look
    /// like one that is done (`SO_LINGER` of zero seconds). Default: false.
    pub fn set_reset_on_drop(&self, resets: bool) {
        self.resets.store(resets, Ordering::Relaxed);
    }

    /// Sends small segments at once (the default), or lets them wait for the acknowledgement of others.
    pub fn set_nodelay(&self, no_delay: bool) {
        self.inner.shared.with(|stack, _| stack.set_no_delay(self.id, no_delay));
    }

    /// Probes the peer when it is silent, and ends the stream with [`TimedOut`](io::ErrorKind::TimedOut) if it does
    /// not answer; `None`: never. What all streams begin with is set by [`Builder::tcp`](crate::Builder::tcp).
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) {
        self.inner.shared.with(|stack, now| stack.set_keepalive(now, self.id, keepalive));
    }

    /// Ends the stream with [`TimedOut`](io::ErrorKind::TimedOut) when what was written waits for the peer's
    /// acknowledgement for so long; `None`: for a quarter of an hour.
    pub fn set_user_timeout(&self, timeout: Option<Duration>) {
        self.inner.shared.with(|stack, now| stack.set_user_timeout(now, self.id, timeout));
    }

    /// Reads what is there, without waiting.
    ///
    /// # Errors
    /// Returns [`WouldBlock`](io::ErrorKind::WouldBlock) if there is nothing at the moment, and an error if the stream
    /// has failed.
    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.shared.with(|stack, now| stack.try_take(now, self.id, out))?;
        Ok(read.ok_or(io::ErrorKind::WouldBlock)?.finish(out))
    }

    /// Writes what there is room for, without waiting.
    ///
    /// # Errors
    /// Returns [`WouldBlock`](io::ErrorKind::WouldBlock) if there is no room at the moment, and an error if the stream
    /// has failed.
    pub fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.shared.with(|stack, now| stack.try_write(now, self.id, bytes)).map_err(not_written)?;
        written.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    /// Waits until [`TcpStream::try_read`] has a result.
    ///
    /// # Errors
    /// Never; tokio's can fail.
    pub async fn readable(&self) -> io::Result<()> {
        let ready = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_read_ready(self.id, waiter),
            |stack, ticket| stack.leave_read(self.id, ticket),
        );
        ready.await;
        Ok(())
    }

    /// Waits until [`TcpStream::try_write`] has a result.
    ///
    /// # Errors
    /// Never; tokio's can fail.
    pub async fn writable(&self) -> io::Result<()> {
        let ready = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_write_ready(self.id, waiter),
            |stack, ticket| stack.leave_write(self.id, ticket),
        );
        ready.await;
        Ok(())
    }

    /// Waits for data, and copies it without taking it: it is read again later. 0 is the end of the stream.
    ///
    /// # Errors
    /// Returns an error if the stream has failed.
    pub async fn peek(&self, out: &mut [u8]) -> io::Result<usize> {
        let peeked = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_peek(self.id, waiter, out),
            |stack, ticket| stack.leave_read(self.id, ticket),
        );
        Ok(peeked.await?)
    }

    /// Reads as one of several who may do so at the same time.
    pub(crate) async fn read_shared(&self, out: &mut [u8]) -> io::Result<usize> {
        let read = wait_for(
            &self.inner.shared,
            |stack, now, waiter| stack.poll_take(now, self.id, waiter, out),
            |stack, ticket| stack.leave_read(self.id, ticket),
        );
        Ok(read.await?.finish(out))
    }

    /// Writes as one of several who may do so at the same time.
    pub(crate) async fn write_shared(&self, bytes: &[u8]) -> io::Result<usize> {
        let written = wait_for(
            &self.inner.shared,
            |stack, now, waiter| stack.poll_write(now, self.id, waiter, bytes),
            |stack, ticket| stack.leave_write(self.id, ticket),
        );
        written.await.map_err(not_written)
    }

    pub(crate) fn shut_down(&self) {
        self.inner.shared.with(|stack, now| stack.shut_down(now, self.id));
    }

    pub(crate) fn poll_read_shared(&self, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let unfilled = out.initialize_unfilled();
        let read = ready!(self.inner.shared.with(|stack, now| stack.poll_take(now, self.id, context, unfilled)))?;
        let count = read.finish(unfilled);
        out.advance(count);
        Poll::Ready(Ok(()))
    }

    pub(crate) fn poll_write_shared(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.inner.shared.with(|stack, now| stack.poll_write(now, self.id, context, bytes));
        written.map_err(not_written)
    }
}

impl Drop for TcpStream {
    fn drop(&mut self) {
        let resets = *self.resets.get_mut();
        self.inner
            .shared
            .with(|stack, now| if resets { stack.reset_connection(now, self.id) } else { stack.close(now, self.id) });
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll_read_shared(context, out)
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_shared(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shut_down();
        Poll::Ready(Ok(()))
    }
}

fn not_written(error: Error) -> io::Error {
    match error {
        Error::Closed => io::ErrorKind::BrokenPipe.into(),
        error => error.into(),
    }
}

/// A port that accepts connections from the overlay.
///
/// ```no_run
/// # async fn run(net: nebula_net::Net) -> std::io::Result<()> {
/// let listener = net.listen(7)?;
/// loop {
///     let (stream, from) = listener.accept().await?;
///     let name = stream.peer_certificate().map(|peer| peer.name().to_owned());
///     println!("{from} is {}", name.as_deref().unwrap_or("behind a gateway"));
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct TcpListener {
    inner: Arc<Inner>,
    address: Option<IpAddr>,
    port: u16,
}

impl TcpListener {
    pub(crate) fn new(inner: Arc<Inner>, address: Option<IpAddr>, port: u16) -> io::Result<Self> {
        let port =
            inner.shared.with(|stack, _| stack.listen(address, port).ok_or_else(|| not_bound(stack, address)))?;
        Ok(Self { inner, address, port })
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Overlay address and port; the unspecified address if it listens on all addresses of the node.
    ///
    /// # Errors
    /// Never; tokio's can fail.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(bound_at(&self.inner, self.address, self.port))
    }

    /// Waits for the next connection, and returns it with overlay address and port of the peer;
    /// [`TcpStream::peer_certificate`] says who that is. Any number of tasks may wait at the same time, and each may
    /// give up: its turn is another one's then.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        let accepted = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_accept(self.address, self.port, waiter),
            |stack, ticket| stack.leave_accept(self.address, self.port, ticket),
        );
        self.stream(accepted.await)
    }

    /// Like [`TcpListener::accept`], for what polls by hand: only the last one of those is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
        let shared = &self.inner.shared;
        shared.with(|stack, _| stack.poll_accept(self.address, self.port, context)).map(|id| self.stream(id))
    }

    fn stream(&self, id: Option<Id>) -> io::Result<(TcpStream, SocketAddr)> {
        let stream = TcpStream::new(Arc::clone(&self.inner), id.ok_or_else(ended)?);
        // Known as long as the stream is, even if the connection has ended already.
        let from = stream.peer_addr()?;
        Ok((stream, from))
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        self.inner.shared.with(|stack, now| stack.unlisten(now, self.address, self.port));
    }
}

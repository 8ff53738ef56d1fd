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
use super::{Inner, ended, not_bound};
use crate::stack::{Flow, Id};
use crate::tcp::{Error, Keepalive};

/// A TCP connection over the overlay. Dropping it closes it: what was written is still delivered, unless something that arrived was
/// not read; then the peer gets a reset.
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

    /// The verified certificate of the peer. `None` if the address is in a network behind another node, whose certificate does not name
    /// the host.
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

    /// Ends the stream with a reset: the peer is told that it is not complete, and what was written and is on its way may be lost.
    pub fn reset(self) {
        self.set_reset_on_drop(true);
    }

    /// Whether dropping the stream is [`TcpStream::reset`], so that a task that is cancelled or fails does not look like one that is
    /// done (`SO_LINGER` of zero seconds). Default: false.
    pub fn set_reset_on_drop(&self, resets: bool) {
        self.resets.store(resets, Ordering::Relaxed);
    }

    /// Sends small segments at once (the default), or lets them wait for the acknowledgement of others.
    pub fn set_nodelay(&self, no_delay: bool) {
        self.inner.shared.with(|stack, _| stack.set_no_delay(self.id, no_delay));
    }

    /// Probes the peer when it is silent, and ends the stream with [`TimedOut`](io::ErrorKind::TimedOut) if it does not answer; `None`:
    /// never. What all streams begin with is set by [`Builder::tcp`](crate::Builder::tcp).
    pub fn set_keepalive(&self, keepalive: Option<Keepalive>) {
        self.inner.shared.with(|stack, now| stack.set_keepalive(now, self.id, keepalive));
    }

    /// Ends the stream with [`TimedOut`](io::ErrorKind::TimedOut) when what was written waits for the peer's acknowledgement for so long;
    /// `None`: for a quarter of an hour.
    pub fn set_user_timeout(&self, timeout: Option<Duration>) {
        self.inner.shared.with(|stack, now| stack.set_user_timeout(now, self.id, timeout));
    }

    /// Reads as one of several who may do so at the same time.
    pub(crate) async fn read_shared(&self, out: &mut [u8]) -> io::Result<usize> {
        let read = wait_for(
            &self.inner.shared,
            |stack, now, waiter| stack.poll_read(now, self.id, waiter, out),
            |stack, ticket| stack.leave_read(self.id, ticket),
        );
        Ok(read.await?)
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
        let id = self.id;
        let unfilled = out.initialize_unfilled();
        let count = ready!(self.inner.shared.with(|stack, now| stack.poll_read(now, id, context, unfilled)))?;
        out.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.inner.shared.with(|stack, now| stack.poll_write(now, self.id, context, bytes));
        written.map_err(not_written)
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

    /// Waits for the next connection, which [`TcpStream::peer_certificate`] and [`TcpStream::peer_addr`] say more about. Any number of
    /// tasks may wait at the same time, and each may give up: its turn is another one's then.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn accept(&self) -> io::Result<TcpStream> {
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
    pub fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        let shared = &self.inner.shared;
        shared.with(|stack, _| stack.poll_accept(self.address, self.port, context)).map(|id| self.stream(id))
    }

    fn stream(&self, id: Option<Id>) -> io::Result<TcpStream> {
        id.map(|id| TcpStream::new(Arc::clone(&self.inner), id)).ok_or_else(ended)
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        self.inner.shared.with(|stack, now| stack.unlisten(now, self.address, self.port));
    }
}

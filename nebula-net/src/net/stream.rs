//! TCP streams and listeners of async programs.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use nebula_cert::VerifiedCertificate;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Inner, ended};
use crate::stack::{Flow, Id};

/// A TCP connection over the overlay. Dropping it closes it: what was written is still delivered, unless something that arrived was
/// not read; then the peer gets a reset.
#[derive(Debug)]
pub struct TcpStream {
    inner: Arc<Inner>,
    id: Id,
}

impl TcpStream {
    pub(crate) fn new(inner: Arc<Inner>, id: Id) -> Self {
        Self { inner, id }
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

    /// Sends small segments at once (the default), or lets them wait for the acknowledgement of others.
    pub fn set_nodelay(&self, no_delay: bool) {
        self.inner.shared.with(|stack, _| stack.set_no_delay(self.id, no_delay));
    }

    pub(crate) fn poll_read_into(&self, context: &mut Context<'_>, out: &mut [u8]) -> Poll<io::Result<usize>> {
        let read = self.inner.shared.with(|stack, now| stack.poll_read(now, self.id, context, out));
        read.map_err(Into::into)
    }

    pub(crate) fn poll_write_from(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.inner.shared.with(|stack, now| stack.poll_write(now, self.id, context, bytes));
        written.map_err(|error| match error {
            crate::tcp::Error::Closed => io::ErrorKind::BrokenPipe.into(),
            error => error.into(),
        })
    }

    pub(crate) fn shut_down(&self) {
        self.inner.shared.with(|stack, now| stack.shut_down(now, self.id));
    }
}

impl Drop for TcpStream {
    fn drop(&mut self) {
        self.inner.shared.with(|stack, now| stack.close(now, self.id));
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let count = ready!(self.poll_read_into(context, out.initialize_unfilled()))?;
        out.advance(count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_from(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.shut_down();
        Poll::Ready(Ok(()))
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
        let port = inner.shared.with(|stack, _| stack.listen(address, port));
        let port = port.ok_or(io::ErrorKind::AddrInUse)?;
        Ok(Self { inner, address, port })
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Waits for the next connection, which [`TcpStream::peer_certificate`] and [`TcpStream::peer_addr`] say more about.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn accept(&self) -> io::Result<TcpStream> {
        std::future::poll_fn(|context| self.poll_accept(context)).await
    }

    pub(crate) fn poll_accept(&self, context: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        let shared = &self.inner.shared;
        let id = ready!(shared.with(|stack, _| stack.poll_accept(self.address, self.port, context)));
        Poll::Ready(id.map(|id| TcpStream::new(Arc::clone(&self.inner), id)).ok_or_else(ended))
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        self.inner.shared.with(|stack, now| stack.unlisten(now, self.address, self.port));
    }
}

//! UDP over the overlay.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use nebula_cert::VerifiedCertificate;
use nebula_core::LocalIndex;
use tokio::io::ReadBuf;

use super::waiting::wait_for;
use super::{Inner, bound_at, ended, not_bound};
use crate::stack::{Received, Stack, names};

/// A UDP port on the overlay. Its functions are those of tokio's `UdpSocket`; [`UdpSocket::recv`] returns a whole
/// datagram, without a buffer of the right size, and [`UdpSocket::peer_certificate`] says who sent it.
///
/// ```no_run
/// # async fn run(net: nebula_net::Net) -> std::io::Result<()> {
/// let socket = net.bind_udp(7)?;
/// loop {
///     let datagram = socket.recv().await?;
///     match socket.peer_certificate(&datagram) {
///         Some(peer) if peer.groups().iter().any(|group| group == "ops") => {
///             socket.send_to(&datagram.payload, datagram.from).await?;
///         }
///         _ => println!("{} is not in the group ops", datagram.from),
///     }
/// }
/// # }
/// ```
#[derive(Debug)]
pub struct UdpSocket {
    inner: Arc<Inner>,
    address: Option<IpAddr>,
    port: u16,
}

/// A datagram that a [`UdpSocket`] received.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Datagram {
    /// Its payload.
    pub payload: Vec<u8>,
    /// Overlay address and port that it came from.
    pub from: SocketAddr,
    tunnel: Option<LocalIndex>,
}

impl From<Received> for Datagram {
    fn from(Received { from, payload, tunnel }: Received) -> Self {
        Self { payload, from, tunnel }
    }
}

impl UdpSocket {
    pub(crate) fn new(inner: Arc<Inner>, address: Option<IpAddr>, port: u16) -> io::Result<Self> {
        let port =
            inner.shared.with(|stack, _| stack.bind_udp(address, port).ok_or_else(|| not_bound(stack, address)))?;
        Ok(Self { inner, address, port })
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Overlay address and port; the unspecified address if the socket has all addresses of the node.
    ///
    /// # Errors
    /// Never; tokio's can fail.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(bound_at(&self.inner, self.address, self.port))
    }

    /// Longest payload of a datagram to this address.
    #[must_use]
    pub fn max_datagram(&self, remote: IpAddr) -> usize {
        self.inner.shared.with(|stack, _| stack.max_datagram(remote))
    }

    /// Sends a datagram; waits while too many others do. Returns its length, which does not mean that it arrives.
    ///
    /// # Errors
    /// Returns EMSGSIZE if it is longer than the MTU allows, [`InvalidInput`](io::ErrorKind::InvalidInput) for a
    /// destination without address or port, [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the node has no
    /// address of that family, and [`NotConnected`](io::ErrorKind::NotConnected) once the node has ended.
    pub async fn send_to(&self, payload: &[u8], remote: SocketAddr) -> io::Result<usize> {
        let sent = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_send_to((self.address, self.port), remote, payload, waiter),
            Stack::leave_send_to,
        );
        sent.await?;
        Ok(payload.len())
    }

    /// Like [`UdpSocket::send_to`], without waiting.
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) if too many datagrams wait to be sent.
    pub fn try_send_to(&self, payload: &[u8], remote: SocketAddr) -> io::Result<usize> {
        self.inner.shared.with(|stack, _| stack.send_to(self.address, self.port, remote, payload))?;
        Ok(payload.len())
    }

    /// Like [`UdpSocket::send_to`], for what polls by hand: only the last one of those is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_send_to(
        &self,
        context: &mut Context<'_>,
        payload: &[u8],
        remote: SocketAddr,
    ) -> Poll<io::Result<usize>> {
        let at = (self.address, self.port);
        ready!(self.inner.shared.with(|stack, _| stack.poll_send_to(at, remote, payload, context)))?;
        Poll::Ready(Ok(payload.len()))
    }

    /// Waits until there is room to send a datagram.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn writable(&self) -> io::Result<()> {
        let room = wait_for(&self.inner.shared, |stack, _, waiter| stack.poll_send_ready(waiter), Stack::leave_send_to);
        Ok(room.await?)
    }

    /// Like [`UdpSocket::writable`], for what polls by hand: only the last one of those is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_send_ready(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner.shared.with(|stack, _| stack.poll_send_ready(context)).map_err(Into::into)
    }

    /// Waits for a datagram. Any number of tasks may wait at the same time, and each may give up.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn recv(&self) -> io::Result<Datagram> {
        let received = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_receive_from(self.address, self.port, waiter),
            |stack, ticket| stack.leave_receive_from(self.address, self.port, ticket),
        );
        received.await.map(Datagram::from).ok_or_else(ended)
    }

    /// Like [`UdpSocket::recv`], without waiting.
    ///
    /// # Errors
    /// As there, and [`WouldBlock`](io::ErrorKind::WouldBlock) if there is none.
    pub fn try_recv(&self) -> io::Result<Datagram> {
        match self.inner.shared.with(|stack, _| stack.try_receive_from(self.address, self.port)) {
            Poll::Ready(received) => received.map(Datagram::from).ok_or_else(ended),
            Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// Like [`UdpSocket::recv`], for what polls by hand: only the last one of those is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_recv(&self, context: &mut Context<'_>) -> Poll<io::Result<Datagram>> {
        let received = self.inner.shared.with(|stack, _| stack.poll_receive_from(self.address, self.port, context));
        received.map(|received| received.map(Datagram::from).ok_or_else(ended))
    }

    /// The verified certificate of the peer that sent a datagram. `None` if the tunnel that it came by has ended since,
    /// or the address is in a network behind another node, whose certificate does not name the host.
    #[must_use]
    pub fn peer_certificate(&self, datagram: &Datagram) -> Option<VerifiedCertificate> {
        let certificate = self.inner.shared.certificate(datagram.tunnel?)?;
        names(&certificate, datagram.from.ip()).then_some(certificate)
    }

    /// Like [`UdpSocket::recv`], into a buffer; what is longer is cut off. Returns the length and the source.
    ///
    /// # Errors
    /// As there.
    pub async fn recv_from(&self, out: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let Datagram { payload, from, .. } = self.recv().await?;
        Ok((fill(out, &payload), from))
    }

    /// Like [`UdpSocket::recv_from`], without waiting.
    ///
    /// # Errors
    /// As [`UdpSocket::try_recv`].
    pub fn try_recv_from(&self, out: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let Datagram { payload, from, .. } = self.try_recv()?;
        Ok((fill(out, &payload), from))
    }

    /// Like [`UdpSocket::recv_from`], for what polls by hand: only the last one of those is woken.
    ///
    /// # Errors
    /// As there.
    pub fn poll_recv_from(&self, context: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<SocketAddr>> {
        let Datagram { payload, from, .. } = ready!(self.poll_recv(context))?;
        let count = payload.len().min(out.remaining());
        out.put_slice(&payload[..count]);
        Poll::Ready(Ok(from))
    }

    /// Waits until there is a datagram to receive, which another task may take first.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn readable(&self) -> io::Result<()> {
        let there = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_receive_ready(self.address, self.port, waiter),
            |stack, ticket| stack.leave_receive_from(self.address, self.port, ticket),
        );
        if there.await { Ok(()) } else { Err(ended()) }
    }
}

impl Drop for UdpSocket {
    fn drop(&mut self) {
        self.inner.shared.with(|stack, _| stack.unbind_udp(self.address, self.port));
    }
}

/// Copies what fits; returns how many bytes.
fn fill(out: &mut [u8], payload: &[u8]) -> usize {
    let count = payload.len().min(out.len());
    out[..count].copy_from_slice(&payload[..count]);
    count
}

//! UDP over the overlay.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::waiting::wait_for;
use super::{Inner, ended, not_bound};

/// A UDP port on the overlay.
#[derive(Debug)]
pub struct UdpSocket {
    inner: Arc<Inner>,
    address: Option<IpAddr>,
    port: u16,
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

    /// Sends a datagram. `Ok` does not mean that it arrives.
    ///
    /// # Errors
    /// Returns EMSGSIZE if it is longer than the MTU allows, [`InvalidInput`](io::ErrorKind::InvalidInput) for a destination without address
    /// or port, [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable) if the node has no address of that family,
    /// [`WouldBlock`](io::ErrorKind::WouldBlock) if too many wait to be sent, and [`NotConnected`](io::ErrorKind::NotConnected) once the
    /// node has ended.
    pub fn send_to(&self, payload: &[u8], remote: SocketAddr) -> io::Result<()> {
        Ok(self.inner.shared.with(|stack, _| stack.send_to(self.address, self.port, remote, payload))?)
    }

    /// Waits for a datagram. Returns its payload and its source. Any number of tasks may wait at the same time, and each may give up.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub async fn recv_from(&self) -> io::Result<(Vec<u8>, SocketAddr)> {
        let received = wait_for(
            &self.inner.shared,
            |stack, _, waiter| stack.poll_receive_from(self.address, self.port, waiter),
            |stack, ticket| stack.leave_receive_from(self.address, self.port, ticket),
        );
        received.await.map(|(from, payload)| (payload, from)).ok_or_else(ended)
    }
}

impl Drop for UdpSocket {
    fn drop(&mut self) {
        self.inner.shared.with(|stack, _| stack.unbind_udp(self.address, self.port));
    }
}

//! What a program does with its UDP sockets.

use std::net::{IpAddr, SocketAddr};
use std::task::Poll;

use nebula_core::LocalIndex;
use nebula_core::forward::Offload;

use super::waiters::{Ticket, Waiter};
use super::{Stack, packet};

/// A datagram that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Received {
    /// Its source.
    pub from: SocketAddr,
    /// Its payload.
    pub payload: Vec<u8>,
    /// The tunnel that it came by, if the stack was told.
    pub tunnel: Option<LocalIndex>,
}

/// Why a datagram cannot be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// It is longer than the MTU allows.
    #[error("a datagram to this address may have {most} bytes")]
    TooLong {
        /// Longest payload.
        most: usize,
    },
    /// The destination has no port, or no address.
    #[error("the destination has no address or port")]
    NoDestination,
    /// The node, or the address that the socket is bound to, is of another family than the destination.
    #[error("there is no address of that family to send from")]
    NoAddress,
    /// Too many wait already to be sent; try again.
    #[error("too many datagrams wait to be sent")]
    Full,
    /// The node was closed, or what ran it has ended.
    #[error("the node has ended")]
    NodeEnded,
}

impl From<SendError> for std::io::Error {
    fn from(error: SendError) -> Self {
        use std::io::ErrorKind;
        let kind = match error {
            // EMSGSIZE, which quinn and others know by its number.
            SendError::TooLong { .. } => return Self::from_raw_os_error(nix::errno::Errno::EMSGSIZE as i32),
            SendError::NoDestination => ErrorKind::InvalidInput,
            SendError::NoAddress => ErrorKind::AddrNotAvailable,
            SendError::Full => ErrorKind::WouldBlock,
            SendError::NodeEnded => ErrorKind::NotConnected,
        };
        Self::new(kind, error)
    }
}

impl Stack {
    /// Opens a UDP port, 0 for any free one, of all addresses or of one. Returns the port; `None` as [`Stack::listen`].
    pub fn bind_udp(&mut self, address: Option<IpAddr>, port: u16) -> Option<u16> {
        self.check_address(address)?;
        self.bindings.bind_udp(address, port, self.secret.next_port())
    }

    /// Closes a UDP port.
    pub fn unbind_udp(&mut self, address: Option<IpAddr>, port: u16) {
        self.bindings.unbind_udp(address, port);
    }

    /// Waits for the next datagram of a UDP port; `None` once the port is closed.
    pub fn poll_receive_from<'w>(
        &mut self,
        address: Option<IpAddr>,
        port: u16,
        waiter: impl Into<Waiter<'w>>,
    ) -> Poll<Option<Received>> {
        let waiter = waiter.into();
        match self.bindings.udp_at(address, port) {
            Some(port) => port.pop(waiter).map(Some),
            None => waiter.served(None),
        }
    }

    /// The next datagram of a UDP port: pending if there is none at the moment, `None` once the port is closed.
    pub fn try_receive_from(&mut self, address: Option<IpAddr>, port: u16) -> Poll<Option<Received>> {
        match self.bindings.udp_at(address, port) {
            Some(port) => port.take().map_or(Poll::Pending, |received| Poll::Ready(Some(received))),
            None => Poll::Ready(None),
        }
    }

    /// Waits until a UDP port has a datagram, and leaves it there. `false` once the port is closed.
    pub fn poll_receive_ready<'w>(
        &mut self,
        address: Option<IpAddr>,
        port: u16,
        waiter: impl Into<Waiter<'w>>,
    ) -> Poll<bool> {
        let waiter = waiter.into();
        match self.bindings.udp_at(address, port) {
            Some(port) => port.ready(waiter).map(|()| true),
            None => waiter.served(false),
        }
    }

    /// A task that waited for a datagram gives up.
    pub fn leave_receive_from(&mut self, address: Option<IpAddr>, port: u16, ticket: &mut Ticket) {
        if let Some(port) = self.bindings.udp_at(address, port) {
            port.waiters.leave(ticket);
        }
    }

    /// Longest payload of a datagram to this address.
    #[must_use]
    pub fn max_datagram(&self, remote: IpAddr) -> usize {
        usize::from(self.mtu) - packet::header_len(remote) - 8
    }

    /// Sends a datagram, or says that too many wait.
    ///
    /// # Errors
    /// Returns an error if it cannot be sent: see [`SendError`].
    pub fn send_to(
        &mut self,
        address: Option<IpAddr>,
        port: u16,
        remote: SocketAddr,
        payload: &[u8],
    ) -> Result<(), SendError> {
        if self.is_shut {
            return Err(SendError::NodeEnded);
        }
        if remote.port() == 0 || remote.ip().is_unspecified() {
            return Err(SendError::NoDestination);
        }
        let local = address.or_else(|| self.local_for(remote.ip()));
        let local = local.filter(|local| local.is_ipv4() == remote.is_ipv4()).ok_or(SendError::NoAddress)?;
        let most = self.max_datagram(remote.ip());
        if payload.len() > most {
            return Err(SendError::TooLong { most });
        }
        let (packet, checksum) = packet::udp_packet(SocketAddr::new(local, port), remote, payload);
        let sent = self.outgoing.push(packet, Offload { segment: None, checksum: Some(checksum) });
        if sent { Ok(()) } else { Err(SendError::Full) }
    }

    /// Sends a datagram, and waits while too many others do.
    ///
    /// # Errors
    /// As [`Stack::send_to`], but never [`SendError::Full`].
    pub fn poll_send_to<'w>(
        &mut self,
        (address, port): (Option<IpAddr>, u16),
        remote: SocketAddr,
        payload: &[u8],
        waiter: impl Into<Waiter<'w>>,
    ) -> Poll<Result<(), SendError>> {
        let waiter = waiter.into();
        match self.send_to(address, port, remote, payload) {
            Err(SendError::Full) => self.outgoing.waiters.wait(waiter),
            result => waiter.served(result),
        }
    }

    /// Waits until there is room for a datagram of any length.
    ///
    /// # Errors
    /// Returns an error once the node was closed.
    pub fn poll_send_ready<'w>(&mut self, waiter: impl Into<Waiter<'w>>) -> Poll<Result<(), SendError>> {
        let waiter = waiter.into();
        if self.is_shut {
            return waiter.served(Err(SendError::NodeEnded));
        }
        if self.outgoing.has_room_for(usize::from(self.mtu)) {
            waiter.served(Ok(()))
        } else {
            self.outgoing.waiters.wait(waiter)
        }
    }

    /// A task that waited to send a datagram gives up.
    pub fn leave_send_to(&mut self, ticket: &mut Ticket) {
        self.outgoing.waiters.leave(ticket);
    }
}

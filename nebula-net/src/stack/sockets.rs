//! What a program does with its connections and ports.

use std::net::IpAddr;
use std::task::Poll;
use std::time::{Duration, Instant};

use nebula_cert::VerifiedCertificate;

use super::bindings::Listener;
use super::entry::Stage;
use super::waiters::{Ticket, Waiter};
use super::{Flow, Id, Stack, names};
use crate::tcp::{Data, Error, Keepalive};

/// What was read: it is in the caller's memory, or was taken out of the connection and is still to be copied there.
#[derive(Debug)]
pub enum Read {
    /// So many bytes are there.
    Copied(usize),
    /// These are to be copied.
    Taken(Data),
}

impl Read {
    /// Copies what was taken into the `out` that it was taken for; returns how many bytes were read.
    ///
    /// # Panics
    /// If `out` is shorter than that.
    pub fn finish(self, out: &mut [u8]) -> usize {
        match self {
            Self::Copied(count) => count,
            Self::Taken(data) => data.copy_to(out),
        }
    }
}

impl Stack {
    /// Waits until a connection that this side opened is open.
    ///
    /// # Errors
    /// Returns an error if it could not be opened.
    pub fn poll_open<'w>(&mut self, id: Id, waiter: impl Into<Waiter<'w>>) -> Poll<Result<(), Error>> {
        let waiter = waiter.into();
        let Some(entry) = self.connections.get_mut(id) else { return waiter.served(Err(Error::Closed)) };
        match (entry.connection.error(), entry.stage) {
            (_, Stage::Open) => waiter.served(Ok(())),
            (Some(error), _) => waiter.served(Err(error)),
            _ => entry.writers.wait(waiter),
        }
    }

    /// Reads; `Ok(0)` is the end of the stream.
    ///
    /// # Errors
    /// Returns an error if the connection has failed.
    pub fn poll_read<'w>(
        &mut self,
        now: Instant,
        id: Id,
        waiter: impl Into<Waiter<'w>>,
        out: &mut [u8],
    ) -> Poll<Result<usize, Error>> {
        let waiter = waiter.into();
        let read = self.try_read(now, id, out);
        if let Ok(None) = read
            && let Some(entry) = self.connections.get_mut(id)
        {
            return entry.readers.wait(waiter);
        }
        waiter.served(read.map(Option::unwrap_or_default))
    }

    /// Reads what is there; `Ok(None)` if there is nothing at the moment.
    ///
    /// # Errors
    /// As [`Stack::poll_read`].
    pub fn try_read(&mut self, now: Instant, id: Id, out: &mut [u8]) -> Result<Option<usize>, Error> {
        let entry = self.connections.get_mut(id).ok_or(Error::Closed)?;
        let before = entry.connection.buffered();
        let read = entry.connection.read(now, out);
        if let Ok(Some(_)) = read {
            self.note_read(now, id, before);
        }
        read
    }

    /// Like [`Stack::poll_read`], and leaves it to the caller to copy long data: call [`Read::finish`] with the same
    /// `out` once others may use the stack.
    ///
    /// # Errors
    /// As there.
    pub fn poll_take<'w>(
        &mut self,
        now: Instant,
        id: Id,
        waiter: impl Into<Waiter<'w>>,
        out: &mut [u8],
    ) -> Poll<Result<Read, Error>> {
        let waiter = waiter.into();
        match self.take(now, id, out.len()) {
            Some(data) => waiter.served(Ok(Read::Taken(data))),
            None => self.poll_read(now, id, waiter, out).map_ok(Read::Copied),
        }
    }

    /// [`Stack::try_read`] in the manner of [`Stack::poll_take`].
    ///
    /// # Errors
    /// As [`Stack::poll_read`].
    pub fn try_take(&mut self, now: Instant, id: Id, out: &mut [u8]) -> Result<Option<Read>, Error> {
        match self.take(now, id, out.len()) {
            Some(data) => Ok(Some(Read::Taken(data))),
            None => Ok(self.try_read(now, id, out)?.map(Read::Copied)),
        }
    }

    fn take(&mut self, now: Instant, id: Id, max: usize) -> Option<Data> {
        let entry = self.connections.get_mut(id)?;
        let before = entry.connection.buffered();
        let data = entry.connection.take(now, max)?;
        self.note_read(now, id, before);
        Some(data)
    }

    /// Data was read from a connection that had `before` bytes of it.
    fn note_read(&mut self, now: Instant, id: Id, before: usize) {
        let Some(entry) = self.connections.get(id) else { return };
        self.peers.buffer(entry.peer, before, entry.connection.buffered());
        // The window may be worth telling.
        if entry.connection.wants_ack(now) {
            self.settle(now, id);
        }
    }

    /// Like [`Stack::poll_read`], and leaves the data there.
    ///
    /// # Errors
    /// As there.
    pub fn poll_peek<'w>(
        &mut self,
        id: Id,
        waiter: impl Into<Waiter<'w>>,
        out: &mut [u8],
    ) -> Poll<Result<usize, Error>> {
        let waiter = waiter.into();
        let Some(entry) = self.connections.get_mut(id) else { return waiter.served(Err(Error::Closed)) };
        match entry.connection.peek(out) {
            Ok(None) => entry.readers.wait(waiter),
            peeked => waiter.served(peeked.map(Option::unwrap_or_default)),
        }
    }

    /// Waits until [`Stack::try_read`] has a result.
    pub fn poll_read_ready<'w>(&mut self, id: Id, waiter: impl Into<Waiter<'w>>) -> Poll<()> {
        let waiter = waiter.into();
        match self.connections.get_mut(id) {
            Some(entry) if !entry.connection.is_readable() => entry.readers.wait(waiter),
            _ => waiter.served(()),
        }
    }

    /// Writes what there is room for.
    ///
    /// # Errors
    /// Returns an error if the connection has failed or this side of it was closed.
    pub fn poll_write<'w>(
        &mut self,
        now: Instant,
        id: Id,
        waiter: impl Into<Waiter<'w>>,
        bytes: &[u8],
    ) -> Poll<Result<usize, Error>> {
        let waiter = waiter.into();
        let written = self.try_write(now, id, bytes);
        if let Ok(None) = written
            && let Some(entry) = self.connections.get_mut(id)
        {
            return entry.writers.wait(waiter);
        }
        waiter.served(written.map(Option::unwrap_or_default))
    }

    /// Writes what there is room for; `Ok(None)` if there is none at the moment.
    ///
    /// # Errors
    /// As [`Stack::poll_write`].
    pub fn try_write(&mut self, now: Instant, id: Id, bytes: &[u8]) -> Result<Option<usize>, Error> {
        let entry = self.connections.get_mut(id).ok_or(Error::Closed)?;
        match entry.connection.write(bytes)? {
            0 if !bytes.is_empty() => Ok(None),
            count => {
                self.settle(now, id);
                Ok(Some(count))
            }
        }
    }

    /// Waits until [`Stack::try_write`] has a result.
    pub fn poll_write_ready<'w>(&mut self, id: Id, waiter: impl Into<Waiter<'w>>) -> Poll<()> {
        let waiter = waiter.into();
        match self.connections.get_mut(id) {
            Some(entry) if !entry.connection.is_writable() => entry.writers.wait(waiter),
            _ => waiter.served(()),
        }
    }

    /// Closes the sending side.
    pub fn shut_down(&mut self, now: Instant, id: Id) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.shut_down();
            self.settle(now, id);
        }
    }

    /// The program needs the connection no more; see [`Connection::close`](crate::tcp::Connection::close).
    pub fn close(&mut self, now: Instant, id: Id) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.orphaned = true;
            entry.connection.close(now);
            self.settle(now, id);
        }
    }

    /// Bytes that were written and the peer has not acknowledged yet.
    #[must_use]
    pub fn unsent(&self, id: Id) -> usize {
        self.connections.get(id).map_or(0, |entry| entry.connection.unsent())
    }

    /// The program needs the connection no more, and ends it with a reset.
    pub fn reset_connection(&mut self, now: Instant, id: Id) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.orphaned = true;
            entry.connection.abort();
            self.settle(now, id);
        }
    }

    /// Ends everything for ever: connections with a reset, listeners and UDP sockets with an error. What is tried
    /// later fails at once.
    pub fn shut(&mut self, now: Instant) {
        self.is_shut = true;
        for id in self.connections.ids().collect::<Vec<_>>() {
            if let Some(entry) = self.connections.get_mut(id) {
                entry.connection.abort_with(Error::NodeEnded);
                entry.wake();
                self.settle(now, id);
            }
        }
        self.bindings.wake_all();
        self.outgoing.wake_all();
    }

    /// Whether [`Stack::shut`] was called.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        self.is_shut
    }

    /// Waits until no connection has anything to deliver.
    pub fn poll_idle<'w>(&mut self, waiter: impl Into<Waiter<'w>>) -> Poll<()> {
        let waiter = waiter.into();
        if self.unfinished == 0 { waiter.served(()) } else { self.idle.wait(waiter) }
    }

    /// A task that waited for that gives up.
    pub fn leave_idle(&mut self, ticket: &mut Ticket) {
        self.idle.leave(ticket);
    }

    /// Sends small segments at once, or waits for the acknowledgement of others.
    pub fn set_no_delay(&mut self, id: Id, no_delay: bool) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.set_no_delay(no_delay);
        }
    }

    /// Probes a silent peer in this way, or never.
    pub fn set_keepalive(&mut self, now: Instant, id: Id, keepalive: Option<Keepalive>) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.set_keepalive(keepalive);
            self.settle(now, id);
        }
    }

    /// Ends a connection when data waits for an acknowledgement for so long.
    pub fn set_user_timeout(&mut self, now: Instant, id: Id, timeout: Option<Duration>) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.connection.set_user_timeout(timeout);
            self.settle(now, id);
        }
    }

    /// The peer's certificate; `None` for a host in a network behind another peer, whose certificate does not name
    /// the host.
    #[must_use]
    pub fn certificate(&self, id: Id) -> Option<VerifiedCertificate> {
        let entry = self.connections.get(id)?;
        let address = entry.flow.remote.ip();
        entry.sender.clone().filter(|sender| names(sender, address))
    }

    /// The two ends of a connection.
    #[must_use]
    pub fn flow(&self, id: Id) -> Option<Flow> {
        self.connections.get(id).map(|entry| entry.flow)
    }

    /// Listens on a port, 0 for any free one, of all addresses or of one. Returns the port.
    ///
    /// # Errors
    /// Returns `None` if the port is taken or the address is not the node's.
    pub fn listen(&mut self, address: Option<IpAddr>, port: u16) -> Option<u16> {
        self.check_address(address)?;
        self.bindings.listen(address, port, self.secret.next_port())
    }

    /// Waits for the next connection of a listener.
    pub fn poll_accept<'w>(
        &mut self,
        address: Option<IpAddr>,
        port: u16,
        waiter: impl Into<Waiter<'w>>,
    ) -> Poll<Option<Id>> {
        let waiter = waiter.into();
        let Some(listener) = self.bindings.listener_at(address, port) else { return waiter.served(None) };
        match listener.accept(waiter) {
            Poll::Ready(id) => {
                if let Some(entry) = self.connections.get_mut(id) {
                    entry.stage = Stage::Open;
                }
                Poll::Ready(Some(id))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Ends a listener, and the connections that wait in it.
    pub fn unlisten(&mut self, now: Instant, address: Option<IpAddr>, port: u16) {
        for id in self.bindings.unlisten(address, port).into_iter().flat_map(Listener::into_waiting) {
            if let Some(entry) = self.connections.get_mut(id) {
                entry.orphaned = true;
                entry.connection.abort();
                self.settle(now, id);
            }
        }
    }

    /// A task that waited for a connection of a listener gives up.
    pub fn leave_accept(&mut self, address: Option<IpAddr>, port: u16, ticket: &mut Ticket) {
        if let Some(listener) = self.bindings.listener_at(address, port) {
            listener.waiters.leave(ticket);
        }
    }

    /// A task that waited to read from a connection gives up.
    pub fn leave_read(&mut self, id: Id, ticket: &mut Ticket) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.readers.leave(ticket);
        }
    }

    /// A task that waited to write to a connection gives up.
    pub fn leave_write(&mut self, id: Id, ticket: &mut Ticket) {
        if let Some(entry) = self.connections.get_mut(id) {
            entry.writers.leave(ticket);
        }
    }

    pub(super) fn check_address(&self, address: Option<IpAddr>) -> Option<()> {
        (!self.is_shut && address.is_none_or(|address| self.addresses.contains(&address))).then_some(())
    }
}

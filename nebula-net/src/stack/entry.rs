//! A connection in the stack: its flow, who waits for it, and where it stands between peer and program.

use std::time::Instant;

use nebula_cert::VerifiedCertificate;
use nebula_core::forward::{Offload, Segment, SegmentKind};
use nebula_core::protocol;

use super::shares::Place;
use super::waiters::Waiters;
use super::{Flow, Id, TCP_CHECKSUM, packet};
use crate::tcp::Connection;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The peer opens it; its place among those that are half open.
    HalfOpen(Place),
    /// Open, and waiting to be accepted by the program.
    Waiting,
    /// This side opens it.
    Opening,
    /// Open, but the peer's certificate is not set.
    Unnamed,
    /// The program has it.
    Open,
}

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) flow: Flow,
    pub(crate) connection: Connection,
    pub(crate) stage: Stage,
    /// Who is charged for it.
    pub(crate) peer: Id,
    /// Of the tunnel that the peer's SYN came by.
    pub(crate) sender: Option<VerifiedCertificate>,
    /// In the list of those that may have something to send.
    pub(crate) queued: bool,
    /// The timer that counts.
    pub(crate) scheduled: Option<Instant>,
    /// This side opened it.
    pub(crate) dialled: bool,
    /// The program dropped it.
    pub(crate) orphaned: bool,
    /// It has nothing to deliver any more.
    pub(crate) finished: bool,
    /// In the list of those in TIME-WAIT.
    pub(crate) resting: bool,
    pub(crate) readers: Waiters,
    pub(crate) writers: Waiters,
}

impl Entry {
    pub(crate) fn new(flow: Flow, connection: Connection, stage: Stage, peer: Id) -> Self {
        Self {
            flow,
            connection,
            stage,
            peer,
            sender: None,
            queued: false,
            scheduled: None,
            dialled: false,
            orphaned: false,
            finished: false,
            resting: false,
            readers: Waiters::default(),
            writers: Waiters::default(),
        }
    }

    /// Writes the next packet of the connection into the empty `out`, if it has one to send.
    pub(crate) fn transmit(&mut self, now: Instant, out: &mut Vec<u8>) -> Option<Offload> {
        let Flow { local, remote } = self.flow;
        packet::begin(local.ip(), remote.ip(), protocol::TCP, out);
        let headers = out.len();
        let Some(size) = self.connection.transmit(now, (local.port(), remote.port()), out) else {
            out.clear();
            return None;
        };
        let start = packet::finish(out, TCP_CHECKSUM);
        let header = usize::from(out[headers + 12] >> 4) * 4;
        let segment =
            (out.len() - headers - header > size).then_some(Segment { kind: SegmentKind::Tcp, size: size as u16 });
        Some(Offload { segment, checksum: Some((start as u16, TCP_CHECKSUM as u16)) })
    }

    /// Wakes whoever would find what it waits for.
    pub(crate) fn wake_if_ready(&mut self) {
        if !self.readers.is_empty() && self.connection.is_readable() {
            self.readers.wake_all();
        }
        if !self.writers.is_empty() && self.stage != Stage::Unnamed && self.connection.is_writable() {
            self.writers.wake_all();
        }
    }

    pub(crate) fn wake(&mut self) {
        self.readers.wake_all();
        self.writers.wake_all();
    }
}

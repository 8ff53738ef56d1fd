//! A connection in the stack: its flow, who waits for it, and where it stands between peer and program.

use std::task::{Context, Waker};
use std::time::Instant;

use nebula_cert::VerifiedCertificate;

use super::Flow;
use crate::tcp::Connection;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The peer opens it.
    HalfOpen,
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
    pub(crate) certificate: Option<VerifiedCertificate>,
    /// In the list of those that may have something to send.
    pub(crate) queued: bool,
    /// The timer that counts.
    pub(crate) scheduled: Option<Instant>,
    /// The program dropped it.
    pub(crate) orphaned: bool,
    /// In the list of those in TIME-WAIT.
    pub(crate) resting: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Entry {
    pub(crate) fn new(flow: Flow, connection: Connection, stage: Stage) -> Self {
        Self {
            flow,
            connection,
            stage,
            certificate: None,
            queued: false,
            scheduled: None,
            orphaned: false,
            resting: false,
            reader: None,
            writer: None,
        }
    }

    pub(crate) fn wait_to_read(&mut self, context: &Context<'_>) {
        self.reader = Some(context.waker().clone());
    }

    pub(crate) fn wait_to_write(&mut self, context: &Context<'_>) {
        self.writer = Some(context.waker().clone());
    }

    /// Wakes whoever would find what it waits for.
    pub(crate) fn wake_if_ready(&mut self) {
        if self.reader.is_some()
            && self.connection.is_readable()
            && let Some(waker) = self.reader.take()
        {
            waker.wake();
        }
        if self.writer.is_some()
            && self.stage != Stage::Unnamed
            && self.connection.is_writable()
            && let Some(waker) = self.writer.take()
        {
            waker.wake();
        }
    }

    pub(crate) fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }
}

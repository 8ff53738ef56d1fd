//! A stream with data both ways, and the programs at its two ends.

use std::task::{Context, Poll};
use std::time::Instant;

use nebula_net::stack::{Id, Stack};
use nebula_net::tcp::Error;

/// How much a program reads or writes in one call.
const CHUNK: usize = 16 << 10;

/// Byte at this place of the data that the program with this number sends: the same in no two places nearby.
fn byte(program: u64, at: u64) -> u8 {
    let word = (program << 40 ^ at >> 3).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (24 + 5 * (at & 7))) as u8
}

/// One end: sends its data, closes its side, and reads and checks what comes until the peer closes.
pub(crate) struct End {
    pub(crate) node: usize,
    /// Missing until the peer's SYN is accepted.
    pub(crate) id: Option<Id>,
    /// Numbers of the data that it sends and expects.
    programs: [u64; 2],
    pub(crate) to_send: u64,
    sent: u64,
    /// What is to be written next.
    chunk: Vec<u8>,
    pub(crate) received: u64,
    open: bool,
    shut: bool,
    finished: bool,
    /// Whether its program reads.
    pub(crate) reads: bool,
    /// How it ended, once it has.
    pub(crate) outcome: Option<Result<(), Error>>,
}

impl std::fmt::Debug for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { node, sent, to_send, received, outcome, .. } = self;
        write!(f, "node {node} sent {sent} of {to_send}, received {received}, {outcome:?}")
    }
}

impl End {
    pub(crate) fn new(node: usize, id: Option<Id>, programs: [u64; 2], to_send: u64) -> Self {
        Self {
            node,
            id,
            programs,
            to_send,
            sent: 0,
            chunk: Vec::new(),
            received: 0,
            open: id.is_none(),
            shut: false,
            finished: false,
            reads: true,
            outcome: None,
        }
    }

    /// Does what can be done without waiting; `context` is woken when there is more.
    pub(crate) fn drive(&mut self, stack: &mut Stack, now: Instant, context: &mut Context<'_>) {
        let Some(id) = self.id.filter(|_| self.outcome.is_none()) else { return };
        let result = self.try_drive(stack, now, id, context);
        if result != Ok(false) {
            self.outcome = Some(result.map(|_| ()));
            stack.close(now, id);
        }
    }

    /// Returns whether both sides have closed.
    fn try_drive(&mut self, stack: &mut Stack, now: Instant, id: Id, context: &mut Context<'_>) -> Result<bool, Error> {
        if !self.open {
            match stack.poll_open(id, &mut *context) {
                Poll::Ready(result) => result?,
                Poll::Pending => return Ok(false),
            }
            self.open = true;
            assert!(stack.certificate(id).is_some(), "an open connection has its peer's certificate");
        }
        let mut buffer = [0; CHUNK];
        while self.reads
            && !self.finished
            && let Poll::Ready(read) = stack.poll_read(now, id, &mut *context, &mut buffer)
        {
            let count = read?;
            for (at, found) in (self.received..).zip(&buffer[..count]) {
                assert_eq!(*found, byte(self.programs[1], at), "byte {at} of {self:?}");
            }
            self.received += count as u64;
            self.finished = count == 0;
        }
        while self.sent < self.to_send {
            if self.chunk.is_empty() {
                let end = self.to_send.min(self.sent + CHUNK as u64);
                self.chunk.extend((self.sent..end).map(|at| byte(self.programs[0], at)));
            }
            let Poll::Ready(written) = stack.poll_write(now, id, &mut *context, &self.chunk) else { return Ok(false) };
            let count = written?;
            self.chunk.drain(..count);
            self.sent += count as u64;
        }
        if !self.shut {
            stack.shut_down(now, id);
            self.shut = true;
        }
        Ok(self.finished)
    }
}

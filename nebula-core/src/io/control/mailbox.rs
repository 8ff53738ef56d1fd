//! The mailbox of the control thread: punts, commands, a stop request and a failure.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::SyncSender;
use std::sync::{OnceLock, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Instant;

use crate::handover::State;
use crate::io::Error;
use crate::io::poll::Wake;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{Node, Punt};

const MAX_PUNTS: usize = 1024;
// A packet that waits for a tunnel may be a super-packet.
const MAX_PUNT_BYTES: usize = 4 << 20;
const MAX_COMMANDS: usize = if cfg!(all(test, loom)) { 1 } else { 64 };

/// Work that a [`crate::io::Handle`] wants done with the node.
pub(in crate::io) struct Work(Box<WithNode>);

type WithNode = dyn FnOnce(&mut Node, Instant) + Send;

impl Work {
    pub(in crate::io) fn new(work: impl FnOnce(&mut Node, Instant) + Send + 'static) -> Self {
        Self(Box::new(work))
    }

    pub(in crate::io) fn run(self, node: &mut Node, now: Instant) {
        (self.0)(node, now);
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Work")
    }
}

/// Bounded: punts beyond the limit are dropped, and senders of commands wait for room.
#[derive(Debug)]
pub(in crate::io) struct Mailbox {
    content: Mutex<Content>,
    // Signalled when commands were taken, or nobody reads any more.
    room: Condvar,
    wake: Wake,
    // Unset until the control thread runs.
    reader: OnceLock<ThreadId>,
}

#[derive(Debug, Default)]
struct Content {
    punts: VecDeque<Punt>,
    punt_bytes: usize,
    commands: VecDeque<Work>,
    hand_over: Option<SyncSender<State>>,
    stop: bool,
    failure: Option<Error>,
    closed: bool,
}

/// Everything that was in the mailbox.
#[derive(Debug, Default)]
pub(in crate::io) struct Delivered {
    pub(in crate::io) punts: VecDeque<Punt>,
    pub(in crate::io) commands: VecDeque<Work>,
    pub(in crate::io) stop: bool,
}

impl Mailbox {
    pub(in crate::io) fn new() -> Result<Self, Error> {
        Ok(Self {
            content: Mutex::new(Content::default()),
            room: Condvar::new(),
            wake: Wake::new()?,
            reader: OnceLock::new(),
        })
    }

    /// Adds a punt. Returns `false` if there are too many.
    #[must_use]
    pub(in crate::io) fn punt(&self, punt: Punt) -> bool {
        let mut content = self.content();
        let bytes = content.punt_bytes + weight(&punt);
        if content.closed || content.punts.len() >= MAX_PUNTS || bytes > MAX_PUNT_BYTES {
            return false;
        }
        content.punt_bytes = bytes;
        content.punts.push_back(punt);
        // The first one wakes the reader, which takes everything.
        if content.punts.len() == 1 {
            self.wake.raise();
        }
        true
    }

    /// Makes the calling thread the reader.
    pub(in crate::io) fn read_here(&self) {
        let _ = self.reader.set(thread::current().id());
    }

    /// Whether the calling thread is the reader, which would wait for itself forever.
    pub(in crate::io) fn is_read_here(&self) -> bool {
        self.reader.get() == Some(&thread::current().id())
    }

    /// Adds a command, waiting for room. It is dropped if the control thread has ended.
    pub(in crate::io) fn command(&self, command: Work) {
        let mut content = self.content();
        while content.commands.len() >= MAX_COMMANDS && !content.closed && !self.is_read_here() {
            content = self.room.wait(content).unwrap_or_else(PoisonError::into_inner);
        }
        if !content.closed {
            content.commands.push_back(command);
            self.wake.raise();
        }
    }

    /// Adds a command. Returns `false` if there is no room, or the control thread has ended.
    #[must_use]
    pub(in crate::io) fn try_command(&self, command: Work) -> bool {
        let mut content = self.content();
        let fits = content.commands.len() < MAX_COMMANDS && !content.closed;
        if fits {
            content.commands.push_back(command);
            self.wake.raise();
        }
        fits
    }

    /// Asks the control thread to hand over and to end. It drops `reply` if it goes on instead.
    pub(in crate::io) fn hand_over(&self, reply: SyncSender<State>) {
        let mut content = self.content();
        if !content.closed {
            content.hand_over = Some(reply);
            self.wake.raise();
        }
    }

    pub(in crate::io) fn take_hand_over(&self) -> Option<SyncSender<State>> {
        self.content().hand_over.take()
    }

    /// Asks the control thread to end.
    pub(in crate::io) fn stop(&self) {
        self.content().stop = true;
        self.wake.raise();
    }

    /// Asks the control thread to end because of `error`; only the first error is kept.
    pub(in crate::io) fn fail(&self, error: Error) {
        let mut content = self.content();
        content.stop = true;
        content.failure.get_or_insert(error);
        drop(content);
        self.wake.raise();
    }

    pub(in crate::io) fn take_failure(&self) -> Option<Error> {
        self.content().failure.take()
    }

    /// Takes everything.
    pub(in crate::io) fn take(&self) -> Delivered {
        let mut content = self.content();
        self.wake.lower();
        content.punt_bytes = 0;
        let punts = std::mem::take(&mut content.punts);
        let commands = std::mem::take(&mut content.commands);
        self.room.notify_all();
        Delivered { punts, commands, stop: content.stop }
    }

    /// Refuses everything from now on, because nobody will read it.
    pub(in crate::io) fn close(&self) {
        let mut content = self.content();
        content.closed = true;
        content.punts = VecDeque::new();
        content.commands = VecDeque::new();
        content.hand_over = None;
        self.room.notify_all();
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Bytes on the heap that a punt owns.
fn weight(punt: &Punt) -> usize {
    match punt {
        Punt::NoTunnel { packet, .. } | Punt::Unknown { packet } => packet.bytes.len(),
        Punt::PathUnexamined { waits, .. } => waits.as_ref().map_or(0, |packet| packet.bytes.len()),
        Punt::Handshake { datagram, .. } => datagram.len(),
        Punt::Message { plaintext, .. } => plaintext.len(),
        Punt::Connect { .. }
        | Punt::RecvError { .. }
        | Punt::UnknownIndex { .. }
        | Punt::Roamed { .. }
        | Punt::Audited { .. }
        | Punt::Confirmed { .. }
        | Punt::Dropped { .. } => 0,
    }
}

#[cfg(all(test, loom))]
#[path = "mailbox_models.rs"]
mod models;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::net::SocketAddr;
    use std::time::Duration;

    use super::*;
    use crate::io::poll::readable;

    fn handshake(len: usize) -> Punt {
        Punt::Handshake { from: SocketAddr::from(([127, 0, 0, 1], 1)).into(), datagram: vec![0; len] }
    }

    fn is_awake(mailbox: &Mailbox) -> bool {
        readable(mailbox, mailbox, Some(Duration::ZERO)).unwrap().first
    }

    #[test]
    fn the_reader_is_woken_until_it_has_taken_everything() {
        let mailbox = Mailbox::new().unwrap();
        assert!(!is_awake(&mailbox));
        assert!(mailbox.punt(handshake(1)) && mailbox.punt(handshake(2)));
        assert!(is_awake(&mailbox));
        assert_eq!(mailbox.take().punts.len(), 2);
        assert!(!is_awake(&mailbox));
        assert!(mailbox.punt(handshake(3)));
        assert!(is_awake(&mailbox), "a punt after an empty box wakes again");
    }

    #[test]
    fn a_flood_of_punts_is_bounded_by_number_and_by_bytes() {
        let mailbox = Mailbox::new().unwrap();
        assert_eq!((0..2000).filter(|_| mailbox.punt(handshake(1))).count(), MAX_PUNTS);
        mailbox.take();
        assert_eq!((0..2000).filter(|_| mailbox.punt(handshake(64 << 10))).count(), MAX_PUNT_BYTES / (64 << 10));
        mailbox.take();
        assert!(mailbox.punt(handshake(1)), "there is room after the box was emptied");
    }

    #[test]
    fn a_flood_of_commands_waits_and_ends_with_the_reader() {
        let mailbox = Mailbox::new().unwrap();
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..3 * MAX_COMMANDS {
                    mailbox.command(Work::new(|_, _| ()));
                }
            });
            let mut taken = 0;
            while taken < 2 * MAX_COMMANDS {
                let commands = mailbox.take().commands.len();
                assert!(commands <= MAX_COMMANDS);
                taken += commands;
            }
            mailbox.close();
            writer.join().unwrap();
        });
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        mailbox.command(Work::new(move |_, _| reply.try_send(()).unwrap()));
        assert!(answer.recv().is_err(), "a question to nobody is not answered");
    }

    #[test]
    fn the_reader_never_waits_for_itself() {
        let mailbox = Mailbox::new().unwrap();
        assert!(!mailbox.is_read_here(), "nobody reads yet");
        mailbox.read_here();
        for _ in 0..MAX_COMMANDS + 1 {
            mailbox.command(Work::new(|_, _| ()));
        }
        assert_eq!(mailbox.take().commands.len(), MAX_COMMANDS + 1);
        thread::scope(|scope| scope.spawn(|| assert!(!mailbox.is_read_here())).join()).unwrap();
    }

    #[test]
    fn the_first_failure_is_kept_and_stops() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.fail(Error::io("first", nix::errno::Errno::EBADFD));
        mailbox.fail(Error::io("second", nix::errno::Errno::EBADFD));
        assert!(mailbox.take().stop);
        assert!(mailbox.take_failure().unwrap().to_string().starts_with("first"));
    }
}

//! What other threads leave for the control thread: punts, commands, the wish to stop, a failure.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::PoisonError;
use std::sync::mpsc::SyncSender;
use std::time::Instant;

use ipnet::IpNet;
use nebula_cert::{CaPool, Identity, Version};

use super::Error;
use super::wake::Wake;
use crate::config::{self, RecvErrorPolicy};
use crate::counters::Direction;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::wire::ip::FlowKey;
use crate::{FlowTrace, Node, Punt, TableSizes, TunnelStatus, Whereabouts, firewall};

const MAX_PUNTS: usize = 1024;
// A packet that waits for a tunnel may be a super-packet.
const MAX_PUNT_BYTES: usize = 4 << 20;
const MAX_COMMANDS: usize = if cfg!(all(test, loom)) { 1 } else { 64 };

/// Something a [`super::Handle`] wants.
#[derive(Debug)]
pub(super) enum Command {
    SetIdentity(Box<Identity>),
    SetInitiatingVersion(Option<Version>),
    SetTrust(Box<CaPool>),
    SetFirewall(Box<firewall::Policy>),
    SetStaticHosts(BTreeMap<IpAddr, Vec<SocketAddr>>),
    SetLighthouse(Box<config::Lighthouse>),
    SetPunchy(config::Punchy),
    SetTimers(config::Timers),
    SetRelay(config::Relay),
    SetPreferredRanges(Vec<IpNet>),
    SetDisconnectInvalid(bool),
    SetRecvError { send: RecvErrorPolicy, accept: RecvErrorPolicy },
    SetSubnets(Vec<config::SubnetRoute>),
    Connect(IpAddr),
    Tunnels(SyncSender<Vec<TunnelStatus>>),
    Sizes(SyncSender<TableSizes>),
    Handshaking(SyncSender<Vec<IpAddr>>),
    Close { peer: IpAddr, quietly: bool, reply: SyncSender<usize> },
    Inquire(IpAddr),
    Whereabouts(IpAddr, SyncSender<Whereabouts>),
    Trace(Direction, Box<FlowKey>, SyncSender<Box<FlowTrace>>),
    Work(Work),
}

/// Something to be done with the node that has no command of its own.
pub(super) struct Work(pub(super) Box<WithNode>);

type WithNode = dyn FnOnce(&mut Node, Instant) + Send;

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Work")
    }
}

/// Bounded on every side: a flood of punts is dropped, a flood of commands waits.
#[derive(Debug)]
pub(super) struct Mailbox {
    content: Mutex<Content>,
    // Commands were taken, or nobody reads any more.
    room: Condvar,
    wake: Wake,
}

#[derive(Debug, Default)]
struct Content {
    punts: VecDeque<Punt>,
    punt_bytes: usize,
    commands: VecDeque<Command>,
    /// Commands are being gathered that only make sense together.
    gathering: bool,
    stop: bool,
    failure: Option<Error>,
    closed: bool,
}

/// Everything that was in the box.
#[derive(Debug, Default)]
pub(super) struct Delivered {
    pub(super) punts: VecDeque<Punt>,
    pub(super) commands: VecDeque<Command>,
    pub(super) stop: bool,
}

impl Mailbox {
    pub(super) fn new() -> Result<Self, Error> {
        Ok(Self { content: Mutex::new(Content::default()), room: Condvar::new(), wake: Wake::new()? })
    }

    /// Leaves a punt. `false`: there are too many.
    #[must_use]
    pub(super) fn punt(&self, punt: Punt) -> bool {
        let mut content = self.content();
        let bytes = content.punt_bytes + weight(&punt);
        if content.closed || content.punts.len() >= MAX_PUNTS || bytes > MAX_PUNT_BYTES {
            return false;
        }
        content.punt_bytes = bytes;
        content.punts.push_back(punt);
        // The first one wakes the reader, which takes all.
        if content.punts.len() == 1 {
            self.wake.raise();
        }
        true
    }

    /// Leaves a command, waiting for room; lost if the control thread has ended.
    pub(super) fn command(&self, command: Command) {
        let mut content = self.content();
        while content.commands.len() >= MAX_COMMANDS && !content.closed && !content.gathering {
            content = self.room.wait(content).unwrap_or_else(PoisonError::into_inner);
        }
        if !content.closed {
            content.commands.push_back(command);
            self.wake.raise();
        }
    }

    /// All commands left while this runs are taken at once, or not yet. Their number is not limited, so it must be by the
    /// caller.
    pub(super) fn gather<T>(&self, commands: impl FnOnce() -> T) -> T {
        let gathering = Gathering::begin(self);
        let result = commands();
        drop(gathering);
        result
    }

    /// Asks the control thread to end.
    pub(super) fn stop(&self) {
        self.content().stop = true;
        self.wake.raise();
    }

    /// Asks the control thread to end because of `error`; the first error counts.
    pub(super) fn fail(&self, error: Error) {
        let mut content = self.content();
        content.stop = true;
        content.failure.get_or_insert(error);
        drop(content);
        self.wake.raise();
    }

    pub(super) fn take_failure(&self) -> Option<Error> {
        self.content().failure.take()
    }

    /// Takes everything.
    pub(super) fn take(&self) -> Delivered {
        let mut content = self.content();
        self.wake.lower();
        content.punt_bytes = 0;
        let punts = std::mem::take(&mut content.punts);
        let commands = if content.gathering { VecDeque::new() } else { std::mem::take(&mut content.commands) };
        self.room.notify_all();
        Delivered { punts, commands, stop: content.stop }
    }

    /// Nobody will read any more.
    pub(super) fn close(&self) {
        let mut content = self.content();
        content.closed = true;
        content.punts = VecDeque::new();
        content.commands = VecDeque::new();
        self.room.notify_all();
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the gathering however the gatherer ends.
struct Gathering<'a>(&'a Mailbox);

impl<'a> Gathering<'a> {
    /// Waits until nobody else gathers.
    fn begin(mailbox: &'a Mailbox) -> Self {
        let mut content = mailbox.content();
        while content.gathering && !content.closed {
            content = mailbox.room.wait(content).unwrap_or_else(PoisonError::into_inner);
        }
        content.gathering = true;
        Self(mailbox)
    }
}

impl Drop for Gathering<'_> {
    fn drop(&mut self) {
        self.0.content().gathering = false;
        self.0.room.notify_all();
        self.0.wake.raise();
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

/// Bytes a punt holds beside itself.
fn weight(punt: &Punt) -> usize {
    match punt {
        Punt::NoTunnel { packet, .. } => packet.bytes.len(),
        Punt::Handshake { datagram, .. } => datagram.len(),
        Punt::Message { plaintext, .. } => plaintext.len(),
        Punt::Connect { .. }
        | Punt::RecvError { .. }
        | Punt::UnknownIndex { .. }
        | Punt::Roamed { .. }
        | Punt::Confirmed { .. } => 0,
    }
}

#[cfg(all(test, loom))]
#[path = "mailbox_models.rs"]
mod models;

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::time::Duration;

    use super::super::poll::readable;
    use super::*;

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
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                for _ in 0..3 * MAX_COMMANDS {
                    mailbox.command(Command::SetStaticHosts(BTreeMap::new()));
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
        mailbox.command(Command::Tunnels(reply));
        assert!(answer.recv().is_err(), "a question to nobody is not answered");
    }

    #[test]
    fn commands_that_are_gathered_are_taken_together() {
        let mailbox = Mailbox::new().unwrap();
        mailbox.gather(|| {
            for _ in 0..MAX_COMMANDS + 1 {
                mailbox.command(Command::SetStaticHosts(BTreeMap::new()));
                assert!(mailbox.take().commands.is_empty());
            }
        });
        assert!(is_awake(&mailbox));
        assert_eq!(mailbox.take().commands.len(), MAX_COMMANDS + 1);
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

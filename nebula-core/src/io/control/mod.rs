//! The control thread, which owns the [`Node`]: handles punts, commands and deadlines, sends datagrams and events.

pub(super) mod mailbox;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use crate::forward::Offload;
use crate::io::interfaces::InterfaceWatch;
use crate::io::poll::readable;
use crate::io::shared::Shared;
use crate::io::tun::Queue;
use crate::io::udp::UdpSocket;
use crate::io::{Bypass, Error, clock};
use crate::{Event, Node, WallClock};

/// Far fewer than the channel of events holds.
const PUNTS_PER_REPORT: usize = 16;

/// Everything the thread owns.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) shared: Arc<Shared>,
    pub(super) node: Box<Node>,
    pub(super) socket: Arc<UdpSocket>,
    // None: this node has no overlay device.
    pub(super) queue: Option<Arc<Queue>>,
    pub(super) wall: WallClock,
    pub(super) events: SyncSender<Event>,
    pub(super) interfaces: Option<InterfaceWatch>,
    // How long the host had slept in total at the last reading.
    pub(super) asleep: Duration,
    pub(super) rare_work: RareWork,
    pub(super) flows: TablePeak,
    pub(super) on_idle: Option<fn(Idle)>,
    pub(super) bypass: Bypass,
}

impl Control {
    /// Runs until it is asked to stop, and closes every tunnel before it returns; or until it hands over.
    pub(super) fn run(mut self) -> Result<(), Error> {
        self.shared.mailbox.read_here();
        loop {
            if self.turn() {
                break;
            }
            if let Some(reply) = self.shared.mailbox.take_hand_over()
                && self.holds_still()
            {
                // Whoever asked waits for it.
                let _ = reply.try_send(self.node.hand_over(clock::now()));
                return Ok(());
            }
            if self.rare_work.is_over(clock::now()) {
                self.say_idle(Idle::ControlWorkOver);
            }
            self.wait()?;
        }
        self.node.close_all(clock::now());
        self.flush();
        Ok(())
    }

    /// Holds the data threads between two packets, and handles what they passed on before. `false` if the driver goes
    /// on instead: a thread does not pause in time, or the driver is to stop.
    fn holds_still(&mut self) -> bool {
        let gate = Arc::clone(&self.shared.gate);
        if !gate.hold(HELD_WITHIN) {
            return false;
        }
        let stops = self.turn();
        if stops {
            // The next turn says so again.
            gate.open();
        }
        !stops
    }

    /// Waits for something to do.
    fn wait(&mut self) -> Result<(), Error> {
        let watch = self.interfaces.as_ref();
        let next = [self.node.poll_timeout(), self.rare_work.due(), watch.and_then(InterfaceWatch::due)];
        let timeout = next.into_iter().flatten().min().map(|at| at.saturating_duration_since(clock::now()));
        let mailbox = self.shared.mailbox.as_fd();
        let changes = watch.and_then(InterfaceWatch::changes);
        let ready = readable(mailbox, changes.unwrap_or(mailbox), timeout)
            .map_err(|errno| Error::io("cannot wait for the control queue (ppoll)", errno))?;
        if ready.second
            && changes.is_some()
            && let Some(watch) = &mut self.interfaces
        {
            watch.notice(clock::now());
        }
        Ok(())
    }

    /// Handles what has arrived and what is due. Returns `true` when it is time to stop.
    fn turn(&mut self) -> bool {
        if let Some(wall) = clock::step_since(&self.wall) {
            self.wall = wall;
            self.node.set_wall_clock(wall);
            // The monotonic clock stands still while the host sleeps, so the node cannot notice that by itself.
            let before = std::mem::replace(&mut self.asleep, clock::asleep());
            if self.asleep > before + MIN_SLEEP {
                self.node.wake(clock::now());
            }
        }
        let delivered = self.shared.mailbox.take();
        for work in delivered.commands {
            work.run(&mut self.node, clock::now());
            self.flush();
        }
        for (nth, punt) in delivered.punts.into_iter().enumerate() {
            self.node.handle_punt(clock::now(), punt);
            self.send();
            if nth % PUNTS_PER_REPORT == PUNTS_PER_REPORT - 1 {
                self.report();
            }
        }
        let now = clock::now();
        // Before the deadline at which addresses are advertised.
        if let Some(listed) = self.interfaces.as_mut().and_then(|watch| watch.look(now)) {
            if let Some(addresses) = listed {
                self.node.set_local_addresses(addresses);
            }
            self.say_idle(Idle::InterfacesListed);
        }
        if self.node.poll_timeout().is_some_and(|at| at <= now) {
            self.node.handle_timeout(now);
            // `handle_timeout` expires flows.
            if self.flows.has_shrunk(self.shared.forwarder.flows()) {
                self.rare_work.note(now);
            }
        }
        self.flush();
        delivered.stop
    }

    fn say_idle(&self, idle: Idle) {
        if let Some(on_idle) = self.on_idle {
            on_idle(idle);
        }
    }

    fn flush(&mut self) {
        self.send();
        self.report();
    }

    fn send(&mut self) {
        while let Some(transmit) = self.node.poll_transmit() {
            if transmit.must_be_whole {
                // A refusal says what silence would say: it is too long.
                let _ = self.socket.send_whole(&transmit.datagram, transmit.to);
            } else if let Err(error) = self.socket.send_one(&transmit.datagram, transmit.to) {
                self.shared.counters.send_refused.add(1);
                self.node.note_send_failure(clock::now(), transmit.to, error.raw_os_error());
            }
        }
        while let Some(packet) = self.node.poll_packet() {
            let written = self.queue.as_ref().map(|queue| queue.write(&Offload::default(), 0, &packet, &[], &[]));
            if !matches!(written, Some(Ok(()))) {
                self.shared.counters.tun_write.add(1);
            }
        }
        while let Some(packet) = self.node.poll_bypass() {
            self.bypass.send(&packet.bytes, packet.offload, &self.shared.counters);
        }
    }

    /// Passes events on. This wakes a thread, which costs a tenth of a handshake.
    fn report(&mut self) {
        while let Some(event) = self.node.poll_event() {
            // Tunnels came or went, so there was a handshake.
            self.rare_work.note(clock::now());
            if self.events.try_send(event).is_err() {
                self.shared.counters.events.add(1);
            }
        }
    }
}

/// Stops the data threads and closes the mailbox, however the control thread ends (a panic included).
#[derive(Debug)]
pub(super) struct EndOfControl(pub(super) Arc<Shared>);

impl Drop for EndOfControl {
    fn drop(&mut self) {
        self.0.mailbox.close();
        self.0.gate.end();
    }
}

// A turn of a data thread takes far less, also on a busy host.
const HELD_WITHIN: Duration = Duration::from_secs(1);
// Shorter sleeps need no action, and the two clocks are not read at the same moment.
const MIN_SLEEP: Duration = Duration::from_secs(1);
// A handshake takes several turns.
const IDLE_AFTER: Duration = Duration::from_secs(1);
// Faulting in the pages of a handshake again costs less than a tenth of the handshake.
const MIN_IDLE_INTERVAL: Duration = Duration::from_secs(10);

// About a hundred kilobytes of flows.
const MIN_PEAK_ENTRIES: usize = 1000;

/// The work after which the control thread became idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Idle {
    /// Handshakes, or the expiry of many flows. Reported a second after they began, and at most every ten seconds.
    ControlWorkOver,
    /// The interfaces of the host were listed; the list is long on some hosts.
    InterfacesListed,
}

/// Rate limit of [`Idle::ControlWorkOver`]: decides when the control thread counts as idle after rare work such as a
/// handshake.
#[derive(Debug, Default)]
pub(super) struct RareWork {
    happened: Option<Instant>,
    released: Option<Instant>,
}

impl RareWork {
    /// Notes rare work such as a handshake.
    pub(super) fn note(&mut self, now: Instant) {
        self.happened.get_or_insert(now);
    }

    /// When to call [`RareWork::is_over`]; `None` if there was no rare work.
    pub(super) fn due(&self) -> Option<Instant> {
        let quiet = self.happened? + IDLE_AFTER;
        Some(self.released.map_or(quiet, |at| quiet.max(at + MIN_IDLE_INTERVAL)))
    }

    /// Returns `true` once, [`IDLE_AFTER`] after the rare work began, and not twice within [`MIN_IDLE_INTERVAL`].
    pub(super) fn is_over(&mut self, now: Instant) -> bool {
        let due = self.due().is_some_and(|due| now >= due);
        if due {
            *self = Self { happened: None, released: Some(now) };
        }
        due
    }
}

/// Notices when a table has shrunk to less than half of its peak, so that the memory it held is worth releasing.
#[derive(Debug, Default)]
pub(super) struct TablePeak {
    peak: usize,
}

impl TablePeak {
    /// Whether `entries` is less than half of the peak since this last returned `true`.
    pub(super) fn has_shrunk(&mut self, entries: usize) -> bool {
        self.peak = self.peak.max(entries);
        let shrunk = self.peak >= MIN_PEAK_ENTRIES && entries < self.peak / 2;
        if shrunk {
            self.peak = entries;
        }
        shrunk
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn pages_are_released_after_rare_work_and_not_after_every_piece_of_it() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut work = RareWork::default();
        assert!(!work.is_over(at(0)));
        work.note(at(0));
        assert!(!work.is_over(at(0)), "the rest of it comes at once");
        assert!(work.is_over(at(1)));
        work.note(at(2));
        assert!(!work.is_over(at(3)));
        assert!(work.is_over(at(11)));
        assert!(!work.is_over(at(30)));
    }

    #[test]
    fn a_table_is_worth_a_look_once_after_it_shrank_much() {
        let mut peak = TablePeak::default();
        let shrunk = [10, 900, 2, 5_000, 4_000, 2_400, 2_300, 1_300, 1_000].map(|entries| peak.has_shrunk(entries));
        assert_eq!(shrunk, [false, false, false, false, false, true, false, false, true]);
    }
}

//! The one thread that owns the [`Node`]: punts, commands and deadlines in, datagrams and events out.

use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::driver::Idle;
use super::idle::{Ebb, RareWork};
use super::poll::readable;
use super::shared::Shared;
use super::tun::Queue;
use super::udp::UdpSocket;
use super::{Error, clock, interfaces};
use crate::forward::Offload;
use crate::lighthouse::LocalAddress;
use crate::{Event, Node, WallClock};

/// Much less than events fit the channel.
const PUNTS_A_REPORT: usize = 16;

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
    pub(super) rare_work: RareWork,
    pub(super) flows: Ebb,
    pub(super) on_idle: Option<fn(Idle)>,
}

impl Control {
    /// Runs until it is told to stop; closes every tunnel before it returns.
    pub(super) fn run(mut self) -> Result<(), Error> {
        self.shared.mailbox.read_here();
        loop {
            if self.turn() {
                break;
            }
            if self.rare_work.is_over(clock::now()) {
                self.say_idle(Idle::ControlWorkOver);
            }
            let next = [self.node.poll_timeout(), self.rare_work.due()].into_iter().flatten().min();
            let timeout = next.map(|at| at.saturating_duration_since(clock::now()));
            let mailbox = &self.shared.mailbox;
            readable(mailbox, mailbox, timeout).map_err(|errno| Error::io("cannot poll the control queue", errno))?;
        }
        self.node.close_all(clock::now());
        self.flush();
        Ok(())
    }

    /// Handles what came and what is due. `true`: time to stop.
    fn turn(&mut self) -> bool {
        if let Some(wall) = clock::step_since(&self.wall) {
            self.wall = wall;
            self.node.set_wall_clock(wall);
        }
        let delivered = self.shared.mailbox.take();
        for work in delivered.commands {
            work.run(&mut self.node, clock::now());
            self.flush();
        }
        for (nth, punt) in delivered.punts.into_iter().enumerate() {
            self.node.handle_punt(clock::now(), punt);
            self.send();
            if nth % PUNTS_A_REPORT == PUNTS_A_REPORT - 1 {
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
            // Flows expire then.
            if self.flows.is_low(self.shared.forwarder.flows()) {
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
            if self.socket.send_one(&transmit.datagram, transmit.to).is_err() {
                self.shared.counters.send_refused.add(1);
            }
        }
        while let Some(packet) = self.node.poll_packet() {
            let written = self.queue.as_ref().map(|queue| queue.write(&Offload::default(), 0, &packet, &[], &[]));
            if !matches!(written, Some(Ok(()))) {
                self.shared.counters.tun_write.add(1);
            }
        }
    }

    /// Hands over what happened. Each time that wakes a thread, which costs a tenth of a handshake.
    fn report(&mut self) {
        while let Some(event) = self.node.poll_event() {
            // Tunnels that come and go: a handshake was near.
            self.rare_work.note(clock::now());
            if self.events.try_send(event).is_err() {
                self.shared.counters.events.add(1);
            }
        }
    }
}

/// Ends the data threads and refuses further mail, however the control thread ends.
#[derive(Debug)]
pub(super) struct EndOfControl(pub(super) Arc<Shared>);

impl Drop for EndOfControl {
    fn drop(&mut self) {
        self.0.mailbox.close();
        self.0.halt_data_threads();
    }
}

/// Looks at the interfaces now and then.
#[derive(Debug)]
pub(super) struct InterfaceWatch {
    except: Option<String>,
    interval: Duration,
    next: Option<Instant>,
    last: Vec<LocalAddress>,
    // None: not listening, so every look is a full one.
    changes: Option<interfaces::Changes>,
}

impl InterfaceWatch {
    /// Looks at most once per `interval`, and not at the interface `except`.
    pub(super) fn new(except: Option<String>, interval: Duration) -> Self {
        Self { except, interval, next: None, last: Vec::new(), changes: None }
    }

    /// Lists the addresses if it is time to and something may have changed. Inside: they differ from those before.
    #[allow(clippy::option_option, reason = "the outer one says whether they were listed")]
    fn look(&mut self, now: Instant) -> Option<Option<Vec<LocalAddress>>> {
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        self.next = Some(now + self.interval);
        match &self.changes {
            Some(changes) if !changes.any() => return None,
            Some(_) => {}
            // Before the look, so that no change falls between the two.
            None => self.changes = interfaces::Changes::listen().ok(),
        }
        let listed = interfaces::reachable_addresses(self.except.as_deref());
        if let Err(errno) = &listed {
            tracing::warn!(%errno, "cannot list the interface addresses");
            self.changes = None;
        }
        let changed = listed.ok().filter(|addresses| *addresses != self.last);
        if let Some(addresses) = &changed {
            self.last.clone_from(addresses);
        }
        Some(changed)
    }
}

//! The data threads: one for each socket and, under load, one for each tun queue.
//!
//! They share one loop, [`serve`]: move what is there; when nothing is left, sleep for a moment or wait for
//! descriptors.

pub(super) mod inbound;
pub(super) mod outbound;
pub(super) mod pacing;
mod priority;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::io::gate::Pass;
use crate::io::poll::{any_readable, readable};
use crate::io::shared::Shared;
use crate::io::threads::inbound::Inbound;
use crate::io::threads::outbound::Outbound;
use crate::io::threads::pacing::{Doze, Duty, Load};
use crate::io::threads::priority::Priority;
use crate::io::{Error, clock};

/// What a thread does until another thread takes over.
trait Service {
    /// Moves what is there. Returns `true` if nothing is left.
    fn turn(&mut self, load: &mut Load) -> Result<bool, Error>;

    /// Whether this service ends now, between two turns.
    fn is_over(&self, load: &Load) -> bool;

    /// Whether it ends because nothing has arrived for long enough. Called only when nothing is left.
    fn is_calm(&self, now: Instant, load: &Load) -> bool;

    /// Maximum time to wait; `None`: no limit.
    fn timeout(&self, now: Instant, load: &Load) -> Option<Duration>;

    /// Waits until there is something to do.
    fn wait(&self, timeout: Option<Duration>) -> Result<(), Errno>;

    /// Releases memory that a burst touched, some time after it.
    fn cool(&mut self);
}

/// What a thread keeps from one service to the next.
#[derive(Debug)]
struct Pace {
    priority: Priority,
    doze: Doze,
}

impl Pace {
    fn new(raise_priority: bool) -> Self {
        Self { priority: Priority::new(raise_priority), doze: Doze::default() }
    }
}

/// Runs `service` until it is over, or the gate is closed.
fn serve(shared: &Shared, pace: &mut Pace, service: &mut impl Service, mut load: Load) -> Result<(), Error> {
    while shared.gate.is_open() && !service.is_over(&load) {
        let nothing_left = service.turn(&mut load)?;
        pace.priority.follow(&mut load);
        if !nothing_left || service.is_over(&load) {
            continue;
        }
        load.pause();
        let now = clock::now();
        pace.priority.pause(now);
        if pace.doze.pause(now, load.take_weight()) {
            continue;
        }
        if service.is_calm(now, &load) {
            break;
        }
        let timeout = service.timeout(now, &load);
        service.wait(timeout).map_err(|errno| Error::io("cannot wait for packets (ppoll)", errno))?;
        if timeout.is_some() {
            service.cool();
        }
    }
    Ok(())
}

/// The thread of a socket.
#[derive(Debug)]
pub(super) struct SocketThread {
    shared: Arc<Shared>,
    inbound: Inbound,
    // None: another thread serves the other direction at all times.
    duty: Option<Arc<Duty<Outbound>>>,
    // Another thread takes over under load.
    relieved: bool,
    pace: Pace,
}

impl SocketThread {
    pub(super) fn new(shared: Arc<Shared>, inbound: Inbound, raise_priority: bool) -> Self {
        Self { shared, inbound, duty: None, relieved: false, pace: Pace::new(raise_priority) }
    }

    /// Makes this thread serve the other direction, too; under load only if it is not `relieved` by another thread.
    pub(super) fn serve_also(&mut self, duty: Arc<Duty<Outbound>>, relieved: bool) {
        (self.duty, self.relieved) = (Some(duty), relieved);
    }

    /// Runs until the driver stops, or the socket or device fails.
    pub(super) fn run(mut self, pass: &Pass) -> Result<(), Error> {
        self.inbound.begin();
        let (shared, duty) = (&*self.shared, self.duty.as_deref());
        while pass.wait_until_open() {
            if let Some((duty, mut outbound)) = duty.and_then(|duty| Some((duty, duty.take()?))) {
                let (inbound, relieved) = (&mut self.inbound, self.relieved);
                let mut both = BothDirections { shared, inbound, outbound: &mut outbound, relieved };
                serve(shared, &mut self.pace, &mut both, Load::default())?;
                duty.hand_over(outbound);
            }
            let mut socket = SocketOnly { shared, inbound: &mut self.inbound, duty };
            serve(shared, &mut self.pace, &mut socket, Load::default())?;
        }
        Ok(())
    }
}

/// The thread of a tun queue, which works under load and sleeps while the socket's thread does its work.
#[derive(Debug)]
pub(super) struct QueueThread {
    shared: Arc<Shared>,
    duty: Arc<Duty<Outbound>>,
    // The socket's thread serves the queue when there is little traffic.
    relieved: bool,
    pace: Pace,
}

impl QueueThread {
    pub(super) fn new(shared: Arc<Shared>, duty: Arc<Duty<Outbound>>, relieved: bool, raise_priority: bool) -> Self {
        Self { shared, duty, relieved, pace: Pace::new(raise_priority) }
    }

    /// Runs until the driver stops or the device fails.
    pub(super) fn run(mut self, pass: &Pass) -> Result<(), Error> {
        let (shared, relieved) = (&*self.shared, self.relieved);
        while pass.wait_until_open() {
            if relieved {
                let wait = readable(&self.duty.needed, &*shared.gate, None);
                if !wait.map_err(|errno| Error::io("cannot wait for load (ppoll)", errno))?.first {
                    continue;
                }
            }
            let mut outbound = self.duty.take_over();
            let mut queue = QueueOnly { shared, outbound: &mut outbound, relieved };
            serve(shared, &mut self.pace, &mut queue, Load::heavy(clock::now()))?;
            self.duty.give_back(outbound);
        }
        Ok(())
    }
}

/// Serves both directions, until there is load and another thread to share it.
struct BothDirections<'a> {
    shared: &'a Shared,
    inbound: &'a mut Inbound,
    outbound: &'a mut Outbound,
    relieved: bool,
}

impl Service for BothDirections<'_> {
    fn turn(&mut self, load: &mut Load) -> Result<bool, Error> {
        let nothing_received = self.inbound.turn(load)?;
        // Applications may have answered already what was just delivered.
        let nothing_to_send = self.outbound.turn(load)?;
        Ok(nothing_received && nothing_to_send)
    }

    fn is_over(&self, load: &Load) -> bool {
        self.relieved && load.is_heavy()
    }

    fn is_calm(&self, _: Instant, _: &Load) -> bool {
        false
    }

    fn timeout(&self, now: Instant, _: &Load) -> Option<Duration> {
        [self.inbound.timeout(now), self.outbound.timeout(now)].into_iter().flatten().min()
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<(), Errno> {
        any_readable([self.inbound.as_fd(), self.outbound.as_fd(), self.shared.gate.as_fd()], timeout).map(drop)
    }

    fn cool(&mut self) {
        let now = clock::now();
        self.inbound.cool(now);
        self.outbound.cool(now);
    }
}

/// Serves the socket, until the queue needs to be served too.
struct SocketOnly<'a> {
    shared: &'a Shared,
    inbound: &'a mut Inbound,
    duty: Option<&'a Duty<Outbound>>,
}

impl Service for SocketOnly<'_> {
    fn turn(&mut self, load: &mut Load) -> Result<bool, Error> {
        self.inbound.turn(load)
    }

    fn is_over(&self, _: &Load) -> bool {
        self.duty.is_some_and(Duty::is_free)
    }

    fn is_calm(&self, _: Instant, _: &Load) -> bool {
        false
    }

    fn timeout(&self, now: Instant, _: &Load) -> Option<Duration> {
        self.inbound.timeout(now)
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<(), Errno> {
        let (socket, halt) = (self.inbound.as_fd(), self.shared.gate.as_fd());
        match self.duty {
            Some(duty) => any_readable([socket, duty.returned.as_fd(), halt], timeout).map(drop),
            None => any_readable([socket, halt], timeout).map(drop),
        }
    }

    fn cool(&mut self) {
        self.inbound.cool(clock::now());
    }
}

/// Serves the queue, until the load is over if the socket's thread can take it back.
struct QueueOnly<'a> {
    shared: &'a Shared,
    outbound: &'a mut Outbound,
    relieved: bool,
}

impl Service for QueueOnly<'_> {
    fn turn(&mut self, load: &mut Load) -> Result<bool, Error> {
        self.outbound.turn(load)
    }

    fn is_over(&self, _: &Load) -> bool {
        false
    }

    fn is_calm(&self, now: Instant, load: &Load) -> bool {
        self.relieved && load.remaining(now).is_zero()
    }

    fn timeout(&self, now: Instant, load: &Load) -> Option<Duration> {
        let remaining = self.relieved.then(|| load.remaining(now));
        [remaining, self.outbound.timeout(now)].into_iter().flatten().min()
    }

    fn wait(&self, timeout: Option<Duration>) -> Result<(), Errno> {
        any_readable([self.outbound.as_fd(), self.shared.gate.as_fd()], timeout).map(drop)
    }

    fn cool(&mut self) {
        self.outbound.cool(clock::now());
    }
}

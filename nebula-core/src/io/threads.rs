//! One thread from a tun queue to the underlay, for times of load; it sleeps while the thread of the socket does its work.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::outbound::Outbound;
use super::pacing::{Doze, Duty, Load};
use super::poll::{any_readable, readable};
use super::priority::Priority;
use super::shared::Shared;
use super::{Error, clock};

/// Everything the thread has.
#[derive(Debug)]
pub(super) struct OutboundThread {
    shared: Arc<Shared>,
    duty: Arc<Duty<Outbound>>,
    // The thread of a socket serves the queue when there is little traffic.
    relieved: bool,
    raise_priority: bool,
}

impl OutboundThread {
    pub(super) fn new(shared: Arc<Shared>, duty: Arc<Duty<Outbound>>, relieved: bool, raise_priority: bool) -> Self {
        Self { shared, duty, relieved, raise_priority }
    }

    /// Runs until the driver stops or the device fails.
    pub(super) fn run(self) -> Result<(), Error> {
        let (mut priority, mut doze) = (Priority::new(self.raise_priority), Doze::default());
        while !self.shared.is_stopping() {
            if self.relieved {
                let wait = readable(&self.duty.needed, &self.shared.halt, None);
                if !wait.map_err(|errno| Error::io("cannot wait for load", errno))?.first {
                    continue;
                }
            }
            self.serve(&mut priority, &mut doze)?;
        }
        Ok(())
    }

    /// Serves the queue until the load is over.
    fn serve(&self, priority: &mut Priority, doze: &mut Doze) -> Result<(), Error> {
        let mut outbound = self.duty.take_over();
        let mut load = Load::heavy(clock::now());
        while !self.shared.is_stopping() {
            let dry = outbound.turn(&mut load)?;
            priority.follow(&mut load);
            if !dry {
                continue;
            }
            load.pause();
            let now = clock::now();
            priority.pause(now);
            if doze.pause(now, load.take_weight()) {
                continue;
            }
            let remaining = self.relieved.then(|| load.remaining(now));
            if remaining.is_some_and(|remaining| remaining.is_zero()) {
                self.duty.give_back(outbound);
                return Ok(());
            }
            let timeout = [remaining, outbound.timeout(now)].into_iter().flatten().min();
            any_readable([outbound.as_fd(), self.shared.halt.as_fd()], timeout)
                .map_err(|errno| Error::io("cannot poll the tun device", errno))?;
            outbound.cool(clock::now());
        }
        Ok(())
    }
}

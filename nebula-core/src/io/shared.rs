//! State shared by all threads of one driver and its handles. No device and no socket, since those end with the
//! threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::counters::Direction;
use crate::io::Error;
use crate::io::control::mailbox::Mailbox;
use crate::io::gate::Gate;
use crate::io::udp::UdpSocket;
use crate::io::udp::send::Sender;
use crate::{DropReason, Forwarder, Lane};

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) forwarder: Arc<Forwarder>,
    pub(super) mailbox: Mailbox,
    pub(super) counters: IoCounters,
    pub(super) gate: Arc<Gate>,
}

impl Shared {
    pub(super) fn new(forwarder: Arc<Forwarder>) -> Result<Self, Error> {
        let (mailbox, gate) = (Mailbox::new()?, Arc::new(Gate::new()?));
        Ok(Self { forwarder, mailbox, counters: IoCounters::default(), gate })
    }

    /// Sends a lane's runs through one socket.
    pub(super) fn send(&self, sender: &mut Sender, socket: &UdpSocket, lane: &Lane) {
        if !lane.runs().is_empty() {
            let lost = sender.send(socket, lane.arena(), lane.runs());
            self.counters.send_full.add(lost.full);
            self.counters.send_refused.add(lost.refused);
        }
    }

    /// Hands a lane's punts to the control thread.
    pub(super) fn punt(&self, lane: &mut Lane, direction: Direction) {
        let counters = Arc::clone(lane.counters());
        for punt in lane.take_punts() {
            if !self.mailbox.punt(punt) {
                counters.drop_many(direction, DropReason::PuntQueueFull, 1);
            }
        }
    }
}

/// Packets lost in the I/O layer.
#[derive(Debug, Default)]
pub(super) struct IoCounters {
    /// Overlay packets dropped because this node has no device.
    pub(super) no_device: IoCounter,
    /// Packets dropped because the tun device refused them: it is down, or its queue is full.
    pub(super) tun_write: IoCounter,
    /// Datagrams dropped because the send buffer was full.
    pub(super) send_full: IoCounter,
    /// Datagrams that the system refused: no route, a filter, an address family the socket does not have.
    pub(super) send_refused: IoCounter,
    /// Packets for the primary network dropped because the socket's send buffer or the device's queue was full.
    pub(super) bypass_full: IoCounter,
    /// Packets for the primary network that the system refused (longer than its MTU, no route, a filter), or for whose
    /// family there is no socket.
    pub(super) bypass_refused: IoCounter,
    /// Events dropped because nobody read them in time.
    pub(super) events: IoCounter,
}

impl IoCounters {
    pub(super) fn add_to(&self, sum: &mut BTreeMap<&'static str, u64>) {
        for (name, counter) in [
            ("lost_no_device", &self.no_device),
            ("lost_tun_write", &self.tun_write),
            ("lost_send_full", &self.send_full),
            ("lost_send_refused", &self.send_refused),
            ("lost_bypass_full", &self.bypass_full),
            ("lost_bypass_refused", &self.bypass_refused),
            ("lost_events", &self.events),
        ] {
            sum.insert(name, counter.get());
        }
    }
}

/// Written by several threads, but only when something is lost.
#[derive(Debug, Default)]
pub(super) struct IoCounter(AtomicU64);

impl IoCounter {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, n: u64) {
        if n > 0 {
            self.0.fetch_add(n, Ordering::Relaxed);
        }
    }
}

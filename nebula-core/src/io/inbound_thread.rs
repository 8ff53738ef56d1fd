//! One thread from a UDP socket to the overlay: receive, open, deliver, until the socket is dry; then wait. With little
//! traffic it serves the other direction too.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::delivery::{Deliverer, Device};
use super::doze::{Doze, Weight};
use super::duty::{Duty, Load};
use super::outbound::Outbound;
use super::poll::any_readable;
use super::priority::Priority;
use super::shared::Shared;
use super::tun::{Queue, TunOffloads};
use super::udp::UdpSocket;
use super::udp_receive::Receiver;
use super::udp_send::Sender;
use super::warmth::Warmth;
use super::{Error, clock};
use crate::counters::Direction;
use crate::forward::{Delivery, Offload, cut_delivery, echo_reply};
use crate::{Lane, Verdict};

// Pings of one receive that are answered without a device.
const MAX_REPLIES: usize = 64;

/// Everything the thread owns.
#[derive(Debug)]
pub(super) struct Inbound {
    shared: Arc<Shared>,
    // None: this node has no overlay device.
    queue: Option<Arc<Queue>>,
    socket: Arc<UdpSocket>,
    // None: another thread serves the other direction at all times.
    duty: Option<Arc<Duty<Outbound>>>,
    // There is another thread for times of load.
    relieved: bool,
    deliverer: Deliverer,
    lane: Lane,
    receiver: Receiver,
    // Relayed datagrams go back to the underlay from here.
    sender: Sender,
    warmth: Warmth,
    priority: Priority,
    doze: Doze,
}

impl Inbound {
    pub(super) fn new(
        shared: Arc<Shared>,
        queue: Option<Arc<Queue>>,
        socket: Arc<UdpSocket>,
        offloads: TunOffloads,
        raise_priority: bool,
    ) -> Result<Self, Error> {
        let lane = shared.forwarder.lane();
        let receiver =
            Receiver::new().map_err(|source| Error::Io { what: "cannot reserve receive buffers", source })?;
        let (sender, warmth) = (Sender::new(), Warmth::default());
        let deliverer = Deliverer::new(offloads);
        Ok(Self {
            shared,
            queue,
            socket,
            duty: None,
            relieved: false,
            deliverer,
            lane,
            receiver,
            sender,
            warmth,
            priority: Priority::new(raise_priority),
            doze: Doze::default(),
        })
    }

    /// Gives it the other direction; while there is load only if it is not `relieved` by another thread.
    pub(super) fn serve_also(&mut self, duty: Arc<Duty<Outbound>>, relieved: bool) {
        (self.duty, self.relieved) = (Some(duty), relieved);
    }

    /// Runs until the driver stops, or socket or device fail.
    pub(super) fn run(mut self) -> Result<(), Error> {
        self.lane.set_max_segments(self.sender.segments(&self.socket));
        self.announce_offloads();
        let duty = self.duty.clone();
        while !self.shared.is_stopping() {
            if let Some(duty) = duty.as_deref() {
                self.serve_both(duty)?;
            }
            self.serve_socket(duty.as_deref())?;
        }
        Ok(())
    }

    /// Serves both directions until there is load and another thread to share it.
    fn serve_both(&mut self, duty: &Duty<Outbound>) -> Result<(), Error> {
        let Some(mut outbound) = duty.take() else { return Ok(()) };
        let mut load = Load::default();
        while !self.shared.is_stopping() {
            let mut dry = self.turn(&mut load)?;
            // What was delivered may have been answered already.
            dry &= outbound.turn(&mut load)?;
            self.priority.follow(&mut load);
            if self.relieved && load.is_heavy() {
                duty.hand_over(outbound);
                break;
            }
            if dry {
                load.pause();
                let now = clock::now();
                self.priority.pause(now);
                if self.doze.pause(now, load.take_weight()) {
                    continue;
                }
                let timeout = [self.timeout(now), outbound.timeout(now)].into_iter().flatten().min();
                any_readable([self.socket.as_fd(), outbound.as_fd(), self.shared.halt.as_fd()], timeout)
                    .map_err(|errno| Error::io("cannot poll socket and device", errno))?;
                if timeout.is_some() {
                    self.cool();
                    outbound.cool(clock::now());
                }
            }
        }
        Ok(())
    }

    /// Serves the socket until the queue is to be served too.
    fn serve_socket(&mut self, duty: Option<&Duty<Outbound>>) -> Result<(), Error> {
        let mut load = Load::default();
        while !self.shared.is_stopping() && !duty.is_some_and(Duty::is_free) {
            let dry = self.turn(&mut load)?;
            self.priority.follow(&mut load);
            if dry {
                self.wait(&mut load, duty)?;
            }
        }
        Ok(())
    }

    fn announce_offloads(&mut self) {
        let offloads = self.deliverer.offloads();
        self.lane.set_coalesce(offloads != TunOffloads::None, offloads == TunOffloads::TcpAndUdp);
    }

    /// Moves what one receive brings. `true`: the socket is dry.
    fn turn(&mut self, load: &mut Load) -> Result<bool, Error> {
        if self.lane.early_due().is_some() {
            self.serve_early()?;
        }
        let received = self.receiver.receive(&self.socket);
        if !received.map_err(|source| Error::Io { what: "cannot receive from the UDP socket", source })? {
            return Ok(true);
        }
        let now = clock::now();
        let (memory, received) = self.receiver.parts();
        let bytes = received.iter().map(|slot| slot.range.len()).sum();
        self.warmth.note(now, bytes);
        load.note(now, bytes, Weight::of(bytes, received.len()));
        self.shared.forwarder.inbound(&mut self.lane, now, memory, received);
        self.pass_on(now, None)?;
        Ok(false)
    }

    /// Moves what waited for a tunnel that is there by now.
    fn serve_early(&mut self) -> Result<(), Error> {
        let now = clock::now();
        while let Some(memory) = self.shared.forwarder.inbound_early(&mut self.lane, now) {
            self.pass_on(now, Some(&memory))?;
        }
        Ok(())
    }

    /// Empties the lane. `memory` is what its pieces point into; `None`: the receive buffer.
    fn pass_on(&mut self, now: Instant, memory: Option<&[u8]>) -> Result<(), Error> {
        match self.queue.clone() {
            Some(queue) => self.deliver(&queue, memory)?,
            None => self.answer_pings(now, memory),
        }
        self.shared.send(&mut self.sender, &self.socket, &self.lane);
        self.shared.punt(&mut self.lane, Direction::Inbound);
        self.lane.clear();
        Ok(())
    }

    /// There is no device, but pings are answered as if there were one.
    fn answer_pings(&mut self, now: Instant, memory: Option<&[u8]>) {
        let memory = memory.unwrap_or_else(|| self.receiver.memory());
        let packet = |delivery: &Delivery| {
            let piece = self.lane.pieces().get(delivery.pieces.clone())?.first()?;
            memory.get(piece.clone())
        };
        let deliveries = self.lane.deliveries();
        let replies = deliveries.iter().filter_map(|delivery| echo_reply(packet(delivery)?)).take(MAX_REPLIES);
        let replies: Vec<_> = replies.collect();
        self.shared.counters.no_device.add((deliveries.len() - replies.len()) as u64);
        for mut reply in replies {
            match self.shared.forwarder.outbound(&mut self.lane, now, &mut reply, Offload::default()) {
                Verdict::Transmit | Verdict::Punt | Verdict::Drop(_) => {}
            }
        }
    }

    fn deliver(&mut self, queue: &Queue, memory: Option<&[u8]>) -> Result<(), Error> {
        let (lane, memory) = (&self.lane, memory.unwrap_or_else(|| self.receiver.memory()));
        let mut device = Overlay { queue, lane, memory };
        if self.deliverer.deliver(lane.deliveries(), &self.shared.counters.tun_write, &mut device)? {
            self.announce_offloads();
        }
        Ok(())
    }

    fn wait(&mut self, load: &mut Load, duty: Option<&Duty<Outbound>>) -> Result<(), Error> {
        let now = clock::now();
        self.priority.pause(now);
        if self.doze.pause(now, load.take_weight()) {
            return Ok(());
        }
        let timeout = self.timeout(now);
        let halt = self.shared.halt.as_fd();
        let returned = duty.map_or(halt, |duty| duty.returned.as_fd());
        any_readable([self.socket.as_fd(), returned, halt], timeout)
            .map_err(|errno| Error::io("cannot poll the UDP socket", errno))?;
        if timeout.is_some() {
            self.cool();
        }
        Ok(())
    }

    /// How long to wait for the socket; `None`: for ever.
    fn timeout(&self, now: Instant) -> Option<Duration> {
        let early = self.lane.early_due().map(|due| due.saturating_duration_since(now));
        [self.warmth.timeout(now), early].into_iter().flatten().min()
    }

    /// Gives memory back that a burst touched, some time after it.
    fn cool(&mut self) {
        if self.warmth.cooled(clock::now()) {
            self.receiver.release();
            self.lane.release_memory();
        }
    }
}

/// A queue, for the packets of one lane.
struct Overlay<'a> {
    queue: &'a Queue,
    lane: &'a Lane,
    /// What the pieces of the lane point into.
    memory: &'a [u8],
}

impl Device for Overlay<'_> {
    fn write(&mut self, delivery: &Delivery) -> Result<(), Errno> {
        write(self.queue, self.lane, self.memory, delivery)
    }

    fn write_singly(&mut self, delivery: &Delivery) -> u64 {
        let mut refused = 0;
        cut_delivery(self.lane, self.memory, delivery, |packet| {
            let piece = 0..packet.len();
            let written = self.queue.write(&Offload::default(), 0, &[], packet, std::slice::from_ref(&piece));
            refused += u64::from(written.is_err());
        });
        refused
    }
}

/// Writes one packet of a lane; `memory` is what its pieces point into.
pub(super) fn write(queue: &Queue, lane: &Lane, memory: &[u8], delivery: &Delivery) -> Result<(), Errno> {
    let head = lane.headers().get(delivery.header.clone()).ok_or(Errno::EFAULT)?;
    let pieces = lane.pieces().get(delivery.pieces.clone()).ok_or(Errno::EFAULT)?;
    queue.write(&delivery.offload, delivery.header_len, head, memory, pieces)
}

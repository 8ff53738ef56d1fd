//! One thread from a tun queue to the underlay: read, seal, send, until the device is dry; then wait.

use std::sync::Arc;

use super::inbound_thread::write;
use super::poll::readable;
use super::shared::Shared;
use super::tun::{Queue, Read, ReadBuffer};
use super::udp::UdpSocket;
use super::udp_send::Sender;
use super::warmth::Warmth;
use super::{Error, clock};
use crate::counters::Direction;
use crate::{DropReason, Lane, Verdict};

// A super-packet leaves at once, so that its transmission overlaps with the next read; small packets gather.
const FLUSH: usize = 32 << 10;

/// Everything the thread owns.
#[derive(Debug)]
pub(super) struct Outbound {
    shared: Arc<Shared>,
    queue: Arc<Queue>,
    socket: Arc<UdpSocket>,
    lane: Lane,
    buffer: ReadBuffer,
    sender: Sender,
    warmth: Warmth,
}

impl Outbound {
    pub(super) fn new(shared: Arc<Shared>, queue: Arc<Queue>, socket: Arc<UdpSocket>) -> Result<Self, Error> {
        let lane = shared.forwarder.lane();
        let buffer = ReadBuffer::new().map_err(|source| Error::Io { what: "cannot reserve a read buffer", source })?;
        Ok(Self { shared, queue, socket, lane, buffer, sender: Sender::new(), warmth: Warmth::default() })
    }

    /// Runs until the driver stops or the device fails.
    pub(super) fn run(mut self) -> Result<(), Error> {
        self.lane.set_max_segments(self.sender.segments(&self.socket));
        while !self.shared.is_stopping() {
            if self.turn()? {
                self.wait()?;
            }
        }
        Ok(())
    }

    /// Moves what is there, up to a flush. `true`: the device is dry.
    fn turn(&mut self) -> Result<bool, Error> {
        let now = clock::now();
        let mut dry = false;
        while !dry && self.lane.has_room() && self.lane.arena().len() < FLUSH {
            let read = self.queue.read(&mut self.buffer);
            match read.map_err(|source| Error::Io { what: "cannot read from the tun device", source })? {
                Read::Packet(packet, offload) => {
                    match self.shared.forwarder.outbound(&mut self.lane, now, packet, offload) {
                        Verdict::Transmit | Verdict::Punt | Verdict::Drop(_) => {}
                    }
                }
                Read::Contradictory => self.lane.counters().drop_many(Direction::Outbound, DropReason::BadOffload, 1),
                Read::Dry => dry = true,
            }
        }
        self.warmth.note(now, self.lane.arena().len());
        self.shared.send(&mut self.sender, &self.socket, &self.lane);
        self.deliver();
        self.shared.punt(&mut self.lane, Direction::Outbound);
        self.lane.clear();
        Ok(dry)
    }

    /// Answers to refused packets.
    fn deliver(&self) {
        for delivery in self.lane.deliveries() {
            if write(&self.queue, &self.lane, &[], delivery).is_err() {
                self.shared.counters.tun_write.add(1);
            }
        }
    }

    fn wait(&mut self) -> Result<(), Error> {
        let timeout = self.warmth.timeout(clock::now());
        readable(&*self.queue, &self.shared.halt, timeout)
            .map_err(|errno| Error::io("cannot poll the tun device", errno))?;
        if timeout.is_some() && self.warmth.cooled(clock::now()) {
            self.buffer.release();
            self.lane.release_memory();
        }
        Ok(())
    }
}

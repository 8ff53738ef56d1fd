//! From a tun queue to the underlay: read, seal, send, until the device is dry.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::counters::Direction;
use crate::io::shared::Shared;
use crate::io::threads::inbound::write;
use crate::io::threads::pacing::{Load, Warmth, Weight};
use crate::io::tun::{Queue, Read, ReadBuffer};
use crate::io::udp::UdpSocket;
use crate::io::udp::send::Sender;
use crate::io::{Bypass, Error, clock};
use crate::{DropReason, Lane, Verdict};

// A super-packet is sent at once, so that its transmission overlaps with the next read; small packets are batched.
const FLUSH_BYTES: usize = 32 << 10;
// Packets that were sealed before them should not wait longer.
const MAX_BYPASSED: usize = 16;
// Smaller than joined packets, and than those of a link with jumbo frames.
const SMALL_PACKET_BYTES: usize = 2 << 10;

/// Everything the thread that serves the queue needs.
#[derive(Debug)]
pub(in crate::io) struct Outbound {
    shared: Arc<Shared>,
    queue: Arc<Queue>,
    socket: Arc<UdpSocket>,
    lane: Lane,
    buffer: ReadBuffer,
    sender: Sender,
    warmth: Warmth,
    bypass: Bypass,
}

impl Outbound {
    pub(in crate::io) fn new(
        shared: Arc<Shared>,
        queue: Arc<Queue>,
        socket: Arc<UdpSocket>,
        bypass: Bypass,
    ) -> Result<Self, Error> {
        let mut lane = shared.forwarder.lane();
        let buffer = ReadBuffer::new().map_err(|source| Error::Io { what: "cannot reserve a read buffer", source })?;
        let (sender, warmth) = (Sender::new(), Warmth::default());
        lane.set_max_segments(sender.segments(&socket));
        Ok(Self { shared, queue, socket, lane, buffer, sender, warmth, bypass })
    }

    /// Moves what is there, up to a flush. Returns `true` if the device is dry.
    pub(in crate::io) fn turn(&mut self, load: &mut Load) -> Result<bool, Error> {
        let now = clock::now();
        let (mut dry, mut small, mut bypassed) = (false, 0, 0);
        while !dry && bypassed < MAX_BYPASSED && self.lane.has_room() && self.lane.arena().len() < FLUSH_BYTES {
            let read = self.queue.read(&mut self.buffer);
            match read.map_err(|source| Error::Io { what: "cannot read from the tun device", source })? {
                Read::Packet(packet, offload) => {
                    // Bulk traffic should not wait here in addition to the wait at its receiver.
                    small += usize::from(packet.len() < SMALL_PACKET_BYTES);
                    match self.shared.forwarder.outbound(&mut self.lane, now, packet, offload) {
                        Verdict::Transmit | Verdict::Deliver | Verdict::Punt | Verdict::Drop(_) => {}
                        Verdict::Bypass => {
                            self.bypass.send(packet, offload, &self.shared.counters);
                            bypassed += 1;
                        }
                    }
                }
                Read::Contradictory => self.lane.counters().drop_many(Direction::Outbound, DropReason::BadOffload, 1),
                Read::Dry => dry = true,
            }
        }
        self.warmth.note(now, self.lane.arena().len());
        load.note(now, self.lane.arena().len(), Weight::of(0, small));
        self.shared.send(&mut self.sender, &self.socket, &self.lane);
        self.deliver();
        self.shared.punt(&mut self.lane, Direction::Outbound);
        self.lane.clear();
        Ok(dry)
    }

    /// Delivers the replies to rejected packets, and packets of this node to itself.
    fn deliver(&self) {
        for delivery in self.lane.deliveries() {
            if write(&self.queue, &self.lane, &[], delivery).is_err() {
                self.shared.counters.tun_write.add(1);
            }
        }
    }

    /// How long to wait before [`Outbound::cool`]; `None` if there is nothing to do.
    pub(in crate::io) fn timeout(&self, now: Instant) -> Option<Duration> {
        let settle = self.shared.forwarder.settle_due(&self.lane).map(|due| due.saturating_duration_since(now));
        [self.warmth.timeout(now), settle].into_iter().flatten().min()
    }

    /// Releases memory that a burst touched, some time after it, and tells what was counted of flows.
    pub(in crate::io) fn cool(&mut self, now: Instant) {
        self.shared.forwarder.settle(&mut self.lane, now);
        if self.warmth.cooled(now) {
            self.buffer.release();
            self.lane.release_memory();
        }
    }
}

impl AsFd for Outbound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }
}

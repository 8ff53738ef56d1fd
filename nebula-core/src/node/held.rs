//! Packets to destinations of which nothing is known yet: kept until there is a newer directory, but not for long.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Node;
use super::timer::Due;
use crate::counters::{Counter, Direction};
use crate::{DropReason, PacketOwned, Punt};

/// A pod that was just started is in the directory within a second.
const KEEP_FOR: Duration = Duration::from_secs(2);
const MAX_PACKETS: usize = 64;
const MAX_BYTES: usize = 128 << 10;

/// Packets of this node in order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Held {
    packets: VecDeque<(Instant, PacketOwned)>,
    bytes: usize,
}

impl Held {
    /// Keeps a packet that came at `since`. Returns `false` if there is no room.
    fn push(&mut self, since: Instant, packet: PacketOwned) -> bool {
        let bytes = self.bytes + packet.bytes.len();
        let fits = self.packets.len() < MAX_PACKETS && bytes <= MAX_BYTES;
        if fits {
            self.bytes = bytes;
            self.packets.push_back((since, packet));
        }
        fits
    }

    /// Whether nothing more fits, as far as lanes have to know.
    fn is_full(&self) -> bool {
        self.packets.len() >= MAX_PACKETS || self.bytes >= MAX_BYTES
    }

    /// When the oldest packet has waited long enough.
    fn due(&self) -> Option<Instant> {
        self.packets.front().map(|(since, _)| *since + KEEP_FOR)
    }

    /// Drops the packets that have waited long enough; returns how many.
    fn expire(&mut self, now: Instant) -> u64 {
        let mut expired = 0;
        while self.due().is_some_and(|due| now >= due) {
            self.bytes -= self.packets.pop_front().map_or(0, |(_, packet)| packet.bytes.len());
            expired += 1;
        }
        expired
    }

    fn take(&mut self) -> VecDeque<(Instant, PacketOwned)> {
        self.bytes = 0;
        std::mem::take(&mut self.packets)
    }
}

impl Node {
    /// A lane found nothing about the destination of a packet.
    pub(super) fn handle_unknown(&mut self, now: Instant, packet: PacketOwned) {
        // The directory may have been replaced while the punt was on its way.
        if self.try_held(now, now, packet) {
            self.outbox.counters().add(Counter::Held, 1);
        }
        self.arm_held();
    }

    /// There is another directory: decides again.
    pub(super) fn release_held(&mut self, now: Instant) {
        self.forwarder.set_hold_full(false);
        for (since, packet) in self.held.take() {
            self.try_held(now, since, packet);
        }
        self.arm_held();
    }

    /// Packets have waited long enough.
    pub(super) fn held_due(&mut self, now: Instant) {
        let expired = self.held.expire(now);
        self.outbox.counters().drop_many(Direction::Outbound, DropReason::UnknownDestination, expired);
        self.arm_held();
    }

    /// Sends a packet that came at `since`, or keeps it. Returns whether it was kept.
    fn try_held(&mut self, now: Instant, since: Instant, packet: PacketOwned) -> bool {
        match self.outbox.overlay_packet(now, packet) {
            Some(Punt::Unknown { packet }) => {
                let kept = self.held.push(since, packet);
                if !kept {
                    self.outbox.counters().drop_one(Direction::Outbound, DropReason::HoldFull);
                }
                kept
            }
            Some(Punt::NoTunnel { peer, packet }) => {
                self.handle_no_tunnel(now, peer, packet);
                false
            }
            Some(Punt::PathUnexamined { tunnel, waits }) => {
                self.paths(now).examine(tunnel, waits);
                false
            }
            _ => false,
        }
    }

    fn arm_held(&mut self) {
        self.forwarder.set_hold_full(self.held.is_full());
        match self.held.due() {
            Some(due) => self.timer.set(Due::Held, due),
            None => self.timer.cancel(Due::Held),
        }
    }
}

//! One thread's scratch: arena, deliveries, punts, caches, counters. Only the counters are shared.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::coalesce::Coalescer;
use super::early::Early;
use super::piece::Batch;
use super::throttle::Throttle;
use super::{Delivery, Offload, Run};
use crate::Punt;
use crate::capture::{InboundCourses, OutboundCourses};
use crate::counters::{Counters, Direction, DropReason};
use crate::firewall::{FlowCache, Passed};
use crate::index::LocalIndex;
use crate::tunnel::TunnelHint;
use crate::wire::ip::FlowKey;

/// Punts beyond this number in one turn are dropped, so that a flood cannot eat memory.
const MAX_PUNTS: usize = 128;
/// A full super-packet, cut into 1300-byte packets and sealed, with a little to spare.
const SUPER_PACKET_BYTES: usize = 72 << 10;
/// Arena bytes before a flush is due.
const MAX_ARENA_BYTES: usize = 4 * SUPER_PACKET_BYTES;
/// Packets that are dropped together mostly have one cause.
const MIN_SAMPLE_INTERVAL: Duration = Duration::from_millis(10);

/// One thread's scratch: arena, deliveries, punts, flow cache, counters. Only the counters are shared.
///
/// Memory is allocated when first needed and then kept; [`Lane::release_memory`] frees it.
#[derive(Debug)]
pub struct Lane {
    /// Only the first `used` bytes are valid. It keeps its greatest length, so that it rarely has to grow.
    pub(super) arena: Vec<u8>,
    pub(super) used: usize,
    pub(super) runs: Vec<Run>,
    pub(super) max_segments: usize,
    pub(super) deliveries: Vec<Delivery>,
    pub(super) headers: Vec<u8>,
    pub(super) pieces: Vec<Range<usize>>,
    pub(super) coalescer: Coalescer,
    pub(super) batch: Batch,
    pub(super) early: Early,
    punts: Vec<Punt>,
    pub(super) last_tunnel: TunnelHint,
    /// Throttles connect requests to the control plane: one per peer and second instead of one per packet.
    pub(super) connects: Throttle<IpAddr, 1000, 32>,
    /// Throttles the reports of dropped packets to the control plane: each kind once a second, and few kinds.
    samples: Throttle<(DropReason, IpAddr, u8, u16), 1000, 8>,
    /// When the next one may be.
    sample_after: Option<Instant>,
    pub(super) flows: FlowCache,
    /// Under capture: what becomes of each flow of this node.
    pub(super) outbound_courses: OutboundCourses,
    /// Under capture: which flows to this node are translated back.
    pub(super) inbound_courses: InboundCourses,
    pub(super) counters: Arc<Counters>,
}

impl Lane {
    pub(super) fn new(counters: Arc<Counters>) -> Self {
        Self {
            arena: Vec::new(),
            used: 0,
            runs: Vec::new(),
            max_segments: 64,
            deliveries: Vec::new(),
            headers: Vec::new(),
            pieces: Vec::new(),
            coalescer: Coalescer::default(),
            batch: Batch::default(),
            early: Early::default(),
            punts: Vec::new(),
            last_tunnel: TunnelHint::default(),
            connects: Throttle::default(),
            samples: Throttle::default(),
            sample_after: None,
            flows: FlowCache::default(),
            outbound_courses: OutboundCourses::default(),
            inbound_courses: InboundCourses::default(),
            counters,
        }
    }

    /// Sets the maximum number of datagrams in one run: what the socket's GSO accepts (1 without GSO). Default: 64.
    pub fn set_max_segments(&mut self, segments: usize) {
        self.max_segments = segments.max(1);
    }

    /// Sets whether the overlay device accepts TCP and UDP super-packets. Default: neither.
    pub fn set_coalesce(&mut self, tcp: bool, udp: bool) {
        self.coalescer.set_enabled(tcp, udp);
    }

    /// This lane's counters. The lane's thread is their only writer.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Sealed datagrams to send, since the last [`Lane::clear`]. [`crate::Forwarder::outbound`] is not the only one
    /// that fills them: [`crate::Forwarder::inbound`] adds the datagrams that this node relays and the answers to
    /// packets that its firewall rejects. So send them after every call of either.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// Memory that the runs point into.
    #[must_use]
    pub fn arena(&self) -> &[u8] {
        &self.arena[..self.used]
    }

    /// Packets for the overlay device since the last [`Lane::clear`], in order per flow: those of
    /// [`crate::Forwarder::inbound`], and from [`crate::Forwarder::outbound`] the answers to packets that were
    /// rejected.
    #[must_use]
    pub fn deliveries(&self) -> &[Delivery] {
        &self.deliveries
    }

    /// Memory that the headers of deliveries point into.
    #[must_use]
    pub fn headers(&self) -> &[u8] {
        &self.headers
    }

    /// Ranges of the receive buffer that deliveries point to.
    #[must_use]
    pub fn pieces(&self) -> &[Range<usize>] {
        &self.pieces
    }

    /// Appends the packet of a delivery to `packet`, as it stands: not cut, and its checksum as [`Delivery::offload`]
    /// says. `memory` is the buffer that was passed to [`crate::Forwarder::inbound`], or returned by
    /// [`crate::Forwarder::inbound_early`]; after [`crate::Forwarder::outbound`] it is not needed and may be empty.
    pub fn copy_delivery(&self, delivery: &Delivery, memory: &[u8], packet: &mut Vec<u8>) {
        packet.extend_from_slice(&self.headers[delivery.header.clone()]);
        for piece in &self.pieces[delivery.pieces.clone()] {
            packet.extend_from_slice(&memory[piece.clone()]);
        }
    }

    /// Whether [`Lane::sample`] may take another packet. In a flood of drops, most of them cost only this comparison.
    #[inline]
    pub(super) fn may_sample(&self, now: Instant) -> bool {
        self.sample_after.is_none_or(|after| now >= after)
    }

    /// Reports a dropped overlay packet to the control plane, if the reason matters there and no packet of this kind
    /// was reported in the last second.
    #[cold]
    #[inline(never)]
    pub(super) fn sample(
        &mut self,
        now: Instant,
        (direction, reason): (Direction, DropReason),
        tunnel: Option<LocalIndex>,
        flow: impl FnOnce() -> Option<FlowKey>,
    ) {
        let is_policy = matches!(
            reason,
            DropReason::NoRule
                | DropReason::NetworkPolicy
                | DropReason::NoRoute
                | DropReason::RemoteAddress
                | DropReason::LocalAddress
                | DropReason::UnknownDestination
                | DropReason::Refused
                | DropReason::EndpointGone
        );
        if !is_policy {
            return;
        }
        self.sample_after = Some(now + MIN_SAMPLE_INTERVAL);
        let Some(flow) = flow().filter(|flow| !flow.remote.is_multicast()) else { return };
        let port = if direction == Direction::Inbound { flow.local_port } else { flow.remote_port };
        if self.punts.len() < MAX_PUNTS / 2 && self.samples.admits((reason, flow.remote, flow.protocol, port), now) {
            self.punts.push(Punt::Dropped { direction, flow, reason, tunnel });
        }
    }

    /// Takes the punts that the control plane must handle.
    pub fn take_punts(&mut self) -> impl Iterator<Item = Punt> {
        let audited = self.flows.take_audited();
        let audited = audited.map(|Passed { direction, flow, tunnel, .. }| Punt::Audited { direction, flow, tunnel });
        self.punts.drain(..).chain(audited)
    }

    /// When to call [`crate::Forwarder::inbound_early`] if nothing is received before then; `None` if no datagram waits
    /// for its tunnel.
    #[must_use]
    pub fn early_due(&self) -> Option<Instant> {
        self.early.due()
    }

    /// Whether the arena, the punt queue and the deliveries have room for another super-packet before a flush.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.used + SUPER_PACKET_BYTES <= MAX_ARENA_BYTES
            && self.punts.len() < MAX_PUNTS
            && self.headers.len() + SUPER_PACKET_BYTES <= MAX_ARENA_BYTES
    }

    /// Clears runs and deliveries; keeps memory, punts that were not taken, and datagrams that wait for their tunnel.
    pub fn clear(&mut self) {
        self.used = 0;
        self.runs.clear();
        self.deliveries.clear();
        self.headers.clear();
        self.pieces.clear();
    }

    /// Frees the memory that traffic needed, to be called after a time without traffic. Clears runs and deliveries like
    /// [`Lane::clear`].
    pub fn release_memory(&mut self) {
        self.clear();
        self.arena = Vec::new();
        self.runs = Vec::new();
        self.deliveries = Vec::new();
        self.headers = Vec::new();
        self.pieces = Vec::new();
        self.punts.shrink_to_fit();
        self.coalescer.release_memory();
        self.batch = Batch::default();
        // What it has counted is not to be lost.
        if !self.flows.has_untold() {
            self.flows = FlowCache::default();
        }
        self.outbound_courses = OutboundCourses::default();
        self.inbound_courses = InboundCourses::default();
        self.last_tunnel = TunnelHint::default();
    }

    /// Grows the arena if necessary so that `bytes` more fit.
    pub(super) fn make_room(&mut self, bytes: usize) {
        let needed = self.used + bytes;
        if needed > self.arena.len() {
            // Doubling ends the growth after a few packets; starting small is enough for a ping's few hundred bytes.
            self.arena.resize(needed.max((self.arena.len() * 2).min(MAX_ARENA_BYTES)), 0);
        }
    }

    /// Queues a packet generated here for delivery to the device.
    pub(super) fn deliver_built(&mut self, packet: &[u8]) {
        self.deliver_whole(packet, Offload::default(), 0);
    }

    /// Queues a (super-)packet for delivery to the device. `header_len` is the length of its IP and transport header,
    /// or 0 if it is not a super-packet.
    pub(super) fn deliver_whole(&mut self, packet: &[u8], offload: Offload, header_len: u16) {
        let start = self.headers.len();
        self.headers.extend_from_slice(packet);
        let pieces = self.pieces.len()..self.pieces.len();
        let header = start..self.headers.len();
        self.deliveries.push(Delivery { header, pieces, offload, header_len, tunnel: None });
    }

    /// Queues a punt; returns `false` if the queue is full.
    pub(super) fn punt(&mut self, punt: Punt) -> bool {
        let fits = self.punts.len() < MAX_PUNTS;
        if fits {
            self.punts.push(punt);
        }
        fits
    }
}

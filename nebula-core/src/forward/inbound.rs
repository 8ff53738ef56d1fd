//! The ingress path: turns underlay datagrams into overlay (super-)packets, stage by stage.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::early::EarlyRun;
use super::fit;
use super::ingress::Ingress;
use super::piece::{Batch, Piece};
use super::reject::{self, MAX_ANSWERS, Meaning};
use super::seal::seal;
use super::segment::{Cut, MIN_JOINED, cut_packet};
use super::sort::{MAX_MESSAGE_LEN, MAX_UNAUTHENTICATED, sort};
use super::{Forwarder, Lane, Offload, Received, Segment, SegmentKind};
use crate::capture::Translation;
use crate::counters::{Counter, Direction};
use crate::firewall::{About, Amount, Firewall, Place};
use crate::index::{LocalIndex, RelayIndex};
use crate::tunnel::Tunnel;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::wire::ip::{FlowKey, Packet, protocol};
use crate::wire::{icmp, test_body};
use crate::{DropReason, Origin, Punt};

impl Forwarder {
    /// Turns underlay datagrams into overlay (super-)packets in `lane`. Decrypts in place in `buffer`; whatever needs
    /// the control plane is punted.
    ///
    /// All slots of one call must lie in one `buffer`; deliveries point into it, so write them out before it is
    /// reused.
    pub fn inbound(&self, lane: &mut Lane, now: Instant, buffer: &mut [u8], received: &[Received]) {
        inbound(self, lane, now, buffer, received);
    }

    /// Like [`Forwarder::inbound`], for buffered datagrams that arrived before their tunnel existed. Deliveries point
    /// into the returned memory. Call it before each [`Forwarder::inbound`] and at [`Lane::early_due`], until it
    /// returns `None`.
    #[must_use]
    pub fn inbound_early(&self, lane: &mut Lane, now: Instant) -> Option<Vec<u8>> {
        inbound_early(self, lane, now)
    }
}

fn inbound(forwarder: &Forwarder, lane: &mut Lane, now: Instant, buffer: &mut [u8], received: &[Received]) {
    let snapshot = forwarder.snapshot.load();
    let mut batch = std::mem::take(&mut lane.batch);
    for slot in received {
        sort(lane, &mut batch, &snapshot, buffer, slot);
    }
    let mut pieces = std::mem::take(&mut batch.pieces);
    for run in pieces.chunk_by_mut(|a, b| a.joins(b)) {
        let mut stage = Ingress { forwarder, snapshot: &snapshot, now, lane, batch: &mut batch, were_kept: false };
        match run.first().map(|piece| (piece.from, piece.header.index, piece.is_relay())) {
            Some((from, index, true)) => stage.hop(buffer, run, from, RelayIndex(index)),
            Some((from, index, false)) => stage.tunnel(buffer, run, from.into(), LocalIndex(index)),
            None => {}
        }
    }
    pieces.clear();
    batch.pieces = pieces;
    finish(lane, batch, buffer);
}

/// Like [`inbound`], for datagrams that arrived before their tunnel existed. Returns the memory that holds them, or
/// `None` if none are ready.
fn inbound_early(forwarder: &Forwarder, lane: &mut Lane, now: Instant) -> Option<Vec<u8>> {
    let EarlyRun { index, from, mut memory, mut pieces, .. } = lane.early.next(now, &forwarder.tunnels)?;
    let snapshot = forwarder.snapshot.load();
    let mut batch = std::mem::take(&mut lane.batch);
    let mut stage = Ingress { forwarder, snapshot: &snapshot, now, lane, batch: &mut batch, were_kept: true };
    stage.tunnel(&mut memory, &mut pieces, from, index);
    finish(lane, batch, &memory);
    Some(memory)
}

/// Ends a call: flushes the coalescer and keeps the scratch memory for the next call.
fn finish(lane: &mut Lane, mut batch: Batch, buffer: &[u8]) {
    let super_packets = lane.coalescer.finish(buffer, &mut lane.deliveries, &mut lane.headers, &mut lane.pieces);
    lane.counters.add(Counter::Coalesced, super_packets);
    batch.confirmed.clear();
    lane.batch = Batch { unknown: 0, recv_errors: 0, answers: 0, ..batch };
}

/// Whether all that was authenticated only measures a path.
#[cold]
fn only_measures(buffer: &[u8], run: &[Piece]) -> bool {
    let mut good = run.iter().filter(|piece| piece.good);
    good.all(|piece| {
        let body = &buffer[piece.range.start + HEADER_LEN..piece.range.end - TAG_LEN];
        test_body::only_measures(piece.header.kind, body)
    })
}

/// The previous flow of a run.
struct Last {
    flow: FlowKey,
    /// Where its packets are counted.
    verdict: Result<Place, DropReason>,
    /// Under capture: how its packets are translated back.
    back: Option<Translation>,
    /// What the lane had delivered before: packets, bytes.
    before: [u64; 2],
}

impl Ingress<'_> {
    /// Handles datagrams for one tunnel from one origin.
    pub(super) fn tunnel(&mut self, buffer: &mut [u8], run: &mut [Piece], from: Origin, index: LocalIndex) {
        let lookup = self.forwarder.tunnels.look_up(index);
        // Buffered datagrams go first.
        let must_queue = !self.lane.early.is_empty() && !self.were_kept && self.lane.early.holds(index);
        let only_receiving;
        let tunnel = match lookup.tunnel().filter(|_| !must_queue) {
            Some(tunnel) => tunnel,
            None => match self.only_receiving(index, must_queue) {
                Some(tunnel) => {
                    only_receiving = tunnel;
                    &only_receiving
                }
                None => return self.no_tunnel(buffer, run, from, index),
            },
        };
        if !self.authenticate(buffer, tunnel, run) {
            return;
        }
        self.hear(tunnel, from, run, || only_measures(buffer, run));
        self.lane.coalescer.tunnel = Some(index);
        let before = self.lane.counters.get(Counter::BytesIn);
        let mut last = None;
        for piece in run.iter().filter(|piece| piece.good) {
            let plaintext = piece.range.start + HEADER_LEN..piece.range.end - TAG_LEN;
            let result = match piece.header.kind {
                MessageType::Data => self.data(buffer, plaintext, tunnel, &mut last),
                kind => self.message(&buffer[plaintext], tunnel, from, kind),
            };
            if let Err(reason) = result {
                self.lane.counters.drop_one(Direction::Inbound, reason);
                if piece.header.kind == MessageType::Data && self.lane.may_sample(self.now) {
                    let packet = &buffer[piece.range.start + HEADER_LEN..piece.range.end - TAG_LEN];
                    let flow = || Packet::inbound(packet).ok().map(|packet| packet.flow);
                    self.lane.sample(self.now, (Direction::Inbound, reason), Some(tunnel.local_index), flow);
                }
            }
        }
        if let Some(last) = &last {
            self.count(last);
        }
        // Once for a run, from what the lane counts anyway.
        tunnel.session.count_received(self.lane.counters.get(Counter::BytesIn).wrapping_sub(before));
    }

    /// The tunnel of an initiator that this node has answered but not yet heard from through the tunnel, or one that
    /// an earlier process of this node had.
    #[cold]
    fn only_receiving(&self, index: LocalIndex, must_queue: bool) -> Option<Arc<Tunnel>> {
        let tunnels = &self.forwarder.tunnels;
        if must_queue { None } else { tunnels.unconfirmed(index).or_else(|| tunnels.inherited(index)) }
    }

    /// Buffers datagrams for a tunnel that is about to exist, and drops all others.
    #[cold]
    fn no_tunnel(&mut self, buffer: &[u8], run: &[Piece], from: Origin, index: LocalIndex) {
        let version = self.forwarder.tunnels.version();
        let kept = if self.is_awaited(index) {
            self.lane.early.keep(self.now, version, buffer, run, (from, index))
        } else {
            0
        };
        if kept < run.len() {
            let lost = run.len() - kept;
            self.lane.counters.drop_many(Direction::Inbound, DropReason::UnknownIndex, lost as u64);
            self.unknown(from, index.0);
        }
    }

    /// Whether a tunnel with this index is about to exist. In a flood of unknown indexes, only the first are checked.
    fn is_awaited(&self, index: LocalIndex) -> bool {
        let tunnels = &self.forwarder.tunnels;
        !self.were_kept
            && self.batch.unknown < MAX_UNAUTHENTICATED
            && (self.lane.early.holds(index)
                || tunnels.is_reserved(index)
                // It was published after the first lookup.
                || tunnels.look_up(index).tunnel().is_some())
    }

    /// Handles an overlay packet. `last` is the previous flow of the run.
    fn data(
        &mut self,
        buffer: &mut [u8],
        plaintext: Range<usize>,
        tunnel: &Tunnel,
        last: &mut Option<Last>,
    ) -> Result<(), DropReason> {
        let packet = Packet::inbound(&buffer[plaintext.clone()])?;
        if icmp::is_error(&buffer[plaintext.clone()], &packet) {
            if let Some(last) = last.take() {
                self.count(&last);
            }
            return self.error(buffer, plaintext, packet, tunnel);
        }
        let last = match last {
            Some(last) if last.flow == packet.flow => last,
            _ => {
                if let Some(last) = last {
                    self.count(last);
                }
                let (snapshot, now, flow) = (self.snapshot, self.now, &packet.flow);
                let (verdict, back) = match &snapshot.capture {
                    None => {
                        let firewall = Firewall { filter: &snapshot.filter, conntrack: &self.forwarder.conntrack };
                        let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
                        let cache = &mut self.lane.flows;
                        (firewall.check(cache, now, Direction::Inbound, flow, tunnel, route), None)
                    }
                    Some(current) => self.admit_captured(current, flow, tunnel),
                };
                last.insert(Last { flow: packet.flow, verdict, back, before: self.delivered() })
            }
        };
        if let Err(reason) = last.verdict {
            return Err(self.refuse_packet(&buffer[plaintext], &packet, tunnel, reason));
        }
        // The flow on the wire stands for the translated one in what follows.
        if last.back.is_some() || packet.fragmented && self.snapshot.capture.is_some() {
            let bytes = &mut buffer[plaintext.clone()];
            self.translate_back(bytes, &packet, last.back.as_ref())?;
        }
        if !tunnel.path_limit.is_open() {
            fit::clamp_inbound(self.lane, tunnel, &mut buffer[plaintext.clone()], &packet);
        }
        self.deliver(buffer, plaintext, &packet);
        Ok(())
    }

    /// What the lane has delivered so far: packets, bytes.
    fn delivered(&self) -> [u64; 2] {
        [Counter::PacketsIn, Counter::BytesIn].map(|counter| self.lane.counters.get(counter))
    }

    /// Counts what was delivered of a flow since it came up, from what the lane counts anyway.
    fn count(&mut self, last: &Last) {
        if let Ok(place) = last.verdict {
            let [packets, bytes] = self.delivered();
            self.lane.flows.count(place, packets.wrapping_sub(last.before[0]), bytes.wrapping_sub(last.before[1]));
        }
    }

    /// Answers a refused packet if its sender is to know, and counts it.
    #[cold]
    fn refuse_packet(&mut self, packet: &[u8], parsed: &Packet, tunnel: &Tunnel, reason: DropReason) -> DropReason {
        if reason.is_refused_flow() && self.snapshot.filter.rejects(Direction::Inbound) {
            self.answer(packet, parsed, tunnel);
        }
        let firewall = Firewall { filter: &self.snapshot.filter, conntrack: &self.forwarder.conntrack };
        let about = About { direction: Direction::Inbound, flow: &parsed.flow, original: None };
        let amount = Amount { packets: 1, bytes: packet.len() as u64 };
        firewall.note_refused(self.now, about, Some(tunnel), (reason, amount));
        reason
    }

    /// Handles an ICMP error.
    #[cold]
    fn error(
        &mut self,
        buffer: &mut [u8],
        plaintext: Range<usize>,
        packet: Packet,
        tunnel: &Tunnel,
    ) -> Result<(), DropReason> {
        let quoted = icmp::quoted_outbound(&buffer[plaintext.clone()], &packet);
        let snapshot = self.snapshot;
        let firewall = Firewall { filter: &snapshot.filter, conntrack: &self.forwarder.conntrack };
        let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
        firewall.check_error(self.now, Direction::Inbound, &packet.flow, quoted.as_ref(), tunnel, route)?;
        if snapshot.capture.is_some()
            && let Some(quoted) = quoted
        {
            self.translate_error_back(&mut buffer[plaintext.clone()], &packet, &quoted)?;
        }
        self.deliver(buffer, plaintext, &packet);
        Ok(())
    }

    fn deliver(&mut self, buffer: &[u8], plaintext: Range<usize>, packet: &Packet) {
        self.lane.counters.add(Counter::PacketsIn, 1);
        self.lane.counters.add(Counter::BytesIn, plaintext.len() as u64);
        let segment = Header::segment_size(&buffer[plaintext.start - HEADER_LEN..]);
        if segment > 0 {
            return self.deliver_segments(buffer, plaintext, packet, segment);
        }
        self.lane.coalescer.push(buffer, plaintext, packet);
    }

    /// Delivers a packet with several TCP segments, whose size the peer says: for the device to take apart, or in
    /// packets for one that cannot.
    #[inline(never)]
    fn deliver_segments(&mut self, buffer: &[u8], plaintext: Range<usize>, packet: &Packet, size: u16) {
        let (bytes, lane) = (&buffer[plaintext.clone()], &mut *self.lane);
        if packet.flow.protocol != protocol::TCP || usize::from(size) < MIN_JOINED {
            return lane.coalescer.push(buffer, plaintext, packet);
        }
        if lane.coalescer.push_segments(buffer, plaintext.clone(), packet, size) {
            return;
        }
        // In order: what came before is ahead of it.
        let joined = lane.coalescer.finish(buffer, &mut lane.deliveries, &mut lane.headers, &mut lane.pieces);
        lane.counters.add(Counter::Coalesced, joined);
        let offload = Offload { segment: Some(Segment { kind: SegmentKind::Tcp, size }), checksum: None };
        cut_packet(bytes, offload, |packet| lane.deliver_built(packet));
    }

    /// Answers the sender of a refused packet, through the tunnel.
    #[cold]
    fn answer(&mut self, packet: &[u8], parsed: &Packet, tunnel: &Tunnel) {
        if self.batch.answers >= MAX_ANSWERS {
            return;
        }
        let Some(answer) = reject::answer(packet, parsed, Meaning::Prohibited) else { return };
        let bytes = answer.len() + HEADER_LEN + TAG_LEN;
        let Some(carrier) = self.forwarder.carrier_for(tunnel, bytes) else { return };
        let cut = Packet::outbound(&answer).and_then(|parsed| Cut::new(&answer, &parsed, Offload::default()));
        if cut.and_then(|cut| seal(self.lane, tunnel, &cut, &carrier, Place::NONE)).is_ok() {
            self.batch.answers += 1;
            self.lane.counters.add(Counter::Rejected, 1);
            tunnel.mark_sent();
        }
    }

    /// Punts a message to the control plane.
    fn message(
        &mut self,
        plaintext: &[u8],
        tunnel: &Tunnel,
        from: Origin,
        kind: MessageType,
    ) -> Result<(), DropReason> {
        let counter = match kind {
            MessageType::Lighthouse => Counter::LighthouseIn,
            MessageType::TestRequest => Counter::TestRequestsIn,
            MessageType::TestReply => Counter::TestRepliesIn,
            MessageType::CloseTunnel => Counter::CloseTunnelIn,
            MessageType::Control => Counter::ControlIn,
            MessageType::Handshake | MessageType::Data | MessageType::Relay | MessageType::RecvError => {
                return Err(DropReason::UnknownType);
            }
        };
        if plaintext.len() > MAX_MESSAGE_LEN {
            return Err(DropReason::BadMessage);
        }
        let punt = Punt::Message { tunnel: tunnel.local_index, from, kind, plaintext: plaintext.to_vec() };
        if !self.lane.punt(punt) {
            return Err(DropReason::PuntQueueFull);
        }
        self.lane.counters.add(counter, 1);
        Ok(())
    }
}

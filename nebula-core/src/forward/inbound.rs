//! Underlay datagrams to overlay (super-)packets, stage by stage (ingress path).

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::early::EarlyRun;
use super::moves::Moves;
use super::outbound::seal;
use super::reject::{self, MAX_ANSWERS};
use super::segment::Cut;
use super::{Forwarder, Lane, Offload, Received, Snapshot};
use crate::counters::{Counter, Direction};
use crate::firewall::Firewall;
use crate::index::{LocalIndex, RelayIndex, RemoteIndex};
use crate::tunnel::{CounterSet, Tunnel};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::wire::icmp;
use crate::wire::ip::{FlowKey, Packet};
use crate::{DropReason, Origin, Punt};

/// No control message is longer: peers have buffers of 9001 bytes.
const MAX_MESSAGE: usize = 9001;
/// Unauthenticated datagrams that reach the control plane in one call, of each kind that needs no state to forge.
const MAX_UNAUTHENTICATED: usize = 16;

/// Scratch of one call, and what is remembered from call to call.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pieces: Vec<Piece>,
    /// What was inside datagrams of relays.
    pub(super) relayed: Vec<Piece>,
    moves: Moves,
    /// Tunnels that were reported as confirmed.
    confirmed: Vec<LocalIndex>,
    unknown: usize,
    recv_errors: usize,
    /// Refused packets that were answered.
    answers: usize,
}

/// One datagram for a tunnel.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) range: Range<usize>,
    from: SocketAddr,
    header: Header,
    /// Not yet refused.
    pub(super) good: bool,
}

impl Piece {
    fn is_relay(&self) -> bool {
        self.header.kind == MessageType::Relay
    }
    /// Bytes that are authenticated only: the header; of a relay's datagram all but the tag.
    fn plain_len(&self) -> usize {
        if self.is_relay() { self.range.len().saturating_sub(TAG_LEN) } else { HEADER_LEN }
    }
    /// The same datagram elsewhere.
    pub(super) fn moved_to(&self, range: Range<usize>) -> Self {
        Self { range, ..*self }
    }
    pub(super) fn tunnel_index(&self) -> LocalIndex {
        LocalIndex(self.header.index)
    }
    /// Whether both can be handled in one go.
    pub(super) fn joins(&self, other: &Self) -> bool {
        self.header.index == other.header.index && self.from == other.from && self.is_relay() == other.is_relay()
    }
}

pub(super) fn inbound(forwarder: &Forwarder, lane: &mut Lane, now: Instant, buffer: &mut [u8], received: &[Received]) {
    let snapshot = forwarder.snapshot.load();
    let mut batch = std::mem::take(&mut lane.batch);
    for slot in received {
        sort(lane, &mut batch, &snapshot, buffer, slot);
    }
    let mut pieces = std::mem::take(&mut batch.pieces);
    for run in pieces.chunk_by_mut(|a, b| a.joins(b)) {
        let mut stage = Stage { forwarder, snapshot: &snapshot, now, lane, batch: &mut batch, were_kept: false };
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

/// As [`inbound`], for datagrams that came before their tunnel. Returns the memory they are in; `None`: none is ready.
pub(super) fn inbound_early(forwarder: &Forwarder, lane: &mut Lane, now: Instant) -> Option<Vec<u8>> {
    let EarlyRun { index, from, mut memory, mut pieces, .. } = lane.early.next(now, &forwarder.tunnels)?;
    let snapshot = forwarder.snapshot.load();
    let mut batch = std::mem::take(&mut lane.batch);
    let mut stage = Stage { forwarder, snapshot: &snapshot, now, lane, batch: &mut batch, were_kept: true };
    stage.tunnel(&mut memory, &mut pieces, from, index);
    finish(lane, batch, &memory);
    Some(memory)
}

/// Ends a call: what is left to join is delivered, and the scratch is kept for the next one.
fn finish(lane: &mut Lane, mut batch: Batch, buffer: &[u8]) {
    let super_packets = lane.coalescer.finish(buffer, &mut lane.deliveries, &mut lane.headers, &mut lane.pieces);
    lane.counters.add(Counter::Coalesced, super_packets);
    batch.confirmed.clear();
    lane.batch = Batch { unknown: 0, recv_errors: 0, answers: 0, ..batch };
}

/// Reads headers: what belongs to a tunnel becomes a piece, the rest is finished here.
fn sort(lane: &mut Lane, batch: &mut Batch, snapshot: &Snapshot, buffer: &[u8], slot: &Received) {
    let Some(bytes) = buffer.get(slot.range.clone()).filter(|bytes| !bytes.is_empty()) else {
        // An empty datagram is a hole punch too; a range outside the buffer cannot be counted as anything better.
        lane.counters.add(Counter::DatagramsIn, 1);
        lane.counters.add(Counter::HolePunchesIn, 1);
        return;
    };
    let size = if slot.segment_size == 0 { bytes.len() } else { slot.segment_size };
    let count = bytes.len().div_ceil(size) as u64;
    lane.counters.add(Counter::DatagramsIn, count);
    lane.counters.add(Counter::DatagramBytesIn, bytes.len() as u64);
    // A tunnel inside a tunnel would loop.
    if snapshot.routes.is_overlay(slot.from.ip()) {
        lane.counters.drop_many(Direction::Inbound, DropReason::FromOverlay, count);
        return;
    }
    for (nth, datagram) in bytes.chunks(size).enumerate() {
        if datagram.len() == 1 {
            lane.counters.add(Counter::HolePunchesIn, 1);
            continue;
        }
        let start = slot.range.start + nth * size;
        if let Err(reason) = sort_one(lane, batch, slot.from.into(), start, datagram) {
            lane.counters.drop_one(Direction::Inbound, reason);
        }
    }
}

/// `start` is where the datagram begins in the buffer.
pub(super) fn sort_one(
    lane: &mut Lane,
    batch: &mut Batch,
    from: Origin,
    start: usize,
    datagram: &[u8],
) -> Result<(), DropReason> {
    let header = Header::parse(datagram)?;
    let (counter, punt) = match header.kind {
        MessageType::Handshake if datagram.len() > MAX_MESSAGE => return Err(DropReason::BadHandshake),
        MessageType::Handshake => (Counter::HandshakesIn, Punt::Handshake { from, datagram: datagram.to_vec() }),
        MessageType::RecvError if batch.recv_errors >= MAX_UNAUTHENTICATED => return Err(DropReason::PuntQueueFull),
        MessageType::RecvError => {
            batch.recv_errors += 1;
            (Counter::RecvErrorsIn, Punt::RecvError { from, index: RemoteIndex(header.index) })
        }
        _ => {
            let range = start..start + datagram.len();
            let piece = Piece { range, from: from.underlay(), header, good: true };
            match from {
                Origin::Direct(_) => batch.pieces.push(piece),
                // Nothing is relayed twice.
                Origin::Relayed { .. } if piece.is_relay() => return Err(DropReason::Relay),
                Origin::Relayed { .. } => batch.relayed.push(piece),
            }
            return Ok(());
        }
    };
    if !lane.punt(punt) {
        return Err(DropReason::PuntQueueFull);
    }
    lane.counters.add(counter, 1);
    Ok(())
}

/// What the stages of one run of datagrams share.
pub(super) struct Stage<'a> {
    pub(super) forwarder: &'a Forwarder,
    snapshot: &'a Snapshot,
    now: Instant,
    pub(super) lane: &'a mut Lane,
    pub(super) batch: &'a mut Batch,
    /// The datagrams waited for their tunnel already.
    were_kept: bool,
}

impl Stage<'_> {
    /// Datagrams for one tunnel that came one way.
    pub(super) fn tunnel(&mut self, buffer: &mut [u8], run: &mut [Piece], from: Origin, index: LocalIndex) {
        let lookup = self.forwarder.tunnels.look_up(index);
        // What waits goes first.
        let must_queue = !self.lane.early.is_empty() && !self.were_kept && self.lane.early.holds(index);
        let unconfirmed;
        let tunnel = match lookup.tunnel().filter(|_| !must_queue) {
            Some(tunnel) => tunnel,
            None => match self.unconfirmed(index, must_queue) {
                Some(tunnel) => {
                    unconfirmed = tunnel;
                    &unconfirmed
                }
                None => return self.no_tunnel(buffer, run, from, index),
            },
        };
        if !self.authenticate(buffer, tunnel, run) {
            return;
        }
        self.hear(tunnel, from);
        let mut last = None;
        for piece in run.iter().filter(|piece| piece.good) {
            let plaintext = piece.range.start + HEADER_LEN..piece.range.end - TAG_LEN;
            let result = match piece.header.kind {
                MessageType::Data => self.data(buffer, plaintext, tunnel, &mut last),
                kind => self.message(&buffer[plaintext], tunnel, from, kind),
            };
            if let Err(reason) = result {
                self.lane.counters.drop_one(Direction::Inbound, reason);
            }
        }
    }

    /// The tunnel of a caller that this node answered and has not heard since.
    #[cold]
    fn unconfirmed(&self, index: LocalIndex, must_queue: bool) -> Option<Arc<Tunnel>> {
        if must_queue { None } else { self.forwarder.tunnels.unconfirmed(index) }
    }

    /// Keeps datagrams for a tunnel that is about to be; those of others are lost.
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

    /// Whether there will be a tunnel with this index. In a flood of wrong ones only the first are looked at.
    fn is_awaited(&self, index: LocalIndex) -> bool {
        let tunnels = &self.forwarder.tunnels;
        !self.were_kept
            && self.batch.unknown < MAX_UNAUTHENTICATED
            && (self.lane.early.holds(index)
                || tunnels.is_reserved(index)
                // It came between the two looks.
                || tunnels.look_up(index).tunnel().is_some())
    }

    /// Lets the peer know that its datagrams lead nowhere.
    pub(super) fn unknown(&mut self, from: Origin, index: u32) {
        // One answer tells the peer as much as one for each datagram.
        if self.batch.unknown < MAX_UNAUTHENTICATED {
            self.batch.unknown += 1;
            self.lane.punt(Punt::UnknownIndex { from, index });
        }
    }

    /// Checks counters, opens in place, records counters, block by block. What fails is counted and no longer good. `true` if any is good.
    pub(super) fn authenticate(&mut self, buffer: &mut [u8], tunnel: &Tunnel, run: &mut [Piece]) -> bool {
        let counters = &self.lane.counters;
        let window = &tunnel.session.replay;
        let refuse = |piece: &mut Piece, reason| {
            piece.good = false;
            counters.drop_one(Direction::Inbound, reason);
        };
        let mut any = false;
        let same_block = |a: &Piece, b: &Piece| CounterSet::spans(a.header.counter, b.header.counter);
        for block in run.chunk_by_mut(same_block) {
            let Some(first) = block.first().map(|piece| piece.header.counter) else { continue };
            let possible = window.check_around(first);
            let mut opened = CounterSet::around(first);
            for piece in &mut *block {
                let counter = piece.header.counter;
                if piece.range.len() < HEADER_LEN + TAG_LEN {
                    refuse(piece, DropReason::Truncated);
                    continue;
                }
                let (head, body) = buffer[piece.range.clone()].split_at_mut(piece.plain_len());
                if !possible.contains(counter) {
                    refuse(piece, DropReason::Replayed);
                } else if !tunnel.session.receive_key.open(counter, head, body) {
                    refuse(piece, DropReason::BadTag);
                } else if !opened.insert(counter) {
                    refuse(piece, DropReason::Replayed);
                }
            }
            // The same counters may be in another lane's hands.
            let fresh = window.commit_set(opened);
            for piece in block.iter_mut().filter(|piece| piece.good) {
                if fresh.contains(piece.header.counter) {
                    any = true;
                } else {
                    refuse(piece, DropReason::Replayed);
                }
            }
        }
        any
    }

    /// Notes that the peer was heard, and tells the control plane what is new about that.
    pub(super) fn hear(&mut self, tunnel: &Tunnel, from: Origin) {
        let index = tunnel.local_index;
        if !tunnel.is_confirmed() && !self.batch.confirmed.contains(&index) {
            self.batch.confirmed.push(index);
            self.lane.punt(Punt::Confirmed { tunnel: index, from });
        }
        match from {
            Origin::Direct(endpoint) => {
                tunnel.mark_received();
                self.notice_roaming(tunnel, endpoint);
            }
            Origin::Relayed { .. } => tunnel.mark_relayed(),
        }
    }

    fn notice_roaming(&mut self, tunnel: &Tunnel, from: SocketAddr) {
        let index = tunnel.local_index;
        if tunnel.endpoint() != Some(from) && self.batch.moves.tell(index, from, self.now) {
            self.lane.punt(Punt::Roamed { tunnel: index, from });
        }
    }

    /// An overlay packet. `last` is the flow before it in the run, and what became of it.
    fn data(
        &mut self,
        buffer: &[u8],
        plaintext: Range<usize>,
        tunnel: &Tunnel,
        last: &mut Option<(FlowKey, Result<(), DropReason>)>,
    ) -> Result<(), DropReason> {
        let packet = Packet::inbound(&buffer[plaintext.clone()])?;
        if icmp::is_error(&buffer[plaintext.clone()], &packet) {
            let quoted = icmp::quoted_outbound(&buffer[plaintext.clone()], &packet);
            let snapshot = self.snapshot;
            let firewall = Firewall { filter: &snapshot.filter, conntrack: &self.forwarder.conntrack };
            let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
            firewall.check_error(self.now, Direction::Inbound, &packet.flow, quoted.as_ref(), tunnel, route)?;
            self.deliver(buffer, plaintext, &packet);
            return Ok(());
        }
        let verdict = match last {
            Some((flow, verdict)) if *flow == packet.flow => *verdict,
            _ => {
                let (snapshot, now, flow) = (self.snapshot, self.now, &packet.flow);
                let firewall = Firewall { filter: &snapshot.filter, conntrack: &self.forwarder.conntrack };
                let route = |flow: &FlowKey| snapshot.routes.shared(flow, tunnel);
                let verdict = firewall.check(&mut self.lane.flows, now, Direction::Inbound, flow, tunnel, route);
                *last = Some((packet.flow, verdict));
                verdict
            }
        };
        if verdict == Err(DropReason::NoRule) && self.snapshot.filter.rejects(Direction::Inbound) {
            self.answer(&buffer[plaintext.clone()], &packet, tunnel);
        }
        verdict?;
        self.deliver(buffer, plaintext, &packet);
        Ok(())
    }

    fn deliver(&mut self, buffer: &[u8], plaintext: Range<usize>, packet: &Packet) {
        self.lane.counters.add(Counter::PacketsIn, 1);
        self.lane.counters.add(Counter::BytesIn, plaintext.len() as u64);
        self.lane.coalescer.push(buffer, plaintext, packet);
    }

    /// Tells the sender of a refused packet, through the tunnel.
    #[cold]
    fn answer(&mut self, packet: &[u8], parsed: &Packet, tunnel: &Tunnel) {
        if self.batch.answers >= MAX_ANSWERS {
            return;
        }
        let Some(answer) = reject::answer(packet, parsed) else { return };
        let Some(carrier) = self.forwarder.carrier(tunnel) else { return };
        let cut = Packet::outbound(&answer).and_then(|parsed| Cut::new(&answer, &parsed, Offload::default()));
        if cut.and_then(|cut| seal(self.lane, tunnel, &cut, &carrier)).is_ok() {
            self.batch.answers += 1;
            self.lane.counters.add(Counter::Rejected, 1);
            tunnel.mark_sent();
        }
    }

    /// A message for the control plane.
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
        if plaintext.len() > MAX_MESSAGE {
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

//! Datagrams inside datagrams of a relay: put in at one end, passed on in the middle, taken out at the other end.
//!
//! A frame is the relay's header, a whole datagram and a tag over both. The middle neither reads nor changes the datagram; it
//! checks one tag and makes another, so it stays on the data path.

use std::net::SocketAddr;

use super::Forwarder;
use super::inbound::{Piece, Stage, sort_one};
use super::outbound::add_to_runs;
use crate::counters::{Counter, Direction};
use crate::index::{Hop, RelayIndex, RemoteIndex};
use crate::relay::Role;
use crate::tunnel::{Lookup, Tunnel};
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::{DropReason, Origin};

/// How the datagrams of a tunnel leave this node.
#[derive(Debug)]
pub(crate) struct Carrier {
    /// Underlay destination: of the peer, or of its relay.
    pub(crate) to: SocketAddr,
    relay: Option<(Lookup, RemoteIndex)>,
}

impl Carrier {
    /// Reserves counters for the frames of `n` datagrams; `None`: they need no frame.
    pub(crate) fn frames(&self, n: u64) -> Result<Option<Frames<'_>>, DropReason> {
        let Some((lookup, index)) = &self.relay else { return Ok(None) };
        let relay = lookup.tunnel().ok_or(DropReason::NoEndpoint)?;
        let first = relay.session.reserve(n).ok_or(DropReason::CounterExhausted)?;
        relay.mark_sent();
        Ok(Some(Frames { relay, index: *index, first }))
    }
    /// Puts a datagram into a frame if it needs one.
    pub(crate) fn wrap(&self, datagram: Vec<u8>) -> Result<Vec<u8>, DropReason> {
        let Some(frames) = self.frames(1)? else { return Ok(datagram) };
        let mut frame = Vec::with_capacity(HEADER_LEN + datagram.len() + TAG_LEN);
        frame.extend([0; HEADER_LEN]);
        frame.extend(datagram);
        frame.extend([0; TAG_LEN]);
        frames.close(0, &mut frame);
        Ok(frame)
    }
}

/// Frames of one relay, with counters of their own.
#[derive(Debug)]
pub(crate) struct Frames<'a> {
    relay: &'a Tunnel,
    index: RemoteIndex,
    first: u64,
}

impl Frames<'_> {
    /// Writes header and tag of the `nth` frame around the datagram that lies between their places.
    pub(super) fn close(&self, nth: u64, frame: &mut [u8]) {
        let counter = self.first + nth;
        let header = Header { kind: MessageType::Relay, index: self.index.0, counter };
        let (body, tag) = frame.split_at_mut(frame.len() - TAG_LEN);
        body[..HEADER_LEN].copy_from_slice(&header.to_bytes());
        tag.copy_from_slice(&self.relay.session.send_key.seal(counter, body, &mut []));
    }
}

impl Forwarder {
    /// How to reach the peer of a tunnel: directly, else by its hop. `None`: not at all.
    pub(crate) fn carrier(&self, tunnel: &Tunnel) -> Option<Carrier> {
        match tunnel.endpoint() {
            Some(to) => Some(Carrier { to, relay: None }),
            None => self.carrier_by(tunnel.hop()?),
        }
    }
    /// How to send by a hop. A neighbour that is itself behind a relay is none.
    pub(crate) fn carrier_by(&self, hop: Hop) -> Option<Carrier> {
        let relay = self.tunnels.look_up(hop.tunnel);
        let to = relay.tunnel()?.endpoint()?;
        Some(Carrier { to, relay: Some((relay, hop.index)) })
    }
}

impl Stage<'_> {
    /// Frames of one source for one hop.
    pub(super) fn hop(&mut self, buffer: &mut [u8], run: &mut [Piece], from: SocketAddr, index: RelayIndex) {
        let known = self.forwarder.relays().get(index);
        let tunnels = self.forwarder.tunnels();
        let lookup = known.map_or_else(Lookup::nothing, |(neighbour, _)| tunnels.look_up(neighbour));
        let (Some(neighbour), Some((_, role))) = (lookup.tunnel(), known) else {
            self.lane.counters.drop_many(Direction::Inbound, DropReason::UnknownIndex, run.len() as u64);
            return self.unknown(from.into(), index.0);
        };
        if !self.authenticate(buffer, neighbour, run) {
            return;
        }
        self.hear(neighbour, from.into());
        self.forwarder.relays().mark_used(index);
        match role {
            Role::Terminal => self.take_out(buffer, run, Origin::Relayed { from, hop: index }),
            Role::Forward(next) => match next.and_then(|next| self.forwarder.carrier_by(next)) {
                Some(carrier) => self.pass_on(buffer, run, &carrier),
                None => {
                    self.refuse(run);
                    // The neighbour must not wait for its peer to time out.
                    self.unknown(from.into(), index.0);
                }
            },
        }
    }

    /// This node is the end: what is inside goes on as if it had come alone.
    fn take_out(&mut self, buffer: &mut [u8], run: &[Piece], origin: Origin) {
        for piece in run.iter().filter(|piece| piece.good) {
            let inner = inner(piece);
            let datagram = &buffer[inner.clone()];
            if let Err(reason) = sort_one(self.lane, self.batch, origin, inner.start, datagram) {
                self.lane.counters.drop_one(Direction::Inbound, reason);
            }
        }
        let mut pieces = std::mem::take(&mut self.batch.relayed);
        for run in pieces.chunk_by_mut(|a, b| a.joins(b)) {
            if let Some(index) = run.first().map(Piece::tunnel_index) {
                self.tunnel(buffer, run, origin, index);
            }
        }
        pieces.clear();
        self.batch.relayed = pieces;
    }

    /// This node is the middle: each datagram leaves in another frame.
    fn pass_on(&mut self, buffer: &[u8], run: &mut [Piece], carrier: &Carrier) {
        for piece in run.iter_mut().filter(|piece| piece.good) {
            // Anything else would be relayed twice, or be dropped by the end.
            let header = Header::parse(&buffer[inner(piece)]);
            if !header.is_ok_and(|header| header.kind != MessageType::Relay) {
                piece.good = false;
                self.lane.counters.drop_one(Direction::Inbound, DropReason::Relay);
            }
        }
        let count = run.iter().filter(|piece| piece.good).count() as u64;
        let Ok(Some(frames)) = carrier.frames(count) else {
            self.lane.counters.drop_many(Direction::Outbound, DropReason::CounterExhausted, count);
            return;
        };
        let lane = &mut *self.lane;
        let mut bytes = 0;
        for (nth, piece) in run.iter().filter(|piece| piece.good).enumerate() {
            let len = piece.range.len();
            lane.make_room(len);
            let (start, end) = (lane.used, lane.used + len);
            let frame = &mut lane.arena[start..end];
            frame.copy_from_slice(&buffer[piece.range.clone()]);
            frames.close(nth as u64, frame);
            lane.used = end;
            add_to_runs(&mut lane.runs, lane.max_segments, carrier.to, start, end);
            bytes += len as u64;
        }
        lane.counters.add(Counter::RelayedDatagrams, count);
        lane.counters.add(Counter::RelayedBytes, bytes);
    }

    fn refuse(&mut self, run: &[Piece]) {
        let datagrams = run.iter().filter(|piece| piece.good).count() as u64;
        self.lane.counters.drop_many(Direction::Inbound, DropReason::NoEndpoint, datagrams);
    }
}

/// Where the datagram is in an authenticated frame.
fn inner(frame: &Piece) -> std::ops::Range<usize> {
    frame.range.start + HEADER_LEN..frame.range.end - TAG_LEN
}

//! Relay frames: a relay passes them on, and the end of the path unwraps the datagrams inside.
//!
//! A frame is a relay header, a whole datagram and a tag over both. The relay reads no more than the header of the
//! datagram and never changes it; it verifies one tag and computes another, so relaying stays on the data path.

use std::net::SocketAddr;

use super::Carrier;
use super::ingress::Ingress;
use super::piece::Piece;
use super::seal::add_to_runs;
use super::sort::sort_one;
use crate::counters::{Counter, Direction};
use crate::index::RelayIndex;
use crate::relay::Role;
use crate::tunnel::Lookup;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};
use crate::{DropReason, Origin};

impl Ingress<'_> {
    /// Handles frames from one source for one hop.
    pub(super) fn hop(&mut self, buffer: &mut [u8], run: &mut [Piece], from: SocketAddr, index: RelayIndex) {
        let known = self.forwarder.relays().get(index);
        let tunnels = self.forwarder.tunnels();
        let lookup = known.map_or_else(Lookup::nothing, |(neighbour, _)| tunnels.look_up(neighbour));
        let inherited = match lookup.tunnel() {
            Some(_) => None,
            None => known.and_then(|(neighbour, _)| tunnels.inherited(neighbour)),
        };
        let (Some(neighbour), Some((_, role))) = (lookup.tunnel().or(inherited.as_deref()), known) else {
            self.lane.counters.drop_many(Direction::Inbound, DropReason::UnknownIndex, run.len() as u64);
            return self.unknown(from.into(), index.0);
        };
        if !self.authenticate(buffer, neighbour, run) {
            return;
        }
        self.hear(neighbour, from.into(), run, || false);
        self.forwarder.relays().mark_used(index);
        match role {
            Role::Terminal => self.take_out(buffer, run, Origin::Relayed { from, hop: index }),
            Role::Forward(next) => match next.and_then(|next| self.forwarder.carrier_by(next)) {
                Some(carrier) => self.pass_on(buffer, run, &carrier),
                None => {
                    self.refuse(run);
                    // Tell the neighbour, which would otherwise wait until its peer times out.
                    self.unknown(from.into(), index.0);
                }
            },
        }
    }

    /// This node is the end of the path: unwraps the datagrams and handles them like those received directly.
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

    /// This node is the relay: sends each datagram on in a new frame.
    fn pass_on(&mut self, buffer: &[u8], run: &mut [Piece], carrier: &Carrier) {
        for piece in run.iter_mut().filter(|piece| piece.good) {
            // A nested frame would be relayed twice, and the end would drop a malformed datagram.
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

/// Range of the datagram inside an authenticated frame.
fn inner(frame: &Piece) -> std::ops::Range<usize> {
    frame.range.start + HEADER_LEN..frame.range.end - TAG_LEN
}

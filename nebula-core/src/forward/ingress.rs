//! What the stages of the inbound path share: authentication, and notices to the control plane about peers.

use std::net::SocketAddr;
use std::time::Instant;

use super::forwarder::Snapshot;
use super::piece::{Batch, Piece};
use super::sort::MAX_UNAUTHENTICATED;
use super::{Forwarder, Lane};
use crate::counters::{Counter, Direction};
use crate::tunnel::{CounterSet, Tunnel};
use crate::wire::header::{HEADER_LEN, TAG_LEN};
use crate::{DropReason, Origin, Punt};

/// State that the stages of one run of datagrams share.
pub(super) struct Ingress<'a> {
    pub(super) forwarder: &'a Forwarder,
    pub(super) snapshot: &'a Snapshot,
    pub(super) now: Instant,
    pub(super) lane: &'a mut Lane,
    pub(super) batch: &'a mut Batch,
    /// Whether the datagrams were buffered until their tunnel existed.
    pub(super) were_kept: bool,
}

impl Ingress<'_> {
    /// Asks the control plane to tell the peer that this node does not know its index.
    pub(super) fn unknown(&mut self, from: Origin, index: u32) {
        // A few answers are enough; one for each datagram would only amplify a flood.
        if self.batch.unknown < MAX_UNAUTHENTICATED {
            self.batch.unknown += 1;
            self.lane.punt(Punt::UnknownIndex { from, index });
        }
    }

    /// Checks counters, decrypts in place and commits the counters, block by block. Marks datagrams that fail as not
    /// good and counts them. Returns `true` if any is good.
    pub(super) fn authenticate(&mut self, buffer: &mut [u8], tunnel: &Tunnel, run: &mut [Piece]) -> bool {
        let counters = &self.lane.counters;
        let window = &tunnel.session.received.replay;
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
                    let is_too_old = window.is_too_old(counter);
                    refuse(piece, if is_too_old { DropReason::TooOld } else { DropReason::Replayed });
                } else if !tunnel.session.receive_key.open(counter, head, body) {
                    refuse(piece, DropReason::BadTag);
                } else if !opened.insert(counter) {
                    refuse(piece, DropReason::Replayed);
                }
            }
            // Another lane may have committed the same counters meanwhile.
            let (fresh, lost) = window.commit_set(opened);
            if lost > 0 {
                counters.add(Counter::DatagramsLost, lost);
            }
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

    /// Marks the peer as heard from in a run of datagrams, and tells the control plane if the tunnel is thereby
    /// confirmed or the peer seems to have roamed. If all that came `only_measures` another path or a relay, that
    /// does not show that the path in use works.
    pub(super) fn hear(&mut self, tunnel: &Tunnel, from: Origin, run: &[Piece], only_measures: impl FnOnce() -> bool) {
        let index = tunnel.local_index;
        if !tunnel.is_confirmed() && !self.batch.confirmed.contains(&index) {
            self.batch.confirmed.push(index);
            self.lane.punt(Punt::Confirmed { tunnel: index, from });
        }
        match from {
            Origin::Direct(endpoint) => {
                if tunnel.endpoint() == Some(endpoint) {
                    tunnel.mark_received();
                } else {
                    self.hear_elsewhere(tunnel, endpoint, run, only_measures);
                }
            }
            Origin::Relayed { .. } => {
                if !tunnel.was_relayed() && !only_measures() {
                    tunnel.mark_relayed();
                }
            }
        }
    }

    #[cold]
    fn hear_elsewhere(
        &mut self,
        tunnel: &Tunnel,
        from: SocketAddr,
        run: &[Piece],
        only_measures: impl FnOnce() -> bool,
    ) {
        let bytes = run.iter().filter(|piece| piece.good).map(|piece| piece.range.len()).sum();
        if let Some(trial) = tunnel.trial().filter(|trial| trial.at == from) {
            trial.heard(bytes);
        }
        if only_measures() {
            return;
        }
        tunnel.mark_received();
        let index = tunnel.local_index;
        if self.batch.moves.admits((index, from), self.now) {
            self.lane.punt(Punt::Roamed { tunnel: index, from, bytes });
        }
    }
}

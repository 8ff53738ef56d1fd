//! Sorts received datagrams by their headers: those of a tunnel become pieces, the rest is punted or dropped.

use super::forwarder::Snapshot;
use super::piece::{Batch, Piece};
use super::{Lane, Received};
use crate::counters::{Counter, Direction};
use crate::index::RemoteIndex;
use crate::wire::header::{Header, MessageType};
use crate::{DropReason, Origin, Punt};

/// No control message is longer, because peers have buffers of 9001 bytes.
pub(super) const MAX_MESSAGE_LEN: usize = 9001;
/// Maximum number of unauthenticated datagrams that reach the control plane in one call, for each kind that can be
/// forged without any state.
pub(super) const MAX_UNAUTHENTICATED: usize = 16;

/// Sorts the datagrams of one receive slot: those of a tunnel become pieces, the rest is handled here.
pub(super) fn sort(lane: &mut Lane, batch: &mut Batch, snapshot: &Snapshot, buffer: &[u8], slot: &Received) {
    let Some(bytes) = buffer.get(slot.range.clone()).filter(|bytes| !bytes.is_empty()) else {
        // An empty datagram is a hole punch too. A range outside the buffer is counted as one for lack of a better
        // counter.
        lane.counters.add(Counter::DatagramsIn, 1);
        lane.counters.add(Counter::HolePunchesIn, 1);
        return;
    };
    let size = if slot.segment_size == 0 { bytes.len() } else { slot.segment_size };
    let count = bytes.len().div_ceil(size) as u64;
    lane.counters.add(Counter::DatagramsIn, count);
    lane.counters.add(Counter::DatagramBytesIn, bytes.len() as u64);
    // A tunnel inside a tunnel would loop.
    if snapshot.routes.is_in_own_network(slot.from.ip()) {
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

/// Sorts one datagram, which begins at `start` in the buffer.
pub(super) fn sort_one(
    lane: &mut Lane,
    batch: &mut Batch,
    from: Origin,
    start: usize,
    datagram: &[u8],
) -> Result<(), DropReason> {
    let header = Header::parse(datagram)?;
    let (counter, punt) = match header.kind {
        MessageType::Handshake if datagram.len() > MAX_MESSAGE_LEN => return Err(DropReason::BadHandshake),
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

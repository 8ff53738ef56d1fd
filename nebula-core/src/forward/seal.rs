//! Seals packets into a lane's arena and groups the datagrams for GSO sends.

use std::net::SocketAddr;

use super::segment::Cut;
use super::{Carrier, Lane, Run};
use crate::DropReason;
use crate::counters::Counter;
use crate::firewall::Place;
use crate::tunnel::Tunnel;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// Maximum length of a UDP GSO send; the kernel requires the whole to fit into one IP packet.
const MAX_RUN_BYTES: usize = 65_000;

/// Segments and seals straight into the arena: one `[header][packet][tag]` after the other, each inside a relay frame
/// if the path is relayed.
/// They are counted for the flow that has this place.
pub(super) fn seal(
    lane: &mut Lane,
    tunnel: &Tunnel,
    cut: &Cut<'_>,
    carrier: &Carrier,
    place: Place,
) -> Result<(), DropReason> {
    let count = cut.count();
    let first = tunnel.session.reserve(count as u64).ok_or(DropReason::CounterExhausted)?;
    let frames = carrier.frames(count as u64)?;
    let (before, after) = if frames.is_some() { (HEADER_LEN, TAG_LEN) } else { (0, 0) };
    let bytes = cut.total_len();
    lane.make_room(bytes + count * (before + HEADER_LEN + TAG_LEN + after));
    for index in 0..count {
        let counter = first + index as u64;
        let header = Header { kind: MessageType::Data, index: tunnel.remote_index.0, counter };
        let header = header.to_bytes_of_segments(cut.segment_size(index));
        let inner = cut.len(index);
        let (start, end) = (lane.used, lane.used + before + HEADER_LEN + inner + TAG_LEN + after);
        let datagram = &mut lane.arena[start..end];
        let (head, rest) = datagram[before..].split_at_mut(HEADER_LEN);
        let (body, tail) = rest.split_at_mut(inner);
        let tail = &mut tail[..TAG_LEN];
        head.copy_from_slice(&header);
        cut.write(index, body);
        tail.copy_from_slice(&tunnel.session.send_key.seal(counter, &header, body));
        if let Some(frames) = &frames {
            frames.close(index as u64, datagram);
        }
        lane.used = end;
        add_to_runs(&mut lane.runs, lane.max_segments, carrier.to, start, end);
    }
    lane.counters.add(Counter::PacketsOut, count as u64);
    lane.counters.add(Counter::BytesOut, bytes as u64);
    lane.flows.count(place, count as u64, bytes as u64);
    tunnel.session.count_sent(bytes as u64);
    Ok(())
}

/// Extends the last run if the datagram can be part of the same GSO send.
pub(super) fn add_to_runs(runs: &mut Vec<Run>, max_segments: usize, to: SocketAddr, start: usize, end: usize) {
    if let Some(run) = runs.last_mut() {
        let len = run.range.len();
        // A shorter datagram ends a run: only while all have the same size is the length a multiple of it.
        let joins = run.to == to
            && run.range.end == start
            && len % run.segment_size == 0
            && end - start <= run.segment_size
            && len / run.segment_size < max_segments
            && end - run.range.start <= MAX_RUN_BYTES;
        if joins {
            run.range.end = end;
            return;
        }
    }
    runs.push(Run { to, range: start..end, segment_size: end - start });
}

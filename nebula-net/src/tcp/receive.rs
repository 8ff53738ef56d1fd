//! The receiving half of a connection: data in order, data out of order, the window, and when to acknowledge.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::buffer::ReceiveBuffer;
use super::chunks::{Chunks, Data};
use super::pieces::Pieces;
use super::segment::{SackBlocks, Space};

/// RFC 9293 section 3.8.6.3 asks for less than half a second.
const DELAYED_ACK: Duration = Duration::from_millis(40);
/// Segments at the beginning that are acknowledged at once, while the peer is in slow start.
const QUICK_ACKS: u32 = 16;
/// Shortest time over which the reading rate of the program is measured.
const MIN_MEASURE: Duration = Duration::from_millis(1);

/// What arrives.
#[derive(Debug)]
pub(crate) struct Receiver {
    pub(crate) space: Space,
    /// Offset of the next byte in order.
    next: u64,
    in_order: ReceiveBuffer,
    /// All are after `next`.
    pieces: Pieces,
    /// An offset in each range that was received out of order lately, newest first.
    recent: VecDeque<u64>,
    /// A segment that arrived twice, to be reported once (RFC 2883).
    duplicate: Option<Range<u64>>,
    /// Offset of the FIN, once it is known.
    fin: Option<u64>,
    /// Whether the program reads no more.
    pub(crate) deaf: bool,
    shift: u8,
    /// Offset up to which the peer may send.
    edge: u64,
    capacity: usize,
    max_capacity: usize,
    measure: Measure,
    segment: usize,
    ack: Acknowledge,
}

/// How much the program reads in a round-trip time: the window has to be twice that.
#[derive(Debug, Clone, Copy)]
struct Measure {
    since: Instant,
    read: usize,
}

/// What has to be acknowledged.
#[derive(Debug, Default)]
struct Acknowledge {
    /// At once.
    now: bool,
    /// At once and in a segment of its own, since data is out of order.
    alone: bool,
    due: Option<Instant>,
    bytes: usize,
    quick: u32,
}

/// What became of the data of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Taken {
    /// Whether the program can read more than before.
    pub(crate) readable: bool,
}

impl Receiver {
    /// For a peer that begins with this sequence number.
    pub(crate) fn new(
        now: Instant,
        initial: u32,
        (capacity, max_capacity): (usize, usize),
        segment: usize,
        pool: Arc<Chunks>,
    ) -> Self {
        Self {
            space: Space { initial },
            next: 1,
            in_order: ReceiveBuffer::new(pool),
            pieces: Pieces::default(),
            recent: VecDeque::new(),
            duplicate: None,
            fin: None,
            deaf: false,
            shift: 0,
            edge: 1 + capacity.min(usize::from(u16::MAX)) as u64,
            capacity,
            max_capacity: max_capacity.max(capacity),
            measure: Measure { since: now, read: 0 },
            segment,
            ack: Acknowledge { quick: QUICK_ACKS, ..Acknowledge::default() },
        }
    }

    pub(crate) fn set_shift(&mut self, shift: u8) {
        self.shift = shift;
    }

    /// Next sequence number that is expected, as an offset.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Copies data in order into `out`, and leaves it there; returns how many bytes.
    pub(crate) fn peek(&self, out: &mut [u8]) -> usize {
        self.in_order.peek(out)
    }

    /// Offset up to which the peer may send.
    pub(crate) fn edge(&self) -> u64 {
        self.edge
    }

    /// Bytes that the program can read.
    pub(crate) fn readable(&self) -> usize {
        self.in_order.len()
    }

    /// Bytes of memory that data takes, in order and not.
    pub(crate) fn buffered(&self) -> usize {
        self.in_order.memory() + self.pieces.memory()
    }

    /// Counts them again.
    pub(crate) fn measure(&self) -> usize {
        self.in_order.measure() + self.pieces.measure()
    }

    /// Makes room for data in order: what is out of order is forgotten, as far as necessary, and comes again.
    pub(crate) fn make_room(&mut self, bytes: usize) {
        self.pieces.forget(bytes);
    }

    /// Whether everything up to the FIN arrived.
    pub(crate) fn finished(&self) -> bool {
        self.fin.is_some_and(|fin| self.next > fin)
    }

    /// Takes the data at offset `start`, and the FIN behind it. Both may lie outside the window in part.
    pub(crate) fn receive(&mut self, now: Instant, start: u64, payload: &[&[u8]], fin: bool) -> Taken {
        let len: usize = payload.iter().map(|slice| slice.len()).sum();
        let end = start + len as u64;
        if len == 0 && !fin {
            return Taken::default();
        }
        let before = self.next;
        let last = self.pieces.end().unwrap_or(self.next);
        if fin && self.fin.is_none() && (last..=self.edge).contains(&end) {
            self.fin = Some(end);
        }
        // Nothing comes after the FIN.
        let limit = self.fin.unwrap_or(self.edge).min(self.edge);
        if end <= self.next && len > 0 {
            self.duplicate = Some(start..end);
            self.ack.now = true;
            self.ack.alone = true;
        } else if start <= self.next {
            self.push_in_order(payload, (self.next - start) as usize, (limit.saturating_sub(self.next)) as usize);
            let had_pieces = !self.pieces.is_empty();
            self.join_pieces();
            // A hole was filled, or there still is one.
            self.ack.now |= had_pieces;
            self.ack.alone |= !self.pieces.is_empty();
        } else {
            self.insert(start, payload, limit);
            self.ack.now = true;
            self.ack.alone = true;
        }
        if self.fin == Some(self.next) {
            self.next += 1;
            self.pieces = Pieces::default();
            self.ack.now = true;
        }
        self.note_arrival(now, (self.next - before) as usize);
        if self.deaf {
            self.in_order.clear();
        }
        Taken { readable: self.next > before }
    }

    fn push_in_order(&mut self, payload: &[&[u8]], mut skip: usize, room: usize) {
        let len: usize = payload.iter().map(|slice| slice.len()).sum();
        let mut left = len.saturating_sub(skip).min(room);
        for slice in payload {
            let skipped = skip.min(slice.len());
            skip -= skipped;
            let slice = &slice[skipped..];
            let slice = &slice[..slice.len().min(left)];
            left -= slice.len();
            self.in_order.push(slice, left);
            self.next += slice.len() as u64;
        }
    }

    /// Moves pieces that are in order by now.
    fn join_pieces(&mut self) {
        while let Some((start, mut bytes)) = self.pieces.take_until(self.next) {
            let known = ((self.next - start) as usize).min(bytes.len());
            bytes.drain(..known);
            self.next += bytes.len() as u64;
            self.in_order.push_owned(bytes);
        }
        let next = self.next;
        self.recent.retain(|offset| *offset >= next);
    }

    /// Keeps what is not yet there of the data at `start`.
    fn insert(&mut self, start: u64, payload: &[&[u8]], limit: u64) {
        let mut at = start;
        let mut fresh = false;
        for slice in payload {
            let slice_end = at + slice.len() as u64;
            let mut from = at;
            while from < slice_end.min(limit) {
                let gap = self.pieces.gap(from);
                let (first, to) = (gap.start, gap.end.min(slice_end).min(limit));
                if first >= to {
                    break;
                }
                if !self.pieces.keep(first, &slice[(first - at) as usize..(to - at) as usize]) {
                    return;
                }
                fresh = true;
                from = to;
            }
            at = slice_end;
        }
        if fresh {
            self.recent.retain(|offset| !(start..at).contains(offset));
            self.recent.push_front(start);
            self.recent.truncate(8);
        } else if at > start {
            self.duplicate = Some(start..at);
        }
    }

    fn note_arrival(&mut self, now: Instant, bytes: usize) {
        if self.ack.quick > 0 {
            self.ack.quick -= 1;
            self.ack.now = true;
        }
        self.ack.bytes += bytes;
        if self.ack.bytes >= 2 * self.segment {
            self.ack.now = true;
        } else if bytes > 0 && self.ack.due.is_none() {
            self.ack.due = Some(now + DELAYED_ACK);
        }
    }

    /// The blocks to report, newest first (RFC 2018 section 4); a duplicate comes before them.
    pub(crate) fn sack_blocks(&mut self) -> SackBlocks {
        let mut blocks = SackBlocks::default();
        if let Some(duplicate) = self.duplicate.take() {
            blocks.push(self.space.sequence(duplicate.start), self.space.sequence(duplicate.end));
        }
        let mut reported: Vec<Range<u64>> = Vec::new();
        for offset in &self.recent {
            if reported.len() == 4 {
                break;
            }
            if let Some(range) = self.pieces.range_around(*offset)
                && !reported.contains(&range)
            {
                blocks.push(self.space.sequence(range.start), self.space.sequence(range.end));
                reported.push(range);
            }
        }
        blocks
    }

    /// Something has to be acknowledged at once.
    pub(crate) fn acknowledge_now(&mut self) {
        self.ack.now = true;
    }

    /// Whether an acknowledgement is due, with data or without.
    pub(crate) fn wants_ack(&self, now: Instant) -> bool {
        self.ack.now || self.ack.due.is_some_and(|due| due <= now)
    }

    /// Whether an acknowledgement is due that must not wait for room in a segment with data.
    pub(crate) fn wants_pure_ack(&self) -> bool {
        self.ack.alone
    }

    pub(crate) fn ack_due(&self) -> Option<Instant> {
        self.ack.due
    }

    /// The acknowledgement number and window field of the next segment, which will be sent. The right edge of the
    /// window never moves back.
    pub(crate) fn acknowledge(&mut self) -> (u32, u16) {
        let quick = self.ack.quick;
        self.ack = Acknowledge { quick, ..Acknowledge::default() };
        self.edge = self.edge.max(self.wanted_edge());
        let field = (self.edge.saturating_sub(self.next)).div_ceil(1 << self.shift).min(u16::MAX.into());
        self.edge = self.edge.max(self.next + (field << self.shift));
        (self.space.sequence(self.next), field as u16)
    }

    /// The window field of a SYN, which is never scaled.
    pub(crate) fn syn_window(&self) -> u16 {
        (self.edge - 1).min(u16::MAX.into()) as u16
    }

    /// The right edge that the free memory allows. It moves in steps worth telling (RFC 9293 section 3.8.6.2.2).
    fn wanted_edge(&self) -> u64 {
        let free = self.capacity.saturating_sub(self.in_order.len());
        let window = (free as u64).min(u64::from(u16::MAX) << self.shift);
        let edge = self.next + window;
        let step = self.segment.min(self.capacity / 2) as u64;
        if edge >= self.edge + step { edge } else { self.edge }
    }

    /// Lets the program read. The window grows with what it reads in a round-trip time.
    pub(crate) fn read(&mut self, now: Instant, rtt: Option<Duration>, out: &mut [u8]) -> usize {
        let count = self.in_order.read(out);
        self.note_read(now, rtt, count);
        count
    }

    /// Takes what can be had without a copy, `max` bytes at most; returns how many.
    pub(crate) fn take(&mut self, now: Instant, rtt: Option<Duration>, max: usize) -> (Data, usize) {
        let (data, count) = self.in_order.take(max);
        self.note_read(now, rtt, count);
        (data, count)
    }

    fn note_read(&mut self, now: Instant, rtt: Option<Duration>, count: usize) {
        self.measure.read += count;
        let period = rtt.unwrap_or(Duration::ZERO).max(MIN_MEASURE);
        let elapsed = now.saturating_duration_since(self.measure.since);
        if elapsed >= period {
            let read = (self.measure.read as f64 * period.as_secs_f64() / elapsed.as_secs_f64()) as usize;
            if read * 2 > self.capacity {
                self.capacity = (read * 4).min(self.max_capacity).max(self.capacity);
            }
            self.measure = Measure { since: now, read: 0 };
        }
        // The peer waits if it has used most of the window.
        let left = self.edge.saturating_sub(self.next);
        if count > 0 && !self.finished() && left < (self.capacity / 2) as u64 && self.wanted_edge() > self.edge {
            self.ack.now = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests;
    use super::*;

    fn receiver() -> (Receiver, Instant) {
        let now = tests::now();
        (Receiver::new(now, 0, (1000, 1000), 100, Arc::default()), now)
    }

    fn read_all(receiver: &mut Receiver, now: Instant) -> Vec<u8> {
        let mut out = [0; 2000];
        let count = receiver.read(now, None, &mut out);
        out[..count].to_vec()
    }

    #[test]
    fn pieces_in_any_order_become_the_stream() {
        let (mut receiver, now) = receiver();
        receiver.receive(now, 6, &[b"f", b"gh"], false);
        receiver.receive(now, 3, &[b"cd"], false);
        receiver.receive(now, 4, &[b"defg"], false);
        assert_eq!(receiver.readable(), 0);
        receiver.receive(now, 1, &[b"a", b"bc"], true);
        assert_eq!(read_all(&mut receiver, now), b"abcdefgh");
        receiver.receive(now, 9, &[], true);
        assert!(receiver.finished());
    }

    #[test]
    fn the_newest_range_is_reported_first_and_a_duplicate_before_it() {
        let (mut receiver, now) = receiver();
        for start in [11, 31, 51] {
            receiver.receive(now, start, &[b"xxxxx"], false);
        }
        assert_eq!(receiver.sack_blocks().as_slice(), [(51, 56), (31, 36), (11, 16)]);
        receiver.receive(now, 16, &[b"yyyyy"], false);
        assert_eq!(receiver.sack_blocks().as_slice(), [(11, 21), (51, 56), (31, 36)]);
        receiver.receive(now, 31, &[b"xxxxx"], false);
        assert_eq!(receiver.sack_blocks().as_slice()[0], (31, 36));
    }

    #[test]
    fn nothing_beyond_the_window_is_kept() {
        let (mut receiver, now) = receiver();
        receiver.receive(now, 990, &[&[0; 100]], false);
        assert_eq!(receiver.pieces.end(), Some(1001));
        receiver.receive(now, 1, &[&[0; 2000]], false);
        assert_eq!((receiver.readable(), receiver.pieces.memory()), (1000, 0));
    }

    #[test]
    fn data_in_order_takes_the_place_of_data_out_of_order() {
        let (mut receiver, now) = receiver();
        for start in [301, 501, 701] {
            receiver.receive(now, start, &[&[7; 100]], false);
        }
        let before = receiver.buffered();
        receiver.make_room(100);
        assert!(receiver.buffered() <= before - 100);
        receiver.receive(now, 1, &[&[7; 300]], false);
        assert_eq!((receiver.readable(), receiver.pieces.end()), (400, Some(601)));
        assert_eq!(receiver.sack_blocks().as_slice(), [(501, 601)], "what was forgotten is reported no more");
        assert_eq!(receiver.buffered(), receiver.measure());
    }

    #[test]
    fn the_window_opens_when_the_program_reads_and_never_shrinks() {
        let (mut receiver, now) = receiver();
        receiver.receive(now, 1, &[&[0; 1000]], false);
        assert_eq!(receiver.acknowledge(), (1001, 0));
        assert_eq!(receiver.read(now, None, &mut [0; 50]), 50);
        assert!(!receiver.wants_ack(now), "a window of half a segment is not worth telling");
        assert_eq!(receiver.read(now, None, &mut [0; 500]), 500);
        assert!(receiver.wants_ack(now));
        assert_eq!(receiver.acknowledge(), (1001, 550));
    }
}

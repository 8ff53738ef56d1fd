//! What was sent and not acknowledged: what the peer has of it, and what is lost (RFC 2018, RFC 8985).

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// A peer that reports every other byte cannot make the list longer.
const MAX_RANGES: usize = 2048;
/// Segments above a hole after which it counts as lost, as long as nothing was seen out of order.
const DUPLICATE_THRESHOLD: u64 = 3;

/// A range that was sent at one time.
#[derive(Debug, Clone, Copy)]
struct Sent {
    start: u64,
    end: u64,
    at: Instant,
    state: State,
    /// Sent more than once.
    again: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    InFlight,
    Lost,
    Sacked,
}

impl Sent {
    fn len(&self) -> u64 {
        self.end - self.start
    }
}

/// Everything from the oldest unacknowledged offset to the next one to send, without gaps.
#[derive(Debug, Default)]
pub(crate) struct Scoreboard {
    ranges: VecDeque<Sent>,
    in_flight: u64,
    lost: u64,
    sacked: u64,
    /// The delivered range that was sent last: when, and its end.
    newest: Option<(Instant, u64)>,
    /// Round-trip time of that range.
    newest_rtt: Duration,
    /// End of the highest range that was delivered.
    highest: u64,
    reordered: bool,
    /// Grows each time that something was sent again without need.
    patience: u32,
}

/// What an acknowledgement says.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Delivered {
    /// Bytes that had not been reported before.
    pub(crate) bytes: u64,
    /// When the newest of the ranges that were sent only once was sent.
    pub(crate) sent_once_at: Option<Instant>,
    /// Whether something that was sent more than once is among it.
    pub(crate) again: bool,
}

impl Scoreboard {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Bytes that are on their way as far as is known.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Bytes that have to be sent again.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Whether the peer has anything beyond a hole.
    pub(crate) fn has_sacked(&self) -> bool {
        self.sacked > 0
    }

    /// Notes that the next bytes were sent.
    pub(crate) fn sent(&mut self, now: Instant, range: Range<u64>) {
        self.in_flight += range.end - range.start;
        self.ranges.push_back(Sent {
            start: range.start,
            end: range.end,
            at: now,
            state: State::InFlight,
            again: false,
        });
    }

    /// Takes the first lost range, of at most `limit` bytes, and notes that it was sent again.
    pub(crate) fn send_lost(&mut self, now: Instant, limit: u64) -> Option<Range<u64>> {
        if self.lost == 0 {
            return None;
        }
        let at = self.ranges.iter().position(|sent| sent.state == State::Lost)?;
        let end = self.ranges[at].start + limit.max(1);
        self.split(end);
        let sent = &mut self.ranges[at];
        (sent.state, sent.at, sent.again) = (State::InFlight, now, true);
        let range = sent.start..sent.end;
        self.lost -= range.end - range.start;
        self.in_flight += range.end - range.start;
        Some(range)
    }

    /// The last segment on its way, of at most `limit` bytes, which is sent again as a probe.
    pub(crate) fn send_last(&mut self, now: Instant, limit: u64) -> Option<Range<u64>> {
        let last = self.ranges.iter().rfind(|sent| sent.state == State::InFlight)?;
        self.split(last.end.saturating_sub(limit.max(1)));
        let last = self.ranges.iter_mut().rfind(|sent| sent.state == State::InFlight)?;
        (last.at, last.again) = (now, true);
        Some(last.start..last.end)
    }

    /// Everything before `offset` was acknowledged.
    pub(crate) fn acknowledged(&mut self, now: Instant, min_rtt: Duration, offset: u64) -> Delivered {
        let mut delivered = Delivered::default();
        while let Some(first) = self.ranges.front().copied()
            && first.start < offset
        {
            let part = Sent { end: first.end.min(offset), ..first };
            if part.end == first.end {
                self.ranges.pop_front();
            } else {
                self.ranges[0].start = part.end;
            }
            if first.state == State::Sacked {
                self.sacked -= part.len();
            } else {
                self.deliver(now, min_rtt, part, &mut delivered);
            }
        }
        if self.ranges.is_empty() {
            self.ranges = VecDeque::new();
        }
        delivered
    }

    /// The peer has `range`, which lies within what was sent, out of order.
    pub(crate) fn selectively_acknowledged(&mut self, now: Instant, min_rtt: Duration, range: Range<u64>) -> Delivered {
        let mut delivered = Delivered::default();
        if self.ranges.len() + 2 > MAX_RANGES {
            return delivered;
        }
        self.split(range.start);
        self.split(range.end);
        let first = self.ranges.partition_point(|sent| sent.start < range.start);
        let end = self.ranges.partition_point(|sent| sent.start < range.end);
        for at in first..end {
            let sent = self.ranges[at];
            if sent.state != State::Sacked {
                self.deliver(now, min_rtt, sent, &mut delivered);
                self.ranges[at].state = State::Sacked;
                self.sacked += sent.len();
            }
        }
        self.merge(first, end);
        delivered
    }

    /// Joins neighbours that the peer has, so that the list stays short.
    fn merge(&mut self, first: usize, end: usize) {
        let mut at = (end + 1).min(self.ranges.len());
        while at > first.max(1) {
            at -= 1;
            if self.ranges[at].state == State::Sacked && self.ranges[at - 1].state == State::Sacked {
                self.ranges[at - 1].end = self.ranges[at].end;
                self.ranges.remove(at);
            }
        }
    }

    /// Splits the range that has `offset` inside.
    fn split(&mut self, offset: u64) {
        let at = self.ranges.partition_point(|sent| sent.end <= offset);
        if let Some(sent) = self.ranges.get_mut(at)
            && sent.start < offset
        {
            let rest = Sent { start: offset, ..*sent };
            sent.end = offset;
            self.ranges.insert(at + 1, rest);
        }
    }

    fn deliver(&mut self, now: Instant, min_rtt: Duration, sent: Sent, delivered: &mut Delivered) {
        delivered.bytes += sent.len();
        match sent.state {
            State::InFlight => self.in_flight -= sent.len(),
            State::Lost => self.lost -= sent.len(),
            State::Sacked => {}
        }
        let rtt = now.saturating_duration_since(sent.at);
        if sent.again {
            delivered.again = true;
            // The acknowledgement is of the first transmission.
            if rtt < min_rtt {
                return;
            }
        } else {
            delivered.sent_once_at = delivered.sent_once_at.max(Some(sent.at));
            self.reordered |= sent.end < self.highest;
        }
        self.highest = self.highest.max(sent.end);
        if self.newest < Some((sent.at, sent.end)) {
            self.newest = Some((sent.at, sent.end));
            self.newest_rtt = rtt;
        }
    }

    /// Something was sent again that the peer had.
    pub(crate) fn duplicate_reported(&mut self) {
        self.patience = (self.patience + 1).min(8);
    }

    /// Marks as lost what was sent longer ago than something that was delivered. Returns whether there is any, and
    /// when to look again.
    pub(crate) fn detect(
        &mut self,
        now: Instant,
        rtt: (Duration, Duration),
        recovering: bool,
        segment: u64,
    ) -> (bool, Option<Instant>) {
        let Some(newest) = self.newest else { return (false, None) };
        let window = self.reordering_window(rtt, recovering, segment);
        let (mut found, mut again) = (false, None);
        for sent in &mut self.ranges {
            // What was sent after the newest cannot be late.
            if sent.state != State::InFlight || (sent.at, sent.end) >= newest {
                continue;
            }
            let due = sent.at + self.newest_rtt + window;
            if due <= now {
                sent.state = State::Lost;
                self.in_flight -= sent.len();
                self.lost += sent.len();
                found = true;
            } else {
                again = again.max(Some(due));
            }
        }
        (found, again)
    }

    fn reordering_window(&self, (min, smoothed): (Duration, Duration), recovering: bool, segment: u64) -> Duration {
        let certain = recovering || self.sacked >= DUPLICATE_THRESHOLD * segment;
        if !self.reordered && certain && self.patience == 0 {
            return Duration::ZERO;
        }
        (min / 4 * (1 + self.patience)).min(smoothed)
    }

    /// If the peer has forgotten what it had out of order, which it may (RFC 2018 section 8): marks all of that as
    /// lost, and returns `true`. It is known by the oldest range, which the peer cannot have without acknowledging
    /// it.
    pub(crate) fn notice_forgotten(&mut self) -> bool {
        let forgotten = self.ranges.front().is_some_and(|first| first.state == State::Sacked);
        if forgotten {
            for sent in self.ranges.iter_mut().filter(|sent| sent.state == State::Sacked) {
                (sent.state, sent.again) = (State::Lost, true);
                self.lost += sent.len();
            }
            self.sacked = 0;
        }
        forgotten
    }

    /// Marks as lost all that the peer is not known to have.
    pub(crate) fn lose_all(&mut self) {
        self.lose_longer(0);
    }

    /// Marks as lost what was sent in ranges of more than `length` bytes, and the peer is not known to have.
    pub(crate) fn lose_longer(&mut self, length: u64) {
        for sent in self.ranges.iter_mut().filter(|sent| sent.state == State::InFlight && sent.len() > length) {
            sent.state = State::Lost;
            self.lost += sent.len();
            self.in_flight -= sent.len();
        }
    }

    /// The loss was none: everything is on its way still.
    pub(crate) fn lose_nothing(&mut self) {
        for sent in self.ranges.iter_mut().filter(|sent| sent.state == State::Lost) {
            sent.state = State::InFlight;
            self.in_flight += sent.end - sent.start;
        }
        self.lost = 0;
    }

    #[cfg(test)]
    pub(crate) fn check(&self, range: Range<u64>) {
        let sum = |state| self.ranges.iter().filter(|sent| sent.state == state).map(Sent::len).sum::<u64>();
        assert_eq!(sum(State::InFlight), self.in_flight);
        assert_eq!(sum(State::Lost), self.lost);
        assert_eq!(sum(State::Sacked), self.sacked);
        let mut at = range.start;
        for sent in &self.ranges {
            assert!(sent.start == at && sent.end > at, "a gap in {:?}", self.ranges);
            at = sent.end;
        }
        assert_eq!(at, range.end);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::now;
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const RTT: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(10));

    /// Ten segments of 100 bytes, one each millisecond.
    fn ten() -> (Scoreboard, Instant) {
        let start = now();
        let mut board = Scoreboard::default();
        for at in 0..10 {
            board.sent(start + MS * at as u32, at * 100..at * 100 + 100);
        }
        (board, start)
    }

    #[test]
    fn a_hole_below_three_segments_is_lost_at_once() {
        let (mut board, start) = ten();
        let now = start + 15 * MS;
        assert_eq!(board.selectively_acknowledged(now, RTT.0, 100..200).bytes, 100);
        assert!(!board.detect(now, RTT, false, 100).0);
        assert_eq!(board.selectively_acknowledged(now, RTT.0, 100..400).bytes, 200);
        assert_eq!(board.detect(now, RTT, false, 100), (true, None));
        assert_eq!((board.lost(), board.in_flight()), (100, 600));
        board.check(0..1000);
        assert_eq!(board.send_lost(now, 60), Some(0..60));
        assert_eq!(board.send_lost(now, 60), Some(60..100));
        assert_eq!(board.send_lost(now, 60), None);
        assert_eq!(board.acknowledged(now + 10 * MS, RTT.0, 400).bytes, 100);
        board.check(400..1000);
    }

    #[test]
    fn a_retransmission_that_was_lost_is_found_by_time() {
        let (mut board, start) = ten();
        let now = start + 15 * MS;
        board.selectively_acknowledged(now, RTT.0, 100..500);
        board.detect(now, RTT, false, 100);
        assert_eq!(board.send_lost(now, 100), Some(0..100));
        board.sent(now + MS, 1000..1100);
        board.selectively_acknowledged(now + 11 * MS, RTT.0, 1000..1100);
        assert!(board.detect(now + 11 * MS, RTT, true, 100).0);
        assert_eq!(board.send_lost(now, 100), Some(0..100));
    }

    #[test]
    fn after_reordering_was_seen_a_hole_may_take_a_quarter_of_the_round_trip_to_fill() {
        let (mut board, start) = ten();
        let now = start + 12 * MS;
        let rtt = (40 * MS, 40 * MS);
        board.selectively_acknowledged(now, MS, 200..300);
        board.selectively_acknowledged(now, MS, 100..200);
        board.selectively_acknowledged(now, MS, 300..600);
        let (found, again) = board.detect(now, rtt, false, 100);
        assert!(!found);
        assert!(board.detect(again.unwrap(), rtt, false, 100).0);
    }

    #[test]
    fn single_bytes_cannot_make_the_list_long() {
        let (mut board, start) = ten();
        board.sent(start, 1000..100_000);
        let mut reported = 0;
        for at in 0..40_000 {
            reported += board.selectively_acknowledged(start, RTT.0, 1000 + at * 2..1001 + at * 2).bytes;
        }
        assert!(board.ranges.len() <= MAX_RANGES);
        board.check(0..100_000);
        assert_eq!(board.acknowledged(start, RTT.0, 100_000).bytes + reported, 100_000);
    }
}

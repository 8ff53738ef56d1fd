//! The sending half of a connection: what may be sent when, what an acknowledgement changes, and the timers for loss.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Error;
use super::buffer::SendBuffer;
use super::chunks::Chunks;
use super::cubic::Cubic;
use super::pacer::{Pace, Pacer};
use super::rtt::Rtt;
use super::scoreboard::{Delivered, Scoreboard};
use super::segment::Space;

/// Added to a tail loss probe's timeout, for the time that the peer's program and ours take.
const PROBE_SLACK: Duration = Duration::from_millis(5);
/// How long a peer may delay the acknowledgement of a single segment.
const MAX_ACK_DELAY: Duration = Duration::from_millis(200);
/// Timeouts in a row after which the peer is given up, which takes about a quarter of an hour.
const MAX_RETRIES: u32 = 15;
/// A super-packet must fit into an IP packet with all headers.
const MAX_BURST: usize = 65_535 - 60 - 60;

/// What is sent.
#[derive(Debug)]
pub(crate) struct Sender {
    pub(crate) space: Space,
    buffer: SendBuffer,
    board: Scoreboard,
    congestion: Cubic,
    pacer: Pacer,
    rtt: Rtt,
    /// Offset of the oldest byte that was not acknowledged.
    acknowledged: u64,
    /// Offset of the next byte to send.
    next: u64,
    /// Whether a FIN follows the last byte.
    fin: bool,
    window: Window,
    /// Payload bytes per segment.
    segment: usize,
    recovery: Option<Recovery>,
    timers: Timers,
    /// Whether the congestion window, and not the program or the peer, limits what is sent.
    limited: bool,
    retries: u32,
    capacity: usize,
    max_capacity: usize,
    /// Send small segments while others are on their way (no Nagle).
    pub(crate) no_delay: bool,
    /// How long data may wait for its acknowledgement.
    pub(crate) user_timeout: Option<Duration>,
    undo: Option<Box<Undo>>,
}

/// The peer's receive window.
#[derive(Debug, Default)]
struct Window {
    /// Offset up to which may be sent.
    edge: u64,
    shift: u8,
    /// Largest window so far.
    max: u64,
    /// Sequence and acknowledgement offset of the segment that told the window (SND.WL1, SND.WL2).
    told_by: (u64, u64),
}

/// From the first loss until everything that was sent by then is acknowledged.
#[derive(Debug)]
struct Recovery {
    end: u64,
    by_timeout: bool,
    /// For proportional rate reduction (RFC 6937): bytes on the way at the beginning, delivered and sent since.
    flight: u64,
    delivered: u64,
    sent: u64,
}

/// What to go back to if a timeout proves to be spurious (RFC 3522).
#[derive(Debug)]
struct Undo {
    congestion: Cubic,
    timestamp: u32,
}

#[derive(Debug)]
struct Timers {
    /// The retransmission timeout counts from here.
    restarted: Instant,
    /// Since when the oldest data waits for its acknowledgement.
    waiting: Instant,
    last_sent: Instant,
    reorder: Option<Instant>,
    /// For a tail loss probe.
    probe: Option<Instant>,
    /// For a probe of a closed window.
    persist: Option<Instant>,
    /// Something may be sent, but not yet.
    pace: Option<Instant>,
    /// A tail loss probe is to be sent, or was sent and not answered.
    probing: Probing,
    send_window_probe: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probing {
    No,
    Due,
    Sent,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alarm {
    Retransmit,
    Reorder,
    Probe,
    Persist,
    GiveUp,
}

/// What an acknowledging segment says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Acknowledgement<'a> {
    /// Offset that is acknowledged.
    pub(crate) offset: u64,
    /// Offset of the segment itself.
    pub(crate) sequence: u64,
    /// Window field.
    pub(crate) window: u16,
    pub(crate) sack: &'a [(u32, u32)],
    /// Timestamp that is echoed.
    pub(crate) echo: Option<u32>,
}

impl Sender {
    pub(crate) fn new(now: Instant, initial: u32, (capacity, max_capacity): (usize, usize), pool: Arc<Chunks>) -> Self {
        Self {
            space: Space { initial },
            buffer: SendBuffer::new(1, pool),
            board: Scoreboard::default(),
            congestion: Cubic::new(1),
            pacer: Pacer::default(),
            rtt: Rtt::default(),
            acknowledged: 1,
            next: 1,
            fin: false,
            window: Window::default(),
            segment: 1,
            recovery: None,
            timers: Timers {
                restarted: now,
                waiting: now,
                last_sent: now,
                reorder: None,
                probe: None,
                persist: None,
                pace: None,
                probing: Probing::No,
                send_window_probe: false,
            },
            limited: false,
            retries: 0,
            capacity,
            max_capacity: max_capacity.max(capacity),
            no_delay: true,
            user_timeout: None,
            undo: None,
        }
    }

    /// The handshake is done. `rtt` is known unless the SYN was sent more than once.
    pub(crate) fn begin(&mut self, segment: usize, shift: u8, edge: u64, told_by: u64, rtt: Option<Duration>) {
        self.segment = segment;
        self.congestion = Cubic::new(segment);
        self.window = Window { edge, shift, max: edge.saturating_sub(1), told_by: (told_by, 1) };
        if let Some(rtt) = rtt {
            self.rtt.sample(rtt);
        }
    }

    /// Sends segments of this size from now on. Longer ones that are on their way did not fit the path, which is no
    /// congestion: they are sent again at once.
    pub(crate) fn set_segment(&mut self, segment: usize) {
        let segment = segment.max(1);
        if segment < self.segment {
            self.board.lose_longer(segment as u64);
        }
        self.segment = segment;
    }

    pub(crate) fn segment(&self) -> usize {
        self.segment
    }

    pub(crate) fn rtt(&self) -> Option<Duration> {
        self.rtt.smoothed()
    }

    /// Offset of the next byte to send.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// Offset below which no acknowledgement can come from this connection (RFC 5961 section 5).
    pub(crate) fn oldest_plausible(&self) -> u64 {
        self.acknowledged.saturating_sub(self.window.max)
    }

    /// Bytes that [`Sender::write`] takes now. The queue grows with the congestion window.
    pub(crate) fn room(&self) -> usize {
        if self.fin { 0 } else { self.queue().saturating_sub(self.buffer.len()) }
    }

    /// Whether there is room enough to wake a program that waits for it: a third of the queue, as in Linux. With less,
    /// each acknowledgement would wake it for a few segments.
    pub(crate) fn is_roomy(&self) -> bool {
        !self.fin && self.buffer.len() <= self.queue() / 3 * 2
    }

    /// Bytes that the queue holds.
    fn queue(&self) -> usize {
        let wanted = usize::try_from(2 * self.congestion.window()).unwrap_or(usize::MAX);
        wanted.clamp(self.capacity, self.max_capacity)
    }

    /// Queues as many bytes as there is room for; returns how many.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.room());
        self.buffer.push(&bytes[..count]);
        count
    }

    /// Bytes that were queued and are not acknowledged.
    pub(crate) fn unsent(&self) -> usize {
        self.buffer.len()
    }

    /// Queues a FIN.
    pub(crate) fn finish(&mut self) {
        self.fin = true;
    }

    /// Whether the peer acknowledged the FIN.
    pub(crate) fn finished(&self) -> bool {
        self.fin && self.acknowledged == self.stream_end()
    }

    fn stream_end(&self) -> u64 {
        self.buffer.end() + u64::from(self.fin)
    }

    /// Appends the data of `range` to `out`. Returns whether the FIN is in the range.
    pub(crate) fn copy(&self, range: Range<u64>, out: &mut Vec<u8>) -> bool {
        let end = range.end.min(self.buffer.end());
        if range.start < end {
            self.buffer.copy(range.start..end, out);
        }
        range.end > self.buffer.end()
    }

    /// Whether everything that was queued is in this range or before it.
    pub(crate) fn is_last(&self, range: &Range<u64>) -> bool {
        range.end >= self.buffer.end()
    }

    /// The next range to send, if one may be sent now. It counts as sent.
    pub(crate) fn next_range(&mut self, now: Instant) -> Option<Range<u64>> {
        let segment = self.segment as u64;
        if self.board.is_empty() && now.saturating_duration_since(self.timers.last_sent) > self.rtt.timeout() {
            self.congestion.idle();
        }
        let probe = self.timers.probing == Probing::Due;
        let in_flight = self.board.in_flight();
        let mut allowance = self.congestion.window().saturating_sub(in_flight);
        if in_flight == 0 || probe {
            allowance = allowance.max(segment);
        }
        self.timers.pace = None;
        if !probe && in_flight > 0 && allowance >= segment {
            match self.pacer.allowance(now, self.pace()) {
                Ok(paced) => allowance = allowance.min(paced.max(segment)),
                Err(due) => {
                    let waits = self.board.lost() > 0 || self.next < self.stream_end().min(self.window.edge);
                    self.timers.pace = waits.then_some(due);
                    return None;
                }
            }
        }
        let whole = |bytes: u64| bytes.min(MAX_BURST as u64) / segment * segment;
        if self.board.lost() > 0 && allowance >= segment {
            let range = self.board.send_lost(now, whole(allowance))?;
            return Some(self.note_sent(now, range));
        }
        let budget = if probe { segment } else { whole(allowance) };
        if let Some(range) = self.new_range(budget) {
            if self.board.is_empty() {
                (self.timers.restarted, self.timers.waiting) = (now, now);
            }
            self.board.sent(now, range.clone());
            self.next = range.end;
            return Some(self.note_sent(now, range));
        }
        if probe {
            let range = self.board.send_last(now, segment);
            self.timers.probing = if range.is_some() { Probing::Sent } else { Probing::No };
            return range.map(|range| self.note_sent(now, range));
        }
        None
    }

    fn pace(&self) -> Pace {
        let window = self.congestion.window();
        let rtt = self.rtt.smoothed().unwrap_or_default();
        Pace { window, rtt, segment: self.segment as u64, slow_start: window < self.congestion.threshold() }
    }

    /// What of the data that was never sent may be sent with this budget of whole segments.
    fn new_range(&mut self, budget: u64) -> Option<Range<u64>> {
        let segment = self.segment as u64;
        let pending = self.stream_end() - self.next;
        let usable = self.window.edge.saturating_sub(self.next);
        self.limited = budget < pending.min(usable);
        let mut count = pending.min(usable).min(budget);
        let whole = count / segment * segment;
        if count < pending {
            // More will follow, so no small segment, unless the peer's window never takes a large one.
            if whole > 0 {
                count = whole;
            } else if !self.board.is_empty() && count < self.window.max / 2 {
                count = 0;
            }
        } else if !self.no_delay && !self.fin && !self.board.is_empty() {
            count = whole;
        }
        (count > 0).then(|| self.next..self.next + count)
    }

    fn note_sent(&mut self, now: Instant, range: Range<u64>) -> Range<u64> {
        self.timers.last_sent = now;
        self.pacer.sent(range.end - range.start);
        if let Some(recovery) = &mut self.recovery {
            recovery.sent += range.end - range.start;
        }
        if self.timers.probing == Probing::Due {
            self.timers.probing = Probing::Sent;
        }
        self.set_probe(now);
        range
    }

    /// Whether a segment without data shall ask the peer for its window.
    pub(crate) fn take_window_probe(&mut self) -> bool {
        std::mem::take(&mut self.timers.send_window_probe)
    }

    /// Sets the timer of the tail loss probe (RFC 8985 section 7.2), which only runs while nothing seems to be lost.
    fn set_probe(&mut self, now: Instant) {
        self.timers.probe = None;
        if self.timers.probing != Probing::No
            || self.recovery.is_some()
            || self.board.is_empty()
            || self.board.has_sacked()
        {
            return;
        }
        if let Some(rtt) = self.rtt.smoothed() {
            let single = self.board.in_flight() <= self.segment as u64;
            let delay = if single { MAX_ACK_DELAY } else { Duration::ZERO };
            self.timers.probe = Some(now + 2 * rtt + PROBE_SLACK + delay);
        }
    }

    /// Sets or clears the timer for a closed window.
    pub(crate) fn set_persist(&mut self, now: Instant) {
        let closed = self.window.edge <= self.next;
        if closed && self.board.is_empty() && self.next < self.stream_end() {
            let due = now + self.rtt.timeout();
            self.timers.persist.get_or_insert(due);
        } else {
            self.timers.persist = None;
        }
    }

    fn alarm(&self) -> Option<(Instant, Alarm)> {
        if self.board.is_empty() {
            return self.timers.persist.map(|at| (at, Alarm::Persist));
        }
        let timers = &self.timers;
        let retransmit = (timers.restarted + self.rtt.timeout(), Alarm::Retransmit);
        let reorder = timers.reorder.map(|at| (at, Alarm::Reorder));
        let probe = timers.probe.map(|at| (at, Alarm::Probe));
        let give_up = self.user_timeout.map(|timeout| (timers.waiting + timeout, Alarm::GiveUp));
        [Some(retransmit), reorder, probe, give_up].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        [self.alarm().map(|(at, _)| at), self.timers.pace].into_iter().flatten().min()
    }

    /// Does what is due. `timestamp` is what segments carry now.
    pub(crate) fn timeout(&mut self, now: Instant, timestamp: u32) -> Result<(), Error> {
        let Some((_, alarm)) = self.alarm().filter(|(at, _)| *at <= now) else { return Ok(()) };
        match alarm {
            Alarm::GiveUp => return Err(Error::TimedOut),
            Alarm::Reorder => self.detect(now),
            Alarm::Probe => {
                self.timers.probing = Probing::Due;
                self.timers.probe = None;
            }
            Alarm::Retransmit => {
                self.count_retry()?;
                self.timers.restarted = now;
                (self.timers.reorder, self.timers.probe, self.timers.probing) = (None, None, Probing::No);
                self.rtt.back_off();
                if self.recovery.as_ref().is_some_and(|recovery| recovery.by_timeout) {
                    self.congestion.set_window(0);
                } else {
                    self.undo = Some(Box::new(Undo { congestion: self.congestion.clone(), timestamp }));
                    self.congestion.timed_out();
                }
                self.board.lose_all();
                self.recovery = Some(Recovery { end: self.next, by_timeout: true, flight: 0, delivered: 0, sent: 0 });
            }
            Alarm::Persist => {
                self.count_retry()?;
                self.rtt.back_off();
                self.timers.persist = Some(now + self.rtt.timeout());
                self.timers.send_window_probe = true;
            }
        }
        Ok(())
    }

    /// Retransmission timeouts in a row, and how many bytes wait for their acknowledgement.
    pub(crate) fn timeouts(&self) -> (u32, u64) {
        let timed_out = self.recovery.as_ref().is_some_and(|recovery| recovery.by_timeout);
        (if timed_out { self.retries } else { 0 }, self.next - self.acknowledged)
    }

    fn count_retry(&mut self) -> Result<(), Error> {
        self.retries += 1;
        if self.retries > MAX_RETRIES { Err(Error::TimedOut) } else { Ok(()) }
    }

    /// Takes an acknowledgement whose offset was checked: it is not beyond what was sent.
    pub(crate) fn acknowledge(&mut self, now: Instant, ack: Acknowledgement<'_>) {
        let min_rtt = self.rtt.min().unwrap_or_default();
        let flight = self.next - self.acknowledged;
        let mut delivered = Delivered::default();
        let progress = ack.offset > self.acknowledged;
        if progress {
            delivered = self.board.acknowledged(now, min_rtt, ack.offset);
            self.acknowledged = ack.offset;
            self.timers.waiting = now;
            self.buffer.release(ack.offset);
            if self.timers.probing == Probing::Sent {
                self.timers.probing = Probing::No;
            }
        }
        self.update_window(ack);
        if !ack.sack.is_empty() {
            self.take_sack(now, min_rtt, ack.sack, &mut delivered);
        }
        self.board.notice_forgotten();
        // The peer lives; only a closed window may keep the data back for as long as it likes.
        if progress || self.window.edge <= self.next {
            self.retries = 0;
        }
        if delivered.bytes > 0 {
            self.timers.restarted = now;
        }
        let sample = delivered.sent_once_at.filter(|_| !delivered.again).map(|at| now.saturating_duration_since(at));
        if let Some(rtt) = sample {
            self.rtt.sample(rtt);
        }
        if progress {
            self.undo_spurious(ack.echo);
        }
        if let Some(recovery) = &self.recovery
            && self.acknowledged >= recovery.end
        {
            if !recovery.by_timeout {
                self.congestion.set_window(self.congestion.threshold());
            }
            self.recovery = None;
            self.undo = None;
        }
        self.detect_after(now, flight);
        self.grow(now, &delivered, sample);
        if delivered.bytes > 0 {
            self.set_probe(now);
        }
        self.set_persist(now);
    }

    fn update_window(&mut self, ack: Acknowledgement<'_>) {
        let (sequence, offset) = self.window.told_by;
        if sequence < ack.sequence || sequence == ack.sequence && offset <= ack.offset {
            let window = u64::from(ack.window) << self.window.shift;
            self.window.edge = ack.offset + window;
            self.window.max = self.window.max.max(window);
            self.window.told_by = (ack.sequence, ack.offset);
        }
    }

    fn take_sack(&mut self, now: Instant, min_rtt: Duration, blocks: &[(u32, u32)], delivered: &mut Delivered) {
        let ranges = blocks.iter().filter_map(|(first, end)| {
            let first = self.space.offset(self.acknowledged, *first)?;
            let end = self.space.offset(self.acknowledged, *end)?;
            (first < end && end <= self.next).then_some(first..end)
        });
        let ranges: Vec<_> = ranges.collect();
        // A first block that was acknowledged before, or lies in the second one, reports a duplicate (RFC 2883).
        if let Some(first) = ranges.first()
            && (first.end <= self.acknowledged
                || ranges.get(1).is_some_and(|second| second.start <= first.start && first.end <= second.end))
        {
            self.board.duplicate_reported();
        }
        for range in ranges.into_iter().filter(|range| range.start >= self.acknowledged) {
            let part = self.board.selectively_acknowledged(now, min_rtt, range);
            delivered.bytes += part.bytes;
            delivered.again |= part.again;
            delivered.sent_once_at = delivered.sent_once_at.max(part.sent_once_at);
        }
    }

    /// If the peer answers a segment from before the timeout, nothing was lost but time.
    fn undo_spurious(&mut self, echo: Option<u32>) {
        if let Some(undo) = self.undo.take()
            && let Some(echo) = echo
            && (undo.timestamp.wrapping_sub(echo) as i32) > 0
        {
            self.congestion = undo.congestion;
            self.board.lose_nothing();
            self.recovery = None;
        }
    }

    fn detect(&mut self, now: Instant) {
        self.detect_after(now, self.next - self.acknowledged);
    }

    fn detect_after(&mut self, now: Instant, flight: u64) {
        let rtt = (self.rtt.min().unwrap_or_default(), self.rtt.smoothed().unwrap_or_default());
        let (found, again) = self.board.detect(now, rtt, self.recovery.is_some(), self.segment as u64);
        self.timers.reorder = again;
        if found && self.recovery.is_none() {
            self.congestion.lost();
            self.recovery = Some(Recovery { end: self.next, by_timeout: false, flight, delivered: 0, sent: 0 });
            (self.timers.probe, self.timers.probing) = (None, Probing::No);
            // The first retransmission goes out at once.
            self.congestion.set_window(self.board.in_flight() + self.segment as u64);
        }
    }

    /// Adapts the congestion window to what was delivered.
    fn grow(&mut self, now: Instant, delivered: &Delivered, sample: Option<Duration>) {
        if delivered.bytes == 0 {
            return;
        }
        let segment = self.segment as u64;
        if let Some(recovery) = self.recovery.as_mut().filter(|recovery| !recovery.by_timeout) {
            recovery.delivered += delivered.bytes;
            let (in_flight, target) = (self.board.in_flight(), self.congestion.threshold());
            let more = if in_flight > target {
                let share = u128::from(recovery.delivered) * u128::from(target) / u128::from(recovery.flight.max(1));
                (share as u64 + 1).saturating_sub(recovery.sent)
            } else {
                let limit = recovery.delivered.saturating_sub(recovery.sent).max(delivered.bytes) + segment;
                limit.min(target - in_flight)
            };
            let first = if recovery.sent == 0 { segment } else { 0 };
            self.congestion.set_window(in_flight + more.max(first));
            return;
        }
        if self.limited || self.recovery.is_some() {
            let rtt = self.rtt.smoothed().unwrap_or_default();
            self.congestion.acknowledged(now, delivered.bytes, rtt);
        }
        if let Some(rtt) = sample {
            self.congestion.sampled(rtt, self.acknowledged, self.next);
        }
    }

    #[cfg(test)]
    pub(crate) fn check(&self) {
        self.board.check(self.acknowledged..self.next);
        assert!(self.congestion.window() >= 1);
    }
}

//! One end of a connection: the state machine (RFC 9293 section 3.10) between its two halves.

mod receiving;
mod transmission;

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chunks::{Chunks, Data};
use super::path_mss::PathMss;
use super::receive::Receiver;
use super::segment::{Header, Options, TIMESTAMPS_LEN};
use super::send::Sender;
use super::{Error, Keepalive, TcpOptions};

/// What a peer without the option takes over IPv4 (RFC 9293 section 3.7.1).
const DEFAULT_MSS: u16 = 536;
/// A peer that asks for less would have a packet sent for a few bytes.
const MIN_MSS: u16 = 88;
/// Challenge acknowledgements in one [`CHALLENGE_PERIOD`] (RFC 5961 section 7).
const CHALLENGES: u32 = 10;
const CHALLENGE_PERIOD: Duration = Duration::from_secs(5);
/// How long a peer may take to close its side after the program dropped the connection.
const ORPHAN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the ports of a connection rest at least.
const MIN_REST: Duration = Duration::from_secs(1);
/// After this long, timestamps may have wrapped (RFC 7323 section 5.5).
const TIMESTAMPS_VALID: Duration = Duration::from_secs(24 * 86_400);

/// State of a connection (RFC 9293 section 3.3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// A SYN was sent.
    SynSent,
    /// A SYN was received.
    SynReceived,
    /// Open in both directions.
    Established,
    /// This side closed; its FIN is not acknowledged.
    FinWait1,
    /// This side closed, the peer did not.
    FinWait2,
    /// The peer closed, this side did not.
    CloseWait,
    /// Both sides closed at the same time.
    Closing,
    /// The peer closed first; the FIN of this side is not acknowledged.
    LastAck,
    /// Both sides closed; late segments are still answered.
    TimeWait,
    /// Over.
    Closed,
}

/// What a segment asks of the stack beyond the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Reaction {
    /// Nothing.
    None,
    /// To answer the segment with a reset.
    Reset,
}

/// One end of a TCP connection.
#[derive(Debug)]
pub struct Connection {
    state: State,
    options: Arc<TcpOptions>,
    sender: Sender,
    receiver: Receiver,
    handshake: Handshake,
    timestamps: Timestamps,
    sack: bool,
    /// Largest payload of a segment without options: from this side's MTU, then of both sides, then of the path.
    mss: PathMss,
    error: Option<Error>,
    /// A reset is to be sent.
    reset: bool,
    /// The program dropped the connection.
    orphaned: bool,
    /// When this state ends by itself.
    expires: Option<Instant>,
    challenges: Challenges,
    silence: Silence,
    chunks: Arc<Chunks>,
}

/// Less is copied while nobody else uses the node.
const WORTH_TAKING: usize = 4 << 10;

#[derive(Debug)]
struct Handshake {
    /// When the SYN is sent next.
    due: Option<Instant>,
    sent: u32,
    sent_at: Instant,
    /// Window scale that the peer offered.
    peer_shift: Option<u8>,
}

#[derive(Debug)]
struct Timestamps {
    enabled: bool,
    epoch: Instant,
    offset: u32,
    /// Newest timestamp of the peer, and when it came.
    recent: (u32, Instant),
    /// Offset that was acknowledged last.
    last_ack: u64,
}

#[derive(Debug)]
struct Challenges {
    since: Instant,
    count: u32,
}

/// For keepalive probes.
#[derive(Debug)]
struct Silence {
    heard: Instant,
    probes: u32,
    /// A probe is to be sent.
    due: bool,
}

/// What the stack knows when it makes a connection.
#[derive(Debug, Clone)]
pub struct Begin {
    /// Settings.
    pub options: Arc<TcpOptions>,
    /// Initial sequence number: hard to guess (RFC 6528).
    pub initial: u32,
    /// Added to the timestamps.
    pub timestamp_offset: u32,
    /// Where the clock of the timestamps begins; not in the future.
    pub epoch: Instant,
    /// Largest payload of a segment without options that the own MTU allows.
    pub mss: u16,
    /// Where its queues have their memory from.
    pub chunks: Arc<Chunks>,
}

impl Connection {
    /// A connection that is opened by this side.
    #[must_use]
    pub fn connect(now: Instant, begin: Begin) -> Self {
        Self::new(now, begin, State::SynSent, 0)
    }

    /// A connection that the peer opens with this SYN, which will be answered.
    #[must_use]
    pub fn accept(now: Instant, begin: Begin, syn: &Header) -> Self {
        let mut connection = Self::new(now, begin, State::SynReceived, syn.sequence);
        connection.take_syn(now, syn);
        connection
    }

    /// A connection whose SYN was answered with [`Begin::initial`] and forgotten: `answer` is the peer's answer to
    /// that, which has to be passed to [`Connection::receive`] next, and `offered` the options of the SYN but for
    /// timestamps.
    #[must_use]
    pub fn resume(now: Instant, begin: Begin, answer: &Header, offered: Options) -> Self {
        let options = Options { timestamps: answer.options.timestamps, ..offered };
        let sequence = answer.sequence.wrapping_sub(1);
        let mut connection = Self::accept(now, begin, &Header { sequence, options, ..*answer });
        // When it was sent is not known, so the answer measures no time.
        (connection.handshake.sent, connection.handshake.due) = (2, None);
        connection
    }

    fn new(now: Instant, begin: Begin, state: State, peer_initial: u32) -> Self {
        let Begin { options, initial, timestamp_offset, epoch, mss, chunks } = begin;
        let queue = (options.send_buffer, options.max_send_buffer);
        let mut sender = Sender::new(now, initial, queue, Arc::clone(&chunks));
        (sender.no_delay, sender.user_timeout) = (options.no_delay, options.user_timeout);
        let window = (options.receive_window, options.max_receive_window);
        let receiver = Receiver::new(now, peer_initial, window, mss.into(), Arc::clone(&chunks));
        Self {
            state,
            sender,
            receiver,
            handshake: Handshake { due: Some(now), sent: 0, sent_at: now, peer_shift: None },
            timestamps: Timestamps { enabled: true, epoch, offset: timestamp_offset, recent: (0, now), last_ack: 0 },
            sack: true,
            mss: PathMss::new(mss),
            error: None,
            reset: false,
            orphaned: false,
            expires: None,
            challenges: Challenges { since: now, count: 0 },
            silence: Silence { heard: now, probes: 0, due: false },
            options,
            chunks,
        }
    }

    /// Its state.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Why it ended, if not by both sides closing it.
    #[must_use]
    pub fn error(&self) -> Option<Error> {
        self.error
    }

    /// Whether the handshake is done, even if the connection has ended since.
    #[must_use]
    pub fn is_established(&self) -> bool {
        !matches!(self.state, State::SynSent | State::SynReceived)
    }

    /// Whether [`Connection::read`] has a result.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        self.receiver.readable() > 0 || self.receiver.finished() || self.error.is_some() || self.state == State::Closed
    }

    /// Whether [`Connection::write`] has a result that is worth waking the program for.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        match self.state {
            State::SynSent | State::SynReceived => self.error.is_some(),
            State::Established | State::CloseWait => self.sender.is_roomy(),
            _ => true,
        }
    }

    /// Whether the peer has acknowledged everything, the FIN included.
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.sender.finished() || self.state == State::Closed
    }

    /// Moves received data into `out`; returns how many bytes. `Ok(None)`: nothing there yet; `Ok(Some(0))`: the peer
    /// closed its side.
    ///
    /// # Errors
    /// Returns an error once the connection has failed and what arrived before is read.
    pub fn read(&mut self, now: Instant, out: &mut [u8]) -> Result<Option<usize>, Error> {
        if self.receiver.readable() > 0 && !out.is_empty() {
            let rtt = self.sender.rtt();
            return Ok(Some(self.receiver.read(now, rtt, out)));
        }
        self.nothing_to_read(out.is_empty())
    }

    /// Takes what can be read without a copy, `max` bytes at most. `None`: ask [`Connection::read`], because there is
    /// nothing, or so little that a copy costs less.
    pub fn take(&mut self, now: Instant, max: usize) -> Option<Data> {
        if max.min(self.receiver.readable()) < WORTH_TAKING {
            return None;
        }
        let (data, count) = self.receiver.take(now, self.sender.rtt(), max);
        (count > 0).then_some(data)
    }

    /// Like [`Connection::read`], and leaves the data there.
    ///
    /// # Errors
    /// As there.
    pub fn peek(&self, out: &mut [u8]) -> Result<Option<usize>, Error> {
        if self.receiver.readable() > 0 && !out.is_empty() {
            return Ok(Some(self.receiver.peek(out)));
        }
        self.nothing_to_read(out.is_empty())
    }

    fn nothing_to_read(&self, nothing_wanted: bool) -> Result<Option<usize>, Error> {
        match self.error {
            _ if self.receiver.finished() || nothing_wanted => Ok(Some(0)),
            Some(error) => Err(error),
            None if self.state == State::Closed => Err(Error::Closed),
            None => Ok(None),
        }
    }

    /// Queues data to send; returns how many bytes there was room for.
    ///
    /// # Errors
    /// Returns an error if this side was closed or the connection has failed.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        match (self.error, self.state) {
            (Some(error), _) => Err(error),
            (None, State::SynSent | State::SynReceived) => Ok(0),
            (None, State::Established | State::CloseWait) => Ok(self.sender.write(bytes)),
            (None, _) => Err(Error::Closed),
        }
    }

    /// Closes the sending side after everything that was written.
    pub fn shut_down(&mut self) {
        match self.state {
            State::SynSent => self.end(None),
            State::SynReceived | State::Established => self.close_to(State::FinWait1),
            State::CloseWait => self.close_to(State::LastAck),
            _ => {}
        }
    }

    fn close_to(&mut self, state: State) {
        // Without an established connection there is nothing to say goodbye to.
        if self.state == State::SynReceived {
            return self.abort();
        }
        self.sender.finish();
        self.state = state;
    }

    /// The program needs the connection no more. What was written is still delivered, unless the program left data
    /// unread: then the peer gets a reset, as it would otherwise believe that all of its data were read (RFC 9293
    /// section 3.6.1).
    pub fn close(&mut self, now: Instant) {
        self.orphaned = true;
        if self.receiver.readable() > 0 {
            return self.abort();
        }
        self.shut_down();
        self.receiver.deaf = true;
        if self.state == State::FinWait2 {
            self.expires = Some(now + ORPHAN_TIMEOUT);
        }
    }

    /// Ends the connection with a reset.
    pub fn abort(&mut self) {
        self.abort_with(Error::Closed);
    }

    /// Ends the connection with a reset, and tells the program this reason.
    pub fn abort_with(&mut self, error: Error) {
        match self.state {
            State::SynSent | State::TimeWait | State::Closed => {}
            State::SynReceived if self.handshake.sent == 0 => {}
            _ => self.reset = true,
        }
        self.end(Some(error));
    }

    /// There is no way to the peer. Matters only while the connection is opened: later, the peer may be back in time.
    pub fn unreachable(&mut self, error: Error) {
        if self.state == State::SynSent {
            self.end(Some(error));
        }
    }

    /// Packets on the path may have at most this MSS. After ten minutes larger ones are tried again.
    pub fn limit_mss(&mut self, now: Instant, mss: u16) {
        if self.mss.limit(now, mss.max(MIN_MSS)) {
            self.sender.set_segment(self.segment());
        }
    }

    fn forget_old_limit(&mut self, now: Instant) {
        if self.mss.is_due(now) {
            self.mss.retry(self.sender.next());
            self.sender.set_segment(self.segment());
        }
    }

    /// Sends small segments at once, or waits for the acknowledgement of others.
    pub fn set_no_delay(&mut self, no_delay: bool) {
        self.sender.no_delay = no_delay;
    }

    /// Bytes that were written and the peer has not acknowledged yet; 0 once the connection has failed.
    #[must_use]
    pub fn unsent(&self) -> usize {
        if self.error.is_some() { 0 } else { self.sender.unsent() }
    }

    /// Probes a silent peer in this way, or never.
    pub fn set_keepalive(&mut self, keepalive: Option<Keepalive>) {
        Arc::make_mut(&mut self.options).keepalive = keepalive;
        self.silence.probes = 0;
    }

    /// Ends the connection when data waits for an acknowledgement for so long; see [`TcpOptions::user_timeout`].
    pub fn set_user_timeout(&mut self, timeout: Option<Duration>) {
        self.sender.user_timeout = timeout;
    }

    /// The peer is gone, whatever may be on its way.
    pub fn lose_peer(&mut self) {
        if !matches!(self.state, State::TimeWait | State::Closed) {
            self.end(Some(Error::TimedOut));
        }
    }

    /// Bytes of memory that received data takes.
    #[must_use]
    pub fn buffered(&self) -> usize {
        self.receiver.buffered()
    }

    /// Counts [`Connection::buffered`] again, which is slow.
    #[doc(hidden)]
    #[must_use]
    pub fn measure(&self) -> usize {
        self.receiver.measure()
    }

    /// Next sequence number of this side.
    #[cfg(test)]
    pub(crate) fn next(&self) -> u32 {
        self.sender.space.sequence(self.sender.next())
    }

    /// Makes room in memory for a segment, if it continues the data in order: data out of order is forgotten as far
    /// as necessary. The peer was told that it arrived, and sends it again nevertheless (RFC 2018 section 8).
    pub fn make_room(&mut self, header: &Header, bytes: usize) {
        let next = self.receiver.next();
        if self.receiver.space.offset(next, header.sequence).is_some_and(|start| start <= next) {
            self.receiver.make_room(bytes);
        }
    }

    /// Whether the peer is to be told something, such as a window that opened.
    #[must_use]
    pub fn wants_ack(&self, now: Instant) -> bool {
        self.receiver.wants_ack(now)
    }

    /// Whether this sequence number was sent and is not acknowledged.
    #[must_use]
    pub fn has_sent(&self, sequence: u32) -> bool {
        if self.state == State::SynSent {
            return sequence == self.sender.space.sequence(0);
        }
        let acknowledged = self.sender.acknowledged();
        let offset = self.sender.space.offset(acknowledged, sequence);
        offset.is_some_and(|offset| (acknowledged..self.sender.next()).contains(&offset))
    }

    /// Whether this SYN may begin the next connection of the same two ends (RFC 6191).
    #[must_use]
    pub fn takes_new_syn(&self, syn: &Header) -> bool {
        let next = self.receiver.next();
        let later = self.receiver.space.offset(next, syn.sequence).is_some_and(|offset| offset > next);
        let newer = syn.options.timestamps.is_some_and(|(value, _)| {
            self.timestamps.enabled && (value.wrapping_sub(self.timestamps.recent.0) as i32) > 0
        });
        self.state == State::TimeWait && (later || newer)
    }

    /// Whether this side may begin the next connection of the same two ends: it has rested for long enough that its
    /// timestamps have gone on, by which the peer tells the new connection from late segments of this one (RFC 6191).
    #[must_use]
    pub fn may_be_followed(&self, now: Instant) -> bool {
        let since = self.expires.and_then(|at| at.checked_sub(self.options.time_wait));
        self.state == State::TimeWait && self.timestamps.enabled && since.is_some_and(|since| now >= since + MIN_REST)
    }

    /// The initial sequence number of the next connection of the same two ends: `wanted`, if it is later than all of
    /// this one.
    #[must_use]
    pub fn later_initial(&self, wanted: u32) -> u32 {
        let next = self.sender.space.sequence(self.sender.next());
        if (wanted.wrapping_sub(next) as i32) > 0 { wanted } else { next.wrapping_add(1 << 16) }
    }

    fn end(&mut self, error: Option<Error>) {
        self.error = self.error.or(error);
        self.state = State::Closed;
        self.expires = None;
    }

    /// Payload per segment, beside the options of each one.
    fn segment(&self) -> usize {
        usize::from(self.mss.size()) - if self.timestamps.enabled { TIMESTAMPS_LEN } else { 0 }
    }

    fn timestamp(&self, now: Instant) -> u32 {
        let elapsed = now.saturating_duration_since(self.timestamps.epoch).as_millis() as u32;
        self.timestamps.offset.wrapping_add(elapsed)
    }

    /// Next time at which [`Connection::timeout`] has something to do.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        if matches!(self.state, State::Closed) {
            return None;
        }
        let ack = self.receiver.ack_due().filter(|_| self.is_established());
        [self.handshake.due, self.sender.deadline(), ack, self.expires, self.keepalive_due()]
            .into_iter()
            .flatten()
            .min()
    }

    fn keepalive_due(&self) -> Option<Instant> {
        let Keepalive { idle, interval, .. } =
            self.options.keepalive.filter(|_| self.is_established() && self.state != State::TimeWait)?;
        Some(self.silence.heard + idle + interval * self.silence.probes)
    }

    /// Does what is due by time.
    pub fn timeout(&mut self, now: Instant) {
        if self.state == State::Closed {
            return;
        }
        if self.expires.is_some_and(|at| at <= now) {
            // The peer of an orphan did not close its side in time.
            self.reset = self.state == State::FinWait2;
            return self.end(None);
        }
        if self.keepalive_due().is_some_and(|at| at <= now) {
            if self.options.keepalive.is_some_and(|it| self.silence.probes >= it.probes) {
                self.reset = true;
                return self.end(Some(Error::TimedOut));
            }
            self.silence.probes += 1;
            self.silence.due = true;
        }
        if let Err(error) = self.sender.timeout(now, self.timestamp(now)) {
            self.reset = true;
            return self.end(Some(error));
        }
        let (timeouts, outstanding) = self.sender.timeouts();
        if self.mss.suspect(now, timeouts, outstanding) {
            self.sender.set_segment(self.segment());
        }
    }

    #[cfg(test)]
    pub(super) fn check(&self) {
        if self.is_established() {
            self.sender.check();
        }
    }
}

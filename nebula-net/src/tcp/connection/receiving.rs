//! What a segment from the peer does to a connection.

use std::sync::Arc;
use std::time::Instant;

use super::{
    CHALLENGE_PERIOD, CHALLENGES, Challenges, Connection, DEFAULT_MSS, MIN_MSS, ORPHAN_TIMEOUT, Reaction, Silence,
    State, TIMESTAMPS_VALID,
};
use crate::tcp::Error;
use crate::tcp::receive::Receiver;
use crate::tcp::segment::{Flags, Header, Options};
use crate::tcp::send::Acknowledgement;

impl Connection {
    /// Takes a segment to this connection; `payload` is its data in order.
    pub fn receive(&mut self, now: Instant, header: &Header, payload: &[&[u8]]) -> Reaction {
        match self.state {
            State::Closed => {
                if header.flags.has(Flags::RST) {
                    Reaction::None
                } else {
                    Reaction::Reset
                }
            }
            State::SynSent => self.receive_in_syn_sent(now, header),
            _ => self.receive_synchronised(now, header, payload),
        }
    }

    fn receive_in_syn_sent(&mut self, now: Instant, header: &Header) -> Reaction {
        let flags = header.flags;
        let acked = flags.has(Flags::ACK);
        if acked && header.acknowledgement != self.sender.space.sequence(1) {
            return if flags.has(Flags::RST) { Reaction::None } else { Reaction::Reset };
        }
        if flags.has(Flags::RST) {
            if acked {
                self.end(Some(Error::Refused));
            }
            return Reaction::None;
        }
        if !flags.has(Flags::SYN) {
            return Reaction::None;
        }
        self.take_syn(now, header);
        if acked {
            self.establish(now, header, 1 + u64::from(header.window));
            self.receiver.acknowledge_now();
        } else {
            // Both sides opened the connection at the same time.
            self.state = State::SynReceived;
            self.handshake.due = Some(now);
        }
        Reaction::None
    }

    /// Learns what the peer's SYN says.
    pub(super) fn take_syn(&mut self, now: Instant, syn: &Header) {
        let Options { mss, window_scale, sack_permitted, timestamps, .. } = syn.options;
        let largest = mss.unwrap_or(DEFAULT_MSS).max(MIN_MSS);
        self.mss.take_peer(largest);
        self.sack = sack_permitted;
        self.timestamps.enabled = timestamps.is_some();
        self.timestamps.recent = (timestamps.map_or(0, |(value, _)| value), now);
        self.timestamps.last_ack = 1;
        self.handshake.peer_shift = window_scale;
        let window = (self.options.receive_window, self.options.max_receive_window);
        self.receiver = Receiver::new(now, syn.sequence, window, self.segment(), Arc::clone(&self.chunks));
        self.silence.heard = now;
    }

    fn establish(&mut self, now: Instant, header: &Header, edge: u64) {
        let rtt = (self.handshake.sent == 1).then(|| now.saturating_duration_since(self.handshake.sent_at));
        if self.handshake.peer_shift.is_some() {
            self.receiver.set_shift(self.options.shift());
        }
        let told_by = self.receiver.space.offset(1, header.sequence).unwrap_or(1);
        self.sender.begin(self.segment(), self.handshake.peer_shift.unwrap_or(0), edge, told_by, rtt);
        self.handshake.due = None;
        self.state = State::Established;
    }

    fn receive_synchronised(&mut self, now: Instant, header: &Header, payload: &[&[u8]]) -> Reaction {
        let flags = header.flags;
        let next = self.receiver.next();
        let Some(start) = self.receiver.space.offset(next, header.sequence) else { return Reaction::None };
        let len: usize = payload.iter().map(|slice| slice.len()).sum();
        let end = start + len as u64 + u64::from(flags.has(Flags::FIN));
        if self.is_old_duplicate(now, header) {
            self.challenge(now, len > 0);
            return Reaction::None;
        }
        // What lies before the window was acknowledged, and what lies behind it cannot be kept.
        let edge = self.receiver.edge().max(next + 1);
        let acceptable = if end > start { end > next && start < edge } else { (next..edge).contains(&start) };
        if flags.has(Flags::RST) {
            if start == next {
                self.end(Some(if self.state == State::SynReceived { Error::Refused } else { Error::Reset }));
            } else if acceptable {
                self.challenge(now, false);
            }
            return Reaction::None;
        }
        if flags.has(Flags::SYN) {
            if self.state == State::SynReceived && start == 0 {
                // Our answer was lost.
                if self.handshake.sent > 0 && self.may_challenge(now) {
                    self.handshake.due = Some(now);
                }
            } else {
                self.challenge(now, false);
            }
            return Reaction::None;
        }
        if !acceptable {
            // Data that was acknowledged before is acknowledged again, for our acknowledgement may be lost.
            if len > 0 && end <= next {
                self.receiver.receive(now, start, payload, false);
            }
            if self.state == State::TimeWait {
                self.expires = Some(now + self.options.time_wait);
            }
            self.challenge(now, end > start);
            return Reaction::None;
        }
        if !flags.has(Flags::ACK) {
            return Reaction::None;
        }
        let acknowledged = self.sender.acknowledged();
        let offset = self.sender.space.offset(acknowledged, header.acknowledgement);
        if self.state == State::SynReceived {
            if offset != Some(1) || self.handshake.sent == 0 {
                return Reaction::Reset;
            }
            let shift = self.handshake.peer_shift.unwrap_or(0);
            self.establish(now, header, 1 + (u64::from(header.window) << shift));
        }
        let Some(offset) =
            offset.filter(|offset| (self.sender.oldest_plausible()..=self.sender.next()).contains(offset))
        else {
            self.challenge(now, false);
            return Reaction::None;
        };
        self.silence = Silence { heard: now, probes: 0, due: false };
        self.remember_timestamp(now, header, start);
        if offset >= acknowledged {
            let ack = Acknowledgement {
                offset,
                sequence: start,
                window: header.window,
                sack: if self.sack { header.options.sack.as_slice() } else { &[] },
                echo: header.options.timestamps.filter(|_| self.timestamps.enabled).map(|(_, echo)| echo),
            };
            self.sender.acknowledge(now, ack);
            self.mss.acknowledged(offset);
            self.note_fin_acknowledged(now);
        }
        self.take_data(now, start, payload, flags.has(Flags::FIN))
    }

    fn take_data(&mut self, now: Instant, start: u64, payload: &[&[u8]], fin: bool) -> Reaction {
        let has_data = payload.iter().any(|slice| !slice.is_empty());
        if !matches!(self.state, State::Established | State::FinWait1 | State::FinWait2) {
            return Reaction::None;
        }
        if has_data && self.receiver.deaf {
            // Nobody will read it.
            self.abort();
            return Reaction::None;
        }
        self.receiver.receive(now, start, payload, fin);
        if self.receiver.finished() {
            match self.state {
                State::Established => self.state = State::CloseWait,
                State::FinWait1 => self.state = State::Closing,
                _ => self.wait(now),
            }
            self.note_fin_acknowledged(now);
        }
        Reaction::None
    }

    /// Follows the state machine once the peer has our FIN.
    fn note_fin_acknowledged(&mut self, now: Instant) {
        if !self.sender.finished() {
            return;
        }
        match self.state {
            State::FinWait1 => {
                self.state = State::FinWait2;
                self.expires = self.orphaned.then(|| now + ORPHAN_TIMEOUT);
            }
            State::Closing => self.wait(now),
            State::LastAck => self.end(None),
            _ => {}
        }
    }

    fn wait(&mut self, now: Instant) {
        self.state = State::TimeWait;
        self.expires = Some(now + self.options.time_wait);
    }

    /// Whether the timestamp shows that the segment is from before others (RFC 7323 section 5.3).
    fn is_old_duplicate(&self, now: Instant, header: &Header) -> bool {
        if !self.timestamps.enabled || header.flags.has(Flags::RST) || header.flags.has(Flags::SYN) {
            return false;
        }
        let (recent, at) = self.timestamps.recent;
        match header.options.timestamps {
            Some((value, _)) => {
                (value.wrapping_sub(recent) as i32) < 0 && now.saturating_duration_since(at) < TIMESTAMPS_VALID
            }
            None => true,
        }
    }

    fn remember_timestamp(&mut self, now: Instant, header: &Header, start: u64) {
        if let Some((value, _)) = header.options.timestamps
            && start <= self.timestamps.last_ack
            && (value.wrapping_sub(self.timestamps.recent.0) as i32) >= 0
        {
            self.timestamps.recent = (value, now);
        }
    }

    /// Acknowledges a segment that is not as it should be; `data` cannot come from an answer of ours.
    fn challenge(&mut self, now: Instant, data: bool) {
        if data || self.may_challenge(now) {
            self.receiver.acknowledge_now();
        }
    }

    fn may_challenge(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.challenges.since) >= CHALLENGE_PERIOD {
            self.challenges = Challenges { since: now, count: 0 };
        }
        self.challenges.count += 1;
        self.challenges.count <= CHALLENGES
    }
}

//! The segments that a connection sends.

use std::time::{Duration, Instant};

use super::{Connection, State};
use crate::tcp::Error;
use crate::tcp::segment::{Flags, Header, Options, SackBlocks};

impl Connection {
    /// Appends the next segment to send, if there is one, to `out`. Returns the payload length after which it is to
    /// be cut.
    pub fn transmit(&mut self, now: Instant, ports: (u16, u16), out: &mut Vec<u8>) -> Option<usize> {
        if std::mem::take(&mut self.reset) {
            let header = self.header(now, ports, self.sender.next(), Flags::RST.with(Flags::ACK));
            header.emit(out);
            return Some(self.segment());
        }
        match self.state {
            State::Closed => None,
            State::SynSent | State::SynReceived => self.transmit_syn(now, ports, out),
            _ => self.transmit_data(now, ports, out),
        }
    }

    fn transmit_syn(&mut self, now: Instant, (source, destination): (u16, u16), out: &mut Vec<u8>) -> Option<usize> {
        self.handshake.due.filter(|due| *due <= now)?;
        if self.handshake.sent > self.options.syn_retries {
            self.end(Some(Error::TimedOut));
            return None;
        }
        self.handshake.sent += 1;
        self.handshake.sent_at = now;
        self.handshake.due = Some(now + Duration::from_secs(1 << (self.handshake.sent - 1).min(6)));
        let answer = self.state == State::SynReceived;
        let echo = if answer { self.timestamps.recent.0 } else { 0 };
        let options = Options {
            mss: Some(self.mss.size()),
            window_scale: (!answer || self.handshake.peer_shift.is_some()).then(|| self.options.shift()),
            sack_permitted: self.sack,
            timestamps: self.timestamps.enabled.then(|| (self.timestamp(now), echo)),
            sack: SackBlocks::default(),
        };
        let header = Header {
            source,
            destination,
            sequence: self.sender.space.sequence(0),
            acknowledgement: if answer { self.receiver.space.sequence(1) } else { 0 },
            flags: if answer { Flags::SYN.with(Flags::ACK) } else { Flags::SYN },
            window: self.receiver.syn_window(),
            options,
        };
        header.emit(out);
        Some(self.segment())
    }

    fn transmit_data(&mut self, now: Instant, ports: (u16, u16), out: &mut Vec<u8>) -> Option<usize> {
        self.forget_old_limit(now);
        // Selective acknowledgements take room that segments with data do not have.
        if self.receiver.wants_pure_ack() {
            return self.transmit_ack(now, ports, self.sender.next(), out);
        }
        if let Some(range) = self.sender.next_range(now) {
            let mut header = self.header(now, ports, range.start, Flags::ACK);
            let start = out.len();
            header.emit(out);
            let fin = self.sender.copy(range.clone(), out);
            if fin {
                header.flags = header.flags.with(Flags::FIN);
            }
            if self.sender.is_last(&range) {
                header.flags = header.flags.with(Flags::PSH);
            }
            out[start + 13] = header.flags.0;
            self.sender.set_persist(now);
            return Some(self.sender.segment());
        }
        self.sender.set_persist(now);
        let probe = self.sender.take_window_probe() | std::mem::take(&mut self.silence.due);
        if probe {
            // A sequence number that the peer has acknowledged must be answered.
            return self.transmit_ack(now, ports, self.sender.next() - 1, out);
        }
        if self.receiver.wants_ack(now) {
            return self.transmit_ack(now, ports, self.sender.next(), out);
        }
        None
    }

    fn transmit_ack(&mut self, now: Instant, ports: (u16, u16), at: u64, out: &mut Vec<u8>) -> Option<usize> {
        let mut header = self.header(now, ports, at, Flags::ACK);
        if self.sack {
            header.options.sack = self.receiver.sack_blocks();
        }
        header.emit(out);
        Some(self.segment())
    }

    /// A header that acknowledges everything that arrived.
    fn header(&mut self, now: Instant, (source, destination): (u16, u16), at: u64, flags: Flags) -> Header {
        let (acknowledgement, window) = self.receiver.acknowledge();
        self.timestamps.last_ack = self.receiver.next();
        let echo = self.timestamps.recent.0;
        let timestamps = self.timestamps.enabled.then(|| (self.timestamp(now), echo));
        let options = Options { timestamps, ..Options::default() };
        Header {
            source,
            destination,
            sequence: self.sender.space.sequence(at),
            acknowledgement,
            flags,
            window,
            options,
        }
    }
}

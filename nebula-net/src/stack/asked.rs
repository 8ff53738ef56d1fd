//! Connections that peers ask for: who may have one, and which one makes room for it.

use std::time::Instant;

use nebula_cert::VerifiedCertificate;

use super::cookies::{Exchange, PERIOD};
use super::entry::{Entry, Stage};
use super::{Flow, Id, Stack};
use crate::tcp::segment::{Flags, Header, Options};
use crate::tcp::{Begin, Connection};

/// A segment that asks for a connection: a SYN, or the answer to ours that was sent for a SYN that is forgotten.
#[derive(Debug)]
pub struct Asked {
    flow: Flow,
    header: Header,
}

/// Requests that nobody decided about; more are dropped, and come again.
const MAX_ASKED: usize = 4096;

impl Asked {
    /// Its two ends.
    #[must_use]
    pub fn flow(&self) -> Flow {
        self.flow
    }
}

impl Stack {
    /// Notes a segment without a connection, if it asks for one. Returns whether it does.
    pub(super) fn ask(&mut self, now: Instant, flow: Flow, header: &Header) -> bool {
        // Data and FIN are left to the peer to send again.
        let header = Header { flags: Flags(header.flags.0 & (Flags::SYN.0 | Flags::ACK.0)), ..*header };
        let asks = match header.flags {
            Flags::SYN => true,
            Flags::ACK if now < self.cookies_until => self.open_cookie(now, flow, &header).is_some(),
            _ => false,
        };
        if !asks || self.bindings.listener(flow.local).is_none() {
            return false;
        }
        if self.asked.len() < MAX_ASKED {
            self.asked.push_back(Asked { flow, header });
        }
        true
    }

    /// The next request for a connection, to be decided by [`Stack::admit`] or [`Stack::refuse`]. Whoever asks after
    /// each packet knows which peer sent it.
    pub fn next_asked(&mut self) -> Option<Asked> {
        self.asked.pop_front()
    }

    /// Lets a connection be opened. `sender` is the certificate of the peer whose tunnel the request came by: the
    /// peer is charged for the connection, whichever address behind it asks.
    pub fn admit(&mut self, now: Instant, asked: Asked, sender: Option<VerifiedCertificate>) {
        let Asked { flow, header } = asked;
        // It was asked for twice.
        if self.flows.contains_key(&flow) {
            return;
        }
        let certificate = sender.as_ref().map(VerifiedCertificate::fingerprint);
        let Some(listener) = self.bindings.listener(flow.local) else { return self.reset(flow, &header, 0) };
        // Whoever is left out here tries again, and finds room if it was a crowd.
        let may_open = self.peers.may_open(certificate, self.limits.connections)
            && listener.may_open(self.peers.find(certificate), self.limits.backlog);
        if !may_open {
            self.counters.over_share += 1;
            return;
        }
        let Some(connection) = self.begun(now, flow, &header) else { return self.reset(flow, &header, 0) };
        let peer = self.peers.open(certificate);
        // The number of the connection is known only then.
        let id = self.insert(Entry::new(flow, connection, Stage::Waiting, peer));
        let place = self.half_open.push(peer, id);
        if let Some(entry) = self.connections.get_mut(id) {
            entry.sender = sender;
            entry.stage = Stage::HalfOpen(place);
            if header.flags.has(Flags::ACK) {
                self.counters.resumed += 1;
                // It answers what was sent before, so it is the last step of the handshake.
                let _ = entry.connection.receive(now, &header, &[]);
            }
        }
        self.settle(now, id);
        while self.half_open.len() > self.limits.half_open {
            self.evict(now);
        }
    }

    /// Answers a request with a reset.
    pub fn refuse(&mut self, asked: &Asked) {
        self.reset(asked.flow, &asked.header, 0);
    }

    fn begun(&self, now: Instant, flow: Flow, header: &Header) -> Option<Connection> {
        let begin = self.begin(now, flow);
        if header.flags.has(Flags::ACK) {
            let offered = self.open_cookie(now, flow, header)?;
            let begin = Begin { initial: header.acknowledgement.wrapping_sub(1), ..begin };
            return Some(Connection::resume(now, begin, header, offered));
        }
        let exchange = self.exchange(now, flow, header.sequence);
        let begin = Begin { initial: exchange.make(&self.secret, &header.options), ..begin };
        Some(Connection::accept(now, begin, header))
    }

    /// Forgets the oldest half-open connection of the peer that has most of them.
    fn evict(&mut self, now: Instant) {
        let Some(id) = self.half_open.take_oldest_of_heaviest() else { return };
        if let Some(entry) = self.connections.get_mut(id) {
            // Its answer may still have to be sent.
            let mut answer = Vec::new();
            if let Some(offload) = entry.transmit(now, &mut answer) {
                self.outgoing.push(answer, offload);
            }
            entry.orphaned = true;
            self.remove(id);
        }
        self.counters.half_open_evicted += 1;
        self.cookies_until = now + 2 * PERIOD;
    }

    /// Puts a connection that is open into the queue of its listener.
    pub(super) fn enqueue(&mut self, now: Instant, id: Id) {
        let Some(entry) = self.connections.get_mut(id) else { return };
        let Some(listener) = self.bindings.listener(entry.flow.local) else {
            entry.orphaned = true;
            return entry.connection.abort();
        };
        if let Some(crowded_out) = listener.established(entry.peer, id, self.limits.backlog)
            && let Some(entry) = self.connections.get_mut(crowded_out)
        {
            self.counters.backlog_evicted += 1;
            entry.orphaned = true;
            entry.connection.abort();
            self.settle(now, crowded_out);
        }
    }

    fn open_cookie(&self, now: Instant, flow: Flow, header: &Header) -> Option<Options> {
        let exchange = self.exchange(now, flow, header.sequence.wrapping_sub(1));
        exchange.open(&self.secret, header.acknowledgement.wrapping_sub(1))
    }

    pub(super) fn exchange(&self, now: Instant, flow: Flow, peer_initial: u32) -> Exchange {
        let elapsed = now.saturating_duration_since(self.epoch).as_secs();
        Exchange { flow, peer_initial, period: 1 + elapsed / PERIOD.as_secs(), mss: self.mss(flow.remote.ip()) }
    }
}

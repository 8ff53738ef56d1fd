//! Starts handshakes, answers those of peers, and installs the finished tunnels.

mod initiator;
mod refusals;
mod responder;

pub(super) use responder::digest_of;

use std::time::Instant;

use super::Node;
use crate::handshake::Own;
use crate::index::LocalIndex;
use crate::wire::header::{Header, MessageType};
use crate::{DropReason, Origin, PostQuantum};

impl Node {
    /// Handles a datagram of type 0.
    pub(super) fn handle_handshake(&mut self, now: Instant, from: Origin, datagram: &[u8]) {
        match Header::parse(datagram) {
            Ok(Header { kind: MessageType::Handshake, counter: 1, index: 0 }) => {
                self.handle_first_message(now, from, datagram);
            }
            Ok(Header { kind: MessageType::Handshake, counter: 3, index }) if index != 0 => {
                self.handle_offer(now, from, LocalIndex(index), datagram);
            }
            Ok(Header { kind: MessageType::Handshake, counter: 2.., index }) if index != 0 => {
                self.handle_answer(now, from, LocalIndex(index), datagram);
            }
            _ => self.outbox.count_drop(DropReason::BadHandshake),
        }
    }

    fn own(&self, now: Instant) -> Own<'_> {
        let time = u64::try_from(self.wall.unix_at(now).as_nanos()).unwrap_or(u64::MAX);
        Own {
            identity: &self.config.identity,
            default_version: self.config.default_version(),
            cipher: self.config.cipher,
            time,
            offers_kem: self.config.post_quantum != PostQuantum::Off,
        }
    }
}

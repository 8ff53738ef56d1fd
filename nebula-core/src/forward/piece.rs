//! Datagrams on their way inbound, and the scratch of one inbound call.

use std::net::SocketAddr;
use std::ops::Range;

use super::throttle::Throttle;
use crate::index::LocalIndex;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// Scratch of one call, and what is remembered from call to call.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) pieces: Vec<Piece>,
    /// What was inside datagrams of relays.
    pub(super) relayed: Vec<Piece>,
    /// Where peers seem to have moved, as the control plane was told. Until it obeyed, or for as long as it refuses,
    /// every datagram comes from elsewhere: telling with each would push other punts out of the queue. A notice may
    /// have been lost, so it is repeated; 128 are a lane's share of the queue in that time.
    pub(super) moves: Throttle<(LocalIndex, SocketAddr), 100, 128>,
    /// Tunnels that were reported as confirmed.
    pub(super) confirmed: Vec<LocalIndex>,
    pub(super) unknown: usize,
    pub(super) recv_errors: usize,
    /// Refused packets that were answered.
    pub(super) answers: usize,
}

/// One datagram for a tunnel.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) range: Range<usize>,
    pub(super) from: SocketAddr,
    pub(super) header: Header,
    /// Not yet refused.
    pub(super) good: bool,
}

impl Piece {
    pub(super) fn is_relay(&self) -> bool {
        self.header.kind == MessageType::Relay
    }

    /// Bytes that are authenticated only: the header; of a relay's datagram all but the tag.
    pub(super) fn plain_len(&self) -> usize {
        if self.is_relay() { self.range.len().saturating_sub(TAG_LEN) } else { HEADER_LEN }
    }

    /// The same datagram elsewhere.
    pub(super) fn moved_to(&self, range: Range<usize>) -> Self {
        Self { range, ..*self }
    }

    pub(super) fn tunnel_index(&self) -> LocalIndex {
        LocalIndex(self.header.index)
    }

    /// Whether both can be handled in one go.
    pub(super) fn joins(&self, other: &Self) -> bool {
        self.header.index == other.header.index && self.from == other.from && self.is_relay() == other.is_relay()
    }
}

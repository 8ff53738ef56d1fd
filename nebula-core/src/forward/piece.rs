//! Inbound datagrams on their way through the stages, and the scratch of one inbound call.

use std::net::SocketAddr;
use std::ops::Range;

use super::throttle::Throttle;
use crate::index::LocalIndex;
use crate::wire::header::{HEADER_LEN, Header, MessageType, TAG_LEN};

/// Scratch of one call, and what is remembered between calls.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) pieces: Vec<Piece>,
    /// Datagrams unwrapped from relay frames.
    pub(super) relayed: Vec<Piece>,
    /// Throttles the roaming notices to the control plane. Until it moves the tunnel, or for as long as it refuses to,
    /// every datagram comes from an unexpected endpoint; a notice for each would push other punts out of the queue.
    /// Notices may be lost, so they are repeated; 128 are a lane's share of the queue in that interval.
    pub(super) moves: Throttle<(LocalIndex, SocketAddr), 100, 128>,
    /// Tunnels that this call already reported as confirmed.
    pub(super) confirmed: Vec<LocalIndex>,
    pub(super) unknown: usize,
    pub(super) recv_errors: usize,
    /// Refused packets that this call answered.
    pub(super) answers: usize,
}

/// One datagram for a tunnel or a relay hop.
#[derive(Debug)]
pub(super) struct Piece {
    pub(super) range: Range<usize>,
    pub(super) from: SocketAddr,
    pub(super) header: Header,
    /// No check has refused it so far.
    pub(super) good: bool,
}

impl Piece {
    pub(super) fn is_relay(&self) -> bool {
        self.header.kind == MessageType::Relay
    }

    /// Length of the part that is authenticated but not encrypted: the header, or everything but the tag in a relay
    /// frame.
    pub(super) fn plain_len(&self) -> usize {
        if self.is_relay() { self.range.len().saturating_sub(TAG_LEN) } else { HEADER_LEN }
    }

    /// The same datagram at another place in memory.
    pub(super) fn moved_to(&self, range: Range<usize>) -> Self {
        Self { range, ..*self }
    }

    pub(super) fn tunnel_index(&self) -> LocalIndex {
        LocalIndex(self.header.index)
    }

    /// Whether both belong to one run: same index, same source, same kind.
    pub(super) fn joins(&self, other: &Self) -> bool {
        self.header.index == other.header.index && self.from == other.from && self.is_relay() == other.is_relay()
    }
}

//! Relays: a third node passes datagrams between two that cannot reach each other (TURN-like relay).
//!
//! A path through a relay has two hops, each with its own pair of indexes: initiator and relay, relay and target. Every
//! node keeps an entry per hop it is part of. The two ends are `Kind::Terminal`, the relay in the middle has two
//! entries that are `Kind::Forwarding`. A relayed datagram is a whole datagram of the tunnel between the two ends,
//! authenticated once more for the hop; it is never relayed twice.

mod entries;
mod rate_limit;
mod table;

use std::net::IpAddr;

pub(crate) use entries::{Entries, Entry, State};
pub(crate) use rate_limit::RateLimit;
pub(crate) use table::{RelayTable, Role};

pub(crate) use crate::index::Hop;
use crate::index::LocalIndex;
pub use crate::index::RelayIndex;

/// This node's role in a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// This node is an end: the neighbour is its relay.
    Terminal,
    /// This node is the relay: the neighbour is an end.
    Forwarding,
}

/// Identity of a hop: a far end beyond a neighbour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct HopKey {
    /// Tunnel to the neighbour.
    pub(crate) tunnel: LocalIndex,
    /// This node's role in it.
    pub(crate) kind: Kind,
    /// The end that is not the neighbour, and not this node.
    pub(crate) far: IpAddr,
}

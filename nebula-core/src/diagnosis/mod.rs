//! What went wrong lately, for the operator who asks: a bounded record beside the tables, off the packet path.
//!
//! Everything here is a fact that this node saw. What follows from it, and what to do, is for the program that shows
//! it.

mod journal;
mod refusal;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::Fingerprint;

use crate::counters::{Direction, DropReason};
use crate::firewall::NearMiss;
use crate::wire::ip::FlowKey;

pub(crate) use journal::Journal;
pub use refusal::{Claimed, Refusal, RefusalReason};

/// All that a node remembers of what went wrong. Every list is bounded; the oldest entries make room for new ones.
#[derive(Debug, Clone, Default)]
pub struct Diagnosis {
    /// Peers that this node called and has no tunnel with, since it last had one.
    pub attempts: Vec<Attempt>,
    /// Callers whose first message was refused here.
    pub callers: Vec<Refusal>,
    /// Destinations that the system refused to send to.
    pub sends: Vec<SendFailure>,
    /// Overlay packets that were dropped: a sample, one per second of each kind.
    pub drops: Vec<Dropped>,
    /// Overlay addresses that several certificates took turns in.
    pub doubles: Vec<Double>,
    /// Requests for a relay that this node refused.
    pub relays: Vec<RelayRefused>,
    /// When the wall clock was last set, and by how many milliseconds (negative: back).
    pub clock_step: Option<(Instant, i64)>,
    /// Clocks of the peers with a tunnel.
    pub clocks: Vec<PeerClock>,
}

/// Handshakes with one peer that led to no tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Overlay address that was called.
    pub peer: IpAddr,
    /// When the first handshake began.
    pub since: Instant,
    /// When something was last sent, or the last handshake ended.
    pub last: Instant,
    /// Whether one is under way.
    pub pending: bool,
    /// Handshakes that ended without a tunnel.
    pub given_up: u32,
    /// Where the first message was sent, and what came back.
    pub tried: Vec<Tried>,
    /// The last answer that was understood and refused.
    pub refusal: Option<Refusal>,
}

/// One endpoint of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// Where.
    pub endpoint: SocketAddr,
    /// First messages sent there.
    pub sent: u32,
    /// Answers from there that could not be opened: encrypted with another cipher, or for another handshake.
    pub unopened: u32,
    /// When the last one was.
    pub last: Instant,
    /// What the system said instead of sending it (errno; 0: the socket cannot reach that address family).
    pub error: Option<i32>,
}

/// A destination that the system refused to send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendFailure {
    /// Where to.
    pub to: SocketAddr,
    /// What the system said; `None`: the socket cannot reach that address family.
    pub errno: Option<i32>,
    /// When, for the last time.
    pub last: Instant,
    /// How often.
    pub times: u32,
}

/// A dropped overlay packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Which way it went.
    pub direction: Direction,
    /// Its addresses, ports and protocol.
    pub flow: FlowKey,
    /// Why.
    pub reason: DropReason,
    /// The peer whose tunnel it came or would have gone by.
    pub peer: Option<IpAddr>,
    /// When, for the last time.
    pub last: Instant,
    /// How many packets of the sample were like it.
    pub times: u32,
    /// If no rule allowed it: the rule that is nearest to it.
    pub nearest: Option<NearMiss>,
}

/// Two certificates that take turns in one overlay address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Double {
    /// The address.
    pub peer: IpAddr,
    /// The certificates, and where each was last.
    pub seen: Vec<(Fingerprint, SocketAddr)>,
    /// How often one came back after another.
    pub turns: u32,
    /// When, for the last time.
    pub last: Instant,
}

/// A request for a relay that this node refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayRefused {
    /// Who asked.
    pub from: IpAddr,
    /// To whom.
    pub to: IpAddr,
    /// Whether this node relays at all (`relay.am_relay`).
    pub am_relay: bool,
    /// When, for the last time.
    pub last: Instant,
}

/// The clock of a peer, as it said in the handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerClock {
    /// The peer.
    pub peer: IpAddr,
    /// Its wall clock less that of this node, in milliseconds. Some seconds of it may be the age of a message.
    pub ahead_ms: i64,
}

impl PeerClock {
    /// `theirs` and `ours`: the same moment on both clocks, since the Unix epoch.
    pub(crate) fn new(peer: IpAddr, theirs: Duration, ours: Duration) -> Self {
        let millis = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        Self { peer, ahead_ms: millis(theirs).saturating_sub(millis(ours)) }
    }
}

//! Flow records as they leave the node.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_cert::VerifiedCertificate;

use crate::counters::{Direction, DropReason};
use crate::wire::ip::FlowKey;

/// What became of one flow, or of refused packets of one kind, up to now. A later record with the same `id` replaces
/// it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FlowRecord {
    /// Rises with each change that is told, over all records and also over restarts while the clock is not set back.
    pub number: u64,
    /// The first number that this flow's record had: tells flows with the same addresses and ports apart.
    pub id: u64,
    /// What happened last.
    pub event: FlowEvent,
    /// Direction of the first packet: who opened it.
    pub direction: Direction,
    /// The flow in the tunnel. Refused packets of one kind share a record whatever port they come from, which is 0.
    pub flow: FlowKey,
    /// The flow as this node's programs know it, if capture translates it.
    pub original: Option<FlowKey>,
    /// The peer's certificate; `None` for packets that got no further than to the routes.
    pub peer: Option<Arc<VerifiedCertificate>>,
    /// When it began, since the Unix epoch.
    pub started: Duration,
    /// When it was last seen, within a second.
    pub last: Duration,
    /// What this node sent into the tunnel; of refused packets, what it would have sent.
    pub sent: Amount,
    /// What came out of the tunnel; of refused packets, what this node did not take.
    pub received: Amount,
    /// Whether policies in audit would refuse it.
    pub is_in_audit: bool,
    /// What decided, as far as it is known. Rules and policies that have changed before anybody looked are not.
    pub decision: Option<Arc<Decision>>,
    /// How its packets reach the peer.
    pub path: Option<FlowPath>,
    /// Whether an ML-KEM exchange is behind the keys of the tunnel that it takes. Always `false` without a path.
    pub is_post_quantum: bool,
}

/// What happened to a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowEvent {
    /// It began.
    Created,
    /// It goes on: told at most once a minute.
    Updated,
    /// The flow table has forgotten it.
    Ended(End),
    /// Packets that could not begin it were dropped.
    Refused(DropReason),
}

/// Why a flow ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It was idle for as long as its protocol may be.
    Idle,
    /// The flow table was full.
    Evicted,
    /// The peer's tunnels ended, or another peer has its address.
    PeerGone,
    /// Rules, policies or the peer's certificate changed and no longer allow it.
    Refused(DropReason),
}

impl End {
    /// Name in answers for programs; stable.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Evicted => "evicted",
            Self::PeerGone => "peer-gone",
            Self::Refused(_) => "refused",
        }
    }
}

/// How packets reach a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowPath {
    /// Without a relay.
    Direct,
    /// Through a relay; `None` if this node has no tunnel to it any more.
    Relay(Option<IpAddr>),
}

/// Packets and their bytes, with all headers of the overlay packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Amount {
    /// Packets after segmentation.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

impl Amount {
    pub(in crate::firewall) fn add(&mut self, other: Self) {
        self.packets = self.packets.saturating_add(other.packets);
        self.bytes = self.bytes.saturating_add(other.bytes);
    }
}

/// What allowed a flow, refused it or would refuse it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Decision {
    /// Position of the node's rule that allows it.
    pub rule: Option<usize>,
    /// What the policies of the network say.
    pub policy: Option<PolicyDecision>,
}

/// Which policy of the network decides about a flow, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PolicyDecision {
    /// The reason in one word; stable.
    pub reason: &'static str,
    /// Its tier.
    pub tier: Option<&'static str>,
    /// Its name.
    pub policy: Option<Box<str>>,
    /// Position of its rule.
    pub rule: Option<u16>,
    /// Name of its rule.
    pub rule_name: Option<Box<str>>,
}

/// An answer about records.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct FlowRecords {
    /// In the order of their numbers.
    pub records: Vec<FlowRecord>,
    /// What to ask from the next time.
    pub next: u64,
    /// Records that gave way to others before anybody who asks in turns had them, since the node started.
    pub lost: u64,
    /// Whether there are more than were asked for.
    pub is_cut: bool,
}

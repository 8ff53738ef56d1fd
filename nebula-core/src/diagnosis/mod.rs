//! What went wrong recently, for an operator who asks: a bounded record beside the tables, off the packet path.
//!
//! Everything here is a fact that this node observed. Conclusions and advice are left to the program that shows them.

mod journal;
mod refusal;

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use nebula_cert::{Certificate, Fingerprint};

use crate::counters::{Direction, DropReason};
use crate::firewall::NearMiss;
use crate::wire::ip::FlowKey;

pub(crate) use journal::Journal;
pub use refusal::{Claimed, Refusal, RefusalReason};

/// Everything that a node remembers of what went wrong. Every list is bounded; new entries evict the oldest ones.
#[derive(Debug, Clone, Default)]
pub struct Diagnosis {
    /// Peers that this node has called since it last had a tunnel to them.
    pub attempts: Vec<Attempt>,
    /// Callers whose first message was refused here.
    pub callers: Vec<Refusal>,
    /// Callers that repeat their first message although this node answers it.
    pub unheard: Vec<Unheard>,
    /// Destinations that the system refused to send to.
    pub sends: Vec<SendFailure>,
    /// Dropped overlay packets: a sample, one per second of each kind.
    pub drops: Vec<Dropped>,
    /// Flows that passed, and that policies of the network in audit would refuse: a sample, too.
    pub audited: Vec<Dropped>,
    /// Overlay addresses that several certificates used in turns, or with different names.
    pub doubles: Vec<Double>,
    /// Addresses of this node that another host has as well, by what lighthouses say.
    pub elsewhere: Vec<Elsewhere>,
    /// Requests for a relay that this node refused.
    pub relays: Vec<RelayRefused>,
    /// When the wall clock was last set, and by how many milliseconds (negative: back).
    pub clock_step: Option<(Instant, i64)>,
    /// Clocks of the peers that this node has a tunnel to.
    pub clocks: Vec<PeerClock>,
}

/// Handshakes with one peer that did not lead to a tunnel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Overlay address that was called.
    pub peer: IpAddr,
    /// When the first handshake began.
    pub since: Instant,
    /// When message 1 was last sent, or the last handshake ended.
    pub last: Instant,
    /// Whether a handshake is in progress.
    pub pending: bool,
    /// Handshakes that ended without a tunnel.
    pub given_up: u32,
    /// Where message 1 was sent, and what came back.
    pub tried: Vec<Tried>,
    /// The last answer that was understood and refused.
    pub refusal: Option<Refusal>,
}

/// One endpoint of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tried {
    /// The endpoint.
    pub endpoint: SocketAddr,
    /// First messages sent there.
    pub sent: u32,
    /// Answers from there that could not be decrypted: encrypted with another cipher, or for another handshake.
    pub unopened: u32,
    /// Times that message 3 of an ML-KEM exchange was sent there, a datagram of 1,217 bytes that the peer has to
    /// answer.
    pub offers: u32,
    /// When message 1 was last sent there.
    pub last: Instant,
    /// The error of the system if it refused to send (errno; 0: the socket cannot reach that address family).
    pub error: Option<i32>,
    /// When it was last probed; see [`crate::Node::probe`].
    pub probed: Option<Instant>,
    /// When a Nebula there last answered a probe: UDP passes in both directions, between the very ports of both nodes.
    pub heard: Option<Instant>,
}

/// A caller that repeats its first message although this node answers it: the answers do not reach it, or it cannot
/// use them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unheard {
    /// Overlay address in its certificate. Nothing proves yet that it is that host.
    pub peer: IpAddr,
    /// Name in its certificate.
    pub name: String,
    /// Where its messages come from.
    pub from: SocketAddr,
    /// How many first messages came again.
    pub repeats: u32,
    /// When the last one came.
    pub last: Instant,
}

/// A destination that the system refused to send to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SendFailure {
    /// The destination.
    pub to: SocketAddr,
    /// The errno of the system; `None`: the socket cannot reach that address family.
    pub errno: Option<i32>,
    /// When it last happened.
    pub last: Instant,
    /// How often it happened.
    pub times: u32,
}

/// A dropped overlay packet, or one that would be dropped if all policies were enforced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Direction of the packet.
    pub direction: Direction,
    /// Its addresses, ports and protocol.
    pub flow: FlowKey,
    /// Why it was dropped.
    pub reason: DropReason,
    /// The peer whose tunnel the packet came through or would have used.
    pub peer: Option<IpAddr>,
    /// When it last happened.
    pub last: Instant,
    /// How many packets of the sample were like it.
    pub times: u32,
    /// If no rule allowed the packet: the rule that comes nearest to allowing it.
    pub nearest: Option<NearMiss>,
    /// If policies of the network refused it, or would: which, as far as it is known.
    pub policy: Option<PolicyRefusal>,
}

/// What the policies of the network say about a flow that they refuse, or would refuse. Its texts are cut to a few
/// hundred bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyRefusal {
    /// Name in this node's certificate.
    pub own: Box<str>,
    /// Name in the peer's certificate.
    pub peer: Box<str>,
    /// Why, in the words of [`crate::firewall::NetworkPolicy::reason`].
    pub reason: Box<str>,
}

impl PolicyRefusal {
    pub(crate) fn new(own: &str, peer: &str, reason: &str) -> Self {
        let cut = |text: &str| text[..text.floor_char_boundary(MAX_TEXT)].into();
        Self { own: cut(own), peer: cut(peer), reason: cut(reason) }
    }
}

/// Longer than a name in Kubernetes and a sentence about it.
const MAX_TEXT: usize = 512;

/// A flow that this node denies. Complete in itself, so that it can be recorded elsewhere than in a log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeniedFlow {
    /// Direction of the packet.
    pub direction: Direction,
    /// Its addresses, ports and protocol.
    pub flow: FlowKey,
    /// Why.
    pub reason: DropReason,
    /// This node.
    pub own: Party,
    /// The peer whose tunnel the packet came through or would have used.
    pub peer: Option<Party>,
    /// If no rule allows it: the rule of that direction that comes nearest.
    pub nearest: Option<NearMiss>,
}

/// One end of a flow, by its certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Party {
    /// Overlay addresses.
    pub addresses: Vec<IpAddr>,
    /// Name.
    pub name: String,
    /// Groups.
    pub groups: Vec<String>,
}

impl From<&Certificate> for Party {
    fn from(certificate: &Certificate) -> Self {
        Self {
            addresses: certificate.networks().iter().map(ipnet::IpNet::addr).collect(),
            name: certificate.name().to_owned(),
            groups: certificate.groups().to_vec(),
        }
    }
}

/// Certificates that take turns at one overlay address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Double {
    /// The overlay address.
    pub peer: IpAddr,
    /// The certificates, and the endpoint at which each was last seen.
    pub seen: Vec<(Fingerprint, SocketAddr)>,
    /// The names in these certificates, if they differ: two hosts, or one that was given another name.
    pub names: Vec<String>,
    /// How often one returned after another.
    pub turns: u32,
    /// When it last happened.
    pub last: Instant,
}

/// An overlay address of this node that another host has as well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elsewhere {
    /// The address.
    pub address: IpAddr,
    /// The lighthouse that says so.
    pub lighthouse: IpAddr,
    /// Where the other host is.
    pub endpoints: Vec<SocketAddr>,
    /// When it was last said.
    pub last: Instant,
}

/// A request for a relay that this node refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayRefused {
    /// The peer that asked.
    pub from: IpAddr,
    /// The target of the request.
    pub to: IpAddr,
    /// Whether this node relays at all (`relay.am_relay`).
    pub am_relay: bool,
    /// When it last happened.
    pub last: Instant,
}

/// The clock of a peer, as shown in its handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerClock {
    /// The peer.
    pub peer: IpAddr,
    /// The peer's wall clock minus this node's, in milliseconds. A few seconds of it may be the age of a message.
    pub ahead_ms: i64,
}

impl PeerClock {
    /// `theirs` and `ours` are the same moment on both clocks, since the Unix epoch.
    pub(crate) fn new(peer: IpAddr, theirs: Duration, ours: Duration) -> Self {
        let millis = |time: Duration| i64::try_from(time.as_millis()).unwrap_or(i64::MAX);
        Self { peer, ahead_ms: millis(theirs).saturating_sub(millis(ours)) }
    }
}

//! Policies of a network that this node is part of, such as a cluster's. They judge a new flow beside the node's own
//! rules: both must allow it.

use std::fmt;
use std::net::IpAddr;

use super::{Peer, PolicyDecision};
use crate::counters::Direction;
use crate::wire::ip::FlowKey;

/// One version of the policies. It is asked for new flows, and once for each known flow when the version changes; never
/// for each packet.
pub trait NetworkPolicy: fmt::Debug + Send + Sync {
    /// Changes whenever any verdict may.
    fn version(&self) -> u64;
    /// What they say about a flow that began in this direction. Must not block, since packets wait for it.
    fn judge(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>, occasion: Occasion) -> PolicyVerdict;
    /// Why they refuse a flow, or would refuse it, in words for an operator; `None` if they do neither. Asked for
    /// samples, off the packet path. Longer texts than a few hundred bytes are cut.
    fn reason(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>) -> Option<String>;
    /// What decides about such a flow, for its record: what refuses it, or would refuse it, else what allows it. Asked
    /// off the packet path.
    fn decision(&self, direction: Direction, flow: &FlowKey, end: &OtherEnd<'_>) -> Option<PolicyDecision> {
        let _ = (direction, flow, end);
        None
    }
}

/// What policies say about a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyVerdict {
    /// They allow it.
    Allow,
    /// They allow it, and would refuse it if those in audit were enforced, too.
    AllowInAudit,
    /// They refuse it.
    Refuse,
}

/// Why policies are asked about a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// Its first packet. Each packet of a flow that was never allowed is a first one.
    NewFlow,
    /// A packet of a flow that was allowed before the policies, the rules or the peer's certificate changed.
    KnownFlow,
    /// No packet depends on the answer.
    Question,
}

/// The other end of a flow, as the peer's certificate proves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OtherEnd<'a> {
    /// Name in the peer's certificate.
    pub name: &'a str,
    /// Groups in it.
    pub groups: &'a [String],
    /// The address of the flow's other end.
    pub address: IpAddr,
    /// Whether it is an address of the peer itself, and not of a network behind it.
    pub is_peer: bool,
}

impl<'a> OtherEnd<'a> {
    pub(super) fn new(flow: &FlowKey, peer: Peer<'a>) -> Self {
        let is_peer = peer.networks.iter().any(|network| network.addr() == flow.remote);
        Self { name: peer.name, groups: peer.groups, address: flow.remote, is_peer }
    }
}

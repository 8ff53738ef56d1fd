//! What the record of one flow says, while it changes.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use nebula_cert::VerifiedCertificate;

use super::{Amount, Decision, End};
use crate::counters::{Direction, DropReason};
use crate::index::LocalIndex;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// What is known of a flow, or of refused packets of one kind. Times are those of the flow table.
#[derive(Debug, Clone)]
pub(in crate::firewall) struct Recorded {
    /// The first number of its record.
    pub(in crate::firewall) id: u64,
    /// The number that its record got last, and when.
    pub(super) number: u64,
    pub(super) numbered_at: u64,
    pub(super) flow: FlowKey,
    /// As this node's programs know it, if it is translated.
    pub(super) original: Option<Box<FlowKey>>,
    /// Shared with the tunnel.
    pub(super) peer: Option<Arc<VerifiedCertificate>>,
    pub(super) direction: Direction,
    pub(super) state: State,
    /// Policies in audit would refuse it.
    pub(super) is_in_audit: bool,
    /// Of the rules that judged it.
    pub(super) generation: u32,
    pub(super) started: u64,
    pub(super) last: u64,
    pub(super) sent: Amount,
    pub(super) received: Amount,
    pub(super) path: Option<Way>,
    /// What decided, once that was looked up.
    pub(super) decision: Option<Arc<Decision>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Open,
    Ended(End),
    Refused(DropReason),
}

/// The way that packets take to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Direct {
        is_post_quantum: bool,
    },
    Relayed {
        /// The relay's tunnel.
        hop: LocalIndex,
        is_post_quantum: bool,
    },
}

impl Way {
    pub(super) fn of(tunnel: &Tunnel) -> Option<Self> {
        let is_post_quantum = tunnel.post_quantum;
        if tunnel.is_direct() {
            return Some(Self::Direct { is_post_quantum });
        }
        tunnel.hop().map(|hop| Self::Relayed { hop: hop.tunnel, is_post_quantum })
    }

    pub(super) const fn is_post_quantum(self) -> bool {
        match self {
            Self::Direct { is_post_quantum } | Self::Relayed { is_post_quantum, .. } => is_post_quantum,
        }
    }
}

impl Recorded {
    /// Whom its record counts against: the peer, or all destinations without a peer together.
    pub(super) fn holder(&self) -> IpAddr {
        let first = self.peer.as_ref().and_then(|peer| peer.networks().first());
        first.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), ipnet::IpNet::addr)
    }

    /// Takes over what changes while a flow goes on.
    pub(super) fn refresh(&mut self, from: &Self) {
        (self.last, self.sent, self.received, self.path) = (from.last, from.sent, from.received, from.path);
        if self.generation != from.generation {
            (self.generation, self.decision) = (from.generation, None);
        }
        self.is_in_audit = from.is_in_audit;
    }

    /// Adds packets that went in this direction.
    pub(in crate::firewall) fn add(&mut self, direction: Direction, amount: Amount) {
        match direction {
            Direction::Inbound => self.received.add(amount),
            Direction::Outbound => self.sent.add(amount),
        }
    }
}

// Each flow that goes on has one, which docs/flows.md counts.
const _: () = assert!(size_of::<Recorded>() <= 152 && size_of::<Option<Way>>() == 8);

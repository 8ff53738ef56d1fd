//! NetworkPolicy of `networking.k8s.io/v1`.

use std::sync::Arc;

use ipnet::IpNet;

use super::ports::PortMatch;
use super::selector::{PodSelector, Selector};
use crate::program::Direction;

/// A NetworkPolicy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkPolicy {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Whether it is evaluated for audit only.
    pub is_audited: bool,
    /// Pods of its namespace that it applies to.
    pub subject: Selector,
    /// Directions that it names. If it names none, it is for ingress, and for egress if it has rules for that.
    pub types: Vec<Direction>,
    /// Rules for flows to the pods.
    pub ingress: Vec<Rule>,
    /// Rules for flows from the pods.
    pub egress: Vec<Rule>,
}

impl NetworkPolicy {
    /// A policy without rules for all pods of its namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            is_audited: false,
            subject: Selector::everything(),
            types: Vec::new(),
            ingress: Vec::new(),
            egress: Vec::new(),
        }
    }

    /// Whether it isolates its pods in this direction.
    #[must_use]
    pub fn is_for(&self, direction: Direction) -> bool {
        if self.types.is_empty() {
            return direction == Direction::Ingress || !self.egress.is_empty();
        }
        self.types.contains(&direction)
    }

    /// Its rules for this direction.
    #[must_use]
    pub fn rules(&self, direction: Direction) -> &[Rule] {
        match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => &self.egress,
        }
    }
}

/// A rule: allows what matches one of the peers and one of the ports.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// The other ends; empty for every one.
    pub peers: Vec<Peer>,
    /// Destination ports; empty for every one of every protocol.
    pub ports: Vec<PortMatch>,
}

/// The other end of flows that a rule allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Peer {
    /// Pods.
    Pods(PodSelector),
    /// Addresses.
    Block(Block),
    /// Whoever is no pod, has a certificate, and carries one of these groups. Rules of one policy share the list.
    Groups(Arc<[String]>),
    /// Of a newer version, or invalid. It matches nothing.
    Unreadable,
}

/// A range of addresses. It matches whoever has one of them, in the cluster or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// The range.
    pub range: IpNet,
    /// Ranges in it that do not match.
    pub except: Vec<IpNet>,
}

//! Policies of both kinds, as the API has them, and bounded. What could not be read is in them as such
//! ([`Peer::Unreadable`], for example): what that means is decided in one place, the compiler.

mod cluster_policy;
mod labels;
mod limits;
mod network_policy;
mod ports;
mod selector;

pub use cluster_policy::{Action, ClusterNetworkPolicy, ClusterPeer, ClusterRule, ClusterTier};
pub use labels::{Labels, NamedPort, Profile, TooLarge};
pub use limits::{
    MAX_CLUSTER_POLICIES, MAX_EXCEPTIONS, MAX_GROUPS, MAX_IDENTITIES, MAX_ITEMS, MAX_LABELS, MAX_NAMED_PORTS,
    MAX_NODE_ADDRESSES, MAX_PEERS, MAX_POLICIES_OF_NAMESPACE, MAX_PORTS, MAX_PROGRAM_LEN, MAX_REQUIREMENTS, MAX_RULES,
    MAX_SELECTORS_OF_NAMESPACE, MAX_STRING, MAX_VALUES, Problem,
};
pub use network_policy::{Block, NetworkPolicy, Peer, Rule};
pub use ports::{PortMatch, Protocol};
pub use selector::{Namespaces, PodSelector, Requirement, Selector};

pub use crate::program::{Direction, Tier};

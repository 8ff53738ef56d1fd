//! How much of an object of the API counts. Whoever may write a policy or a pod chooses its size, so each has a bound,
//! and what is beyond it is treated as if it could not be read: it allows nothing.

use super::Direction;

/// Labels of a pod or a namespace. A pod with more gets no identity, so its peers refuse it.
pub const MAX_LABELS: usize = 256;
/// Named ports of a pod. A pod with more gets no identity.
pub const MAX_NAMED_PORTS: usize = 256;
/// Bytes of a name, a label's key or its value. Longer ones are invalid in Kubernetes, too.
pub const MAX_STRING: usize = 317;
/// Requirements of a selector. One with more is invalid.
pub const MAX_REQUIREMENTS: usize = 64;
/// Values of a requirement. One with more is invalid.
pub const MAX_VALUES: usize = 256;
/// Rules of a NetworkPolicy in one direction. More rules allow nothing.
pub const MAX_RULES: usize = 512;
/// Peers of a rule of a NetworkPolicy. More peers are not allowed.
pub const MAX_PEERS: usize = 4096;
/// Ports of a rule of a NetworkPolicy. More ports are not allowed.
pub const MAX_PORTS: usize = 1024;
/// Groups that a NetworkPolicy may allow. With more, none of them is.
pub const MAX_GROUPS: usize = 64;
/// Exceptions of one block. A block with more matches nothing.
pub const MAX_EXCEPTIONS: usize = 1024;
/// Rules of a ClusterNetworkPolicy in one direction, peers and protocols of one of its rules, networks and domain names
/// of a peer: the bound of the API. Instead of further rules there is one that denies everything; a rule with more
/// of the others cannot be read.
pub const MAX_ITEMS: usize = 25;
/// NetworkPolicies of one namespace. Each further one isolates all pods of the namespace in both directions.
pub const MAX_POLICIES_OF_NAMESPACE: usize = 2048;
/// Selectors of peers in the NetworkPolicies of one namespace: each is compared with the pods of all the cluster. Peers
/// of further ones are not allowed, until their policies are set again when there is room.
pub const MAX_SELECTORS_OF_NAMESPACE: usize = 4096;
/// ClusterNetworkPolicies. A further one is refused with an error: only administrators of the cluster can make any.
pub const MAX_CLUSTER_POLICIES: usize = 2048;
/// Identities. A pod for which there is none left gets none.
pub const MAX_IDENTITIES: usize = 1 << 18;
/// Addresses of one node. More are not used.
pub const MAX_NODE_ADDRESSES: usize = 64;
/// Bytes of a program. A pod whose program would be larger is closed.
pub const MAX_PROGRAM_LEN: usize = 4 << 20;

/// Something of a policy that is not enforced as it is written. For its status, and for the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The selector of the pods that it applies to is invalid.
    #[error("its selector of pods is invalid: pods that match the valid part are isolated or denied, none is allowed")]
    Subject,
    /// A part of a rule cannot be read, or is beyond a bound.
    #[error("{direction:?} rule {rule}: a part of it cannot be read or is too large; it allows nothing by that part")]
    Rule {
        /// Direction of the rule.
        direction: Direction,
        /// Its place.
        rule: usize,
    },
    /// A rule of a ClusterNetworkPolicy cannot be read, and is one that denies everything.
    #[error("{direction:?} rule {rule}: it cannot be read as a whole, so it denies everything")]
    DeniesAll {
        /// Direction of the rule.
        direction: Direction,
        /// Its place.
        rule: usize,
    },
    /// Domain names match nothing.
    #[error("{direction:?} rule {rule}: domain names are not enforced, they match nothing")]
    DomainNames {
        /// Direction of the rule.
        direction: Direction,
        /// Its place.
        rule: usize,
    },
    /// There are more rules than a policy may have.
    #[error("more than {limit} {direction:?} rules: the others allow nothing")]
    TooManyRules {
        /// Direction of the rules.
        direction: Direction,
        /// How many are used.
        limit: usize,
    },
    /// The namespace has too many NetworkPolicies.
    #[error("its namespace has more than {MAX_POLICIES_OF_NAMESPACE} NetworkPolicies: this one isolates all its pods")]
    TooManyPolicies,
}

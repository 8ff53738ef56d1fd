//! The numbers by which datagrams name tunnels and relay hops.

/// Index this node allocated; peers put it into datagrams to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalIndex(pub u32);

/// Index the peer allocated; this node puts it into datagrams to the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RemoteIndex(pub u32);

/// Index this node allocated for one hop; in a number space separate from that of tunnels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RelayIndex(pub u32);

/// Where datagrams that leave through a hop go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hop {
    /// Tunnel to the neighbour.
    pub(crate) tunnel: LocalIndex,
    /// The neighbour's index for this hop.
    pub(crate) index: RemoteIndex,
}

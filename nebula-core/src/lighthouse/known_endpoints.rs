//! One source's information about where a peer is.

use std::net::{IpAddr, SocketAddr};

/// One source's information about where a peer is. A source is a lighthouse, the peer itself, or the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KnownEndpoints {
    /// Endpoints at which the peer was reached.
    pub learnt: Vec<SocketAddr>,
    /// Endpoints that the source reported, in its order.
    pub reported: Vec<SocketAddr>,
    /// Overlay addresses of the relays through which the peer can be reached.
    pub relays: Vec<IpAddr>,
}

//! What people ask a running node: where a peer is, to close its tunnels, how many handshakes are under way.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::Node;
use crate::TunnelDownReason;
use crate::lighthouse::KnownEndpoints;

/// What is known about where a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Whereabouts {
    /// Endpoints that would be tried, best first.
    pub endpoints: Vec<SocketAddr>,
    /// Relays through which the peer can be reached.
    pub relays: Vec<IpAddr>,
    /// Answers to the last question, by lighthouse.
    pub answers: BTreeMap<IpAddr, KnownEndpoints>,
    /// Lighthouses that are asked.
    pub lighthouses: Vec<IpAddr>,
    /// What the peer reported to this node, if this is a lighthouse.
    pub reported: Option<KnownEndpoints>,
    /// A handshake with the peer is under way.
    pub pending: bool,
}

impl Node {
    /// Asks every lighthouse where `peer` is; [`Node::whereabouts`] has the answers as they come.
    pub fn inquire(&mut self, now: Instant, peer: IpAddr) {
        self.now = now;
        self.lighthouse.questions().ask(now, peer);
        self.ask_lighthouses(now, peer);
    }

    /// What is known about where `peer` is.
    #[must_use]
    pub fn whereabouts(&self, peer: IpAddr) -> Whereabouts {
        Whereabouts {
            endpoints: self.endpoints_of(peer),
            relays: self.lighthouse.relays(peer).into_iter().collect(),
            answers: self.lighthouse.answers(peer),
            lighthouses: if self.has_lighthouses() { self.config.lighthouse.hosts.clone() } else { Vec::new() },
            reported: self.server.report(peer),
            pending: self.pending.contains(peer),
        }
    }

    /// Closes every tunnel to `peer`, telling it so unless `quietly`. Returns how many there were.
    pub fn close(&mut self, now: Instant, peer: IpAddr, quietly: bool) -> usize {
        self.now = now;
        let indexes = self.tunnels.of_peer(peer).to_vec();
        for index in &indexes {
            if quietly {
                self.remove_tunnel(*index, TunnelDownReason::ClosedHere);
            } else {
                self.close_tunnel(*index, TunnelDownReason::ClosedHere);
            }
        }
        indexes.len()
    }

    /// Peers with which a handshake of this node is under way.
    #[must_use]
    pub fn handshaking(&self) -> Vec<IpAddr> {
        self.pending.peers()
    }
}

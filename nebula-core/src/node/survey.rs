//! All that a running node knows, for people who look into it: handshakes under way, what each source says of a peer, every
//! relay. And the two ways to overrule it: where to look for a peer, and where a tunnel goes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::Node;
use crate::index::{LocalIndex, RelayIndex, RemoteIndex};
use crate::lighthouse::KnownEndpoints;
use crate::relay::{Kind, State};

/// A handshake that this node started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingStatus {
    /// The overlay address that was asked for.
    pub peer: IpAddr,
    /// Own index of the tunnel to be.
    pub local_index: LocalIndex,
    /// Where the peer may be, best first.
    pub endpoints: Vec<SocketAddr>,
}

/// One hop through a relay, or of this node as a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RelayStatus {
    /// First overlay address of the node at the other end of the hop.
    pub neighbour: IpAddr,
    /// The end that is reached by way of this hop.
    pub far: IpAddr,
    /// Own index.
    pub local_index: RelayIndex,
    /// The neighbour's index, once it is known.
    pub remote_index: Option<RemoteIndex>,
    /// This node is the relay; otherwise it is an end.
    pub forwarding: bool,
    /// How far it is.
    pub state: RelayState,
}

/// How far the making of a hop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayState {
    /// This node asked its neighbour.
    Requested,
    /// In use.
    Established,
    /// The other side is not ready, or gone.
    Waiting,
}

impl Node {
    /// Handshakes this node started, by peer.
    #[must_use]
    pub fn pending_handshakes(&self) -> Vec<PendingStatus> {
        let status = |(peer, local_index)| PendingStatus { peer, local_index, endpoints: self.endpoints_of(peer) };
        self.pending.indexes().map(status).collect()
    }

    /// Peers of which it is known where they may be, the first `limit` by address.
    #[must_use]
    pub fn known_peers(&self, limit: usize) -> Vec<IpAddr> {
        let tunnels = self.tunnels.iter().flat_map(|live| live.tunnel.peer_addresses.iter().copied());
        let configured = self.config.static_hosts.keys().copied();
        let known: BTreeSet<_> =
            tunnels.chain(configured).chain(self.lighthouse.peers()).chain(self.server.subjects()).collect();
        known.into_iter().take(limit).collect()
    }

    /// What is said of where `peer` is, by who says so: a lighthouse, the peer itself, or this node's configuration.
    #[must_use]
    pub fn sources(&self, peer: IpAddr) -> BTreeMap<IpAddr, KnownEndpoints> {
        let mut sources = self.lighthouse.sources(peer);
        for (lighthouse, answer) in self.lighthouse.answers(peer) {
            sources.entry(lighthouse).or_insert(answer);
        }
        let fixed = self.fixed_endpoints_of(peer);
        if let Some(own) = self.config.identity.networks().first().filter(|_| !fixed.is_empty()) {
            sources.entry(own.addr()).or_default().reported.extend_from_slice(&fixed);
        }
        let tunnel = self.forwarder.tunnels().by_address(peer);
        let first = tunnel.as_ref().and_then(|tunnel| tunnel.peer_addresses.first().copied()).unwrap_or(peer);
        if let Some(report) = self.server.report(peer) {
            let own = sources.entry(first).or_default();
            own.reported.extend(report.reported);
            own.relays.extend(report.relays);
        }
        if let Some(endpoint) = tunnel.and_then(|tunnel| tunnel.endpoint()) {
            sources.entry(first).or_default().learnt = vec![endpoint];
        }
        sources
    }

    /// Every hop this node is part of, by own index.
    #[must_use]
    pub fn relays(&self) -> Vec<RelayStatus> {
        let status = |entry: &crate::relay::Entry| {
            let neighbour = self.forwarder.tunnels().by_index(entry.way.tunnel)?;
            Some(RelayStatus {
                neighbour: *neighbour.peer_addresses.first()?,
                far: entry.way.far,
                local_index: entry.index,
                remote_index: entry.remote,
                forwarding: entry.way.kind == Kind::Forwarding,
                state: match entry.state {
                    State::Requested => RelayState::Requested,
                    State::Established => RelayState::Established,
                    State::PeerRequested | State::Disestablished => RelayState::Waiting,
                },
            })
        };
        self.relays.iter().filter_map(status).collect()
    }

    /// As [`Node::connect`], and looks for the peer at `endpoint`, too.
    pub fn connect_at(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) {
        self.now = now;
        self.lighthouse.candidates(peer).learn(endpoint);
        self.connect(now, peer);
        self.retry_if_endpoints_changed(peer);
    }

    /// Sends what is for `peer` to `endpoint` from now on, until the peer shows that it is elsewhere. `false`: there is no
    /// tunnel, or nobody may be there.
    pub fn redirect(&mut self, now: Instant, peer: IpAddr, endpoint: SocketAddr) -> bool {
        self.now = now;
        let Some(tunnel) = self.forwarder.tunnels().by_address(peer) else { return false };
        if !self.may_try(&tunnel, endpoint) {
            return false;
        }
        tunnel.set_endpoint(Some(endpoint));
        for &address in &tunnel.peer_addresses {
            self.lighthouse.candidates(address).learn(endpoint);
        }
        true
    }
}

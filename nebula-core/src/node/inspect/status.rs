//! What the read-only views of a node consist of.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use nebula_cert::Version;

use crate::counters::Direction;
use crate::firewall::{Explanation, Rule};
use crate::forward::{Capture, Route};
use crate::index::{LocalIndex, RelayIndex, RemoteIndex};
use crate::node::path_choice::{PathReason, PathStatus};
use crate::relay::{Entry, Kind, State};
use crate::wire::ip::FlowKey;
use crate::{DropReason, Forwarder};

/// A live tunnel, as reported to operators and programs.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TunnelStatus {
    /// Peer's overlay addresses.
    pub peer: Vec<IpAddr>,
    /// Peer's certificate name.
    pub name: String,
    /// The name stands for this peer: it is not this node's own, and no other peer had it before. Who looks up names
    /// must not take others.
    pub holds_name: bool,
    /// Current endpoint.
    pub endpoint: Option<SocketAddr>,
    /// Relay that is used while there is no endpoint, by its overlay address.
    pub relay: Option<IpAddr>,
    /// The largest packet that is known to reach the peer, in bytes; `None` while nothing is known, and without
    /// [`Config::path_mtu`](crate::Config::path_mtu).
    pub path_mtu: Option<u16>,
    /// Own index.
    pub local_index: LocalIndex,
    /// Peer's index.
    pub remote_index: RemoteIndex,
    /// Next send counter.
    pub message_counter: u64,
    /// Highest counter received.
    pub received_counter: u64,
    /// Bytes of overlay packets sent in this tunnel; a new handshake begins at 0.
    pub bytes_sent: u64,
    /// Bytes of overlay packets that came in this tunnel and were delivered.
    pub bytes_received: u64,
    /// Version of the peer's certificate.
    pub version: Version,
    /// An ML-KEM secret is part of its keys; see [`Config::post_quantum`](crate::Config::post_quantum).
    pub post_quantum: bool,
    /// This node started the handshake.
    pub initiator: bool,
    /// Paths to the peer, if this node measures paths and there are several.
    pub paths: Vec<PathStatus>,
    /// Why this node uses the path that it uses, if it measures.
    pub path_reason: Option<PathReason>,
    /// Carries this node's packets to the peer.
    pub primary: bool,
    /// Time the handshake took, for tunnels this node initiated.
    pub handshake: Option<Duration>,
}

/// A handshake that this node started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingStatus {
    /// The overlay address that was asked for.
    pub peer: IpAddr,
    /// Own index of the tunnel being set up.
    pub local_index: LocalIndex,
    /// Where the peer may be, best first.
    pub endpoints: Vec<SocketAddr>,
}

/// One hop through a relay, or one that this node forwards as a relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayStatus {
    /// First overlay address of the node at the other end of the hop.
    pub neighbour: IpAddr,
    /// The end that is reached through this hop.
    pub far: IpAddr,
    /// Own index.
    pub local_index: RelayIndex,
    /// The neighbour's index, once it is known.
    pub remote_index: Option<RemoteIndex>,
    /// This node is the relay; otherwise it is an end.
    pub forwarding: bool,
    /// Progress of its setup.
    pub state: RelayState,
}

/// Progress of setting up a hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayState {
    /// This node asked its neighbour.
    Requested,
    /// In use.
    Established,
    /// The other side is not ready yet, or is gone.
    Waiting,
}

/// What would happen to a packet.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FlowTrace {
    /// Which way the packet goes.
    pub direction: Direction,
    /// What capture does with a packet of this node. Everything below is about what then goes into the tunnel. `None`
    /// if this node captures nothing, and for an inbound packet.
    pub capture: Option<Capture>,
    /// The flow as this node's programs see it, if capture translates an inbound packet.
    pub back: Option<FlowKey>,
    /// Where packets to the remote end go; for an inbound packet, where its replies go.
    pub route: Result<Route, DropReason>,
    /// The tunnel that carries it.
    pub tunnel: Option<TunnelStatus>,
    /// The firewall's explanation. It depends on the peer's certificate, so there is none without a tunnel.
    pub firewall: Option<Explanation>,
    /// The rule that the explanation names.
    pub rule: Option<Rule>,
    /// What would happen to it.
    pub outcome: Outcome,
}

/// What happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It arrives.
    Passes,
    /// It waits for a handshake with the peer; the firewall checks it afterwards.
    WaitsForTunnel,
    /// It leaves on the primary network.
    Bypasses,
    /// It comes back to this node under another address.
    ComesBack,
    /// It waits for a newer directory, and is dropped if that knows nothing about the destination either.
    WaitsForDirectory,
    /// It is dropped.
    Dropped(DropReason),
}

/// Number of entries in each table of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TableSizes {
    /// Live tunnels.
    pub tunnels: usize,
    /// Sessions of an earlier process of this node in which peers may still send.
    pub inherited: usize,
    /// Overlay addresses that a tunnel carries packets to.
    pub primaries: usize,
    /// Entries in the lookup tables of tunnels: by peer, by the peer's index, by first message.
    pub lookups: usize,
    /// Handshakes that this node answered and whose callers are not confirmed yet.
    pub half_open: usize,
    /// Handshakes that this node started and that are in progress.
    pub pending: usize,
    /// New endpoints of peers that have not answered a challenge yet.
    pub validations: usize,
    /// Bytes of overlay packets that wait for these handshakes and endpoints.
    pub waiting_bytes: usize,
    /// Own indexes reserved for tunnels that are being set up.
    pub reserved: usize,
    /// Peers whose endpoints are remembered.
    pub candidates: usize,
    /// Overlay addresses whose hosts reported to this lighthouse.
    pub reports: usize,
    /// Scheduled hole punches.
    pub punches: usize,
    /// Hops through relays that this node is part of, as an end or in the middle.
    pub relay_hops: usize,
    /// Deadlines set.
    pub deadlines: usize,
    /// Flows the firewall remembers.
    pub flows: usize,
    /// Flows under translated addresses.
    pub translated: usize,
}

impl RelayStatus {
    /// `None` if the tunnel to the neighbour is gone.
    pub(super) fn new(entry: &Entry, forwarder: &Forwarder) -> Option<Self> {
        let neighbour = forwarder.tunnels().by_index(entry.key.tunnel)?;
        Some(Self {
            neighbour: *neighbour.peer_addresses.first()?,
            far: entry.key.far,
            local_index: entry.index,
            remote_index: entry.remote,
            forwarding: entry.key.kind == Kind::Forwarding,
            state: match entry.state {
                State::Requested => RelayState::Requested,
                State::Established => RelayState::Established,
                State::PeerRequested | State::Disestablished => RelayState::Waiting,
            },
        })
    }
}

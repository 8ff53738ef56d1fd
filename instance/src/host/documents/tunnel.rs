//! Tunnels, their peers and paths, and the gateways of routes.

use serde::{Deserialize, Serialize};

use super::{Certificate, Known};

/// The answer to `peers`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Peers {
    /// By the tunnel that is in use with each.
    pub peers: Vec<Tunnel>,
    /// Peers that are not listed.
    pub more: usize,
    /// Addresses.
    pub handshaking: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tunnel {
    pub name: String,
    pub addresses: Vec<String>,
    /// Absent if it is only reached through a relay.
    pub endpoint: Option<String>,
    /// Address of the relay, if it is reached through one.
    pub relay: Option<String>,
    /// Largest overlay packet that the path carries, in bytes, if it is known.
    pub mtu: Option<u16>,
    pub paths: Vec<Path>,
    pub path_reason: Option<String>,
    /// Whether it is the one that is used, of those with the peer.
    pub primary: bool,
    /// Whether an ML-KEM secret is part of its keys.
    pub post_quantum: bool,
    pub initiator: bool,
    pub certificate_version: u64,
    pub local_index: u32,
    pub remote_index: u32,
    pub messages_sent: u64,
    pub messages_received: u64,
    /// Bytes of overlay packets.
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub handshake_ms: Option<f64>,
}

/// A path to a peer, with why it is used or not.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Path {
    pub endpoint: Option<String>,
    pub relay: Option<String>,
    pub round_trip_ms: Option<f64>,
    pub loss_percent: Option<u32>,
    pub in_use: bool,
    pub verdict: String,
    pub reason: Option<String>,
}

/// The answer to `tunnel`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tunnels {
    pub tunnels: Vec<TunnelOfPeer>,
    pub known: Known,
}

/// A tunnel with the certificate of its peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TunnelOfPeer {
    #[serde(flatten)]
    pub tunnel: Tunnel,
    pub certificate: Option<Certificate>,
}

/// The answer to `close`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Closed {
    /// Number of tunnels.
    pub closed: usize,
}

/// The answer to `upgrade`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Upgraded {
    /// The process that serves now.
    pub pid: u32,
    pub version: String,
    /// What it took over.
    pub peers: usize,
    pub flows: usize,
    /// Why it is the old program that took over again.
    pub rolled_back: Option<String>,
}

/// The answer to `log-level`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Level {
    pub level: String,
}

/// The answer to `gateways`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gateways {
    pub gateways: Vec<Gateway>,
    /// Flows that stay where they moved while their own gateway was dead.
    pub moved_flows: usize,
}

/// A gateway of a route.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Gateway {
    pub network: String,
    pub gateway: String,
    pub priority: u32,
    pub weight: u32,
    pub state: String,
    /// Absent for the only gateway of a route, like the flows.
    pub state_seconds: Option<u64>,
    pub flows: Option<usize>,
}

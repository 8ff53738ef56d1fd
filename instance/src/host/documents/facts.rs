//! The answer to `doctor`: everything known about a host that may be wrong.

use serde::{Deserialize, Serialize};

use super::{KernelRoute, LastReload, NearestRule, OfferedRelay, PeerFacts, Refusal, Unheard, Unmet, Validity};

/// In the answer to `why` there is one peer, in that to `doctor` all whose handshake is in progress or has failed.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    pub host: Host,
    pub peers: Vec<PeerFacts>,
    /// Hosts whose handshakes this one refuses.
    pub callers: Vec<Refusal>,
    pub unheard: Vec<Unheard>,
    pub sends: Vec<SendFailure>,
    pub drops: Vec<Drop>,
    pub doubles: Vec<Double>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own_elsewhere: Vec<Elsewhere>,
    pub same_names: Vec<SameName>,
    pub relays_refused: Vec<RefusedRelaying>,
    pub clocks: Vec<Clock>,
    pub unsafe_routes: Vec<RoutedSubnet>,
    pub paths: Vec<UnderlayPath>,
    #[serde(flatten)]
    pub unmet: Unmet,
    pub configuration: Configuration,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    pub name: Option<String>,
    pub networks: Vec<String>,
    pub groups: Option<Vec<String>>,
    pub device: String,
    pub udp: String,
    pub certificate: Option<Validity>,
    pub cas: Vec<TrustedCa>,
    pub am_lighthouse: bool,
    pub am_relay: bool,
    pub use_relays: Option<bool>,
    pub relay_groups: Vec<String>,
    pub relays: Vec<OfferedRelay>,
    pub lighthouses: Vec<LighthouseFacts>,
    /// Absent on a host without a device.
    pub link: Option<Link>,
    pub mtu: Mtu,
    pub routes: Vec<NetworkRoute>,
    pub routes_replaced: Vec<ReplacedRoute>,
    pub names: Option<RegisteredNames>,
    pub clock_step: Option<ClockStep>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrustedCa {
    #[serde(flatten)]
    pub validity: Validity,
    /// Whether it signed the certificate of this host.
    pub own: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LighthouseFacts {
    pub address: String,
    pub connected: bool,
    pub own_address: bool,
    /// Whether static_host_map has it.
    pub configured: bool,
    pub endpoints: Vec<String>,
}

/// The device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    pub present: bool,
    pub up: bool,
    pub mtu: Option<u32>,
    pub addresses: Vec<String>,
    pub ipv6_off: bool,
}

/// As configured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Mtu {
    pub tun: Option<u32>,
    pub device: Option<u32>,
    pub discovery: bool,
}

/// The kernel's route for a network of the overlay.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetworkRoute {
    #[serde(flatten)]
    pub route: KernelRoute,
    pub network: String,
    pub unsafe_route: bool,
}

/// A network of this host's own links that an unsafe route takes the place of.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReplacedRoute {
    pub route: String,
    pub network: String,
    pub interface: String,
}

/// How the overlay's names are registered with the host's resolver.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegisteredNames {
    pub domain: String,
    pub server: String,
    /// The resolver that was told.
    pub told: Option<String>,
    pub error: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClockStep {
    pub seconds_ago: u64,
    pub by_ms: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SendFailure {
    pub to: String,
    pub errno: Option<String>,
    pub text: Option<String>,
    pub times: u32,
    pub seconds_ago: u64,
}

/// A dropped packet, of which the last ones are sampled.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Drop {
    pub direction: String,
    pub reason: String,
    /// Number of the protocol.
    pub protocol: u8,
    pub local: String,
    pub remote: String,
    /// Of the host that is called.
    pub port: u16,
    pub peer: Option<String>,
    pub peer_name: Option<String>,
    pub peer_groups: Option<Vec<String>>,
    pub times: u32,
    pub seconds_ago: u64,
    /// Absent if there is no rule at all.
    pub nearest: Option<NearestRule>,
    /// Why policies of the network refuse it, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

/// Two certificates with one address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Double {
    pub peer: String,
    /// How often one took the place of the other.
    pub turns: u32,
    pub names: Vec<String>,
    pub seconds_ago: u64,
    pub endpoints: Vec<String>,
}

/// An address of this host that another one has as well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Elsewhere {
    pub address: String,
    /// Who says so.
    pub lighthouse: String,
    /// Where the other host is.
    pub endpoints: Vec<String>,
    pub seconds_ago: u64,
}

/// A peer whose name stands for another host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SameName {
    pub name: String,
    pub peer: Option<String>,
    /// Whether it is this host's name.
    pub own_name: bool,
    pub holder: Option<String>,
}

/// A request to relay that this host refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusedRelaying {
    pub from: String,
    pub to: String,
    pub am_relay: bool,
    pub seconds_ago: u64,
}

/// How far the clock of a peer is ahead, by its handshake.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Clock {
    pub peer: String,
    pub ahead_ms: i64,
    pub lighthouse: bool,
}

/// A network behind peers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoutedSubnet {
    pub network: String,
    pub gateways: Vec<GatewayFacts>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayFacts {
    pub address: String,
    pub name: Option<String>,
    pub connected: bool,
    /// Absent for the only gateway of a route.
    pub state: Option<String>,
    /// Whether its certificate has the network, if it is known.
    pub covered: Option<bool>,
}

/// The underlay route of a tunnel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UnderlayPath {
    #[serde(flatten)]
    pub route: KernelRoute,
    pub endpoint: String,
    pub peer: Option<String>,
    /// Bytes that a tunnel adds to a packet.
    pub overhead: u32,
}

/// The configuration on disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Configuration {
    pub last_reload: Option<LastReload>,
    /// Why it would be refused.
    pub refused: Vec<String>,
    pub remarks: Vec<String>,
}

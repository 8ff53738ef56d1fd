//! What is known about one peer: where it is, and what `doctor` and `why` find.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{KernelRoute, Tunnel, Validity};

/// The answer to `query`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Known {
    pub peer: String,
    pub endpoints: Vec<String>,
    pub relays: Vec<String>,
    pub lighthouses: Vec<LighthouseAnswer>,
    /// What the peer reported to this lighthouse.
    pub reported: Option<Reported>,
    pub handshaking: bool,
}

/// What a lighthouse answered about a peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LighthouseAnswer {
    pub lighthouse: String,
    pub connected: bool,
    /// Whether it answered at all lately.
    pub alive: bool,
    /// Whether it answered about the peer. One that is alive and did not does not know the peer.
    pub answered: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoints: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relays: Option<Vec<String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reported {
    pub endpoints: Vec<String>,
    pub relays: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerFacts {
    pub peer: String,
    pub in_overlay: bool,
    pub own_address: bool,
    /// Of the unsafe routes that lead to it.
    pub gateways: Vec<String>,
    /// State of each gateway by its address.
    pub gateway_states: BTreeMap<String, String>,
    /// Whether static_host_map has it.
    pub configured: bool,
    pub connected: bool,
    pub tunnels: Vec<PeerTunnel>,
    pub endpoints: Vec<Endpoint>,
    pub known: Known,
    pub unheard: Option<Unheard>,
    pub relay_states: Vec<RelayTunnel>,
    pub attempt: Option<Attempt>,
    pub relay_hops: Vec<RelayHop>,
    /// Absent on a host without a device.
    pub kernel_route: Option<KernelRoute>,
}

impl PeerFacts {
    /// Endpoints whose probe had this result.
    pub fn endpoints_found(&self, found: Found) -> impl Iterator<Item = &str> {
        let has = move |probe: &Probe| probe.found == found;
        let endpoints = self.endpoints.iter().filter(move |endpoint| endpoint.probe.as_ref().is_some_and(has));
        endpoints.map(|endpoint| endpoint.endpoint.as_str())
    }
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerTunnel {
    #[serde(flatten)]
    pub tunnel: Tunnel,
    pub certificate: Option<Validity>,
    pub groups: Option<Vec<String>>,
}

/// An endpoint with the kernel's route to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Endpoint {
    pub endpoint: String,
    #[serde(flatten)]
    pub route: KernelRoute,
    pub inside_overlay: bool,
    /// Absent if none was sent.
    pub probe: Option<Probe>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Probe {
    pub found: Found,
    /// Of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// What a probe of an endpoint found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Found {
    /// A Nebula that answers.
    Nebula,
    /// One that answers if it is asked from another port.
    NebulaToOtherPort,
    Silence,
    /// By the kernel, or by a router on the way.
    Refused,
    /// By a daemon of another release.
    #[default]
    #[serde(other)]
    Unknown,
}

/// A caller that goes on calling although this host answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Unheard {
    pub peer: String,
    pub name: String,
    pub from: String,
    pub repeats: u32,
    pub seconds_ago: u64,
    /// Whether something of it came from there just now, if that was looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub udp_passes: Option<bool>,
}

/// Whether there is a tunnel with a relay.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RelayTunnel {
    pub relay: String,
    pub connected: bool,
}

/// A way through a relay.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RelayHop {
    pub relay: String,
    pub established: bool,
}

/// Handshakes with the peer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Attempt {
    pub since_seconds: u64,
    pub seconds_ago: u64,
    pub pending: bool,
    /// How many got no answer.
    pub given_up: u32,
    pub tried: Vec<Tried>,
    /// The answer that this host refused.
    pub refusal: Option<Refusal>,
}

/// An endpoint to which messages were sent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tried {
    pub endpoint: String,
    pub sent: u32,
    /// Answers that could not be opened.
    pub unopened: u32,
    /// Messages of an ML-KEM exchange that were sent again because nothing answered.
    pub offers: u32,
    pub errno: Option<String>,
}

/// A message of a handshake that this host refused. What it claims is not proven.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Refusal {
    pub from: String,
    pub reason: String,
    pub text: String,
    pub name: Option<String>,
    pub addresses: Vec<String>,
    pub clock_ahead_seconds: Option<i64>,
    pub times: u32,
    pub seconds_ago: u64,
}

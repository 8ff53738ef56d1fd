//! The answer to `status`.

use nebula_enrolment::renewal_health::RenewalState;
use serde::{Deserialize, Serialize};

use super::Facts;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub uptime_seconds: i64,
    /// The file or folder.
    pub config: String,
    pub device: String,
    pub udp: String,
    /// Of its certificate, like all that may be absent here.
    pub name: Option<String>,
    pub networks: Vec<String>,
    pub groups: Option<Vec<String>>,
    pub certificate_seconds_left: Option<i64>,
    pub certificate_begins_in_seconds: Option<i64>,
    pub am_lighthouse: bool,
    pub am_relay: bool,
    pub relay_groups: Vec<String>,
    pub relays: Vec<OfferedRelay>,
    pub lighthouses: Vec<Lighthouse>,
    /// Peers with a tunnel.
    pub peers: usize,
    pub tunnels: usize,
    pub handshaking: usize,
    pub flows: usize,
    pub log_level: String,
    pub last_reload: Option<LastReload>,
    /// Absent on a host without a device.
    pub device_up: Option<bool>,
    #[serde(flatten)]
    pub unmet: Unmet,
    /// What is known about the lighthouses of a host that has a tunnel with none of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lighthouse_facts: Option<Facts>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Lighthouse {
    pub address: String,
    pub connected: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LastReload {
    pub at: i64,
    /// Absent if it succeeded.
    pub error: Option<String>,
}

/// What the configuration asks for and the daemon does not do at the moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Unmet {
    /// The longest missing first.
    pub missing_listeners: Vec<MissingListener>,
    /// Keys of settings that only a start takes over.
    pub at_next_start: Vec<String>,
    pub full_flow_table: Option<FullFlowTable>,
    /// Absent on a host that does not renew its certificate by itself.
    pub enrolment: Option<RenewalState>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MissingListener {
    /// Key of the configuration.
    pub section: String,
    pub error: String,
    pub for_seconds: u64,
}

/// A flow table that was full in the last minutes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FullFlowTable {
    /// Packets of new flows.
    pub refused: u64,
    pub seconds_ago: u64,
}

/// A relay that lighthouses offered to this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OfferedRelay {
    pub relay: String,
    pub chosen: bool,
    pub tried: bool,
    /// Number of lighthouses.
    pub offered_by: usize,
    /// Whether it answered a request for a hop, and how.
    pub relays: Option<bool>,
    pub round_trip_ms: Option<f64>,
    pub loss_percent: Option<u32>,
    /// Why it is chosen.
    pub reason: Option<String>,
    /// Why it cannot be, as one word and in words.
    pub trouble: Option<String>,
    pub trouble_text: Option<String>,
}

//! What is known about where a peer is.

use serde::{Deserialize, Serialize};

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

//! Parts of the status document.

use serde::{Deserialize, Serialize};

/// The certificate in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    /// Name of the pod in the overlay.
    pub name: String,
    /// SHA-256, in hexadecimal digits.
    pub fingerprint: String,
    /// Since when it is valid, in seconds since 1970.
    pub not_before: i64,
    /// When it expires, in seconds since 1970.
    pub not_after: i64,
    /// Fingerprint of the CA.
    pub issuer: Option<String>,
}

impl Certificate {
    /// How long before its end it is worth a look, in seconds. It should have been renewed by then: that is due when a
    /// third of its life is left.
    #[must_use]
    pub fn warning_time(&self) -> i64 {
        warning_time(self.not_before, self.not_after)
    }
}

/// [`Certificate::warning_time`] of a certificate that is valid from one second to another.
#[must_use]
pub fn warning_time(not_before: i64, not_after: i64) -> i64 {
    (not_after.saturating_sub(not_before) / 4).clamp(0, MOST_WARNING)
}

/// A tunnel with a peer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tunnel {
    /// Overlay addresses.
    pub peer: Vec<String>,
    /// Name in the peer's certificate.
    pub name: String,
    /// Absent if it is only reached through a relay.
    pub endpoint: Option<String>,
    /// How long the handshake took, if this instance began it.
    pub handshake_ms: Option<f64>,
    /// Whether it is the one that is used, of those with the peer.
    pub primary: bool,
}

/// The settings of the tunnel that the instance follows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FollowedSettings {
    /// [`crate::launch::contract_hash`] of the contract that they are from.
    pub contract: String,
    /// How often it was told to read its contract again.
    pub reloads: u64,
    /// MTU of the device that belongs to them.
    pub device_mtu: Option<u32>,
    /// Why those that came last are not in force.
    pub refused: Option<String>,
    /// Keys of Nebula's configuration whose change takes effect at the next start.
    pub at_the_next_start: Vec<String>,
}

/// The cluster table of a captured pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClusterTable {
    /// Whether there is one.
    pub state: TableState,
    /// Version of the table in use.
    pub version: Option<u64>,
    /// Since it was written.
    pub age_seconds: Option<u64>,
    /// Number of enrolled pods.
    pub pods: u32,
    /// Number of addresses that are known not to be enrolled.
    pub clear: u32,
    /// Number of ports of Services.
    pub services: u32,
    /// Number of their endpoints.
    pub endpoints: u32,
    /// Why the file that is there is not used.
    pub problem: Option<String>,
    /// Why the pod is closed although there is a table.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub closed: Option<String>,
}

/// Whether an instance has a cluster table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TableState {
    /// The one that was written last.
    Used,
    /// One from before, for the one that was written last cannot be used.
    Kept,
    /// None, so captured traffic is dropped.
    Missing,
    /// A word that this release does not know, or none.
    #[default]
    #[serde(other)]
    Unknown,
}

/// What went wrong lately.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// Peers that were called in vain.
    pub lost_peers: Vec<LostPeer>,
    /// Callers that this instance refused.
    pub refused_callers: Vec<RefusedCaller>,
    /// The last packets that were dropped, sampled.
    pub dropped: Vec<DroppedPacket>,
    /// The last packets that passed and that network policies in audit would refuse, sampled.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub audited: Vec<DroppedPacket>,
}

/// A peer that was called in vain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LostPeer {
    /// Overlay address.
    pub peer: String,
    /// Why it does not answer, as far as it is known.
    pub cause: String,
    /// The same as one word; empty if the instance is of an earlier release.
    pub reason: String,
    /// Why its answer was refused, as [`RefusedCaller::reason`]; empty if none was.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub refusal: String,
    /// Since the last call.
    pub seconds_ago: u64,
}

impl LostPeer {
    /// Nobody says where it is.
    pub const NOBODY_KNOWS: &str = "nobody_knows";
    /// The system sends nothing to where it is.
    pub const CANNOT_SEND: &str = "cannot_send";
    /// Its answer cannot be opened.
    pub const OTHER_CIPHER: &str = "other_cipher";
    /// Its answer was refused.
    pub const REFUSED: &str = "refused";
    /// It does not answer.
    pub const NO_ANSWER: &str = "no_answer";
}

/// A caller that this instance refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RefusedCaller {
    /// Its endpoint.
    pub from: String,
    /// Why, as one word.
    pub reason: String,
    /// Why, in words.
    pub text: String,
    /// Since then.
    pub seconds_ago: u64,
}

impl RefusedCaller {
    /// It does not offer post-quantum keys, which are required here.
    pub const NOT_POST_QUANTUM: &str = "not_post_quantum";
}

/// A packet that was dropped, or would be if all network policies were enforced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DroppedPacket {
    /// `inbound` or `outbound`.
    pub direction: String,
    /// Why, as one word.
    pub reason: String,
    /// Number of the protocol.
    pub protocol: u8,
    /// `ADDRESS:PORT` of this end.
    pub local: String,
    /// `ADDRESS:PORT` of the other end.
    pub remote: String,
    /// Number of the rule that is nearest to allowing it.
    pub nearest_rule: Option<usize>,
    /// Of one that network policies refuse: which one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyRefusal>,
    /// Since then.
    pub seconds_ago: u64,
}

/// Between whom network policies refuse a flow, and why.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyRefusal {
    /// Name in the certificate of the pod.
    pub own: String,
    /// Name in the certificate of the other end.
    pub peer: String,
    /// Direction, policy, tier and rule, in words.
    pub reason: String,
}

/// What a network policy said about flows of one direction since the instance started, or the first of those that took
/// over from each other.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyVerdicts {
    /// `ingress` or `egress`.
    pub direction: String,
    /// `Admin`, `NetworkPolicy` or `Baseline`; `none` if no policy decided.
    pub tier: String,
    /// `NAMESPACE/NAME` of a NetworkPolicy, `NAME` of a ClusterNetworkPolicy. Without a tier: the word for the reason,
    /// such as `no-policy` or `closed`, or `other-policies` for those beyond a bound.
    pub policy: String,
    /// New flows that it allowed.
    pub allowed: u64,
    /// Packets of flows that it refused.
    pub denied: u64,
    /// Flows that passed and that it would refuse if the policies in audit were enforced, too. Flows that go on are
    /// counted again when the cluster table changes.
    pub would_deny: u64,
}

/// An hour: certificates of pods usually live for a day.
const MOST_WARNING: i64 = 3600;

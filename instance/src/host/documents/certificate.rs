//! Certificates, of which hosts and CAs show themselves.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The answer to `cert`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificates {
    /// Of this host, one for each version.
    pub certificates: Vec<Certificate>,
    /// Of the CAs that it trusts.
    pub cas: Vec<Certificate>,
}

/// A certificate as `nebula-cert print -json` shows it, with the seconds that are left.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Certificate {
    pub details: Details,
    pub fingerprint: String,
    pub version: u64,
    #[serde(rename = "secondsLeft")]
    pub seconds_left: i64,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// What a certificate says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Details {
    pub name: String,
    /// Null in certificates of version 2 that have none, like the two lists below.
    pub networks: Option<Vec<String>>,
    pub groups: Option<Vec<String>>,
    pub unsafe_networks: Option<Vec<String>>,
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// The answer to `whois`: who a host is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    pub name: String,
    pub addresses: Vec<String>,
    pub groups: Vec<String>,
    pub issuer: Option<String>,
    pub fingerprint: String,
    pub not_after: i64,
    /// Whether it is this host.
    pub own: bool,
}

/// For how long a certificate is valid.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Validity {
    pub name: String,
    pub version: u64,
    pub fingerprint: String,
    pub seconds_left: Option<i64>,
    pub begins_in_seconds: i64,
    pub lifetime_seconds: Option<i64>,
}

//! Messages between an instance and the CA service: JSON over HTTPS, `POST /v1/certificate`.
//!
//! The request proves who asks; the public key is the only key material that travels.

use serde::{Deserialize, Serialize};

/// Path of the one call.
pub const CERTIFICATE_PATH: &str = "/v1/certificate";
/// Path of the trust bundle (`GET`, with an entity tag to poll cheaply).
pub const TRUST_PATH: &str = "/v1/trust";
/// Longest request body the service accepts, in bytes.
pub const MAX_BODY: usize = 64 * 1024;
/// Longest reply body a caller must accept, in bytes: a long blocklist is part of it.
pub const MAX_REPLY: usize = 4 * 1024 * 1024;

/// Request body.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// PEM of the host's public key (`NEBULA X25519 PUBLIC KEY` or `NEBULA P256 PUBLIC KEY`).
    pub public_key: String,
    /// Who asks.
    pub proof: Proof,
}

/// How the asker proves who it is.
#[derive(Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Proof {
    /// A one-time enrolment token made by `nebula-ca token`. Name, groups and addresses are bound to the token.
    Token {
        /// The secret.
        token: String,
    },
    /// A node vouches for one of its pods, with the node's own token.
    Node {
        /// The node's secret.
        token: String,
        /// The pod.
        pod: Pod,
    },
}

/// A pod as the node describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// Kubernetes namespace.
    pub namespace: String,
    /// Pod name.
    pub name: String,
    /// Pod UID.
    pub uid: String,
    /// Primary address of the pod from the CNI result, for address mode `derive`.
    pub address: std::net::IpAddr,
}

/// Successful reply body.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Reply {
    /// PEM of the signed certificate (one per version issued).
    pub certificate: String,
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// Blocked fingerprints, lower-case hex.
    #[serde(default)]
    pub blocklist: Vec<String>,
}

/// Reply body of [`TRUST_PATH`]: whom to trust from now on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// PEM bundle of the CAs to trust.
    pub ca: String,
    /// Blocked fingerprints, lower-case hex.
    pub blocklist: Vec<String>,
}

/// Error reply body, with an HTTP status of 4xx or 5xx.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Refusal {
    /// Stable machine-readable reason, for example `unknown_token`.
    pub code: String,
    /// One line for people: which check failed and what to do. Never a secret.
    pub message: String,
}

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Token { .. } => f.write_str("Token(redacted)"),
            Self::Node { pod, .. } => write!(f, "Node(redacted, {pod:?})"),
        }
    }
}

//! How a node stands.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

use super::UpgradeState;
use crate::instance_status::warning_time;

/// How a node stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// Its name in Kubernetes.
    pub node: String,
    /// Release of its agent.
    pub version: String,
    /// Whether pods may be put on it.
    pub is_ready: bool,
    /// Each part of it, in the order in which the agent works.
    pub parts: Vec<PartState>,
    /// Its pods.
    pub pods: PodCounts,
    /// The certificate of a pod that expires first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_to_expire: Option<ExpiringCertificate>,
    /// The CAs that the network trusts, as the CA service said last, the first to expire above.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cas: Vec<TrustedCa>,
    /// How far an upgrade of the instances is.
    pub upgrade: UpgradeState,
}

/// How one part of a node stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PartState {
    /// Its name.
    pub name: String,
    /// Whether it is as it must be.
    pub ok: bool,
    /// Whether the node is not ready without it.
    pub is_required: bool,
    /// What is so, or what is wrong.
    pub reason: String,
    /// What the operator can do; empty if nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

/// Enrolled pods of a node, by how they stand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodCounts {
    /// They have a tunnel.
    pub protected: usize,
    /// They run without one.
    pub unprotected: usize,
    /// They wait for a certificate, or their tunnel is closed: nothing leaves them in clear.
    pub closed: usize,
    /// Nobody can tell whether they are enrolled.
    pub undecided: usize,
}

/// A CA that the network trusts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TrustedCa {
    /// The name in its certificate.
    pub name: String,
    /// Of its certificate, in hexadecimal.
    pub fingerprint: String,
    /// When it expires, in seconds since 1970.
    pub not_after: i64,
}

/// When the certificate of a pod expires.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExpiringCertificate {
    /// `namespace/name`.
    pub pod: String,
    /// In seconds since 1970, as is `not_after`. 0: an agent of an earlier release does not say.
    pub not_before: i64,
    /// When it expires.
    pub not_after: i64,
}

impl ExpiringCertificate {
    /// Whether it should have been renewed by `now`.
    #[must_use]
    pub fn is_late(&self, now: i64) -> bool {
        self.not_after.saturating_sub(now) < warning_time(self.not_before, self.not_after)
    }
}

/// A table of all parts. All texts are printed as they are.
#[must_use]
pub fn parts_table(parts: &[PartState]) -> String {
    let mut text = String::new();
    for part in parts {
        let mark = match (part.ok, part.is_required) {
            (true, _) => "ok",
            (false, true) => "NOT OK",
            (false, false) => "missing",
        };
        let _ = writeln!(text, "{:<12} {mark:<8} {}", part.name, part.reason);
        if !part.advice.is_empty() {
            let _ = writeln!(text, "{:<21} -> {}", "", part.advice);
        }
    }
    text
}

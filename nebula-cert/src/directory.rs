//! The directory of the CA service: who holds a certificate now, for the agents of nodes.
//!
//! `GET` [`DIRECTORY_PATH`] with the node's token (`Authorization: Bearer TOKEN`) answers with a [`Directory`]. These
//! parameters may be in the query:
//!
//! | Parameter | Means |
//! | --- | --- |
//! | `since=VERSION` | only what changed after the answer with that [`Directory::version`] |
//! | `wait=SECONDS` | with `since`: long poll, until somebody joins or leaves or SECONDS have passed, at most [`MAX_WAIT_SECONDS`] |
//! | `from=CURSOR` | the next page of a full answer, as [`Directory::next`] of the page before said |
//!
//! An answer has at most about [`PAGE_BYTES`]. A caller that knows nothing reads all pages, and goes on with the
//! version of the *first* one: whatever changed while it read the others is in the next answer. A caller whose
//! version is unknown or too old gets a full answer. A service with too many waiting callers answers at once, with
//! the seconds to wait before the next call in `Retry-After`.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::UnixTime;
pub use crate::issuance::MAX_WAIT_SECONDS;

/// Path of the directory.
pub const DIRECTORY_PATH: &str = "/v1/directory";
/// Length in bytes after which a page ends. A page is longer by at most one entry and its frame.
pub const PAGE_BYTES: usize = 256 * 1024;
/// Maximum length of an answer in bytes that a caller must accept.
pub const MAX_PAGE_BYTES: usize = 2 * PAGE_BYTES;

/// Annotations of nodes in which network plugins note the addresses of the node's devices, some with a prefix length.
/// No pod has these addresses.
pub const NODE_ADDRESS_ANNOTATIONS: [&str; 13] = [
    "flannel.alpha.coreos.com/public-ip",
    "flannel.alpha.coreos.com/public-ipv6",
    "projectcalico.org/IPv4Address",
    "projectcalico.org/IPv6Address",
    "projectcalico.org/IPv4IPIPTunnelAddr",
    "projectcalico.org/IPv4VXLANTunnelAddr",
    "projectcalico.org/IPv6VXLANTunnelAddr",
    "projectcalico.org/IPv4WireguardInterfaceAddr",
    "projectcalico.org/IPv6WireguardInterfaceAddr",
    "network.cilium.io/ipv4-cilium-host",
    "network.cilium.io/ipv6-cilium-host",
    "network.cilium.io/ipv4-health-ip",
    "network.cilium.io/ipv6-health-ip",
];

/// One answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Directory {
    /// `EPOCH-N`; opaque to callers.
    pub version: String,
    /// Whether [`Directory::pods`] and the pages that follow are all there are; otherwise they replace what the caller
    /// has under the same UIDs.
    pub full: bool,
    /// Holders of certificates, each address with one of them.
    pub pods: Vec<Member>,
    /// UIDs of those that left.
    #[serde(default)]
    pub gone: Vec<String>,
    /// Cursor of the next page of a full answer, made of hex digits; `None` with the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// A holder of a certificate that is valid and not blocked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Overlay addresses of the certificate.
    pub addresses: Vec<IpAddr>,
    /// Kubernetes namespace; empty for a host.
    pub namespace: String,
    /// Name of the pod or host.
    pub name: String,
    /// Service account of the pod; empty if it is not known.
    #[serde(default)]
    pub service_account: String,
    /// Node of the pod; empty if it is not known.
    #[serde(default)]
    pub node: String,
    /// UID of the pod; `host NAME` for a host.
    pub uid: String,
    /// Last second of the certificate.
    pub until: UnixTime,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_what_is_optional_is_understood() {
        let text = r#"{"version": "e-7", "full": false, "later": 1,
            "pods": [{"addresses": ["10.0.0.1"], "namespace": "shop", "name": "web", "uid": "u", "until": 9}]}"#;
        let answer: Directory = serde_json::from_str(text).unwrap();
        assert_eq!((answer.version.as_str(), answer.gone.len(), answer.next.clone()), ("e-7", 0, None));
        assert_eq!((answer.pods[0].node.as_str(), answer.pods[0].service_account.as_str()), ("", ""));
        assert_eq!(serde_json::from_str::<Directory>(&serde_json::to_string(&answer).unwrap()).unwrap(), answer);
    }
}

//! What an instance must know to serve one pod (launch contract). Written by the plugin to
//! `<state dir>/<network>/<containerID>-<ifname>.launch` (0600), read by `nebula-cni-instance --launch FILE`.
//! Holds no key and no token, only paths to them.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The launch contract. Readers refuse another `version`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchSpec {
    /// [`LaunchSpec::VERSION`].
    pub version: u32,
    /// CNI network name.
    pub network: String,
    /// CNI_CONTAINERID.
    pub container_id: String,
    /// CNI_IFNAME.
    pub ifname: String,
    /// Path of the pod's network namespace.
    pub netns: PathBuf,
    /// (st_dev, st_ino) of that namespace when the plugin opened it; the instance refuses another one.
    pub netns_id: (u64, u64),
    /// Kubernetes' view of the pod.
    pub pod: Pod,
    /// The pod's primary address from prevResult.
    pub pod_address: IpAddr,
    /// Name of the tun device in the pod.
    pub device: String,
    /// Whether readiness waits for the certificate.
    pub mode: Mode,
    /// Overlay prefixes that are routed to the device before there is a certificate, so that nothing for them leaves in clear.
    pub overlay: Vec<IpNet>,
    /// Seconds a strict start may take; then the instance gives up and says why.
    pub budget_seconds: u64,
    /// UDP ports in the host namespace the instance may choose from, inclusive.
    pub port_range: (u16, u16),
    /// Where certificates come from.
    pub ca: CaAccess,
    /// Configuration of the tunnel: the keys of Nebula's config.yml except `pki`, as JSON.
    pub nebula: serde_json::Value,
    /// Unix socket on which the instance answers each connection with one JSON status document.
    pub status_socket: PathBuf,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pod {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID; empty if the runtime gave none.
    pub uid: String,
}

/// When an instance is ready (flow B).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Certificate in hand and data path open.
    #[default]
    Strict,
    /// Data path closed until the certificate arrives.
    Lazy,
}

/// How to reach the CA service.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaAccess {
    /// `https://host:port`.
    pub url: String,
    /// PEM file with the TLS roots of the CA service.
    pub tls_ca_file: PathBuf,
    /// File with the node's token (node proof).
    pub token_file: PathBuf,
}

impl LaunchSpec {
    /// Current version of the contract.
    pub const VERSION: u32 = 1;
}

//! The answer to `trace`: which way a packet goes.

use serde::{Deserialize, Serialize};

use super::Tunnel;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trace {
    pub direction: String,
    /// Absent where nothing is captured.
    pub capture: Option<Captured>,
    /// As what an inbound packet is delivered, if it is translated.
    pub back: Option<Ends>,
    pub route: Route,
    pub tunnel: Option<Tunnel>,
    /// Absent if the packet gets no further than to the route.
    pub firewall: Option<FirewallVerdict>,
    pub outcome: String,
    /// Why it is dropped.
    pub reason: Option<String>,
    /// Of a packet of this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kernel_route: Option<KernelRoute>,
}

/// What capture knows about the destination.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Captured {
    pub found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub becomes: Option<Ends>,
}

/// The ends of a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Ends {
    pub local: String,
    pub remote: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Route {
    None {
        /// Why there is no route.
        none: String,
    },
    To {
        #[serde(default)]
        peer: String,
        /// The network behind the peer.
        #[serde(default)]
        unsafe_route: Option<String>,
        #[serde(default)]
        other_gateways: Vec<String>,
    },
}

impl Default for Route {
    fn default() -> Self {
        Self::To { peer: String::new(), unsafe_route: None, other_gateways: Vec::new() }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FirewallVerdict {
    pub addresses: String,
    /// Absent if the flow is not known.
    pub conntrack: Option<Conntrack>,
    /// Absent if none allows it.
    pub rule: Option<NumberedRule>,
    pub nearest: Option<NearestRule>,
    /// Why policies of the network refuse the flow, or would if those in audit were enforced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Conntrack {
    pub began: String,
    pub answered: bool,
    pub idle_seconds: u64,
    /// Why rules or policies no longer allow it; its packets are dropped in both directions until it expires.
    pub ended: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NumberedRule {
    /// Key of the configuration.
    pub list: String,
    /// From 0.
    pub index: usize,
    pub text: Option<String>,
}

/// The rule that is nearest to allowing a flow.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NearestRule {
    pub list: String,
    pub index: usize,
    pub text: String,
    pub groups: Vec<String>,
    pub host: Option<String>,
    /// Names of the fields.
    pub differs: Vec<String>,
}

/// The kernel's route for a packet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct KernelRoute {
    pub to_overlay: bool,
    /// Whether the destination is this host.
    pub local: bool,
    pub device: Option<String>,
    pub mtu: Option<u32>,
    /// Why there is no route.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

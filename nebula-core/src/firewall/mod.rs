//! Packet filter: rules over the peer's certificate, and the flows already allowed.

mod conntrack;
mod filter;
mod rules;

use std::time::Duration;

pub(crate) use conntrack::{Conntrack, FlowCache};
pub(crate) use filter::Filter;
pub use rules::{Cidr, PortRange, Protocol, Rule};

/// Rules and settings; what the configuration says.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Rules for packets from peers.
    pub inbound: Vec<Rule>,
    /// Rules for packets to peers.
    pub outbound: Vec<Rule>,
    /// Without `local_cidr`, a rule covers any local address even if the own certificate has unsafe networks.
    pub default_local_cidr_any: bool,
    /// Idle TCP flows are forgotten after this.
    pub tcp_timeout: Duration,
    /// Idle UDP flows.
    pub udp_timeout: Duration,
    /// Other idle flows.
    pub default_timeout: Duration,
    /// Most flows remembered at a time; when there are more, the longest idle ones are forgotten early.
    pub max_flows: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            inbound: Vec::new(),
            outbound: Vec::new(),
            default_local_cidr_any: false,
            tcp_timeout: Duration::from_secs(12 * 60),
            udp_timeout: Duration::from_secs(3 * 60),
            default_timeout: Duration::from_secs(10 * 60),
            // About 20 MB when full.
            max_flows: 1 << 18,
        }
    }
}

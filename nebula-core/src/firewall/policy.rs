//! Rules and settings of the packet filter, as the configuration says them.

use std::time::Duration;

use super::Rule;

/// Rules and settings; what the configuration says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Rules for packets from peers.
    pub inbound: Vec<Rule>,
    /// Rules for packets to peers.
    pub outbound: Vec<Rule>,
    /// What becomes of refused packets from peers.
    pub inbound_action: Action,
    /// What becomes of refused packets to peers.
    pub outbound_action: Action,
    /// Without `local_cidr`, a rule covers any local address even if the own certificate has unsafe networks.
    pub default_local_cidr_any: bool,
    /// Idle TCP flows are forgotten after this.
    pub tcp_timeout: Duration,
    /// Idle UDP flows.
    pub udp_timeout: Duration,
    /// Other idle flows.
    pub default_timeout: Duration,
    /// Most flows remembered at a time; when there are more, the longest idle ones of the peers that hold the most are
    /// forgotten early.
    pub max_flows: usize,
}

/// What becomes of a refused packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Action {
    /// Its sender hears nothing.
    #[default]
    Drop,
    /// Its sender gets a TCP reset or an ICMP error.
    Reject,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            inbound: Vec::new(),
            outbound: Vec::new(),
            inbound_action: Action::Drop,
            outbound_action: Action::Drop,
            default_local_cidr_any: false,
            tcp_timeout: Duration::from_secs(12 * 60),
            udp_timeout: Duration::from_secs(3 * 60),
            default_timeout: Duration::from_secs(10 * 60),
            // About 28 MB when full.
            max_flows: 1 << 18,
        }
    }
}

//! Firewall rules and settings, as configured.

use std::time::Duration;

use ipnet::IpNet;
use nebula_cert::Fingerprint;

/// Protocol of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// Any protocol.
    #[default]
    Any,
    /// IP protocol 6.
    Tcp,
    /// IP protocol 17.
    Udp,
    /// ICMP and ICMPv6; ports do not matter.
    Icmp,
}

/// Ports of a rule: local ports inbound, remote ports outbound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PortRange {
    /// Any port, fragments included.
    #[default]
    Any,
    /// Non-first fragments only.
    Fragment,
    /// Inclusive range.
    Range(u16, u16),
}

/// One allow rule. Matches if protocol AND port AND CA AND local_cidr AND (host OR groups OR cidr, or none given).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    /// Protocol.
    pub protocol: Protocol,
    /// Ports.
    pub port: PortRange,
    /// Peer certificate name; `any` matches everybody.
    pub host: Option<String>,
    /// All of these groups must be in the peer's certificate; an `any` among them matches everybody.
    pub groups: Vec<String>,
    /// The peer's address in the packet.
    pub cidr: Option<Cidr>,
    /// This node's address in the packet.
    pub local_cidr: Option<Cidr>,
    /// Name of the peer's CA.
    pub ca_name: Option<String>,
    /// Fingerprint of the peer's CA; with `ca_name`, either suffices.
    pub ca_sha: Option<Fingerprint>,
}

/// `any` or a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cidr {
    /// Every address.
    Any,
    /// Addresses inside.
    Prefix(IpNet),
}

impl Rule {
    /// A rule that allows everything from or to everybody.
    #[must_use]
    pub fn any() -> Self {
        Self { host: Some("any".to_owned()), ..Self::default() }
    }
}

/// Firewall rules and settings of a node.
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
    /// Idle UDP flows are forgotten after this.
    pub udp_timeout: Duration,
    /// Other idle flows are forgotten after this.
    pub default_timeout: Duration,
    /// Maximum number of flows tracked at a time. Beyond it, the longest idle flows of the peers that hold the most are
    /// evicted early.
    pub max_flows: usize,
}

/// What becomes of a refused packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Action {
    /// Its sender gets no answer.
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

//! Rules, as configured and as indexed.

use ipnet::IpNet;
use nebula_cert::Fingerprint;

/// Protocol of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    /// All.
    #[default]
    Any,
    /// 6.
    Tcp,
    /// 17.
    Udp,
    /// ICMP and ICMPv6; ports do not matter.
    Icmp,
}

/// Ports of a rule: local ports inbound, remote ports outbound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PortRange {
    /// All, fragments included.
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
    /// Peer's packet address.
    pub cidr: Option<Cidr>,
    /// Own packet address.
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
    /// Everything from or to everybody.
    #[must_use]
    pub fn any() -> Self {
        Self { host: Some("any".to_owned()), ..Self::default() }
    }
}

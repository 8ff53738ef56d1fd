//! What a rule says of protocols and ports.

use crate::program::protocol;

/// A protocol whose ports a rule can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Its IP protocol number.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => protocol::TCP,
            Self::Udp => protocol::UDP,
            Self::Sctp => protocol::SCTP,
        }
    }

    /// The protocol that the API means by this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "TCP" => Some(Self::Tcp),
            "UDP" => Some(Self::Udp),
            "SCTP" => Some(Self::Sctp),
            _ => None,
        }
    }
}

/// One item of the ports of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PortMatch {
    /// Every port of a protocol.
    Protocol(Protocol),
    /// Ports from the first to the last one.
    Ports {
        /// Protocol of the ports.
        protocol: Protocol,
        /// The first one.
        first: u16,
        /// The last one. If it is less than the first one, the item is unreadable.
        last: u16,
    },
    /// The ports of the destination pod with this name.
    Name {
        /// Protocol of the ports; `None` for all protocols.
        protocol: Option<Protocol>,
        /// The name.
        name: String,
    },
    /// Of a newer version, or invalid.
    Unreadable,
}

impl PortMatch {
    /// One port.
    #[must_use]
    pub const fn port(protocol: Protocol, port: u16) -> Self {
        Self::Ports { protocol, first: port, last: port }
    }
}

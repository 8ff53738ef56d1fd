//! The ends of a flow, as they are written on the command line.

use std::fmt;
use std::net::IpAddr;

use crate::agent_api::is_name;
use crate::why::{Asked, BadQuestion, Kind, Question};

/// A text that is no end of a flow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no end of a flow: expected an address, POD.NAMESPACE or NAMESPACE/POD, with :PORT or :PORT/PROTOCOL after \
     the second one"
)]
pub struct BadEnd(pub String);

/// One end of a flow: an address, or `POD.NAMESPACE`, or `NAMESPACE/POD`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// An address.
    Address(IpAddr),
    /// A pod.
    Pod {
        /// Its name.
        name: String,
        /// Its namespace.
        namespace: String,
    },
}

/// Where a flow leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// Where it leads.
    pub end: End,
    /// Number of the IP protocol.
    pub protocol: u8,
    /// Destination port; 0 for a protocol without ports.
    pub port: u16,
}

impl End {
    /// Reads an address, `POD.NAMESPACE` or `NAMESPACE/POD`.
    ///
    /// # Errors
    /// Refuses everything else.
    pub fn parse(text: &str) -> Result<Self, BadEnd> {
        let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        if let Ok(address) = bare.parse::<IpAddr>() {
            return Ok(Self::Address(address.to_canonical()));
        }
        let malformed = || BadEnd(text.to_owned());
        let (name, namespace) = match text.split_once('/') {
            Some((namespace, name)) => (name, namespace),
            // A namespace has no dot; the name of a pod may.
            None => text.rsplit_once('.').ok_or_else(malformed)?,
        };
        let is_pod = is_name(name) && is_name(namespace) && !namespace.contains('.');
        is_pod.then(|| Self::Pod { name: name.to_owned(), namespace: namespace.to_owned() }).ok_or_else(malformed)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Pod { name, namespace } => write!(f, "{name}.{namespace}"),
        }
    }
}

impl Destination {
    /// Reads `END[:PORT[/PROTOCOL]]`. Without a port it is an ICMP message, which only rules without ports allow.
    ///
    /// # Errors
    /// Refuses everything else.
    pub fn parse(text: &str) -> Result<Self, BadEnd> {
        let malformed = || BadEnd(text.to_owned());
        if let Ok(end) = End::parse(text) {
            let protocol = match end {
                End::Address(IpAddr::V6(_)) => ICMPV6,
                End::Address(IpAddr::V4(_)) | End::Pod { .. } => ICMP,
            };
            return Ok(Self { end, protocol, port: 0 });
        }
        let (end, port) = text.rsplit_once(':').ok_or_else(malformed)?;
        let (port, protocol) = port.split_once('/').unwrap_or((port, "tcp"));
        let protocol = match protocol.to_ascii_lowercase().as_str() {
            "tcp" => 6,
            "udp" => 17,
            "sctp" => 132,
            _ => return Err(malformed()),
        };
        let port = port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(malformed)?;
        Ok(Self { end: End::parse(end)?, protocol, port })
    }
}

/// Reads the ends that [`Question::parse`] does, and also `POD.NAMESPACE` at both and an address that sends.
///
/// # Errors
/// Refuses everything else.
pub fn question(from: &str, to: &str) -> Result<Question, BadQuestion> {
    let (namespace, name) = match End::parse(from).map_err(|_| BadQuestion(from.to_owned()))? {
        End::Address(address) => (String::new(), address.to_string()),
        End::Pod { name, namespace } => (namespace, name),
    };
    let (target, protocol, port) = match crate::why::destination(to) {
        Some(found) => found,
        None => {
            let to = Destination::parse(to).map_err(|_| BadQuestion(to.to_owned()))?;
            let target = match to.end {
                End::Address(address) => Asked::Address(address),
                End::Pod { name, namespace } => Asked::Name { namespace, name, kind: Some(Kind::Pod) },
            };
            (target, to.protocol, to.port)
        }
    };
    Ok(Question { namespace, name, target, protocol, port })
}

const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

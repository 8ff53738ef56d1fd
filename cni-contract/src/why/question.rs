//! The flow that is asked about, as it is written on the command line.

use std::net::IpAddr;

use crate::agent_api::is_name;

/// A text that is no end of a flow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no end of a flow: expected NAMESPACE/NAME for a pod, and for what it sends to NAMESPACE/NAME, \
     NAME.NAMESPACE.svc or an address, with :PORT or :PORT/udp after it"
)]
pub struct BadQuestion(pub String);

/// A flow from a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Namespace of the pod that sends; empty if an address is named instead.
    pub namespace: String,
    /// Its name, or that address.
    pub name: String,
    /// What it sends to.
    pub target: Asked,
    /// Number of the IP protocol.
    pub protocol: u8,
    /// Port; 0 for an ICMP message.
    pub port: u16,
}

/// What is sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// A name.
    Name {
        /// Its namespace.
        namespace: String,
        /// The name.
        name: String,
        /// What it is the name of; `None`: of a Service if there is one, else of a pod.
        kind: Option<Kind>,
    },
    /// An address.
    Address(IpAddr),
}

/// What has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A pod.
    Pod,
    /// A Service.
    Service,
}

impl Question {
    /// Reads `NAMESPACE/POD` and what it sends to: `[pod/|service/]NAMESPACE/NAME`, `NAME.NAMESPACE.svc[.DOMAIN]` or an
    /// address, then `[:PORT[/PROTOCOL]]`. Without a port it is an ICMP message.
    ///
    /// # Errors
    /// Refuses everything else.
    pub fn parse(source: &str, target: &str) -> Result<Self, BadQuestion> {
        let (namespace, name) = full_name(source).ok_or_else(|| BadQuestion(source.to_owned()))?;
        let (target, protocol, port) = destination(target).ok_or_else(|| BadQuestion(target.to_owned()))?;
        Ok(Self { namespace, name, target, protocol, port })
    }

    /// The address that sends, where no pod is named.
    #[must_use]
    pub fn source_address(&self) -> Option<IpAddr> {
        if self.namespace.is_empty() { self.name.parse().ok() } else { None }
    }
}

/// What is sent to, with protocol and port.
pub(crate) fn destination(text: &str) -> Option<(Asked, u8, u16)> {
    // An address of IPv6 has colons of its own.
    if let Some(address) = address(text) {
        return Some((Asked::Address(address), icmp(Some(address)), 0));
    }
    let (end, port) = match text.rsplit_once(':') {
        Some((end, port)) => (end, Some(port)),
        None => (text, None),
    };
    let target = match address(end) {
        Some(address) => Asked::Address(address),
        None => name(end)?,
    };
    let Some(port) = port else { return Some((target, icmp(None), 0)) };
    let (port, protocol) = port.split_once('/').unwrap_or((port, "tcp"));
    let protocol = match protocol.to_ascii_lowercase().as_str() {
        "tcp" => TCP,
        "udp" => UDP,
        "sctp" => SCTP,
        _ => return None,
    };
    let port = port.parse::<u16>().ok().filter(|port| *port > 0)?;
    Some((target, protocol, port))
}

fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    bare.parse::<IpAddr>().ok().map(|address| address.to_canonical())
}

fn name(text: &str) -> Option<Asked> {
    if let Some((service, _)) = text.split_once(".svc").filter(|(_, rest)| rest.is_empty() || rest.starts_with('.')) {
        // A namespace has no dot, and neither has the name of a Service.
        let (name, namespace) = service.split_once('.')?;
        let (namespace, name) = full_name(&format!("{namespace}/{name}"))?;
        return Some(Asked::Name { namespace, name, kind: Some(Kind::Service) });
    }
    let (kind, rest) = match text.split_once('/')? {
        ("pod" | "pods" | "po", rest) if rest.contains('/') => (Some(Kind::Pod), rest),
        ("service" | "services" | "svc", rest) if rest.contains('/') => (Some(Kind::Service), rest),
        _ => (None, text),
    };
    let (namespace, name) = full_name(rest)?;
    Some(Asked::Name { namespace, name, kind })
}

fn full_name(text: &str) -> Option<(String, String)> {
    let (namespace, name) = text.split_once('/')?;
    let are_names = is_name(namespace) && is_name(name) && !namespace.contains('.');
    are_names.then(|| (namespace.to_owned(), name.to_owned()))
}

fn icmp(address: Option<IpAddr>) -> u8 {
    if address.is_some_and(|address| address.is_ipv6()) { ICMPV6 } else { ICMP }
}

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

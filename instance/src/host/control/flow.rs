//! A flow as people write it: protocol, source, destination.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nebula_core::counters::Direction;
use nebula_core::{FlowKey, protocol};

use super::refusal::Refusal;

/// A packet's protocol, source and destination, before it is known which of the two is this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Flow {
    protocol: u8,
    /// `None` means this node.
    source: Option<(IpAddr, u16)>,
    destination: (IpAddr, u16),
}

impl Flow {
    /// `protocol` is `tcp`, `udp`, `icmp` or a number; an end is an address with or without a port.
    pub(super) fn read(protocol: &str, source: Option<&str>, destination: &str) -> Result<Self, Refusal> {
        let destination = end(destination)?;
        let protocol = match protocol.to_ascii_lowercase().as_str() {
            "tcp" => protocol::TCP,
            "udp" => protocol::UDP,
            "icmp" | "icmpv6" if destination.0.is_ipv6() => protocol::ICMPV6,
            "icmp" => protocol::ICMP,
            other => other.parse().map_err(|_| Refusal::UnknownProtocol(other.to_owned()))?,
        };
        let source = source.map(end).transpose()?;
        if source.is_some_and(|(address, _)| address.is_ipv4() != destination.0.is_ipv4()) {
            return Err(Refusal::TwoFamilies);
        }
        Ok(Self { protocol, source, destination })
    }

    /// Converts the flow to the view of a node with these networks (its own addresses) and the networks `behind` it.
    ///
    /// # Errors
    /// Returns an error if the node has no address of the destination's family to send from.
    pub(super) fn seen_by(&self, networks: &[IpNet], behind: &[IpNet]) -> Result<(Direction, FlowKey), Refusal> {
        let is_own = |address: IpAddr| {
            networks.iter().any(|own| own.addr() == address) || behind.iter().any(|net| net.contains(&address))
        };
        let source = match self.source {
            Some(source) => source,
            None => {
                let own = networks.iter().map(IpNet::addr).find(|own| own.is_ipv4() == self.destination.0.is_ipv4());
                (own.ok_or(Refusal::NoAddressOfFamily)?, 0)
            }
        };
        let inbound = is_own(self.destination.0) && !is_own(source.0);
        let (local, remote) = if inbound { (self.destination, source) } else { (source, self.destination) };
        let is_icmp = matches!(self.protocol, protocol::ICMP | protocol::ICMPV6);
        let (local_port, remote_port) = if is_icmp { (0, local.1.max(remote.1)) } else { (local.1, remote.1) };
        let key = FlowKey {
            local: local.0,
            remote: remote.0,
            local_port,
            remote_port,
            protocol: self.protocol,
            fragment: false,
        };
        Ok((if inbound { Direction::Inbound } else { Direction::Outbound }, key))
    }
}

fn end(text: &str) -> Result<(IpAddr, u16), Refusal> {
    if let Ok(address) = text.trim_matches(['[', ']']).parse::<IpAddr>() {
        return Ok((address, 0));
    }
    let both = text.parse::<SocketAddr>().map_err(|_| Refusal::NotAnAddress(text.to_owned()))?;
    Ok((both.ip(), both.port()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_end_that_is_this_node_decides_the_direction() {
        let own = networks(&["10.42.0.1/16", "fd42::1/64"]);
        let behind = networks(&["192.168.7.0/24"]);
        for (source, destination, direction, local, remote) in [
            (None, "10.42.0.7:443", Direction::Outbound, "10.42.0.1", "10.42.0.7"),
            (None, "[fd42::7]:443", Direction::Outbound, "fd42::1", "fd42::7"),
            (Some("10.42.0.1:5000"), "10.42.0.7:443", Direction::Outbound, "10.42.0.1", "10.42.0.7"),
            (Some("10.42.0.7:5000"), "10.42.0.1:443", Direction::Inbound, "10.42.0.1", "10.42.0.7"),
            (Some("10.42.0.7"), "192.168.7.9:443", Direction::Inbound, "192.168.7.9", "10.42.0.7"),
            (Some("192.168.7.9"), "10.42.0.7:443", Direction::Outbound, "192.168.7.9", "10.42.0.7"),
        ] {
            let flow = Flow::read("tcp", source, destination).unwrap();
            let (found, key) = flow.seen_by(&own, &behind).unwrap();
            let expected = (direction, local.parse().unwrap(), remote.parse().unwrap());
            assert_eq!((found, key.local, key.remote), expected, "{destination}");
            let port = if direction == Direction::Inbound { key.local_port } else { key.remote_port };
            assert_eq!(port, 443);
        }
        assert!(Flow::read("udp", None, "fd42::7").unwrap().seen_by(&own[..1], &[]).is_err());
    }

    #[test]
    fn what_is_no_flow_is_refused() {
        for (protocol, source, destination) in [
            ("tpc", None, "10.0.0.1:1"),
            ("300", None, "10.0.0.1:1"),
            ("tcp", None, "host:1"),
            ("tcp", None, "10.0.0.1:70000"),
            ("tcp", Some("fd00::1"), "10.0.0.1"),
        ] {
            assert!(Flow::read(protocol, source, destination).is_err(), "{protocol} {destination}");
        }
        assert!(Flow::read("47", None, "10.0.0.1").is_ok());
    }
}

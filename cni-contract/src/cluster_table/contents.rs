//! Everything in a table, as `nebula-cni-plugin table` prints and reads it.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Subnets, Ipv6Subnets};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::builder::{Builder, EndpointState, ServiceEndpoint, ServicePort};
use super::table::{End, Labels, ListedService, Table};

/// The contents of a table, each list in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Contents {
    /// Version of the contents; 0 is that of no table.
    pub version: u64,
    /// Enrolled pods, hosts and lighthouses.
    pub enrolled: Vec<Enrolled>,
    /// Ranges whose members are all enrolled, although the table does not list them.
    pub sealed: Vec<IpNet>,
    /// Addresses known not to be enrolled.
    pub clear: Vec<IpNet>,
    /// Ports of Services. Those with the address 0.0.0.0 or :: are ports of all nodes.
    pub services: Vec<Service>,
    /// Addresses of nodes.
    pub nodes: Vec<IpAddr>,
}

/// The address of an enrolled pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Enrolled {
    /// The address.
    pub address: IpAddr,
    /// What tells the pod from another one that had the address before. Text in JSON, where numbers have 53 bits.
    #[serde(serialize_with = "as_hex", deserialize_with = "from_hex")]
    pub incarnation: u64,
    /// Where its tunnel probably ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<End>,
    /// Number of its set of labels; `None`: it is no pod, or they are not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<u32>,
}

/// A port of a Service.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Service {
    /// The ClusterIP.
    pub address: IpAddr,
    /// The Service's port.
    pub port: u16,
    /// The IP protocol.
    pub protocol: Protocol,
    /// Time of session affinity; 0 without it.
    #[serde(default)]
    pub affinity_seconds: u32,
    /// Number of its endpoints that are not enrolled: so large a part of the flows to it stays on the primary network.
    #[serde(default)]
    pub clear_endpoints: u32,
    /// Whether of all of its endpoints it is not known whether they are enrolled: what is sent there waits for news.
    #[serde(default)]
    pub unknown: bool,
    /// Its enrolled endpoints.
    #[serde(default)]
    pub endpoints: Vec<Endpoint>,
}

/// An enrolled endpoint of a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Endpoint {
    /// Address of the pod.
    pub address: IpAddr,
    /// The pod's port.
    pub port: u16,
    /// Whether it keeps its flows and takes no new ones.
    #[serde(default)]
    pub terminating: bool,
}

/// A protocol of Services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "they are what they are called")]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Contents {
    /// Lists a table. Takes memory in proportion to the table, also if that is malformed.
    #[must_use]
    pub fn of(table: &Table<'_>) -> Self {
        let mut contents = Self { version: table.version(), ..Self::default() };
        let ends: HashMap<IpAddr, End> = table.ends().collect();
        let sets: HashMap<IpAddr, Labels> = table.identities().collect();
        let enrolled = |(address, incarnation)| {
            let labels = match sets.get(&address) {
                Some(Labels::Set(number)) => Some(*number),
                _ => None,
            };
            Enrolled { address, incarnation, end: ends.get(&address).copied(), labels }
        };
        contents.enrolled = table.pods().map(enrolled).collect();
        contents.clear = table.clear_addresses().map(IpNet::from).collect();
        let in_clear = table.clear_ranges().flat_map(|(first, last)| prefixes(first, last));
        contents.clear.extend(in_clear.take(MAX_PREFIXES));
        let sealed = table.sealed_ranges().flat_map(|(first, last)| prefixes(first, last));
        contents.sealed = sealed.take(MAX_PREFIXES).collect();
        let mut left = MAX_ENDPOINTS;
        contents.services = table.services().filter_map(|service| Service::of(&service, table, &mut left)).collect();
        contents.nodes = table.nodes().collect();
        contents.enrolled.sort_unstable();
        contents.sealed.sort_unstable();
        contents.clear.sort_unstable();
        contents.services.sort_unstable();
        contents
    }

    /// The bytes of a table with these contents.
    #[must_use]
    pub fn to_table(&self) -> Vec<u8> {
        let mut builder = Builder::new();
        for Enrolled { address, incarnation, end, labels } in &self.enrolled {
            builder.pod(*address, *incarnation);
            end.iter().for_each(|end| builder.end(*address, *end));
            labels.iter().for_each(|number| builder.identity(*address, Some(*number)));
        }
        for network in &self.clear {
            if network.prefix_len() == network.max_prefix_len() {
                builder.clear(network.addr());
            } else {
                builder.clear_prefix(*network);
            }
        }
        self.sealed.iter().for_each(|network| builder.sealed_prefix(*network));
        self.nodes.iter().for_each(|address| builder.node(*address));
        for service in &self.services {
            service.add_to(&mut builder);
        }
        builder.finish(self.version)
    }
}

impl Service {
    /// Takes at most `left` endpoints. `None`: a protocol that Services do not have.
    fn of(listed: &ListedService, table: &Table<'_>, left: &mut u32) -> Option<Self> {
        let protocol = Protocol::ALL.into_iter().find(|protocol| protocol.number() == listed.protocol)?;
        let mut endpoints = Vec::new();
        for (terminating, group) in [false, true].into_iter().zip(listed.groups.clone()) {
            for index in group.take(*left as usize) {
                let Some((address, port)) = table.endpoint_address(index, listed.target) else { break };
                *left -= 1;
                endpoints.push(Endpoint { address, port, terminating });
            }
        }
        Some(Self {
            address: listed.address,
            port: listed.port,
            protocol,
            affinity_seconds: listed.affinity_seconds,
            clear_endpoints: listed.clear,
            unknown: listed.is_unknown,
            endpoints,
        })
    }

    fn add_to(&self, builder: &mut Builder) {
        let affinity = (self.affinity_seconds > 0).then(|| Duration::from_secs(self.affinity_seconds.into()));
        let Self { address, port, protocol, .. } = *self;
        let port = ServicePort { address, port, protocol: protocol.number(), affinity, this_node_only: false };
        let endpoints = self.endpoints.iter().map(|endpoint| ServiceEndpoint {
            address: endpoint.address,
            port: endpoint.port,
            state: if endpoint.terminating { EndpointState::Terminating } else { EndpointState::Ready },
            is_on_this_node: true,
        });
        // The table does not say which these are.
        let other = |n: u32| ServiceEndpoint {
            address: Ipv6Addr::from_bits(DISCARD.to_bits() | u128::from(n)).into(),
            port: 0,
            state: EndpointState::Ready,
            is_on_this_node: true,
        };
        let clear = (1..=self.clear_endpoints.min(MAX_ENDPOINTS)).map(other);
        let unknown = self.unknown.then(|| other(0));
        if let Some(unknown) = unknown {
            builder.pod_prefix(unknown.address.into());
        }
        builder.service(port, endpoints.chain(clear).chain(unknown));
    }
}

impl Protocol {
    const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

/// For people.
impl fmt::Display for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "version {}", self.version)?;
        writeln!(f, "enrolled:")?;
        self.enrolled.iter().try_for_each(|pod| writeln!(f, "  {pod}"))?;
        self.sealed.iter().try_for_each(|network| writeln!(f, "  {network} (all of it)"))?;
        writeln!(f, "not enrolled:")?;
        self.clear.iter().try_for_each(|network| writeln!(f, "  {network}"))?;
        writeln!(f, "services:")?;
        self.services.iter().try_for_each(|service| writeln!(f, "  {service}"))?;
        writeln!(f, "nodes, at whose addresses the ports of 0.0.0.0 and :: are open:")?;
        self.nodes.iter().try_for_each(|address| writeln!(f, "  {address}"))
    }
}

impl fmt::Display for Enrolled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (incarnation {:016x})", self.address, self.incarnation)?;
        self.labels.map_or(Ok(()), |number| write!(f, " labels {number}"))?;
        let Some(End { node, port, other }) = self.end else { return Ok(()) };
        write!(f, " probably at {}", SocketAddr::new(node, port))?;
        other.map_or(Ok(()), |other| write!(f, " or {other}"))
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = SocketAddr::new(self.address, self.port);
        write!(f, "{at}/{} ->", format!("{:?}", self.protocol).to_lowercase())?;
        for endpoint in &self.endpoints {
            let at = SocketAddr::new(endpoint.address, endpoint.port);
            write!(f, " {at}{}", if endpoint.terminating { " (terminating)" } else { "" })?;
        }
        let is_chosen = |endpoint: &Endpoint| !endpoint.terminating;
        match self.clear_endpoints {
            0 if self.unknown => f.write_str(" nothing is known of its endpoints: waits")?,
            0 if self.endpoints.is_empty() => f.write_str(" no endpoint: refused")?,
            0 => {}
            _ if !self.endpoints.iter().any(is_chosen) => {
                f.write_str(" none of its endpoints is enrolled: primary network")?;
            }
            clear => write!(f, " and {clear} not enrolled: primary network")?,
        }
        if self.affinity_seconds > 0 {
            write!(f, " (affinity {} s)", self.affinity_seconds)?;
        }
        Ok(())
    }
}

/// The prefixes of a range.
fn prefixes(first: IpAddr, last: IpAddr) -> Vec<IpNet> {
    match (first, last) {
        (IpAddr::V4(first), IpAddr::V4(last)) => Ipv4Subnets::new(first, last, 0).map(IpNet::V4).collect(),
        (IpAddr::V6(first), IpAddr::V6(last)) => Ipv6Subnets::new(first, last, 0).map(IpNet::V6).collect(),
        // Of a malformed table.
        _ => Vec::new(),
    }
}

/// More than a cluster has. A range of a malformed table can take 250 prefixes to list.
const MAX_PREFIXES: usize = 1 << 20;
/// Of all Services together. Ports share lists, so listed one by one they can be many more than the table has.
const MAX_ENDPOINTS: u32 = 1 << 20;
/// Addresses that nobody has (RFC 6666).
const DISCARD: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 0);

fn as_hex<S: Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{number:016x}"))
}

fn from_hex<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    match u64::from_str_radix(&text, 16) {
        Ok(number) if number > 0 => Ok(number),
        _ => {
            Err(serde::de::Error::custom(format!("{text:?} is no incarnation: 1 to 16 hexadecimal digits, not all 0")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster_table::{self, Found, Layout};

    const TEXT: &str = r#"{"version": 7,
        "enrolled": [{"address": "10.42.1.2", "incarnation": "ffffffffffffffff",
            "end": {"node": "192.0.2.1", "port": 61000, "other": 61001}}, {"address": "fd00::2", "incarnation": "2"}],
        "sealed": ["10.42.255.0/24"], "clear": ["10.42.1.4/32", "192.0.2.0/25", "fd00:9::/64"],
        "services": [
            {"address": "0.0.0.0", "port": 30080, "protocol": "tcp", "endpoints": [{"address": "10.42.1.2", "port": 8080}]},
            {"address": "10.96.0.10", "port": 80, "protocol": "tcp", "affinity_seconds": 9,
             "endpoints": [{"address": "10.42.1.2", "port": 8080}, {"address": "fd00::2", "port": 8081, "terminating": true}]},
            {"address": "10.96.0.11", "port": 80, "protocol": "tcp", "clear_endpoints": 3,
             "endpoints": [{"address": "10.42.1.2", "port": 8080}]},
            {"address": "10.96.0.12", "port": 80, "protocol": "tcp", "unknown": true},
            {"address": "10.96.0.53", "port": 53, "protocol": "udp", "clear_endpoints": 2},
            {"address": "fd00:96::1", "port": 1, "protocol": "sctp"}],
        "nodes": ["192.0.2.1", "fd00:2::1"]}"#;

    #[test]
    fn what_was_read_from_json_is_in_the_table_and_is_listed_again() {
        let contents: Contents = serde_json::from_str(TEXT).unwrap();
        let bytes = contents.to_table();
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        let found = table.find("10.96.0.53".parse().unwrap(), 53, 17);
        assert!(matches!(found, Found::Service(cluster_table::Service { ready: 0, clear: 2, .. })), "{found:?}");
        assert_eq!(Contents::of(&table), contents);
        let text = serde_json::to_string(&contents).unwrap();
        assert_eq!(serde_json::from_str::<Contents>(&text).unwrap(), contents);
    }

    #[test]
    fn people_see_where_each_service_leads() {
        let contents: Contents = serde_json::from_str(TEXT).unwrap();
        let text = contents.to_string();
        for line in [
            "version 7",
            "  10.42.1.2 (incarnation ffffffffffffffff) probably at 192.0.2.1:61000 or 61001",
            "  10.42.255.0/24 (all of it)",
            "  192.0.2.0/25",
            "  10.96.0.10:80/tcp -> 10.42.1.2:8080 [fd00::2]:8081 (terminating) (affinity 9 s)",
            "  10.96.0.11:80/tcp -> 10.42.1.2:8080 and 3 not enrolled: primary network",
            "  10.96.0.12:80/tcp -> nothing is known of its endpoints: waits",
            "  10.96.0.53:53/udp -> none of its endpoints is enrolled: primary network",
            "  [fd00:96::1]:1/sctp -> no endpoint: refused",
            "  0.0.0.0:30080/tcp -> 10.42.1.2:8080",
            "  fd00:2::1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn an_incarnation_that_means_nothing_and_unknown_keys_are_refused() {
        for (bad, says) in [
            (TEXT.replace(r#""2""#, r#""0""#), "incarnation"),
            (TEXT.replace(r#""2""#, r#""pod""#), "incarnation"),
            (TEXT.replace("sealed", "seeled"), "seeled"),
            (TEXT.replace("sctp", "dccp"), "dccp"),
        ] {
            let error = serde_json::from_str::<Contents>(&bad).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_malformed_table_is_listed_within_bounds() {
        let bytes = serde_json::from_str::<Contents>(TEXT).unwrap().to_table();
        for at in 0..bytes.len() {
            for value in [0, 0x7f, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] = value;
                let Ok(layout) = Layout::read(&bytes) else { continue };
                let contents = Contents::of(&layout.table(&bytes));
                let listed: usize = contents.services.iter().map(|service| service.endpoints.len()).sum();
                // Each Service lists at most what there is.
                let most = contents.services.len() * bytes.len() / 8;
                assert!(listed <= most && contents.enrolled.len() <= bytes.len(), "byte {at} is {value}");
            }
        }
    }
}

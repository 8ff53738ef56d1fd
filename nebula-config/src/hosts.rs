//! Underlay endpoints from the configuration: literal addresses and names to look up.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::section::Section;
use super::{Invalid, Refused, Value};
use crate::go::netip;

/// `static_host_map`, and how its names are looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticHosts {
    /// Endpoints by overlay address.
    pub entries: BTreeMap<IpAddr, Vec<HostTarget>>,
    /// Time between two look-ups.
    pub cadence: Duration,
    /// Which address families are used.
    pub family: NameFamily,
    /// Longest time that the look-up of one name may take.
    pub lookup_timeout: Duration,
}

/// One `host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostTarget {
    /// Usable at once.
    Address(SocketAddr),
    /// To be looked up.
    Name {
        /// DNS name.
        host: String,
        /// UDP port.
        port: u16,
    },
}

impl std::fmt::Display for HostTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

/// `static_map.network`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NameFamily {
    /// A records.
    #[default]
    Ip4,
    /// AAAA records.
    Ip6,
    /// Both.
    Both,
}

impl NameFamily {
    /// As `static_map.network` has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ip4 => "ip4",
            Self::Ip6 => "ip6",
            Self::Both => "ip",
        }
    }
}

impl StaticHosts {
    /// `networks` are the node's own networks as far as they are known yet.
    pub(super) fn read(section: &Section<'_>, networks: &[ipnet::IpNet]) -> Result<Self, Refused> {
        let entries = read_map(section)?;
        for peer in entries.keys() {
            if !networks.is_empty() && !networks.iter().any(|network| network.contains(peer)) {
                let text = format!("static_host_map key {peer} is not in our networks, it may not be reachable");
                section.warn(format!("static_host_map.{peer}"), text);
            }
        }
        let names = entries.values().flatten().any(|target| matches!(target, HostTarget::Name { .. }));
        Ok(Self {
            entries,
            cadence: strict_duration(section, "static_map.cadence", Duration::from_secs(30), names)?,
            family: match section.string("static_map.network").as_deref() {
                None | Some("ip4") => NameFamily::Ip4,
                Some("ip6") => NameFamily::Ip6,
                Some("ip") => NameFamily::Both,
                Some(other) => return Err(refuse(format!("static_map.network must be ip, ip4 or ip6, got {other:?}"))),
            },
            lookup_timeout: strict_duration(section, "static_map.lookup_timeout", Duration::from_millis(250), names)?,
        })
    }

    /// Whether anything has to be looked up.
    #[must_use]
    pub fn has_names(&self) -> bool {
        self.entries.values().flatten().any(|target| matches!(target, HostTarget::Name { .. }))
    }

    /// Every name, without duplicates.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let names = self.entries.values().flatten().filter_map(|target| match target {
            HostTarget::Name { host, .. } => Some(host.clone()),
            HostTarget::Address(_) => None,
        });
        names.collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }

    /// Endpoints with each name replaced by its `answers`; names without an answer are left out.
    #[must_use]
    pub fn endpoints(&self, answers: &BTreeMap<String, Vec<IpAddr>>) -> BTreeMap<IpAddr, Vec<SocketAddr>> {
        let resolve = |targets: &Vec<HostTarget>| {
            let mut endpoints = Vec::new();
            for target in targets {
                match target {
                    HostTarget::Address(address) => endpoints.push(*address),
                    HostTarget::Name { host, port } => {
                        let found = answers.get(host).into_iter().flatten();
                        endpoints.extend(found.map(|ip| SocketAddr::new(*ip, *port)));
                    }
                }
            }
            endpoints
        };
        self.entries.iter().map(|(peer, targets)| (*peer, resolve(targets))).collect()
    }
}

impl std::str::FromStr for HostTarget {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let (host, port) = text.rsplit_once(':').ok_or_else(|| format!("address {text}: missing port in address"))?;
        let port = port.parse().map_err(|_| format!("address {text}: {port:?} is not a port number"))?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Some((ip, _)) = netip::address(bare) {
            if ip.is_ipv6() && bare == host {
                return Err(
                    format!("address {text}: an IPv6 address must be written in brackets, [{host}]:{port}").into()
                );
            }
            return Ok(Self::Address(SocketAddr::new(ip.to_canonical(), port)));
        }
        Ok(Self::Name { host: bare.to_owned(), port })
    }
}

impl HostTarget {
    /// Warns about the part of `text`, from which this was read, that has no effect. Go Nebula starts with it as well.
    pub(super) fn remark(&self, section: &Section<'_>, path: &str, text: &str) {
        match self {
            Self::Name { host, .. } if !is_name(host) => {
                section.warn(path, format!("{path}: {host:?} is neither an IP address nor a name"));
            }
            Self::Address(_) if text.contains('%') => {
                section.warn(path, format!("{path}: the zone in {text} is ignored"));
            }
            _ => {}
        }
    }
}

/// Whether `host` is a name that a resolver may be asked for.
pub(super) fn is_name(host: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    !host.is_empty() && host.len() <= 253 && host.chars().all(allowed)
}

fn read_map(section: &Section<'_>) -> Result<BTreeMap<IpAddr, Vec<HostTarget>>, Refused> {
    let map = match section.get("static_host_map") {
        None => return Ok(BTreeMap::new()),
        Some(Value::Map(map)) => map,
        Some(other) => {
            section.warn("static_host_map", format!("static_host_map is {}, not a map, and is ignored", other.kind()));
            return Ok(BTreeMap::new());
        }
    };
    let mut entries = BTreeMap::new();
    for (key, value) in map {
        let path = format!("static_host_map.{key}");
        let at = |cause: String| refuse(format!("static_host_map entry {key}: {cause}")).at(&path);
        let (peer, zone) = netip::address(key).ok_or_else(|| at("the key is not an overlay address".to_owned()))?;
        if zone.is_some() {
            section.warn(&path, format!("static_host_map entry {key}: overlay addresses have no zone, it is ignored"));
        }
        let items = match value {
            Value::List(items) => items.as_slice(),
            single => std::slice::from_ref(single),
        };
        let mut targets = Vec::new();
        for text in items.iter().map(Value::printed) {
            if has_unusable_port(&text) {
                section
                    .warn(&path, format!("static_host_map entry {key}: {text} has no valid UDP port and is skipped"));
            } else {
                let target: HostTarget = text.parse().map_err(|cause: Invalid| at(cause.to_string()))?;
                target.remark(section, &path, &text);
                targets.push(target);
            }
        }
        entries.insert(peer, targets);
    }
    Ok(entries)
}

/// Whether the port is a number out of range. Go Nebula takes its lowest 16 bits.
pub(super) fn has_unusable_port(text: &str) -> bool {
    let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<i64>().ok());
    port.is_some_and(|port| u16::try_from(port).is_err())
}

/// A bad duration prevents the start, unlike elsewhere, as in Go. One that is not above zero does so only if there are
/// names to look up: otherwise it is not used.
fn strict_duration(section: &Section<'_>, path: &str, default: Duration, names: bool) -> Result<Duration, Refused> {
    let Some(value) = section.get(path) else { return Ok(default) };
    let above_zero = format!("{path} must be a duration above zero with a unit, such as 30s");
    match value.duration() {
        Some(duration) if !duration.negative && !duration.magnitude.is_zero() => Ok(duration.magnitude),
        Some(_) if !names => {
            section.warn(path, above_zero);
            Ok(default)
        }
        _ => Err(refuse(above_zero).at(path)),
    }
}

fn refuse(cause: String) -> Refused {
    Refused::new("Failed to initialize lighthouse handler", cause)
}

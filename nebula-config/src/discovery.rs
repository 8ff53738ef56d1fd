//! `lighthouse.*` and related keys: how peers are found.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use nebula_core::config::{CalculatedRemotes, Calculation, LocalAllowList, RemoteAllowList};

use super::allow_list::{self, go_type, map, prefix, shown};
use super::hosts::{has_unusable_port, is_name};
use super::section::Section;
use super::{HostTarget, Invalid, Refused, StaticHosts, Value, resolver};
use crate::go::netip;

/// How this node finds peers, and how they find it.
pub(super) struct Discovery {
    pub(super) static_hosts: StaticHosts,
    pub(super) am_lighthouse: bool,
    pub(super) lighthouses: Vec<IpAddr>,
    pub(super) interval: Option<Duration>,
    pub(super) advertise: Vec<HostTarget>,
    pub(super) calculated_remotes: CalculatedRemotes,
    pub(super) remote_allow: RemoteAllowList,
    pub(super) local_allow: LocalAllowList,
    pub(super) dns: Option<Dns>,
}

/// Where a lighthouse answers DNS queries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dns {
    /// Address or name to listen on; empty: every address.
    pub host: String,
    /// Port for UDP and TCP.
    pub port: u16,
    /// Domain below which names and groups are answered too; lower case.
    pub domain: Option<String>,
}

impl Discovery {
    /// `None` if anything was refused. `networks` are the node's own networks as far as they are known yet.
    pub(super) fn read(section: &Section<'_>, networks: &[IpNet]) -> Option<Self> {
        let static_hosts = section.keep("static_host_map", StaticHosts::read(section, networks));
        let am_lighthouse = section.boolean("lighthouse.am_lighthouse", false);
        let known = |host: &IpAddr| {
            static_hosts.as_ref().is_none_or(|hosts| hosts.entries.get(host).is_some_and(|targets| !targets.is_empty()))
        };
        let lighthouses = section.keep("lighthouse.hosts", lighthouses(section, am_lighthouse, &known));
        let advertise = section.keep("lighthouse.advertise_addrs", advertise(section, networks));
        let calculated_remotes = section.keep("lighthouse.calculated_remotes", calculated_remotes(section));
        let remote_allow = section.keep("lighthouse.remote_allow_list", allow_list::remote(section));
        let local_allow = section.keep("lighthouse.local_allow_list", allow_list::local(section));
        let interval = match section.int("lighthouse.interval", 0..=i64::from(u32::MAX)) {
            Some(0) => None,
            seconds => Some(Duration::from_secs(seconds.map_or(10, i64::unsigned_abs))),
        };
        let dns = section.keep("lighthouse.dns", dns(section, am_lighthouse));
        Some(Self {
            static_hosts: static_hosts?,
            am_lighthouse,
            lighthouses: lighthouses?,
            interval,
            advertise: advertise?,
            calculated_remotes: calculated_remotes?,
            remote_allow: remote_allow?,
            local_allow: local_allow?,
            dns: dns?,
        })
    }
}

fn lighthouses(
    section: &Section<'_>,
    am_lighthouse: bool,
    is_known: &dyn Fn(&IpAddr) -> bool,
) -> Result<Vec<IpAddr>, Refused> {
    // An unusable port number is reported where the port is read.
    if am_lighthouse && section.get("listen.port").is_none_or(|port| port.int().unwrap_or(0) == 0) {
        let cause = "lighthouse.am_lighthouse enabled on node but no port number is set in config";
        return Err(refuse(cause).at("lighthouse.am_lighthouse"));
    }
    let mut hosts = Vec::new();
    for (index, text) in section.strings("lighthouse.hosts").iter().enumerate() {
        let at = format!("lighthouse.hosts.{index}");
        let (host, _) = netip::address(text).ok_or_else(|| {
            let number = index + 1;
            refuse(format!("unable to parse lighthouse host entry {number}: {text:?} is not an overlay address"))
                .at(&at)
        })?;
        if !is_known(&host) {
            return Err(refuse(format!("lighthouse {host} does not have a static_host_map entry")).at(&at));
        }
        hosts.push(host);
    }
    if am_lighthouse && !hosts.is_empty() {
        section.warn(
            "lighthouse.hosts",
            "lighthouse.am_lighthouse enabled on node but upstream lighthouses exist in config",
        );
    } else if !am_lighthouse && hosts.is_empty() {
        section.warn(
            "lighthouse.hosts",
            "No lighthouse.hosts configured, this host will only be able to initiate tunnels with static_host_map entries",
        );
    }
    Ok(hosts)
}

fn dns(section: &Section<'_>, am_lighthouse: bool) -> Result<Option<Dns>, Refused> {
    let host = section.string("lighthouse.dns.host").unwrap_or_default();
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(&host).to_owned();
    let port = section.int("lighthouse.dns.port", 0..=65535).and_then(|port| u16::try_from(port).ok()).unwrap_or(53);
    let serve = section.boolean("lighthouse.serve_dns", false);
    if serve && !am_lighthouse {
        let text = "lighthouse.serve_dns: DNS server refusing to run because this host is not a lighthouse.";
        section.warn("lighthouse.serve_dns", text);
    }
    let domain = resolver::domain(section, "lighthouse.dns.domain")?;
    Ok((serve && am_lighthouse).then_some(Dns { host, port, domain }))
}

fn advertise(section: &Section<'_>, networks: &[IpNet]) -> Result<Vec<HostTarget>, Refused> {
    let mut targets = Vec::new();
    for (index, text) in section.strings("lighthouse.advertise_addrs").iter().enumerate() {
        let at = format!("lighthouse.advertise_addrs.{index}");
        if has_unusable_port(text) {
            section.warn(at, format!("lighthouse.advertise_addrs: {text} has no valid UDP port and is skipped"));
            continue;
        }
        let target: HostTarget =
            text.parse().map_err(|cause: Invalid| refuse(format!("lighthouse.advertise_addrs: {cause}")).at(&at))?;
        target.remark(section, &at, text);
        match target {
            HostTarget::Name { host, .. } if !is_name(&host) => {
                let cause =
                    format!("lighthouse.advertise_addrs: address {text}: {host:?} is neither an IP address nor a name");
                return Err(refuse(cause).at(&at));
            }
            HostTarget::Address(address) if networks.iter().any(|network| network.contains(&address.ip())) => {
                let text = format!("lighthouse.advertise_addrs: {address} is inside the overlay and is skipped");
                section.warn(at, text);
            }
            target => targets.push(target),
        }
    }
    Ok(targets)
}

fn refuse(cause: impl Into<String>) -> Refused {
    Refused::new("Failed to initialize lighthouse handler", cause)
}

/// Key of the endpoints that are calculated from overlay addresses.
const CALCULATED_REMOTES: &str = "lighthouse.calculated_remotes";

fn calculated_remotes(section: &Section<'_>) -> Result<CalculatedRemotes, Refused> {
    let mut ranges = Vec::new();
    for (text, entries) in map(section, CALCULATED_REMOTES)?.into_iter().flatten() {
        let range = prefix(CALCULATED_REMOTES, text)?;
        let at = |cause: String| refuse(format!("config '{CALCULATED_REMOTES}.{text}': {cause}"));
        let Value::List(entries) = entries else {
            return Err(at(format!("calculated_remotes entry has invalid type: {}", go_type(entries))));
        };
        let calculations = entries.iter().map(calculation).collect::<Result<Vec<_>, _>>();
        ranges.push((range, calculations.map_err(|cause| at(format!("calculated_remotes entry: {cause}")))?));
    }
    CalculatedRemotes::new(ranges).map_err(|error| {
        refuse(format!("config '{CALCULATED_REMOTES}.{}': calculated_remotes entry: {error}", error.range))
    })
}

fn calculation(entry: &Value) -> Result<Calculation, Invalid> {
    let Value::Map(entry) = entry else { return Err(format!("invalid type: {}", go_type(entry)).into()) };
    let mask = match entry.get("mask") {
        None | Some(Value::Null) => return Err("missing mask: it must be a prefix such as 192.168.0.0/16".into()),
        Some(Value::String(text)) => netip::prefix(text).ok_or_else(|| format!("invalid mask: {text}"))?,
        Some(other) => return Err(format!("invalid mask (type {}): {}", go_type(other), shown(other)).into()),
    };
    let port = match entry.get("port") {
        None | Some(Value::Null) => return Err("missing port: it must be a UDP port".into()),
        Some(value @ (Value::Int(_) | Value::String(_))) => {
            value.int().ok_or_else(|| format!("invalid port: {}", shown(value)))?
        }
        Some(other) => return Err(format!("invalid port (type {}): {}", go_type(other), shown(other)).into()),
    };
    let port = u16::try_from(port).map_err(|_| format!("invalid port: {port}"))?;
    Ok(Calculation { mask, port })
}

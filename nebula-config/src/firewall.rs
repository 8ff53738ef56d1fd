//! Turns `firewall.*` into a policy, with Go Nebula's error messages.

use std::collections::BTreeMap;
use std::time::Duration;

use nebula_core::firewall::{Action, Cidr, Policy, PortRange, Protocol, Rule};

use super::section::Section;
use super::{Invalid, Refused, Value};
use crate::go::netip;

pub(super) fn read(section: &Section<'_>) -> Result<Policy, Refused> {
    let defaults = Policy::default();
    Ok(Policy {
        inbound: rules(section, "firewall.inbound")?,
        outbound: rules(section, "firewall.outbound")?,
        inbound_action: action(section, "firewall.inbound_action"),
        outbound_action: action(section, "firewall.outbound_action"),
        default_local_cidr_any: section.boolean("firewall.default_local_cidr_any", defaults.default_local_cidr_any),
        tcp_timeout: timeout(section, "firewall.conntrack.tcp_timeout", defaults.tcp_timeout)?,
        udp_timeout: timeout(section, "firewall.conntrack.udp_timeout", defaults.udp_timeout)?,
        default_timeout: timeout(section, "firewall.conntrack.default_timeout", defaults.default_timeout)?,
        max_flows: max_flows(section).unwrap_or(defaults.max_flows),
    })
}

fn action(section: &Section<'_>, path: &str) -> Action {
    match section.string(path).as_deref() {
        None | Some("drop") => Action::Drop,
        Some("reject") => Action::Reject,
        Some(other) => {
            section.warn(path, format!("invalid {path}: {other}, defaulting to drop"));
            Action::Drop
        }
    }
}

/// A key of our own, because many files hold Go's `max_connections`, which Go never applies. 0 means the default.
fn max_flows(section: &Section<'_>) -> Option<usize> {
    let flows = section.int(FLOW_LIMIT, 0..=MAX_FLOWS)?;
    usize::try_from(flows).ok().filter(|flows| *flows > 0)
}

pub(super) const FLOW_LIMIT: &str = "firewall.conntrack.max_flows";
// About 1.5 GB.
const MAX_FLOWS: i64 = 1 << 24;

fn timeout(section: &Section<'_>, path: &str, default: Duration) -> Result<Duration, Refused> {
    match section.get(path).and_then(Value::duration) {
        Some(given) if given.negative || given.magnitude.is_zero() => Err(refuse(format!("{path} must be above zero"))),
        _ => Ok(section.duration(path, default)),
    }
}

fn rules(section: &Section<'_>, table: &str) -> Result<Vec<Rule>, Refused> {
    let items = match section.get(table) {
        None => return Ok(Vec::new()),
        Some(Value::List(items)) => items,
        Some(_) => return Err(refuse(format!("{table} failed to parse, should be an array of rules"))),
    };
    let mut rules = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let at = format!("{table}.{index}");
        let (rule, remarks) = rule(item).map_err(|cause| refuse(format!("{table} rule #{index}; {cause}")).at(&at))?;
        remarks.into_iter().for_each(|text| section.warn(&at, format!("{table} rule #{index}; {text}")));
        rules.extend(rule);
    }
    Ok(rules)
}

fn refuse(cause: String) -> Refused {
    Refused::new("Error while loading firewall rules", cause)
}

/// `None` for a rule that cannot match any peer.
fn rule(item: &Value) -> Result<(Option<Rule>, Vec<&'static str>), Invalid> {
    let Value::Map(map) = item else { return Err("could not parse rule".into()) };
    let mut warnings = Vec::new();
    let raw = RawRule::read(map, &mut warnings)?;
    if raw.code.is_some() && raw.port.is_some() {
        return Err("only one of port or code should be provided".into());
    }
    let matches_nothing =
        [&raw.host, &raw.cidr, &raw.local_cidr, &raw.ca_name, &raw.ca_sha].iter().all(|f| f.is_none());
    if matches_nothing && raw.groups.is_empty() {
        return Err("at least one of host, group, cidr, local_cidr, ca_name, or ca_sha must be provided".into());
    }
    let (slot, port_text) = match raw.code.as_deref() {
        Some(code) => ("code", code),
        None => ("port", raw.port.as_deref().unwrap_or_default()),
    };
    let protocol = match raw.proto.as_deref().unwrap_or_default() {
        "any" => Protocol::Any,
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        "icmp" => Protocol::Icmp,
        other => return Err(format!("proto was not understood; `{other}`").into()),
    };
    let port = if protocol == Protocol::Icmp {
        if !port_text.is_empty() && port_text != "any" {
            warnings.push("port or code is ignored for proto icmp, matching any ICMP traffic");
        }
        PortRange::Any
    } else {
        ports(port_text).map_err(|cause| match cause {
            PortError::Text(cause) => format!("{slot} {cause}"),
            PortError::Order => "`start port was lower than end port`".to_owned(),
        })?
    };
    if raw.code.is_some() {
        warnings.push("code is not matched on; it is read as a port");
    }
    let cidr = |text: Option<&str>, name: &str| match text {
        None => Ok(None),
        Some("any") => Ok(Some(Cidr::Any)),
        Some(text) => match netip::prefix(text) {
            Some(prefix) => Ok(Some(Cidr::Prefix(prefix))),
            None => Err(format!("{name} did not parse; {text:?} is not a prefix such as 10.0.0.0/8, nor any")),
        },
    };
    let ca_sha = raw.ca_sha.as_deref().map(str::parse);
    let nobody = matches!(ca_sha, Some(Err(_))) && raw.ca_name.is_none();
    if matches!(ca_sha, Some(Err(_))) {
        warnings.push("ca_sha is not a fingerprint (64 hexadecimal digits) and matches no CA");
    }
    let rule = Rule {
        protocol,
        port,
        cidr: cidr(raw.cidr.as_deref(), "cidr")?,
        local_cidr: cidr(raw.local_cidr.as_deref(), "local_cidr")?,
        host: raw.host,
        groups: raw.groups,
        ca_name: raw.ca_name,
        ca_sha: ca_sha.and_then(Result::ok),
    };
    warnings.extend(sanity(&rule));
    Ok(((!nobody).then_some(rule), warnings))
}

struct RawRule {
    port: Option<String>,
    code: Option<String>,
    proto: Option<String>,
    host: Option<String>,
    groups: Vec<String>,
    cidr: Option<String>,
    local_cidr: Option<String>,
    ca_name: Option<String>,
    ca_sha: Option<String>,
}

impl RawRule {
    fn read(map: &BTreeMap<String, Value>, warnings: &mut Vec<&'static str>) -> Result<Self, Invalid> {
        // Go prints a key without a value as the text `<nil>`, which matches nobody.
        let printed = |value: &Value| Some(value.printed().into_owned()).filter(|text| !text.is_empty());
        let text = |key: &str| map.get(key).and_then(printed);
        if map.values().any(|value| *value == Value::Null) {
            warnings.push("a key without a value matches nobody; leave it out");
        }
        if TEXTS.iter().any(|key| matches!(map.get(*key), Some(Value::List(_) | Value::Map(_)))) {
            warnings.push("a list or a map stands where a single value is expected; it is read as text");
        }
        let group = match map.get("group") {
            Some(Value::List(items)) => match items.as_slice() {
                [] => None,
                [one] => {
                    warnings.push("group was an array with a single value, converting to simple value");
                    printed(one)
                }
                _ => {
                    let cause = "group should contain a single value, an array with more than one entry was provided";
                    return Err(cause.into());
                }
            },
            _ => text("group"),
        };
        let mut groups = match map.get("groups") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::List(items)) => items.iter().map(|item| item.printed().into_owned()).collect(),
            Some(single) => vec![single.printed().into_owned()],
        };
        if let Some(group) = group {
            if !groups.is_empty() {
                return Err("only one of group or groups should be defined, both provided".into());
            }
            groups = vec![group];
        }
        Ok(Self {
            port: text("port"),
            code: text("code"),
            proto: text("proto"),
            host: text("host"),
            groups,
            cidr: text("cidr"),
            local_cidr: text("local_cidr"),
            ca_name: text("ca_name"),
            ca_sha: text("ca_sha"),
        })
    }
}

const TEXTS: &[&str] = &["port", "code", "proto", "host", "cidr", "local_cidr", "ca_name", "ca_sha"];

enum PortError {
    Text(String),
    Order,
}

fn ports(text: &str) -> Result<PortRange, PortError> {
    if text == "any" {
        return Ok(PortRange::Any);
    }
    if text == "fragment" {
        return Ok(PortRange::Fragment);
    }
    let number = |digits: &str, what: &str| {
        let value: i64 = digits.parse().map_err(|_| PortError::Text(format!("{what}was not a number; `{digits}`")))?;
        u16::try_from(value).map_err(|_| PortError::Text(format!("out of range [0,65535]; `{digits}`")))
    };
    let Some((first, last)) = text.split_once('-') else {
        return Ok(match number(text, "")? {
            0 => PortRange::Any,
            port => PortRange::Range(port, port),
        });
    };
    if first.trim().is_empty() || last.trim().is_empty() {
        return Err(PortError::Text(format!("appears to be a range but could not be parsed; `{text}`")));
    }
    let (first, last) = (number(first.trim(), "beginning range ")?, number(last.trim(), "ending range ")?);
    match first {
        0 => Ok(PortRange::Any),
        _ if first > last => Err(PortError::Order),
        _ => Ok(PortRange::Range(first, last)),
    }
}

/// Warns about combinations that load but rarely mean what they seem to say.
fn sanity(rule: &Rule) -> Option<&'static str> {
    let any_group = rule.groups.iter().any(|group| group == "any");
    let any_host = rule.host.as_deref() == Some("any");
    if any_group && rule.groups.len() > 1 {
        Some("groups spec [any] will match any group; the other groups have no effect")
    } else if any_host && (!rule.groups.is_empty() || rule.cidr.is_some()) {
        Some("rule will match any host; groups and cidr have no effect")
    } else if any_group && (rule.host.is_some() || rule.cidr.is_some()) {
        Some("rule will match any group; host and cidr have no effect")
    } else {
        None
    }
}

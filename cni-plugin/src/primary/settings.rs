//! The keys of an entry that makes pods' interfaces itself (`"primary": true`).

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::Value;

use crate::primary::range::Range;
use crate::reply::{Error, code};
use crate::request::NetworkConfig;
use crate::request::checked::{boolean, prefixes, refused};

/// What the operator wants of the primary network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Primary {
    /// Where addresses come from.
    pub ipam: Ipam,
    /// Whether pods reach what is no pod with an address of the node, and what sees their own addresses all the same.
    pub masquerade: Option<Vec<IpNet>>,
    /// MTU of pods' interfaces; `None` for that of the node.
    pub mtu: Option<u32>,
    /// Whether pods can have tunnels, too.
    pub has_tunnels: bool,
}

/// Where addresses come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ipam {
    /// From these ranges: one address of each family that is there.
    Own {
        /// Never empty.
        ranges: Vec<Range>,
        /// What no pod gets.
        reserved: Vec<IpNet>,
    },
    /// From the plugin of this name.
    Delegated(String),
}

impl Primary {
    /// Reads the keys; `None` if the entry comes after another plugin.
    ///
    /// # Errors
    /// Code 7, naming key and value.
    pub fn read(config: &NetworkConfig) -> Result<Option<Self>, Error> {
        if !is_primary(config)? {
            let stray = KEYS.iter().find(|key| config.keys().any(|found| found == **key));
            return match stray.filter(|key| **key != PRIMARY) {
                Some(key) => {
                    let value = config.value(key)?.unwrap_or_default();
                    Err(refused(key, &value, "nothing here: it needs \"primary\": true"))
                }
                None => Ok(None),
            };
        }
        let list = |key| config.value(key)?.map_or(Ok(Vec::new()), |value| prefixes(key, &value));
        let subnets = list("subnets")?;
        let ipam = match delegate(config)? {
            Some(_) if !subnets.is_empty() => {
                let msg = "network configuration: \"subnets\" and \"ipam\" give addresses both";
                return Err(Error::new(code::CONFIG, msg).details("leave one of them out"));
            }
            Some(plugin) => Ipam::Delegated(plugin),
            None if subnets.is_empty() => {
                let msg = "network configuration: \"primary\" needs addresses for pods, and \"subnets\" has none";
                return Err(Error::new(code::CONFIG, msg).details(
                    "list them with \"subnets\": [\"10.22.0.0/24\"], or name another plugin for that with \"ipam\"",
                ));
            }
            None => Ipam::Own { ranges: ranges(&subnets)?, reserved: reserved(config)? },
        };
        let masquerade = boolean(config, "ipMasq", true)?.then_some(list("noMasquerade")?);
        let has_tunnels = config.value("ca")?.is_some();
        if !has_tunnels && let Some(enrol) = config.value("enrol")? {
            return Err(refused("enrol", &enrol, "the key \"ca\" as well: certificates come from there"));
        }
        Ok(Some(Self { ipam, masquerade, mtu: mtu(config)?, has_tunnels }))
    }
}

/// Whether the entry says so, regardless of errors in other keys. DEL and GC need nothing else.
///
/// # Errors
/// Code 7 if the key is no boolean.
pub fn is_primary(config: &NetworkConfig) -> Result<bool, Error> {
    boolean(config, PRIMARY, false)
}

/// The plugin that manages addresses, if the entry names one (CNI specification, section 4).
///
/// # Errors
/// Code 7 if there is no name that a file of CNI_PATH could have.
pub fn delegate(config: &NetworkConfig) -> Result<Option<String>, Error> {
    let Some(ipam) = config.value("ipam")?.filter(|ipam| ipam.as_object().is_none_or(|keys| !keys.is_empty())) else {
        return Ok(None);
    };
    let plugin = ipam.get("type").and_then(Value::as_str).filter(|name| {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        (1..=64).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with('.')
    });
    let plugin = plugin.ok_or_else(|| refused("ipam", &ipam, "an object with \"type\", the name of a plugin"))?;
    Ok(Some(plugin.to_owned()))
}

fn ranges(subnets: &[IpNet]) -> Result<Vec<Range>, Error> {
    let meet = |one: &IpNet, other: &IpNet| one.contains(other) || other.contains(one);
    for (place, subnet) in subnets.iter().enumerate() {
        if let Some(other) = subnets.iter().take(place).find(|other| meet(other, subnet)) {
            return Err(refused(
                "subnets",
                &subnet.to_string().into(),
                &format!("no part of {other}, which is listed, too"),
            ));
        }
        let address = subnet.addr();
        if address.is_loopback() || address.is_multicast() || is_link_local(&address) {
            return Err(refused("subnets", &subnet.to_string().into(), "addresses that are routed"));
        }
    }
    Ok(subnets.iter().copied().map(Range::new).collect())
}

fn is_link_local(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Prefixes, or single addresses.
fn reserved(config: &NetworkConfig) -> Result<Vec<IpNet>, Error> {
    let Some(mut value) = config.value("reserved")? else { return Ok(Vec::new()) };
    for item in value.as_array_mut().into_iter().flatten() {
        if let Some(address) = item.as_str().and_then(|text| text.parse::<IpAddr>().ok()) {
            *item = IpNet::from(address).to_string().into();
        }
    }
    prefixes("reserved", &value)
}

fn mtu(config: &NetworkConfig) -> Result<Option<u32>, Error> {
    let Some(value) = config.value("mtu")? else { return Ok(None) };
    // IPv6 needs the lowest (RFC 8200, section 5); a link of Ethernet carries no more than the highest.
    let mtu = value.as_u64().and_then(|mtu| u32::try_from(mtu).ok()).filter(|mtu| (1280..=65_535).contains(mtu));
    mtu.map(Some).ok_or_else(|| refused("mtu", &value, "a whole number from 1280 to 65535"))
}

/// Keys that only an entry with `primary` may have.
pub const KEYS: [&str; 5] = [PRIMARY, "subnets", "reserved", "noMasquerade", "mtu"];
const PRIMARY: &str = "primary";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::settings::tests::config;

    #[test]
    fn subnets_are_all_that_is_needed() {
        let read = |entry: Value| Primary::read(&config(&entry)).unwrap();
        assert_eq!(read(json!({})), None);
        assert_eq!(read(json!({"primary": false, "ipam": {}, "ipMasq": true})), None);
        let subnets = ["10.22.0.0/24", "fd22::/64"].map(|text| text.parse::<IpNet>().unwrap());
        let plain = read(json!({"primary": true, "subnets": subnets})).unwrap();
        let expected = Primary {
            ipam: Ipam::Own { ranges: subnets.map(Range::new).to_vec(), reserved: Vec::new() },
            masquerade: Some(Vec::new()),
            mtu: None,
            has_tunnels: false,
        };
        assert_eq!(plain, expected);
        let all = json!({"primary": true, "subnets": ["10.22.0.0/24"], "reserved": ["10.22.0.1", "10.22.0.16/28"], "mtu": 1400,
            "ipMasq": true, "noMasquerade": ["10.0.0.0/8"], "ca": {}, "enrol": {}});
        let all = read(all).unwrap();
        let reserved = ["10.22.0.1/32", "10.22.0.16/28"].map(|text| text.parse().unwrap()).to_vec();
        assert_eq!(all.ipam, Ipam::Own { ranges: vec![Range::new(subnets[0])], reserved });
        assert_eq!((all.mtu, all.has_tunnels), (Some(1400), true));
        assert_eq!(all.masquerade, Some(vec!["10.0.0.0/8".parse().unwrap()]));
        let delegated = read(json!({"primary": true, "ipam": {"type": "host-local"}, "ipMasq": false})).unwrap();
        assert_eq!((delegated.ipam, delegated.masquerade), (Ipam::Delegated("host-local".into()), None));
    }

    #[test]
    fn each_wrong_value_is_refused_by_key() {
        for (key, value) in [
            ("primary", json!("yes")),
            ("subnets", json!("10.22.0.0/24")),
            ("subnets", json!(["10.22.0.7/24"])),
            ("subnets", json!(["10.22.0.0/24", "10.22.0.128/25"])),
            ("subnets", json!(["127.0.0.0/8"])),
            ("subnets", json!(["224.0.0.0/8"])),
            ("subnets", json!(["fe80::/64"])),
            ("subnets", json!([])),
            ("reserved", json!(["10.22.0"])),
            ("noMasquerade", json!([7])),
            ("ipMasq", json!("yes")),
            ("mtu", json!(1279)),
            ("mtu", json!(65_536)),
            ("ipam", json!({"type": "../host-local"})),
            ("ipam", json!({"type": ""})),
            ("ipam", json!({"subnet": "10.22.0.0/24"})),
            ("ipam", json!({"type": "host-local"})),
            ("enrol", json!({"namespaces": ["shop"]})),
        ] {
            let mut entry = json!({"primary": true, "subnets": ["10.22.0.0/24"]});
            entry[key] = value.clone();
            let error = Primary::read(&config(&entry)).expect_err(&format!("{key}: {value}"));
            assert!(error.code == 7 && error.msg.contains(key), "{error}");
        }
    }

    #[test]
    fn its_keys_mean_nothing_behind_another_plugin() {
        for key in KEYS.iter().filter(|key| **key != PRIMARY) {
            let error = Primary::read(&config(&json!({*key: 7}))).unwrap_err();
            assert!(error.msg.contains(key) && error.msg.contains("\"primary\": true"), "{error}");
        }
    }
}

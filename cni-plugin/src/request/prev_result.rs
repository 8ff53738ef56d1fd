//! The result of the previous plugin in the chain: read for the pod's address, and passed on byte for byte.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::Value;
use serde_json::value::RawValue;

use crate::reply::{Error, code};

/// A CNI result. The original text is kept, so that fields of newer specifications survive.
#[derive(Debug, Clone)]
pub struct PrevResult {
    raw: Box<RawValue>,
    value: Value,
}

impl PrevResult {
    /// Decodes a result.
    ///
    /// # Errors
    /// Code 6 if it is not a JSON object.
    pub fn parse(raw: &RawValue) -> Result<Self, Error> {
        let wrong = |why: &str| Error::new(code::CONTENT, format!("prevResult {why}"));
        let value: Value = serde_json::from_str(raw.get()).map_err(|e| wrong(&format!("cannot be decoded: {e}")))?;
        if !value.is_object() {
            return Err(wrong("must be a JSON object"));
        }
        Ok(Self { raw: raw.to_owned(), value })
    }

    /// The result for the runtime: the same bytes, with `cniVersion` inserted if there is none. A `cniVersion` that is
    /// empty or not a string is replaced, and the whole result is encoded again.
    #[must_use]
    pub fn as_output(&self, version: &str) -> String {
        let raw = self.raw.get();
        if self.value.get("cniVersion").and_then(Value::as_str).is_some_and(|v| !v.is_empty()) {
            return raw.to_owned();
        }
        let others = self.value.as_object().is_some_and(|o| o.keys().any(|k| k != "cniVersion"));
        if self.value.get("cniVersion").is_none() {
            let rest = raw.strip_prefix('{').unwrap_or(raw);
            return format!(r#"{{"cniVersion":"{version}"{}{rest}"#, if others { "," } else { "" });
        }
        let mut value = self.value.clone();
        value["cniVersion"] = Value::from(version);
        value.to_string()
    }

    /// The result with `address` in place of the pod's address of the same family; all other bytes are unchanged.
    ///
    /// # Errors
    /// Code 7 if the pod has no such address, code 6 if an entry that is read before it is found is malformed.
    pub fn renumbered(&self, ifname: &str, address: IpAddr, version: &str) -> Result<String, Error> {
        let decode = |e: serde_json::Error| Error::new(code::CONTENT, format!("prevResult cannot be decoded: {e}"));
        let text = self.as_output(version);
        let fields: BTreeMap<String, &RawValue> = serde_json::from_str(&text).map_err(decode)?;
        let entries: Vec<BTreeMap<String, &RawValue>> =
            fields.get("ips").map_or(Ok(Vec::new()), |ips| serde_json::from_str(ips.get())).map_err(decode)?;
        for (entry, ip) in entries.iter().zip(self.list("ips")?) {
            if !self.is_of(ip, ifname)? || self::address(ip)?.is_ipv4() != address.is_ipv4() {
                continue;
            }
            let Some(old) = entry.get("address") else { continue };
            return Ok(with_address(&text, old, address));
        }
        let old_form = OLD_FORM[usize::from(address.is_ipv6())];
        if let Some(ip) = fields.get(old_form) {
            let entry: BTreeMap<String, &RawValue> = serde_json::from_str(ip.get()).map_err(decode)?;
            if let Some(old) = entry.get("ip") {
                return Ok(with_address(&text, old, address));
            }
        }
        Err(Error::new(
            code::CONFIG,
            format!("prevResult holds no address of interface {ifname:?} to be replaced by {address}"),
        ))
    }

    /// The first address of the container's interface `ifname`.
    ///
    /// # Errors
    /// Code 7 if there is none, code 6 if an entry that is read before it is found is malformed.
    pub fn pod_address(&self, ifname: &str) -> Result<IpAddr, Error> {
        for ip in self.list("ips")? {
            if self.is_of(ip, ifname)? {
                return address(ip);
            }
        }
        // Before 0.3.0 a result describes a single interface with one address per family.
        if let Some(ip) = OLD_FORM.iter().find_map(|key| self.value.get(*key)) {
            return parse_address(ip.get("ip"));
        }
        let msg = format!("prevResult holds no address of interface {ifname:?}");
        Err(Error::new(code::CONFIG, msg)
            .details("nebula-cni-plugin must be chained after the plugin that gives the pod its interface and address"))
    }

    /// The first address of the container's interface `ifname` that is of the other family than `first`, and no
    /// link-local one.
    #[must_use]
    pub fn other_address(&self, ifname: &str, first: IpAddr) -> Option<IpAddr> {
        let is_link_local = |address: &IpAddr| match address {
            IpAddr::V4(address) => address.is_link_local(),
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let mut others = self.addresses(ifname).into_iter().filter(|other| other.is_ipv4() != first.is_ipv4());
        others.find(|other| !is_link_local(other) && !other.is_unspecified())
    }

    /// All addresses of the container's interface `ifname` that can be parsed.
    #[must_use]
    pub fn addresses(&self, ifname: &str) -> Vec<IpAddr> {
        let of_interface = |ip: &&Value| self.is_of(ip, ifname).is_ok_and(|is_its| is_its);
        let listed = self.list("ips").unwrap_or_default().iter().filter(of_interface).map(|ip| ip.get("address"));
        let old_form = OLD_FORM.iter().filter_map(|key| Some(self.value.get(*key)?.get("ip")));
        listed.chain(old_form).filter_map(|value| parse_address(value).ok()).collect()
    }

    /// The DNS servers that the previous plugin reported.
    #[must_use]
    pub fn name_servers(&self) -> Vec<IpAddr> {
        let listed = self.value.get("dns").and_then(|dns| dns.get("nameservers")).and_then(Value::as_array);
        listed.into_iter().flatten().filter_map(|server| reachable(server.as_str()?)).collect()
    }

    /// The gateways of the addresses and routes.
    #[must_use]
    pub fn gateways(&self) -> Vec<IpAddr> {
        let old = OLD_FORM.iter().filter_map(|key| self.value.get(*key));
        let old_routes = old.clone().filter_map(|ip| ip.get("routes")?.as_array()).flatten();
        let routes =
            self.list("routes").unwrap_or_default().iter().chain(old_routes).filter_map(|route| route.get("gw"));
        let ips = self.list("ips").unwrap_or_default().iter().chain(old).filter_map(|ip| ip.get("gateway"));
        ips.chain(routes).filter_map(|gateway| gateway.as_str()?.parse().ok()).collect()
    }

    /// Whether the container already has an interface called `name`.
    #[must_use]
    pub fn has_container_interface(&self, name: &str) -> bool {
        self.list("interfaces").is_ok_and(|interfaces| {
            interfaces.iter().any(|i| is_in_container(i) && i.get("name").and_then(Value::as_str) == Some(name))
        })
    }

    /// Whether an entry of `ips` belongs to the container's interface `ifname`.
    fn is_of(&self, ip: &Value, ifname: &str) -> Result<bool, Error> {
        // An entry without an index belongs to the interface named by CNI_IFNAME.
        let Some(index) = ip.get("interface").filter(|index| !index.is_null()) else { return Ok(true) };
        let interfaces = self.list("interfaces")?;
        let interface = index.as_u64().and_then(|i| interfaces.get(usize::try_from(i).ok()?)).ok_or_else(|| {
            Error::new(code::CONTENT, format!("prevResult: ips[].interface {index} names no interface"))
        })?;
        Ok(is_in_container(interface) && interface.get("name").and_then(Value::as_str) == Some(ifname))
    }

    fn list(&self, key: &str) -> Result<&[Value], Error> {
        match self.value.get(key) {
            None | Some(Value::Null) => Ok(&[]),
            Some(Value::Array(list)) => Ok(list),
            Some(_) => Err(Error::new(code::CONTENT, format!("prevResult: {key} must be a list"))),
        }
    }
}

/// Parses an address, unless it is loopback or unspecified and so means something else in a pod than on its node.
pub(crate) fn reachable(text: &str) -> Option<IpAddr> {
    let address: IpAddr = text.parse().ok()?;
    let is_local = address.is_loopback() || address.is_unspecified();
    (!is_local).then_some(address)
}

const OLD_FORM: [&str; 2] = ["ip4", "ip6"];

// Interfaces on the host have no sandbox.
fn is_in_container(interface: &Value) -> bool {
    interface.get("sandbox").and_then(Value::as_str).is_some_and(|s| !s.is_empty())
}

/// Replaces `old`, which must be a slice of `text`, with `address`. Raw values borrow from the text they were parsed
/// from.
fn with_address(text: &str, old: &RawValue, address: IpAddr) -> String {
    let start = old.get().as_ptr() as usize - text.as_ptr() as usize;
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let (before, after) = (&text[..start], &text[start + old.get().len()..]);
    format!("{before}\"{address}/{bits}\"{after}")
}

fn address(ip: &Value) -> Result<IpAddr, Error> {
    parse_address(ip.get("address"))
}

fn parse_address(value: Option<&Value>) -> Result<IpAddr, Error> {
    let text = value.and_then(Value::as_str).unwrap_or_default();
    let wrong = || Error::new(code::CONTENT, format!("prevResult: address {text:?} is not ADDRESS/PREFIX"));
    let (address, prefix) = text.split_once('/').ok_or_else(wrong)?;
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    prefix.parse::<u8>().ok().filter(|p| *p <= longest).ok_or_else(wrong)?;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> PrevResult {
        PrevResult::parse(&serde_json::from_str::<Box<RawValue>>(text).unwrap()).unwrap()
    }

    #[test]
    fn the_output_is_the_input_byte_for_byte() {
        let text = r#"{ "zeta":1.50,"cniVersion" : "1.0.0", "ips":[ ],"x":{"b":1,"a":"\u00e9"}}"#;
        assert_eq!(parse(text).as_output("1.0.0"), text);
    }

    #[test]
    fn a_missing_version_is_filled_in_and_nothing_else() {
        assert_eq!(parse(r#"{ "b":1, "a":2}"#).as_output("0.4.0"), r#"{"cniVersion":"0.4.0", "b":1, "a":2}"#);
        assert_eq!(parse("{}").as_output("0.4.0"), r#"{"cniVersion":"0.4.0"}"#);
        assert_eq!(parse(r#"{"cniVersion":"","b":1}"#).as_output("0.4.0"), r#"{"cniVersion":"0.4.0","b":1}"#);
    }

    #[test]
    fn renumbering_changes_the_address_and_no_other_byte() {
        let text = |one: &str, two: &str| {
            format!(
                r#"{{ "zeta":1.50,"ips":[ {{"interface":0,"address":"10.0.0.9/24"}},{{"gateway":"10.4.0.1", "address" : "{one}","x":[ 1]}},
                {{"address":"fd00::7\/64"}},{{"address":"{two}"}}],"cniVersion":"1.0.0","interfaces":[{{"name":"eth0"}}]}}"#
            )
        };
        let prev = parse(&text("10.4.0.7/24", "10.4.0.8/24"));
        let v4 = prev.renumbered("eth0", "10.42.0.7".parse().unwrap(), "1.0.0").unwrap();
        assert_eq!(v4, text("10.42.0.7/32", "10.4.0.8/24"));
        let v6 = prev.renumbered("eth0", "fd42::7".parse().unwrap(), "1.0.0").unwrap();
        assert_eq!(v6, text("10.4.0.7/24", "10.4.0.8/24").replace(r"fd00::7\/64", "fd42::7/128"));
        let only_v4 = parse(r#"{"ips":[{"address":"10.4.0.7/24"}]}"#);
        assert_eq!(only_v4.renumbered("eth0", "fd42::7".parse().unwrap(), "1.0.0").unwrap_err().code, 7);
        let filled = only_v4.renumbered("eth0", "10.42.0.7".parse().unwrap(), "0.4.0").unwrap();
        assert_eq!(filled, r#"{"cniVersion":"0.4.0","ips":[{"address":"10.42.0.7/32"}]}"#);
    }

    #[test]
    fn the_pod_address_is_the_first_one_inside_the_container() {
        let prev = parse(
            r#"{"interfaces":[{"name":"eth0"},{"name":"net1","sandbox":"/n"},{"name":"eth0","sandbox":"/n"}],
                "ips":[{"interface":0,"address":"10.0.0.1/24"},{"interface":1,"address":"10.0.0.2/24"},
                       {"interface":2,"address":"fd00::3/64"},{"interface":2,"address":"10.0.0.4/24"}]}"#,
        );
        assert_eq!(prev.pod_address("eth0").unwrap(), "fd00::3".parse::<IpAddr>().unwrap());
        assert_eq!(prev.pod_address("net1").unwrap(), "10.0.0.2".parse::<IpAddr>().unwrap());
        assert_eq!(prev.pod_address("eth9").unwrap_err().code, 7);
        assert_eq!(prev.addresses("eth0"), ["fd00::3", "10.0.0.4"].map(|text| text.parse::<IpAddr>().unwrap()));
        let other = |first: &str| prev.other_address("eth0", first.parse().unwrap());
        assert_eq!((other("fd00::3"), other("10.0.0.4")), ("10.0.0.4".parse().ok(), "fd00::3".parse().ok()));
        let link_local = parse(r#"{"ips":[{"address":"10.4.0.7/24"},{"address":"fe80::7/64"}]}"#);
        assert_eq!(link_local.other_address("eth0", "10.4.0.7".parse().unwrap()), None);
        assert!(prev.has_container_interface("net1") && !prev.has_container_interface("nebula0"));
    }

    #[test]
    fn an_address_without_an_interface_belongs_to_the_one_asked_for() {
        let prev = parse(r#"{"ips":[{"version":"4","address":"10.4.0.7/24"}]}"#);
        assert_eq!(prev.pod_address("eth0").unwrap(), "10.4.0.7".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn results_of_the_old_form_have_one_address_of_each_family() {
        let text = r#"{"cniVersion":"0.2.0","ip6":{"ip":"fd00:4::7/64"},"ip4":{"ip":"10.4.0.7/24","gateway":"10.4.0.1"},"dns":{}}"#;
        let prev = parse(text);
        assert_eq!(prev.pod_address("eth0").unwrap(), "10.4.0.7".parse::<IpAddr>().unwrap());
        assert_eq!(prev.as_output("0.2.0"), text);
        let v4 = prev.renumbered("eth0", "10.42.0.7".parse().unwrap(), "0.2.0").unwrap();
        assert_eq!(v4, text.replace("10.4.0.7/24", "10.42.0.7/32"));
        let v6 = prev.renumbered("eth0", "fd42::7".parse().unwrap(), "0.2.0").unwrap();
        assert_eq!(v6, text.replace("fd00:4::7/64", "fd42::7/128"));
        let both = ["10.4.0.7", "fd00:4::7"].map(|text| text.parse::<IpAddr>().unwrap());
        assert_eq!(prev.addresses("eth0"), both);
        assert_eq!(parse(r#"{"ip4":{"ip":7}}"#).pod_address("eth0").unwrap_err().code, 6);
    }

    #[test]
    fn gateways_and_name_servers_are_found_in_old_and_new_forms() {
        let addresses = |found: Vec<IpAddr>| found.iter().map(ToString::to_string).collect::<Vec<_>>();
        let new = parse(
            r#"{"ips":[{"address":"10.0.0.2/24","gateway":"10.0.0.1"}],"routes":[{"dst":"::/0","gw":"fe80::1"},{"dst":"x"}],
                "dns":{"nameservers":["10.0.0.53",7,"127.0.0.1"]}}"#,
        );
        assert_eq!(addresses(new.gateways()), ["10.0.0.1", "fe80::1"]);
        assert_eq!(addresses(new.name_servers()), ["10.0.0.53"]);
        let old = parse(
            r#"{"ip4":{"ip":"10.0.0.2/24","gateway":"10.0.0.1","routes":[{"dst":"0.0.0.0/0","gw":"10.0.0.3"}]}}"#,
        );
        assert_eq!(addresses(old.gateways()), ["10.0.0.1", "10.0.0.3"]);
        assert!(addresses(old.name_servers()).is_empty());
    }

    #[test]
    fn malformed_results_are_errors() {
        for text in [
            r#"{"ips":7}"#,
            r#"{"ips":[{"address":"10.0.0.1"}]}"#,
            r#"{"ips":[{"address":"10.0.0.1/33"}]}"#,
            r#"{"ips":[{"address":7}]}"#,
            r#"{"ips":[{"interface":1,"address":"10.0.0.1/24"}],"interfaces":[{"name":"eth0","sandbox":"/n"}]}"#,
            r#"{"ips":[{"interface":-1,"address":"10.0.0.1/24"}]}"#,
        ] {
            assert_eq!(parse(text).pod_address("eth0").unwrap_err().code, 6, "{text}");
            assert!(parse(text).addresses("eth0").is_empty(), "{text}");
        }
    }
}

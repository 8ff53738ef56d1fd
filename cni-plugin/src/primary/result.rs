//! The result of ADD, in the form of each version of the CNI specification.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::link::pod_link::Mac;
use crate::link::veth::{GATEWAYS, Veth, everything, has_family};
use crate::reply::speaks;

/// Describes the interface as plugins and runtimes of this version expect it. `dns` is passed on.
#[must_use]
pub(super) fn of(veth: &Veth, netns: &str, addresses: &[IpAddr], mtu: u32, dns: Option<Value>, version: &str) -> Value {
    let gateways = || GATEWAYS.into_iter().filter(|gateway| has_family(addresses, *gateway));
    let route = |gateway: IpAddr| json!({"dst": everything(gateway), "gw": gateway});
    let mut result = Map::from_iter([("cniVersion".to_owned(), version.into())]);
    result.insert("dns".to_owned(), dns.unwrap_or_else(|| json!({})));
    if !speaks(version, "0.3.0") {
        for (key, is_v4) in [("ip4", true), ("ip6", false)] {
            let Some(address) = addresses.iter().find(|address| address.is_ipv4() == is_v4) else { continue };
            let routes: Vec<Value> = gateways().filter(|gateway| gateway.is_ipv4() == is_v4).map(route).collect();
            result.insert(key.to_owned(), json!({"ip": IpNet::from(*address), "routes": routes}));
        }
        return result.into();
    }
    let mut ends = [
        json!({"name": veth.node_end, "mac": text(veth.node_mac)}),
        json!({"name": veth.pod_end, "mac": text(veth.pod_mac), "sandbox": netns}),
    ];
    if speaks(version, "1.1.0") {
        ends.iter_mut().for_each(|end| end["mtu"] = mtu.into());
    }
    let ip = |address: &IpAddr| {
        let mut ip = json!({"address": IpNet::from(*address), "interface": 1});
        if !speaks(version, "1.0.0") {
            ip["version"] = if address.is_ipv4() { "4" } else { "6" }.into();
        }
        ip
    };
    result.insert("interfaces".to_owned(), ends.to_vec().into());
    result.insert("ips".to_owned(), addresses.iter().map(ip).collect());
    result.insert("routes".to_owned(), gateways().map(route).collect());
    result.into()
}

fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::SUPPORTED;
    use crate::request::Key;
    use crate::request::prev_result::PrevResult;

    fn veth() -> Veth {
        Veth::new(&Key { network: "net".into(), container_id: "c".into(), ifname: "eth0".into() })
    }

    #[test]
    fn chained_plugins_find_addresses_and_gateways_in_every_version() {
        let addresses = ["10.22.0.5", "fd22::5"].map(|text| text.parse::<IpAddr>().unwrap());
        for version in SUPPORTED {
            let result = of(&veth(), "/run/netns/x", &addresses, 1500, None, version);
            let read = PrevResult::parse(&serde_json::value::to_raw_value(&result).unwrap()).unwrap();
            assert_eq!(read.addresses("eth0"), addresses, "{version}");
            assert_eq!(read.pod_address("eth0").unwrap(), addresses[0], "{version}");
            assert_eq!(read.gateways(), GATEWAYS, "{version}");
            assert_eq!(read.has_container_interface("eth0"), speaks(version, "0.3.0"), "{version}");
            assert_eq!(result["ips"][0].get("version").is_some(), ["0.3.0", "0.3.1", "0.4.0"].contains(&version));
        }
    }

    #[test]
    fn one_family_has_one_address_and_one_route() {
        let address = ["fd22::5".parse::<IpAddr>().unwrap()];
        let dns = json!({"nameservers": ["10.96.0.10"]});
        let result = of(&veth(), "/run/netns/x", &address, 9000, Some(dns.clone()), "1.1.0");
        assert_eq!(result["routes"], json!([{"dst": "::/0", "gw": "fe80::1"}]));
        assert_eq!(result["ips"], json!([{"address": "fd22::5/128", "interface": 1}]));
        assert_eq!((&result["interfaces"][1]["mtu"], &result["dns"]), (&json!(9000), &dns));
        let old = of(&veth(), "/run/netns/x", &address, 9000, None, "0.2.0");
        assert_eq!(
            old,
            json!({"cniVersion": "0.2.0", "dns": {}, "ip6": {"ip": "fd22::5/128", "routes": [{"dst": "::/0", "gw": "fe80::1"}]}})
        );
    }
}

//! Addresses of nodes: they are no pods, whatever range they are in.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;

use super::facts::first_host;

/// All addresses by which a node speaks or is spoken to: those that it reports, and those that its network plugin gives it
/// in the range of its pods, from which probes and forwarded traffic come.
#[must_use]
pub fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let status = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let reported = status.filter_map(|entry| entry.address.parse().ok());
    let spec = node.spec.iter().flat_map(|spec| spec.pod_cidrs.iter().flatten().chain(&spec.pod_cidr));
    let ranges = spec.filter_map(|range| range.parse::<IpNet>().ok());
    // flannel's device has the first of these, bridges of most plugins the second.
    let own = ranges.flat_map(|range| [Some(range.network()), first_host(range)]).flatten();
    let annotations = node.metadata.annotations.iter().flatten();
    let noted = annotations.filter(|(key, _)| ANNOTATIONS.contains(&key.as_str())).filter_map(|(_, value)| {
        let address = value.split_once('/').map_or(value.as_str(), |(address, _)| address);
        address.parse().ok()
    });
    let is_usable = |address: &IpAddr| !address.is_unspecified() && !address.is_loopback() && !address.is_multicast();
    reported.chain(own).chain(noted).filter(is_usable).collect()
}

/// Where network plugins note the addresses of their devices, some with a prefix length.
const ANNOTATIONS: [&str; 13] = [
    "flannel.alpha.coreos.com/public-ip",
    "flannel.alpha.coreos.com/public-ipv6",
    "projectcalico.org/IPv4Address",
    "projectcalico.org/IPv6Address",
    "projectcalico.org/IPv4IPIPTunnelAddr",
    "projectcalico.org/IPv4VXLANTunnelAddr",
    "projectcalico.org/IPv6VXLANTunnelAddr",
    "projectcalico.org/IPv4WireguardInterfaceAddr",
    "projectcalico.org/IPv6WireguardInterfaceAddr",
    "network.cilium.io/ipv4-cilium-host",
    "network.cilium.io/ipv6-cilium-host",
    "network.cilium.io/ipv4-health-ip",
    "network.cilium.io/ipv6-health-ip",
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_has_what_it_reports_what_its_range_begins_with_and_what_its_network_notes() {
        let node = json!({
            "metadata": {"annotations": {
                "projectcalico.org/IPv4Address": "192.0.2.1/24", "projectcalico.org/IPv4VXLANTunnelAddr": "10.244.7.64",
                "flannel.alpha.coreos.com/public-ip": "nonsense", "other": "192.0.2.99",
            }},
            "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:244:0:1::/64"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": "n1"},
                {"type": "ExternalIP", "address": "198.51.100.1"}]},
        });
        let found = addresses(&serde_json::from_value(node).unwrap());
        let shown: Vec<String> = found.iter().map(ToString::to_string).collect();
        let mut expected =
            ["10.244.1.0", "10.244.1.1", "10.244.7.64", "192.0.2.1", "198.51.100.1"].map(str::to_owned).to_vec();
        expected.extend(["fd00:244:0:1::", "fd00:244:0:1::1"].map(str::to_owned));
        assert_eq!(shown, expected);
    }
}

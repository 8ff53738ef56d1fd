//! The routes of a captured pod that lead to its device.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nebula_cni_contract::launch::{LaunchSpec, NODE_PORT_TABLE, ROUTE_TABLE};
use nebula_linux::rtnetlink::LinkRoute;

/// Routes for all that is captured, and for the rest of the overlay, in the table that the rule of the plugin leads to.
/// The device has no address, so they name the pod's own one as the source. The same routes without the device, which
/// keep packets from leaving where this instance does not run, are the plugin's.
pub(crate) fn routes(spec: &LaunchSpec) -> Vec<LinkRoute> {
    let Some(capture) = &spec.capture else { return Vec::new() };
    let mut networks: Vec<IpNet> = Vec::new();
    for network in capture.ranges.iter().chain(&capture.services).chain(&spec.overlay) {
        if !networks.contains(&network.trunc()) {
            networks.push(network.trunc());
        }
    }
    let source_of =
        |network: &IpNet| capture.sources.iter().copied().find(|own| own.is_ipv4() == network.addr().is_ipv4());
    let everywhere: &[IpNet] = if capture.node_ports.is_some() { &EVERYWHERE } else { &[] };
    let networks = networks.into_iter().map(|network| (network, ROUTE_TABLE));
    let networks = networks.chain(everywhere.iter().map(|network| (*network, NODE_PORT_TABLE)));
    // A pod without an address of that family sends nothing there.
    let routed = networks.filter_map(|(network, table)| Some((network, table, source_of(&network)?)));
    routed
        .map(|(network, table, source)| LinkRoute { network, mtu: None, metric: 0, source: Some(source), table })
        .collect()
}

const EVERYWHERE: [IpNet; 2] = [
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::UNSPECIFIED, 0)),
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::UNSPECIFIED, 0)),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod::launch_file::tests::launch;

    #[test]
    fn what_is_captured_leads_to_the_device_in_a_table_of_its_own_and_comes_from_the_pod_s_address() {
        let spec = launch(|spec| {
            spec["overlay"] = serde_json::json!(["10.244.0.0/16", "10.99.0.0/16"]);
            spec["capture"] = serde_json::json!({
                "ranges": ["10.244.0.0/16", "fd00:244::/48"],
                "services": ["10.96.0.1/12", "fd00:96::/108"],
                "sources": ["10.244.1.7"],
                "table": "/run/nebula-cni/cluster/table",
            });
        });
        let routes = routes(&spec.unwrap());
        let networks: Vec<_> = routes.iter().map(|route| route.network.to_string()).collect();
        assert_eq!(networks, ["10.244.0.0/16", "10.96.0.0/12", "10.99.0.0/16"]);
        assert!(routes.iter().all(|route| route.table == ROUTE_TABLE && route.source == Some([10, 244, 1, 7].into())));
        let with_ports = |spec: &mut serde_json::Value| {
            spec["overlay"] = serde_json::json!([]);
            spec["capture"] = serde_json::json!({"ranges": ["10.244.0.0/16"], "sources": ["10.244.1.7"],
                "node_ports": [30_000, 32_767], "table": "/run/nebula-cni/cluster/table"});
        };
        let routes = super::routes(&launch(with_ports).unwrap());
        let last = routes.last().unwrap();
        assert_eq!((routes.len(), last.network.to_string().as_str(), last.table), (2, "0.0.0.0/0", NODE_PORT_TABLE));
        assert_eq!(super::routes(&launch(|_| ()).unwrap()), []);
    }
}

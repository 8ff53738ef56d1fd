//! The routes of a captured pod that lead to its device.

use ipnet::IpNet;
use nebula_cni_plugin::launch::{LaunchSpec, ROUTE_TABLE};

use crate::linux::rtnetlink::LinkRoute;

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
    // A pod without an address of that family sends nothing there.
    let routed = networks.into_iter().filter_map(|network| Some((network, source_of(&network)?)));
    routed
        .map(|(network, source)| LinkRoute { network, mtu: None, metric: 0, source: Some(source), table: ROUTE_TABLE })
        .collect()
}

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
        assert_eq!(super::routes(&launch(|_| ()).unwrap()), []);
    }
}

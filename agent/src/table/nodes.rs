//! What nodes say of themselves: addresses by which they speak or are spoken to, and the ranges from which they give
//! addresses to their pods.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use nebula_cert::directory::NODE_ADDRESS_ANNOTATIONS;

use super::kept::created;
use crate::policy::described::Packed;

/// What counts of a node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// Addresses that its kubelet and its network plugin report; a kubelet can make them up.
    pub(super) reported: BTreeSet<IpAddr>,
    /// The address by which its kubelet says that other nodes reach it.
    pub(super) internal: Option<IpAddr>,
    /// Ranges of its pods, which no kubelet changes.
    pub(super) ranges: Vec<IpNet>,
    /// When the API server made the object, in seconds since 1970.
    pub(super) created: i64,
    /// Its labels, if policies are enforced.
    pub(super) labels: Option<Packed>,
}

impl NodeFacts {
    /// Of a node: its addresses in the status, and those that network plugins note in annotations.
    #[must_use]
    pub fn of(node: &Node) -> Self {
        let status = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
        let in_status = status.filter_map(|entry| entry.address.parse().ok());
        let spec = node.spec.iter().flat_map(|spec| spec.pod_cidrs.iter().flatten().chain(&spec.pod_cidr));
        let mut ranges: Vec<IpNet> =
            spec.filter_map(|range| range.parse::<IpNet>().ok()).map(|range| range.trunc()).collect();
        ranges.sort_unstable();
        ranges.dedup();
        let annotations = node.metadata.annotations.iter().flatten();
        let noted =
            annotations.filter(|(key, _)| NODE_ADDRESS_ANNOTATIONS.contains(&key.as_str())).filter_map(|(_, value)| {
                let address = value.split_once('/').map_or(value.as_str(), |(address, _)| address);
                address.parse().ok()
            });
        let is_usable =
            |address: &IpAddr| !address.is_unspecified() && !address.is_loopback() && !address.is_multicast();
        let reported = in_status.chain(noted).filter(is_usable).take(MAX_ADDRESSES).collect();
        let entries = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
        let internal = entries.filter(|entry| entry.type_ == "InternalIP").take(MAX_ADDRESSES);
        let internal = internal.filter_map(|entry| entry.address.parse().ok()).find(is_usable);
        Self { reported, internal, ranges, created: created(&node.metadata), labels: None }
    }

    /// Ranges of its pods.
    pub(crate) fn ranges(&self) -> &[IpNet] {
        &self.ranges
    }

    /// When the API server made the object, in seconds since 1970.
    pub(crate) fn created(&self) -> i64 {
        self.created
    }

    /// The same with the labels of the node.
    pub(super) fn with_labels(self, node: &Node) -> Self {
        Self { labels: node.metadata.labels.as_ref().and_then(Packed::of), ..self }
    }
}

/// More than a node has.
const MAX_ADDRESSES: usize = 64;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_node_has_what_it_reports_and_what_its_network_notes() {
        let node = json!({
            "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z", "annotations": {
                "projectcalico.org/IPv4Address": "192.0.2.1/24", "projectcalico.org/IPv4VXLANTunnelAddr": "10.244.7.64",
                "flannel.alpha.coreos.com/public-ip": "nonsense", "other": "192.0.2.99",
            }},
            "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:244:0:1::/64"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}, {"type": "Hostname", "address": "n1"},
                {"type": "ExternalIP", "address": "198.51.100.1"}, {"address": "127.0.0.1"}]},
        });
        let found = NodeFacts::of(&serde_json::from_value(node).unwrap());
        let shown: Vec<String> = found.reported.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["10.244.7.64", "192.0.2.1", "198.51.100.1"]);
        let ranges: Vec<String> = found.ranges.iter().map(ToString::to_string).collect();
        assert_eq!(ranges, ["10.244.1.0/24", "fd00:244:0:1::/64"]);
        assert_eq!((found.created, found.internal), (1_767_225_600, "192.0.2.1".parse().ok()));
        assert_eq!(NodeFacts::of(&Node::default()), NodeFacts::default());
    }

    #[test]
    fn a_node_reports_so_many_addresses_and_no_more() {
        let addresses: Vec<_> =
            (0..1_000).map(|n| json!({"address": format!("10.9.{}.{}", n / 250, n % 250)})).collect();
        let node = json!({"metadata": {}, "status": {"addresses": addresses}});
        assert_eq!(NodeFacts::of(&serde_json::from_value(node).unwrap()).reported.len(), MAX_ADDRESSES);
    }
}

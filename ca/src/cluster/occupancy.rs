//! Who has which address, as the API server shows it: pods by what their kubelets report, nodes by what they report
//! of themselves and by the ranges that they give to their pods. In memory, and followed by whoever asks the API
//! server.

use std::{collections::HashMap, net::IpAddr};

use ipnet::IpNet;
use nebula_cert::directory::NODE_ADDRESS_ANNOTATIONS;
use serde::Deserialize;

use super::{Pod, Sandbox};
use crate::address::first_host;

/// All pods with an address, and all nodes.
#[derive(Debug, Default)]
pub(crate) struct Occupancy {
    /// By `namespace/name`.
    pods: HashMap<Box<str>, Occupant>,
    by_address: HashMap<IpAddr, Vec<Box<str>>>,
    nodes: HashMap<Box<str>, NodeFacts>,
}

/// A pod that runs, or that will.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Occupant {
    uid: Box<str>,
    /// The UID of the static pod of which it is the mirror.
    mirrors: Option<Box<str>>,
    node: Box<str>,
    addresses: Box<[IpAddr]>,
    /// Its node takes it down, or its sandbox is gone: the node may have given its address to another pod.
    is_leaving: bool,
}

/// What counts of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    /// What its kubelet and its network plugin report. A kubelet can make it up.
    reported: Vec<IpAddr>,
    /// Ranges of its pods, which no kubelet changes.
    ranges: Vec<IpNet>,
    /// As the API server writes it, which sorts by time.
    created: String,
}

/// Whose address is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker<'a> {
    pub(crate) uid: &'a str,
    pub(crate) node: &'a str,
    /// Whether its node vouches for it.
    pub(crate) is_vouched: bool,
    /// UID of the pod that the ledger has for the address, which is judged by other rules.
    pub(crate) holder: Option<&'a str>,
    /// Whether the ranges of nodes are those of their pods.
    pub(crate) node_ranges: bool,
}

/// Why nobody else may have an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Taken {
    /// It is that of this pod.
    Pod(String),
    /// It is that of this node.
    Node(String),
    /// It is of the range of this other node.
    Range(String),
}

impl Occupancy {
    /// Whose address that is, if another one's than the asker's.
    pub(crate) fn taken(&self, address: IpAddr, asker: &Asker<'_>) -> Option<Taken> {
        let owner = self.owner(address).filter(|_| asker.node_ranges);
        if let Some(owner) = owner.filter(|owner| *owner != asker.node) {
            return Some(Taken::Range(owner.to_owned()));
        }
        // In the range of one node nobody else has anything to say.
        let counts = |node: &str| owner.is_none_or(|owner| owner == node);
        let is_of =
            |facts: &NodeFacts| facts.reported.contains(&address) || asker.node_ranges && facts.begins_with(address);
        if let Some((name, _)) = self.nodes.iter().find(|(name, facts)| counts(name) && is_of(facts)) {
            return Some(Taken::Node(name.to_string()));
        }
        let is_other = |pod: &Occupant| {
            let is = |uid: &str| *pod.uid == *uid || pod.mirrors.as_deref() == Some(uid);
            let has_left = asker.is_vouched && pod.is_leaving && *pod.node == *asker.node;
            counts(&pod.node) && !is(asker.uid) && !asker.holder.is_some_and(is) && !has_left
        };
        let mut here = self.by_address.get(&address).into_iter().flatten();
        let other = here.find(|name| self.pods.get(*name).is_some_and(is_other))?;
        Some(Taken::Pod(other.to_string()))
    }

    /// The oldest node that gives this address to its pods.
    fn owner(&self, address: IpAddr) -> Option<&str> {
        let has = |facts: &NodeFacts| facts.ranges.iter().any(|range| range.contains(&address));
        let owners = self.nodes.iter().filter(|(_, facts)| has(facts));
        owners.min_by_key(|(name, facts)| (facts.created.as_str(), *name)).map(|(name, _)| &**name)
    }

    /// The oldest node that gives addresses of this range to its pods, if that is not `node`.
    pub(crate) fn other_owner(&self, range: IpNet, node: &str) -> Option<&str> {
        let meets = |other: &IpNet| other.contains(&range) || range.contains(other);
        let owners = self.nodes.iter().filter(|(name, facts)| &***name == node || facts.ranges.iter().any(meets));
        let oldest = owners.min_by_key(|(name, facts)| (facts.created.as_str(), *name));
        oldest.map(|(name, _)| &**name).filter(|name| *name != node)
    }

    /// Takes over what the API server shows of a pod.
    pub(crate) fn put_pod(&mut self, pod: &Pod) {
        let name = key(pod);
        self.remove(&name);
        let addresses = pod.addresses();
        if addresses.is_empty() || pod.spec.host_network || pod.is_over() {
            return;
        }
        for address in &addresses {
            let here = self.by_address.entry(*address).or_default();
            if !here.contains(&name) {
                here.push(name.clone());
            }
        }
        let occupant = Occupant {
            uid: pod.metadata.uid.as_str().into(),
            mirrors: pod.metadata.static_uid(Some(&pod.spec.node_name)).map(Into::into),
            node: pod.spec.node_name.as_str().into(),
            addresses: addresses.into_boxed_slice(),
            is_leaving: pod.is_ending() || pod.sandbox() == Sandbox::Gone,
        };
        self.pods.insert(name, occupant);
    }

    /// The pod is gone.
    pub(crate) fn remove_pod(&mut self, pod: &Pod) {
        self.remove(&key(pod));
    }

    /// Takes over what the API server shows of a node.
    pub(crate) fn put_node(&mut self, node: &Node) {
        self.nodes.insert(node.metadata.name.as_str().into(), NodeFacts::of(node));
    }

    /// The node is gone.
    pub(crate) fn remove_node(&mut self, node: &Node) {
        self.nodes.remove(&*node.metadata.name);
    }

    /// Takes over all pods of another one.
    pub(crate) fn replace_pods(&mut self, all: Self) {
        (self.pods, self.by_address) = (all.pods, all.by_address);
    }

    /// Takes over all nodes of another one.
    pub(crate) fn replace_nodes(&mut self, all: Self) {
        self.nodes = all.nodes;
    }

    fn remove(&mut self, name: &str) {
        let Some(before) = self.pods.remove(name) else { return };
        for address in &before.addresses {
            if let Some(here) = self.by_address.get_mut(address) {
                here.retain(|other| **other != *name);
                if here.is_empty() {
                    self.by_address.remove(address);
                }
            }
        }
    }
}

fn key(pod: &Pod) -> Box<str> {
    format!("{}/{}", pod.metadata.namespace, pod.metadata.name).into()
}

impl NodeFacts {
    fn of(node: &Node) -> Self {
        let noted = node.metadata.annotations.iter().filter_map(|(key, value)| {
            let is_known = NODE_ADDRESS_ANNOTATIONS.contains(&key.as_str());
            is_known.then(|| value.split_once('/').map_or(value.as_str(), |(address, _)| address))
        });
        let listed = node.status.addresses.iter().map(|entry| entry.address.as_str()).chain(noted);
        let reported = listed.filter_map(|text| text.parse().ok()).take(MAX_ADDRESSES).collect();
        let ranges = node.spec.all.iter().chain(&node.spec.one).map(IpNet::trunc).collect();
        Self { reported, ranges, created: node.metadata.creation_timestamp.clone() }
    }

    /// Whether the node's own devices have this address: flannel's has the first one of a range, bridges of most
    /// network plugins have the second.
    fn begins_with(&self, address: IpAddr) -> bool {
        let is_first = |range: &IpNet| address == range.network() || address == first_host(*range);
        self.ranges.iter().any(is_first)
    }
}

/// The fields of a node that are used.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Node {
    metadata: NodeMetadata,
    pub(super) spec: NodeSpec,
    status: NodeStatus,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct NodeMetadata {
    name: String,
    creation_timestamp: String,
    annotations: HashMap<String, String>,
}

/// Ranges from which a node gives addresses to its pods.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct NodeSpec {
    #[serde(rename = "podCIDR")]
    pub(super) one: Option<IpNet>,
    #[serde(rename = "podCIDRs")]
    pub(super) all: Vec<IpNet>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct NodeStatus {
    addresses: Vec<NodeAddress>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
struct NodeAddress {
    address: String,
}

/// More than a node has.
const MAX_ADDRESSES: usize = 64;

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn node(name: &str, created: u8, reported: &[&str], ranges: &[&str]) -> Node {
        let addresses: Vec<Value> = reported.iter().map(|address| json!({"address": address})).collect();
        let json = json!({
            "metadata": {"name": name, "creationTimestamp": format!("2026-01-0{created}T00:00:00Z")},
            "spec": {"podCIDRs": ranges}, "status": {"addresses": addresses},
        });
        serde_json::from_value(json).unwrap()
    }

    fn pod(name: &str, node: &str, addresses: &[&str], change: impl FnOnce(&mut Value)) -> Pod {
        let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
        let mut json = json!({
            "metadata": {"namespace": "shop", "name": name, "uid": format!("u-{name}")}, "spec": {"nodeName": node},
            "status": {"phase": "Running", "podIPs": ips},
        });
        change(&mut json);
        serde_json::from_value(json).unwrap()
    }

    const ASKER: Asker<'static> = Asker { uid: "u-new", node: "n1", is_vouched: true, holder: None, node_ranges: true };

    fn two_nodes(ranges: bool) -> Occupancy {
        let mut all = Occupancy::default();
        for (name, number) in [("n1", 1), ("n2", 2)] {
            let of = [format!("10.244.{number}.0/24"), format!("fd00:244:0:{number}::/64")];
            let of: Vec<&str> = of.iter().map(String::as_str).filter(|_| ranges).collect();
            all.put_node(&node(name, number, &[&format!("192.0.2.{number}")], &of));
        }
        all
    }

    #[test]
    fn addresses_of_other_pods_nodes_and_ranges_are_taken_in_both_families() {
        let mut all = two_nodes(true);
        all.put_pod(&pod("dns", "n1", &["10.244.1.3", "fd00:244:0:1::3"], |_| {}));
        all.put_pod(&pod("host", "n1", &["192.0.2.1"], |pod| pod["spec"]["hostNetwork"] = true.into()));
        let taken = |address: &str| all.taken(ip(address), &ASKER);
        let dns = || Some(Taken::Pod("shop/dns".to_owned()));
        assert_eq!(["10.244.1.3", "fd00:244:0:1::3"].map(taken), [dns(), dns()]);
        assert_eq!(["10.244.1.7", "fd00:244:0:1::7", "10.99.0.1"].map(taken), [None, None, None]);
        for own in ["10.244.1.0", "10.244.1.1", "fd00:244:0:1::1", "192.0.2.1", "192.0.2.2"] {
            assert!(matches!(taken(own), Some(Taken::Node(_))), "{own}");
        }
        for other in ["10.244.2.7", "10.244.2.1", "fd00:244:0:2::7"] {
            assert_eq!(taken(other), Some(Taken::Range("n2".to_owned())), "{other}");
        }
        // The pod itself, by either of its UIDs, and whom the ledger has for the address.
        assert_eq!(all.taken(ip("10.244.1.3"), &Asker { uid: "u-dns", ..ASKER }), None);
        assert_eq!(all.taken(ip("10.244.1.3"), &Asker { holder: Some("u-dns"), ..ASKER }), None);
    }

    #[test]
    fn a_pod_makes_room_when_it_ends_and_on_its_own_node_as_soon_as_it_is_taken_down() {
        let mut all = two_nodes(false);
        let ending = |pod: &mut Value| pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        let over = |pod: &mut Value| pod["status"]["phase"] = "Succeeded".into();
        let is_taken = |all: &Occupancy, node: &str, is_vouched: bool| {
            all.taken(ip("10.244.1.3"), &Asker { node, is_vouched, ..ASKER }).is_some()
        };
        all.put_pod(&pod("job", "n1", &["10.244.1.3"], |_| {}));
        assert!(is_taken(&all, "n1", true) && is_taken(&all, "n2", true));
        all.put_pod(&pod("job", "n1", &["10.244.1.3"], ending));
        assert!(!is_taken(&all, "n1", true) && is_taken(&all, "n1", false) && is_taken(&all, "n2", true));
        all.put_pod(&pod("job", "n1", &["10.244.1.3"], over));
        assert!(!is_taken(&all, "n2", true));
        all.put_pod(&pod("job", "n1", &["10.244.1.3"], |_| {}));
        all.put_pod(&pod("job", "n1", &["10.244.1.9"], |_| {}));
        assert!(!is_taken(&all, "n2", true), "it has moved");
        all.remove_pod(&pod("job", "n1", &["10.244.1.9"], |_| {}));
        assert!(all.pods.is_empty() && all.by_address.is_empty());
    }

    #[test]
    fn a_kubelet_keeps_no_pod_of_another_node_from_its_address() {
        let mut all = two_nodes(true);
        all.put_node(&node("n2", 2, &["192.0.2.2", "10.244.1.7"], &["10.244.2.0/24"]));
        all.put_pod(&pod("liar", "n2", &["10.244.1.8"], |_| {}));
        assert_eq!(["10.244.1.7", "10.244.1.8"].map(|address| all.taken(ip(address), &ASKER)), [None, None]);
        // A node that came later with the range of another one.
        all.put_node(&node("n3", 3, &[], &["10.244.0.0/16"]));
        assert_eq!(all.taken(ip("10.244.1.7"), &ASKER), None);
        assert_eq!(all.taken(ip("10.244.1.7"), &Asker { node: "n3", ..ASKER }), Some(Taken::Range("n1".to_owned())));
        // Where ranges mean nothing, what is reported counts.
        let unused = Asker { node_ranges: false, ..ASKER };
        assert!(["10.244.1.7", "10.244.1.8"].iter().all(|address| all.taken(ip(address), &unused).is_some()));
        assert_eq!(["10.244.2.9", "10.244.1.1"].map(|address| all.taken(ip(address), &unused)), [None, None]);
    }

    #[test]
    fn a_node_has_what_its_network_plugin_notes() {
        let mut all = two_nodes(false);
        let json = json!({"metadata": {"name": "n9", "annotations": {
            "projectcalico.org/IPv4IPIPTunnelAddr": "10.244.7.64", "projectcalico.org/IPv4Address": "198.51.100.9/24",
            "other": "10.244.7.65", "network.cilium.io/ipv4-cilium-host": "nonsense",
        }}});
        all.put_node(&serde_json::from_value(json).unwrap());
        let taken = |address: &str| all.taken(ip(address), &ASKER).is_some();
        assert_eq!(["10.244.7.64", "198.51.100.9", "10.244.7.65"].map(taken), [true, true, false]);
        let mut other = Occupancy::default();
        other.put_pod(&pod("web", "n1", &["10.244.7.65"], |_| {}));
        all.replace_pods(other);
        assert!(all.taken(ip("10.244.7.65"), &ASKER).is_some());
        all.replace_nodes(Occupancy::default());
        assert!(all.taken(ip("10.244.7.64"), &ASKER).is_none());
    }
}

//! Services, as far as kube-proxy would translate them for a pod: cluster IPs, ports, affinity and traffic policy;
//! ports of nodes, and addresses of load balancers. What a pod sends to those two reaches all endpoints, as with
//! kube-proxy, which takes a pod of the cluster for no client from outside. External IPs are left out: whoever makes
//! a Service can name those of others.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1 as core;
use nebula_cni_contract::cluster_table::{Builder, EndpointList, ServiceEndpoint, ServicePort};

use super::endpoints::{Port, Slice, protocol};
use super::kept::{Weighed, created};
use super::seeded::Set;

/// A Service with cluster IPs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    addresses: Box<[IpAddr]>,
    /// Addresses of its load balancers.
    balanced: Box<[IpAddr]>,
    ports: Box<[Port]>,
    /// The port of all nodes for each of these, or 0.
    node_ports: Box<[u16]>,
    affinity: Option<Duration>,
    this_node_only: bool,
    /// When the API server made it, in seconds since 1970.
    pub(super) created: i64,
}

impl Service {
    /// `None` for what is not translated: headless Services, whose names lead to the pods' own addresses, and those
    /// that stand for a name elsewhere.
    #[must_use]
    pub fn of(service: &core::Service) -> Option<Self> {
        let spec = service.spec.as_ref().filter(|spec| spec.type_.as_deref() != Some("ExternalName"))?;
        let listed = spec.cluster_ips.iter().flatten().chain(&spec.cluster_ip);
        let mut addresses: Vec<IpAddr> = listed.filter_map(|address| address.parse().ok()).collect();
        addresses.sort_unstable();
        addresses.dedup();
        let port = |port: &core::ServicePort| {
            let own = Port {
                name: port.name.as_deref().unwrap_or_default().into(),
                port: u16::try_from(port.port).ok().filter(|port| *port > 0)?,
                protocol: protocol(port.protocol.as_deref())?,
            };
            Some((own, port.node_port.and_then(|port| u16::try_from(port).ok()).unwrap_or_default()))
        };
        let (ports, node_ports): (Vec<Port>, Vec<u16>) = spec.ports.iter().flatten().filter_map(port).unzip();
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let ingress = status.into_iter().flat_map(|status| status.ingress.iter().flatten());
        // Through one that is a proxy, the primary network sends everything.
        let translated = ingress.filter(|ingress| ingress.ip_mode.as_deref() != Some("Proxy"));
        let balanced = translated.filter_map(|ingress| ingress.ip.as_ref()?.parse().ok()).take(MAX_BALANCED);
        let timeout = || {
            let client_ip = spec.session_affinity_config.as_ref().and_then(|config| config.client_ip.as_ref());
            let seconds = client_ip.and_then(|client_ip| client_ip.timeout_seconds);
            Duration::from_secs(seconds.and_then(|seconds| seconds.try_into().ok()).unwrap_or(DEFAULT_AFFINITY))
        };
        let has_affinity = spec.session_affinity.as_deref() == Some("ClientIP");
        (!addresses.is_empty()).then(|| Self {
            addresses: addresses.into_boxed_slice(),
            balanced: balanced.collect(),
            ports: ports.into_boxed_slice(),
            node_ports: node_ports.into_boxed_slice(),
            affinity: has_affinity.then(timeout),
            this_node_only: spec.internal_traffic_policy.as_deref() == Some("Local"),
            created: created(&service.metadata),
        })
    }

    /// Its cluster IPs.
    pub(super) fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// Whether a load balancer has addresses for it.
    pub(super) fn is_balanced(&self) -> bool {
        !self.balanced.is_empty()
    }

    /// Each of its ports at each cluster IP.
    pub(super) fn ports_of_clusters(&self) -> impl Iterator<Item = (IpAddr, &Port)> {
        self.addresses.iter().flat_map(|address| self.ports.iter().map(|port| (*address, port)))
    }

    #[cfg(test)]
    pub(super) fn new(address: IpAddr, port: u16) -> Self {
        Self::with(address, [Port { name: "".into(), port, protocol: 6 }])
    }

    #[cfg(test)]
    pub(super) fn made_at(self, created: i64) -> Self {
        Self { created, ..self }
    }

    #[cfg(test)]
    pub(super) fn with(address: IpAddr, ports: impl IntoIterator<Item = Port>) -> Self {
        let ports: Box<[Port]> = ports.into_iter().collect();
        let node_ports = vec![0; ports.len()].into_boxed_slice();
        let (balanced, affinity) = (Box::default(), None);
        Self {
            addresses: Box::new([address]),
            balanced,
            ports,
            node_ports,
            affinity,
            this_node_only: false,
            created: 0,
        }
    }

    /// Adds its ports with their endpoints, those of the same family and port name: as many as the table has records
    /// `left` for its namespace. What is `taken` is another Service's.
    pub(super) fn add_to(
        &self,
        builder: &mut Builder,
        slices: &[&Slice],
        node: &str,
        taken: &mut Taken,
        left: &mut usize,
    ) {
        for is_ipv4 in [true, false] {
            let own = self.addresses.iter().filter(|address| address.is_ipv4() == is_ipv4);
            let addresses: Vec<&IpAddr> = own.filter(|address| taken.addresses.insert(**address)).collect();
            if addresses.is_empty() {
                continue;
            }
            let lists = lists(builder, slices.iter().copied().filter(|slice| slice.is_ipv4 == is_ipv4), node);
            for (port, node_port) in self.ports.iter().zip(&self.node_ports) {
                let parts: Vec<_> = lists.iter().filter_map(|list| Some((list, port.target(list.ports)?))).collect();
                let is_uniform = parts.windows(2).all(|pair| pair[0].1 == pair[1].1);
                let endpoints = if is_uniform { 0 } else { parts.iter().map(|(list, _)| list.count).sum() };
                let cost = 1 + parts.len() + endpoints;
                let parts = || parts.iter().map(|(list, target)| (list.list, *target));
                let at = |address: IpAddr, port_number: u16| ServicePort {
                    address,
                    port: port_number,
                    protocol: port.protocol,
                    affinity: self.affinity,
                    this_node_only: false,
                };
                for address in &addresses {
                    let Some(rest) = left.checked_sub(cost) else { return };
                    *left = rest;
                    let this_node_only = self.this_node_only;
                    builder.service_port(ServicePort { this_node_only, ..at(**address, port.port) }, parts());
                }
                let mut is_free = |at: ServicePort| taken.ports.insert((at.address, at.port, at.protocol));
                if let (Some(address), 1..) = (addresses.first(), *node_port) {
                    let unspecified = if is_ipv4 { IpAddr::from([0; 4]) } else { IpAddr::from([0_u8; 16]) };
                    let Some(rest) = left.checked_sub(cost) else { return };
                    if is_free(at(unspecified, *node_port)) {
                        *left = rest;
                        builder.node_port(at(**address, *node_port), parts());
                    }
                }
                for address in self.balanced.iter().filter(|address| address.is_ipv4() == is_ipv4) {
                    let Some(rest) = left.checked_sub(cost) else { return };
                    if !taken.reserved.contains(address) && is_free(at(*address, port.port)) {
                        *left = rest;
                        builder.outer_port(at(*address, port.port), parts());
                    }
                }
            }
        }
    }
}

/// What one Service has and no other gets.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Cluster IPs.
    pub(super) addresses: HashSet<IpAddr>,
    /// Ports of nodes, at the unspecified address, and of load balancers.
    pub(super) ports: HashSet<(IpAddr, u16, u8)>,
    /// Addresses that no load balancer has.
    pub(super) reserved: Set<IpAddr>,
}

impl Weighed for Service {
    fn weight(&self) -> usize {
        let addresses = size_of_val(&*self.addresses) + size_of_val(&*self.balanced) + size_of_val(&*self.node_ports);
        size_of::<Self>() + addresses + self.ports.iter().map(Port::weight).sum::<usize>()
    }
}

impl Port {
    pub(super) fn weight(&self) -> usize {
        // A block of memory takes at least so much.
        size_of::<Self>() + self.name.len().max(16)
    }
}

/// Endpoints that have their ports in common.
struct List<'a> {
    ports: &'a [Port],
    list: EndpointList,
    count: usize,
}

/// The endpoints of slices, those with the same ports together.
fn lists<'a>(builder: &mut Builder, slices: impl Iterator<Item = &'a Slice>, node: &str) -> Vec<List<'a>> {
    let mut by_ports: HashMap<&[Port], Vec<&Slice>> = HashMap::new();
    slices.for_each(|slice| by_ports.entry(&slice.ports).or_default().push(slice));
    let mut list = |(ports, slices): (&'a [Port], Vec<&Slice>)| {
        let count = slices.iter().map(|slice| slice.endpoints.len()).sum();
        let all = slices.into_iter().flat_map(|slice| slice.endpoints.iter());
        let endpoints = all.map(|endpoint| ServiceEndpoint {
            address: endpoint.address,
            port: 0,
            state: endpoint.state,
            is_on_this_node: endpoint.node.as_deref() == Some(node),
        });
        List { ports, list: builder.endpoints(endpoints), count }
    };
    by_ports.into_iter().map(&mut list).collect()
}

/// More than a Service has.
const MAX_BALANCED: usize = 16;
/// Seconds that the API server fills in.
const DEFAULT_AFFINITY: u64 = 10_800;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::cluster_table::{Found, Layout};
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: Value) -> Option<Service> {
        Service::of(&serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap())
    }

    #[test]
    fn what_is_not_translated_is_left_out() {
        let port = json!([{"port": 80}]);
        assert!(service(json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": port})).is_none(), "headless");
        assert!(service(json!({"type": "ExternalName", "externalName": "example.org"})).is_none());
        assert!(service(json!({"type": "ExternalName", "clusterIP": "10.96.0.9", "ports": port})).is_none());
        assert!(service(json!({"ports": port})).is_none());
        let odd =
            json!([{"port": 80, "protocol": "QUIC"}, {"port": 0}, {"port": 70_000}, {"port": 53, "protocol": "UDP"}]);
        assert_eq!(service(json!({"clusterIP": "10.96.0.9", "ports": odd})).unwrap().ports.len(), 1);
    }

    #[test]
    fn addresses_of_both_families_affinity_and_policy_are_read() {
        let found = service(json!({
            "clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9", "fd00:96::9"], "ports": [{"port": 80, "name": "web"}],
            "sessionAffinity": "ClientIP", "internalTrafficPolicy": "Local",
        }))
        .unwrap();
        assert_eq!((found.addresses.len(), found.this_node_only), (2, true));
        assert_eq!(found.affinity, Some(Duration::from_secs(10_800)));
        let timed = json!({"clusterIP": "10.96.0.9", "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 7}}});
        assert_eq!(service(timed).unwrap().affinity, Some(Duration::from_secs(7)));
        let outer: core::Service = serde_json::from_value(json!({"metadata": {},
            "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.9", "externalIPs": ["198.51.100.9"],
                "ports": [{"port": 80, "nodePort": 30_080}, {"port": 0, "nodePort": 30_081}, {"port": 81}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "Proxy"},
                {"hostname": "lb.example.org"}]}}}))
        .unwrap();
        let outer = Service::of(&outer).unwrap();
        assert_eq!((&*outer.node_ports, &*outer.balanced), (&[30_080, 0][..], &["198.51.100.1".parse().unwrap()][..]));
        let plain = service(json!({"clusterIP": "10.96.0.9", "sessionAffinity": "None"})).unwrap();
        assert_eq!((plain.affinity, plain.this_node_only), (None, false));
    }

    #[test]
    fn ports_of_nodes_and_load_balancers_lead_to_all_endpoints_and_nobody_takes_those_of_another() {
        let service = |made: i64, cluster_ip: &str, balanced: &str| {
            let object = json!({"metadata": {},
                "spec": {"type": "LoadBalancer", "clusterIP": cluster_ip, "internalTrafficPolicy": "Local",
                    "ports": [{"port": 80, "nodePort": 30_080}]},
                "status": {"loadBalancer": {"ingress": [{"ip": balanced}, {"ip": "10.244.1.7"}]}}});
            Service::of(&serde_json::from_value(object).unwrap()).unwrap().made_at(made)
        };
        let slice = |address: &str| {
            let object = json!({"metadata": {"namespace": "shop", "name": "web-1",
                "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4", "ports": [{"port": 8080}],
                "endpoints": [{"addresses": [address], "nodeName": "n2"}]});
            Slice::of_slice(&serde_json::from_value(object).unwrap()).remove(0)
        };
        let [own, pod, node]: [IpAddr; 3] = ["10.96.0.1", "10.244.1.7", "192.0.2.1"].map(|text| text.parse().unwrap());
        let mut builder = Builder::new();
        builder.pod(pod, 7);
        builder.node(node);
        let (mut taken, mut left) = (Taken { reserved: Set::from_iter([own, pod, node]), ..Taken::default() }, 1_000);
        for (service, endpoint) in [
            (service(1, "10.96.0.1", "198.51.100.1"), "10.244.1.7"),
            // It names what others have.
            (service(2, "10.96.0.2", "198.51.100.1"), "10.244.1.8"),
            (service(3, "10.96.0.3", "10.96.0.1"), "10.244.1.8"),
        ] {
            service.add_to(&mut builder, &[&slice(endpoint)], "n1", &mut taken, &mut left);
        }
        builder.clear("10.244.1.8".parse().unwrap());
        let bytes = builder.finish(1);
        let layout = Layout::read(&bytes).unwrap();
        let table = layout.table(&bytes);
        for outer in ["198.51.100.1:80", "192.0.2.1:30080"] {
            let at: std::net::SocketAddr = outer.parse().unwrap();
            let Found::Service(found) = table.find(at.ip(), at.port(), 6) else { panic!("{outer} is no Service") };
            assert_eq!(table.endpoint(found.id, 0).map(|endpoint| endpoint.address), Some(pod), "{outer}");
        }
        // No endpoint of it is on this node.
        assert_eq!(table.find(own, 80, 6), Found::NoEndpoint);
        assert_eq!(table.find(pod, 80, 6), Found::Enrolled { incarnation: 7 });
    }
}

//! Endpoints of Services: from EndpointSlices, or from Endpoints where a server has only those.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1 as discovery;
use nebula_cni_contract::cluster_table::EndpointState;

use super::kept::{Name, Weighed};

/// Endpoints of one family that share their ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The Service.
    pub(super) service: Name,
    pub(super) is_ipv4: bool,
    pub(super) ports: Box<[Port]>,
    pub(super) endpoints: Box<[Endpoint]>,
}

/// One endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) address: IpAddr,
    pub(super) state: EndpointState,
    pub(super) node: Option<Arc<str>>,
}

/// A named port. Its name is empty if the Service has only one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Port {
    pub(super) name: Box<str>,
    pub(super) port: u16,
    pub(super) protocol: u8,
}

impl Port {
    /// The port to which this one leads in a slice with these ports.
    pub(super) fn target(&self, ports: &[Self]) -> Option<u16> {
        let is_same = |own: &&Self| own.name == self.name && own.protocol == self.protocol;
        ports.iter().find(is_same).map(|own| own.port)
    }
}

impl Weighed for Vec<Slice> {
    fn weight(&self) -> usize {
        let endpoint =
            |endpoint: &Endpoint| size_of::<Endpoint>() + endpoint.node.as_ref().map_or(0, |node| node.len());
        let of_slice = |slice: &Slice| {
            let ports: usize = slice.ports.iter().map(Port::weight).sum();
            size_of::<Slice>() + slice.service.len() + ports + slice.endpoints.iter().map(endpoint).sum::<usize>()
        };
        self.iter().map(of_slice).sum()
    }
}

impl Slice {
    /// Its endpoints, and whether they take new flows.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = (IpAddr, EndpointState)> {
        self.endpoints.iter().map(|endpoint| (endpoint.address, endpoint.state))
    }

    /// Its port of this name and protocol.
    pub(crate) fn port_of(&self, name: &str, protocol: u8) -> Option<u16> {
        let is_it = |port: &&Port| *port.name == *name && port.protocol == protocol;
        self.ports.iter().find(is_it).map(|port| port.port)
    }

    /// The slices of an EndpointSlice: none if it belongs to no Service, or holds names instead of addresses.
    #[must_use]
    pub fn of_slice(slice: &discovery::EndpointSlice) -> Vec<Self> {
        let service = slice.metadata.labels.as_ref().and_then(|labels| labels.get(SERVICE_NAME));
        let is_ipv4 = match slice.address_type.as_str() {
            "IPv4" => true,
            "IPv6" => false,
            _ => return Vec::new(),
        };
        let (Some(service), Some(namespace)) = (service, &slice.metadata.namespace) else { return Vec::new() };
        let port = |port: &discovery::EndpointPort| {
            Some(Port {
                name: port.name.as_deref().unwrap_or_default().into(),
                port: port.port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0)?,
                protocol: protocol(port.protocol.as_deref())?,
            })
        };
        let mut nodes = Nodes::default();
        let mut endpoints = Vec::with_capacity(slice.endpoints.len());
        for endpoint in &slice.endpoints {
            // The first address stands for all of them.
            let address = endpoint.addresses.first().and_then(|address| address.parse::<IpAddr>().ok());
            let Some(address) = address.filter(|address| address.is_ipv4() == is_ipv4) else { continue };
            let state = endpoint.conditions.as_ref().map_or(EndpointState::Ready, state);
            let node = endpoint.node_name.as_deref().map(|node| nodes.shared(node));
            endpoints.push(Endpoint { address, state, node });
        }
        let ports = slice.ports.iter().flatten().filter_map(port).collect();
        vec![Self {
            service: format!("{namespace}/{service}").into(),
            is_ipv4,
            ports,
            endpoints: endpoints.into_boxed_slice(),
        }]
    }

    /// The slices of an Endpoints object. It does not tell endpoints that terminate from others that are not ready.
    #[must_use]
    pub fn of_endpoints(endpoints: &core::Endpoints) -> Vec<Self> {
        let (Some(name), Some(namespace)) = (&endpoints.metadata.name, &endpoints.metadata.namespace) else {
            return Vec::new();
        };
        let service: Name = format!("{namespace}/{name}").into();
        let mut slices = Vec::new();
        let mut nodes = Nodes::default();
        for subset in endpoints.subsets.iter().flatten() {
            let port = |port: &core::EndpointPort| {
                Some(Port {
                    name: port.name.as_deref().unwrap_or_default().into(),
                    port: u16::try_from(port.port).ok().filter(|port| *port > 0)?,
                    protocol: protocol(port.protocol.as_deref())?,
                })
            };
            let ports: Box<[Port]> = subset.ports.iter().flatten().filter_map(port).collect();
            let ready = subset.addresses.iter().flatten().map(|address| (address, EndpointState::Ready));
            let others = subset.not_ready_addresses.iter().flatten().map(|address| (address, EndpointState::NotReady));
            let mut families: [Vec<Endpoint>; 2] = Default::default();
            for (found, state) in ready.chain(others) {
                let Ok(address) = found.ip.parse::<IpAddr>() else { continue };
                let node = found.node_name.as_deref().map(|node| nodes.shared(node));
                families[usize::from(address.is_ipv6())].push(Endpoint { address, state, node });
            }
            for (endpoints, is_ipv4) in families.into_iter().zip([true, false]) {
                if !endpoints.is_empty() {
                    let (service, ports) = (service.clone(), ports.clone());
                    slices.push(Self { service, is_ipv4, ports, endpoints: endpoints.into_boxed_slice() });
                }
            }
        }
        slices
    }
}

/// As kube-proxy reads the conditions: what is unset counts as "yes" for ready, and serving defaults to ready.
fn state(conditions: &discovery::EndpointConditions) -> EndpointState {
    let is_ready = conditions.ready.unwrap_or(true);
    match (is_ready, conditions.serving.unwrap_or(is_ready), conditions.terminating.unwrap_or(false)) {
        (true, _, _) => EndpointState::Ready,
        (false, true, true) => EndpointState::Terminating,
        (false, _, _) => EndpointState::NotReady,
    }
}

/// Number of a protocol by its name in the API; TCP if there is none.
pub(crate) fn protocol(name: Option<&str>) -> Option<u8> {
    match name.unwrap_or("TCP") {
        "TCP" => Some(6),
        "UDP" => Some(17),
        "SCTP" => Some(132),
        _ => None,
    }
}

/// Names of nodes, each once in memory.
#[derive(Default)]
struct Nodes<'a>(HashMap<&'a str, Arc<str>>);

impl<'a> Nodes<'a> {
    fn shared(&mut self, name: &'a str) -> Arc<str> {
        Arc::clone(self.0.entry(name).or_insert_with(|| Arc::from(name)))
    }
}

const SERVICE_NAME: &str = "kubernetes.io/service-name";

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(family: &str, endpoints: Value) -> Vec<Slice> {
        let object = json!({
            "metadata": {"namespace": "shop", "name": "web-1", "labels": {SERVICE_NAME: "web"}},
            "addressType": family, "ports": [{"name": "http", "port": 8080}, {"name": "all"}], "endpoints": endpoints,
        });
        Slice::of_slice(&serde_json::from_value(object).unwrap())
    }

    #[test]
    fn conditions_are_read_as_kube_proxy_reads_them() {
        let state = |conditions: Value| {
            slice("IPv4", json!([{"addresses": ["10.0.0.1"], "conditions": conditions}]))[0].endpoints[0].state
        };
        assert_eq!(state(json!({})), EndpointState::Ready);
        assert_eq!(state(json!({"ready": true})), EndpointState::Ready);
        assert_eq!(
            state(json!({"ready": true, "terminating": true})),
            EndpointState::Ready,
            "publishNotReadyAddresses"
        );
        assert_eq!(state(json!({"ready": false})), EndpointState::NotReady);
        assert_eq!(state(json!({"ready": false, "serving": true})), EndpointState::NotReady);
        assert_eq!(state(json!({"ready": false, "serving": true, "terminating": true})), EndpointState::Terminating);
        assert_eq!(state(json!({"ready": false, "serving": false, "terminating": true})), EndpointState::NotReady);
    }

    /// `.ci/kubernetes` holds the object against the API of each release from 1.33 on.
    #[test]
    fn a_slice_has_the_endpoints_that_the_api_server_shows() {
        let object = serde_json::from_str(include_str!("../../tests/objects/endpointslice.json")).unwrap();
        let [found] = &Slice::of_slice(&object)[..] else { panic!("one slice") };
        assert_eq!((&*found.service, found.port_of("http", 6)), ("shop/web", Some(8080)));
        let expected = [("10.244.1.7", EndpointState::Ready), ("10.244.2.7", EndpointState::Terminating)];
        assert!(found.addresses().eq(expected.map(|(address, state)| (address.parse().unwrap(), state))));
    }

    #[test]
    fn names_and_addresses_of_another_family_are_left_out() {
        assert!(slice("FQDN", json!([{"addresses": ["example.org"]}])).is_empty());
        let found =
            slice("IPv6", json!([{"addresses": ["10.0.0.1"]}, {"addresses": ["x"]}, {"addresses": ["fd00::1"]}]));
        assert_eq!((found[0].endpoints.len(), found[0].ports.len(), &*found[0].service), (1, 1, "shop/web"));
    }

    #[test]
    fn endpoints_of_old_servers_are_split_by_family() {
        let object = json!({"metadata": {"namespace": "shop", "name": "web"}, "subsets": [{
            "addresses": [{"ip": "10.0.0.1", "nodeName": "n1"}, {"ip": "fd00::1"}],
            "notReadyAddresses": [{"ip": "10.0.0.2"}], "ports": [{"port": 8080}],
        }]});
        let found = Slice::of_endpoints(&serde_json::from_value(object).unwrap());
        assert_eq!(found.len(), 2);
        let states: Vec<_> = found[0].endpoints.iter().map(|endpoint| endpoint.state).collect();
        assert_eq!(states, [EndpointState::Ready, EndpointState::NotReady]);
        assert_eq!(found[0].endpoints[0].node.as_deref(), Some("n1"));
    }
}

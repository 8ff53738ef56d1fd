//! Three namespaces of three pods on two nodes, all enrolled, and one of two pods that is not; and who reaches whom in
//! what way.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::thread;

use serde_json::{Value, json};

use super::super::capture::town::{Town, list};
use super::probes::{PORTS, Probe, Protocol, Servers, answers};

/// Enrolled namespaces. Each has the label `ns` with its name.
const NAMESPACES: [char; 3] = ['x', 'y', 'z'];
/// The namespace that is not enrolled, with a label like that of the others.
const OUTSIDE: char = 'w';
/// Pods of each namespace. Each has the label `pod` with its name.
const NAMES: [char; 3] = ['a', 'b', 'c'];

/// A pod of the grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pod {
    pub(super) namespace: char,
    pub(super) name: char,
}

impl Pod {
    fn all() -> impl Iterator<Item = Self> {
        let enrolled =
            NAMESPACES.into_iter().flat_map(|namespace| NAMES.into_iter().map(move |name| Self { namespace, name }));
        enrolled.chain(['a', 'b'].map(|name| Self { namespace: OUTSIDE, name }))
    }

    /// Without a certificate: it is reached in clear.
    pub(super) fn is_outside(self) -> bool {
        self.namespace == OUTSIDE
    }

    /// `a` and `b` are apart in each namespace.
    fn node(self) -> &'static str {
        let number = u32::from(self.namespace) + u32::from(self.name);
        if number.is_multiple_of(2) { "test-node" } else { "node2" }
    }

    fn key(self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// A flow that somebody would open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Flow {
    pub(super) from: Pod,
    pub(super) to: Pod,
    pub(super) protocol: Protocol,
    /// 0 of ICMP.
    pub(super) port: u16,
}

impl Flow {
    pub(super) fn is_to(&self, namespace: char) -> bool {
        self.to.namespace == namespace
    }

    pub(super) fn is_from(&self, namespace: char) -> bool {
        self.from.namespace == namespace
    }
}

/// How a flow names its other end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Way {
    V4,
    V6,
    /// By the pod's own Service, of IPv4.
    Service,
}

struct Place {
    network: PathBuf,
    /// By way.
    addresses: [IpAddr; 3],
    _servers: Servers,
}

pub(super) struct Grid(BTreeMap<Pod, Place>);

impl Grid {
    pub(super) fn build(town: &Town) -> Self {
        let namespaces: Vec<Value> = NAMESPACES
            .iter()
            .chain([&OUTSIDE])
            .map(|name| {
                json!({"apiVersion": "v1", "kind": "Namespace",
                       "metadata": {"name": name.to_string(), "labels": {"ns": name.to_string()}}})
            })
            .collect();
        town.nodes.apply("namespaces.json", &list(&namespaces));
        for namespace in NAMESPACES.into_iter().chain([OUTSIDE]) {
            let account = ["get", "serviceaccount", "-n", &namespace.to_string(), "default"];
            let is_there = || town.nodes.try_kubectl(&account).status.success();
            town.nodes.until("accounts", super::SOON, is_there);
        }
        let all: Vec<Value> = Pod::all().flat_map(|pod| [manifest(pod), service(pod)]).collect();
        town.nodes.apply("grid.json", &list(&all));
        for pod in Pod::all() {
            town.nodes.wait_for_pod(&pod.namespace.to_string(), &pod.name.to_string());
        }
        let networks = town.nodes.pod_networks();
        let v6 = IpAddr::from([0; 16]);
        let place = |pod: Pod| {
            let (namespace, name) = (pod.namespace.to_string(), pod.name.to_string());
            let network = networks[&pod.key()].clone();
            let addresses = [
                town.pod_address(&namespace, &name),
                town.pod_address_like(v6, &namespace, &name),
                town.cluster_ip(&namespace, &name),
            ];
            let _servers = Servers::start(&network, &pod.key());
            (pod, Place { network, addresses, _servers })
        };
        Self(Pod::all().map(place).collect())
    }

    pub(super) fn address(&self, pod: Pod, way: Way) -> IpAddr {
        self.0[&pod].addresses[way as usize]
    }

    pub(super) fn network(&self, pod: Pod) -> &Path {
        &self.0[&pod].network
    }

    /// Tries every flow in every way at the same time; returns those that were answered by the right pod.
    ///
    /// # Panics
    /// If another pod answers.
    pub(super) fn opened(&self) -> BTreeMap<(Flow, Way), bool> {
        let asking: Vec<_> = self
            .0
            .iter()
            .map(|(from, place)| {
                let flows = self.flows_of(*from);
                let probe = |(flow, way): &(Flow, Way)| Probe {
                    target: self.address(flow.to, *way),
                    protocol: flow.protocol,
                    port: flow.port,
                };
                let (network, probes) = (place.network.clone(), flows.iter().map(probe).collect());
                thread::spawn(move || flows.into_iter().zip(answers(&network, probes)).collect::<Vec<_>>())
            })
            .collect();
        let all = asking.into_iter().flat_map(|thread| thread.join().expect("it asks"));
        all.map(|((flow, way), answer)| {
            if let Some(name) = &answer
                && flow.protocol != Protocol::Icmp
            {
                assert_eq!(*name, flow.to.key(), "{flow:?} {way:?}");
            }
            ((flow, way), answer.is_some())
        })
        .collect()
    }

    fn flows_of(&self, from: Pod) -> Vec<(Flow, Way)> {
        let with_ports = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
            .into_iter()
            .flat_map(|protocol| PORTS.map(|port| (protocol, port)));
        let kinds: Vec<_> = with_ports.chain([(Protocol::Icmp, 0)]).collect();
        let ways = [Way::V4, Way::V6, Way::Service];
        let to = |to: Pod| {
            let flows = kinds.iter().map(move |(protocol, port)| Flow { from, to, protocol: *protocol, port: *port });
            flows.flat_map(move |flow| ways.map(|way| (flow, way)))
        };
        let all = self.0.keys().flat_map(|pod| to(*pod));
        // An echo request to a Service is to nobody. In clear, Services are kube-proxy's, which needs more of the
        // kernel for SCTP than the one under test may have.
        let has_service =
            |flow: &Flow| flow.protocol != Protocol::Icmp && !flow.from.is_outside() && !flow.to.is_outside();
        all.filter(|(flow, way)| *way != Way::Service || has_service(flow)).collect()
    }
}

fn manifest(pod: Pod) -> Value {
    let (namespace, name) = (pod.namespace.to_string(), pod.name.to_string());
    let mut ports: Vec<Value> = PORTS
        .iter()
        .flat_map(|port| {
            [("TCP", 't'), ("UDP", 'u'), ("SCTP", 's')].map(|(protocol, letter)| {
                json!({"containerPort": port, "protocol": protocol, "name": format!("serve-{port}-{letter}")})
            })
        })
        .collect();
    // One name, another port in each pod.
    let own = PORTS[NAMES.iter().position(|name| *name == pod.name).expect("a pod of the grid")];
    ports[usize::from(own - PORTS[0]) * 3]["name"] = json!("web");
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": {"pod": name}},
        "spec": {"nodeName": pod.node(), "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": false,
                 "containers": [{"name": "c", "image": "localhost/busybox:1", "imagePullPolicy": "IfNotPresent",
                                 "command": ["sleep", "36000"], "ports": ports}]},
    })
}

/// A Service for one pod.
fn service(pod: Pod) -> Value {
    let (namespace, name) = (pod.namespace.to_string(), pod.name.to_string());
    let ports: Vec<Value> = PORTS
        .iter()
        .flat_map(|port| {
            ["TCP", "UDP", "SCTP"].map(|protocol| {
                json!({"name": format!("{}-{port}", protocol.to_lowercase()), "port": port, "protocol": protocol})
            })
        })
        .collect();
    json!({"apiVersion": "v1", "kind": "Service", "metadata": {"namespace": namespace, "name": name},
           "spec": {"selector": {"pod": name}, "ports": ports}})
}

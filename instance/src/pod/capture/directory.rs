//! Answers the forwarding plane's question where a flow goes: looks the destination up in the cluster table and applies
//! the pod's policy (`clear` of the chain entry).
//!
//! There is no policy that lets out what nothing is known about. Such an address may be that of an enrolled pod that
//! the agent has not heard of yet, so the rules on the node drop what is sent there in clear anyway.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use nebula_cni_contract::cluster_table::{self, Table};
use nebula_cni_contract::launch::{Capture, Clear};
use nebula_core::capture::{Directory, Endpoint, Found, Service, Target, clear_tags, rendezvous};

use super::table_file::MappedTable;

/// One version of the cluster table, or none, and the policy of the pod.
#[derive(Debug)]
pub(crate) struct ClusterDirectory {
    spec: Arc<Capture>,
    /// Networks that are reached through tunnels, some of which may be outside of what is captured.
    overlay: Arc<[IpNet]>,
    table: Option<MappedTable>,
}

impl ClusterDirectory {
    /// Of a cluster of which nothing is known.
    pub(crate) fn unknown(spec: Arc<Capture>, overlay: Arc<[IpNet]>) -> Self {
        Self { spec, overlay, table: None }
    }

    /// The next version, by another table.
    pub(crate) fn with(&self, table: MappedTable) -> Self {
        Self { spec: Arc::clone(&self.spec), overlay: Arc::clone(&self.overlay), table: Some(table) }
    }

    pub(crate) fn table(&self) -> Option<&MappedTable> {
        self.table.as_ref()
    }

    pub(crate) fn table_version(&self) -> Option<u64> {
        Some(self.table()?.version())
    }

    /// Whether network policies must allow the pod's flows.
    pub(crate) fn is_under_policy(&self) -> bool {
        self.spec.policy
    }

    /// Why the pod is closed by a table that has no policies for it.
    pub(super) fn why_closed(&self) -> Option<&'static str> {
        let table = self.contents().filter(|_| self.is_under_policy())?;
        let has_programs = self.own_address().is_some_and(|own| table.programs(own).is_some());
        (!has_programs).then_some(CLOSED)
    }

    /// The pod's address, by which the table has its programs.
    pub(super) fn own_address(&self) -> Option<IpAddr> {
        self.spec.sources.first().copied()
    }

    pub(super) fn contents(&self) -> Option<Table<'_>> {
        Some(self.table()?.contents())
    }

    fn is_captured(&self, address: IpAddr) -> bool {
        self.spec.ranges.iter().chain(&self.spec.services).any(|range| range.contains(&address))
    }

    /// Whether a packet with this destination is here only because of its port.
    fn is_for_port_alone(&self, Target { address, port, .. }: &Target) -> bool {
        self.spec.node_ports.is_some_and(|(first, last)| (first..=last).contains(port))
            && !self.is_captured(*address)
            && !self.overlay.iter().any(|network| network.contains(address))
    }
}

impl Directory for ClusterDirectory {
    /// 0 without a table; tables have greater ones.
    fn version(&self) -> u64 {
        self.table_version().unwrap_or(0)
    }

    fn find(&self, target: &Target) -> Found {
        let Target { address, port, protocol } = *target;
        let found = self.contents().map_or(cluster_table::Found::Unknown, |table| table.find(address, port, protocol));
        match found {
            cluster_table::Found::Enrolled { incarnation } => Found::Peer { incarnation },
            cluster_table::Found::Service(cluster_table::Service { id, ready, clear, affinity }) => {
                match (ready, if self.spec.clear == Clear::Allow { clear } else { 0 }) {
                    (0, 0) => Found::Refused,
                    (_, clear) => Found::Service(Service { id, ready, clear, affinity }),
                }
            }
            cluster_table::Found::NoEndpoint => Found::Refused,
            // No Service has the port there. The rules on the node decide.
            cluster_table::Found::Clear | cluster_table::Found::Unknown if self.is_for_port_alone(target) => {
                Found::Clear
            }
            cluster_table::Found::Clear => match self.spec.clear {
                Clear::Allow => Found::Clear,
                // It may be an answer, which the rules on the node know.
                Clear::Deny if self.spec.answers.contains(&protocol) => Found::Clear,
                Clear::Deny => Found::Refused,
            },
            // Elsewhere in the overlay there is nothing but hosts of the overlay.
            cluster_table::Found::Unknown if !self.is_captured(address) => Found::Peer { incarnation: 0 },
            cluster_table::Found::Unknown => Found::Unknown,
        }
    }

    fn endpoint(&self, service: &Service, n: u32) -> Option<Endpoint> {
        let cluster_table::Endpoint { address, port, incarnation } = self.contents()?.endpoint(service.id, n)?;
        Some(Endpoint { address, port, incarnation })
    }

    fn choose(&self, service: &Service, hash: u64) -> Option<u32> {
        let table = self.contents()?;
        rendezvous(hash, table.tags(service.id).map(u32::from).chain(clear_tags(service.clear)))
    }

    fn serves(&self, service: &Service, endpoint: &Endpoint) -> bool {
        self.incarnation(endpoint.address) == Some(endpoint.incarnation)
            && self.contents().is_some_and(|table| table.serves(service.id, endpoint.address, endpoint.port))
    }

    fn likely_endpoints(&self, peer: IpAddr) -> Vec<SocketAddr> {
        let Some(cluster_table::End { node, port, other }) = self.contents().and_then(|table| table.end(peer)) else {
            return Vec::new();
        };
        [Some(port), other].into_iter().flatten().map(|port| SocketAddr::new(node, port)).collect()
    }

    fn incarnation(&self, address: IpAddr) -> Option<u64> {
        let known = self.contents().and_then(|table| table.incarnation(address));
        known.or_else(|| (!self.is_captured(address)).then_some(0))
    }
}

const CLOSED: &str = "the node agent has not compiled the pod's network policies yet";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nebula_cni_contract::cluster_table::{Builder, EndpointState, ServiceEndpoint, ServicePort};

    use super::*;
    use crate::pod::capture::table_file::TableFile;
    use crate::pod::capture::table_file::tests::{spec, write};

    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const ICMP: u8 = 1;
    const SCTP: u8 = 132;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn target(text: &str, port: u16, protocol: u8) -> Target {
        Target { address: address(text), port, protocol }
    }

    fn cluster() -> Builder {
        let mut builder = Builder::new();
        builder.pod(address("10.244.1.1"), 11);
        builder.pod(address("fd00:244::1"), 12);
        builder.clear(address("10.244.1.2"));
        builder.clear(address("192.0.2.1"));
        builder.node(address("192.0.2.1"));
        let endpoint = |is: &str| ServiceEndpoint {
            address: address(is),
            port: 8080,
            state: EndpointState::Ready,
            is_on_this_node: true,
        };
        let list = builder.endpoints([endpoint("10.244.1.1"), endpoint("10.244.1.2")]);
        let at = address("10.96.0.1");
        let port = ServicePort { address: at, port: 30_080, protocol: TCP, affinity: None, this_node_only: false };
        builder.node_port(port, [(list, 8080)]);
        for (service, endpoint, protocol) in [
            ("10.96.0.1", "10.244.1.1", TCP),
            ("10.96.0.1", "10.244.1.1", SCTP),
            ("10.96.0.2", "10.244.1.2", TCP),
            ("10.96.0.2", "10.244.1.2", SCTP),
        ] {
            let affinity = Some(Duration::from_secs(9));
            builder.service(
                ServicePort { address: address(service), port: 80, protocol, affinity, this_node_only: false },
                [ServiceEndpoint {
                    address: address(endpoint),
                    port: 8080,
                    state: EndpointState::Ready,
                    is_on_this_node: true,
                }],
            );
        }
        builder
    }

    /// Some of it is outside of what is captured.
    fn overlay() -> Arc<[IpNet]> {
        Arc::new(["10.244.0.0/16", "10.99.0.0/16"].map(|network| network.parse().unwrap()))
    }

    fn of(mut spec: Capture, table: MappedTable) -> ClusterDirectory {
        spec.node_ports = Some((30_000, 32_767));
        ClusterDirectory::unknown(Arc::new(spec), overlay()).with(table)
    }

    fn directory(change: impl FnOnce(&mut Capture)) -> (tempfile::TempDir, ClusterDirectory) {
        let folder = tempfile::tempdir().unwrap();
        write(&folder, &cluster().finish(5));
        let mut spec = spec(&folder);
        change(&mut spec);
        let table = TableFile::new(&spec.table).read_newer(None).unwrap();
        (folder, of(spec, table))
    }

    #[test]
    fn the_policy_of_the_pod_decides_what_becomes_of_flows_to_who_is_not_enrolled() {
        let (_folder, plain) = directory(|_| ());
        let (_folder, strict) = directory(|spec| (spec.clear, spec.answers) = (Clear::Deny, vec![UDP]));
        // A Service with one endpoint, which is not enrolled.
        let only_clear = Found::Service(Service { id: 0, ready: 0, clear: 1, affinity: Some(Duration::from_secs(9)) });
        for (to, expected) in [
            (target("10.244.1.1", 80, TCP), [Found::Peer { incarnation: 11 }; 2]),
            (target("fd00:244::1", 80, TCP), [Found::Peer { incarnation: 12 }; 2]),
            (target("10.244.1.2", 80, TCP), [Found::Clear, Found::Refused]),
            (target("10.244.1.2", 80, UDP), [Found::Clear; 2]),
            (target("10.96.0.2", 80, TCP), [only_clear, Found::Refused]),
            (target("10.96.0.2", 80, SCTP), [only_clear, Found::Refused]),
            (target("10.244.9.9", 80, TCP), [Found::Unknown; 2]),
            (target("10.96.9.9", 80, TCP), [Found::Unknown; 2]),
            (target("fd00:244::9", 80, TCP), [Found::Unknown; 2]),
            (target("10.96.0.1", 81, TCP), [Found::Refused; 2]),
            (target("10.96.0.1", 0, ICMP), [Found::Refused; 2]),
            (target("10.99.0.1", 80, TCP), [Found::Peer { incarnation: 0 }; 2]),
            // What comes here because of its port: a port of a node, another one, and somebody's on the internet.
            (
                target("192.0.2.1", 30_080, TCP),
                [Found::Service(Service { id: 0, ready: 1, clear: 0, affinity: None }); 2],
            ),
            (target("192.0.2.1", 30_081, TCP), [Found::Clear; 2]),
            (target("198.51.100.1", 30_080, TCP), [Found::Clear; 2]),
            (target("10.99.0.1", 30_080, TCP), [Found::Peer { incarnation: 0 }; 2]),
        ] {
            let found = [&plain, &strict].map(|directory| match directory.find(&to) {
                Found::Service(service) => Found::Service(Service { id: 0, ..service }),
                other => other,
            });
            assert_eq!(found, expected, "{to:?}");
        }
        assert_eq!(plain.version(), 5);
        assert_eq!(plain.incarnation(address("10.99.0.1")), Some(0), "a host elsewhere in the overlay");
        assert_eq!(plain.incarnation(address("10.244.1.2")), None);
    }

    #[test]
    fn an_endpoint_serves_as_long_as_the_same_pod_has_its_address() {
        let (_folder, directory) = directory(|_| ());
        let Found::Service(service) = directory.find(&target("10.96.0.1", 80, TCP)) else { panic!("a Service") };
        assert_eq!((service.ready, service.affinity), (1, Some(Duration::from_secs(9))));
        let endpoint = directory.endpoint(&service, 0).unwrap();
        assert_eq!(directory.choose(&service, 7), Some(0));
        assert!(matches!(directory.find(&target("10.96.0.1", 80, SCTP)), Found::Service(_)));
        assert_eq!((endpoint.address, endpoint.port, endpoint.incarnation), (address("10.244.1.1"), 8080, 11));
        assert_eq!(directory.endpoint(&service, 1), None);
        assert!(directory.serves(&service, &endpoint));
        assert!(!directory.serves(&service, &Endpoint { incarnation: 10, ..endpoint }), "of the pod before it");
        assert!(!directory.serves(&service, &Endpoint { port: 8081, ..endpoint }));
    }

    #[test]
    fn flows_spread_over_all_endpoints_unless_those_that_are_not_enrolled_are_refused() {
        let (address, protocol) = (address("10.96.0.1"), TCP);
        let mut builder = Builder::new();
        let endpoint = |last| ServiceEndpoint {
            address: [10, 244, 1, last].into(),
            port: 8080,
            state: EndpointState::Ready,
            is_on_this_node: true,
        };
        let endpoints = [1, 2, 3, 4].map(endpoint);
        endpoints[..2].iter().for_each(|endpoint| builder.pod(endpoint.address, 1));
        builder.service(ServicePort { address, port: 80, protocol, affinity: None, this_node_only: false }, endpoints);
        let folder = tempfile::tempdir().unwrap();
        write(&folder, &builder.finish(5));
        for (clear, expected) in [(Clear::Allow, [16, 16, 32]), (Clear::Deny, [32, 32, 0])] {
            let mut spec = spec(&folder);
            spec.clear = clear;
            let table = TableFile::new(&spec.table).read_newer(None).unwrap();
            let directory = of(spec, table);
            let Found::Service(service) = directory.find(&target("10.96.0.1", 80, TCP)) else { panic!("a Service") };
            let chosen: Vec<_> = (0..64).filter_map(|hash| directory.choose(&service, hash)).collect();
            let count = |is: &dyn Fn(u32) -> bool| chosen.iter().filter(|n| is(**n)).count();
            let counts = [count(&|n| n == 0), count(&|n| n == 1), count(&|n| n >= 2)];
            assert!(counts.iter().zip(expected).all(|(found, expected)| found.abs_diff(expected) < 16), "{counts:?}");
            assert_eq!((counts.iter().sum::<usize>(), counts[2] > 0), (64, clear == Clear::Allow));
        }
    }

    #[test]
    fn without_a_table_nothing_in_the_ranges_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let directory = ClusterDirectory::unknown(Arc::new(spec(&folder)), overlay());
        for to in ["10.244.1.1", "10.96.0.1", "fd00:244::1"] {
            assert_eq!(directory.find(&target(to, 80, TCP)), Found::Unknown);
            assert_eq!(directory.incarnation(address(to)), None);
        }
        assert_eq!(directory.find(&target("10.99.0.1", 80, TCP)), Found::Peer { incarnation: 0 });
        assert_eq!(directory.version(), 0);
        assert_eq!(directory.endpoint(&Service { id: 0, ready: 1, clear: 0, affinity: None }, 0), None);
    }
}

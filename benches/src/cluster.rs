//! A cluster of Services for the benchmarks of capture.

use std::net::{IpAddr, Ipv4Addr};

use nebula_core::capture::Target;
use nebula_core::simulator::Cluster;

use crate::Host;

const ENDPOINTS: u16 = 5;

/// The address of the `n`th Service.
#[must_use]
pub fn service(n: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits((10 << 24 | 96 << 16) + n)
}

/// Puts a host under capture, in a cluster of `services` Services with 5 endpoints each. Those of the first Service, on
/// `port` for TCP and UDP, are all on `server`.
pub fn capture(host: &mut Host, server: &Host, services: u32, port: u16) {
    let mut cluster = Cluster::default();
    cluster.pod(host.overlay, 1);
    cluster.pod(server.overlay, 2);
    for protocol in [6, 17] {
        let endpoints: Vec<_> = (0..ENDPOINTS).map(|n| (server.overlay, 8000 + n)).collect();
        let target = Target { address: service(0).into(), port, protocol };
        cluster.service(target, &endpoints, endpoints.len() as u32, None);
    }
    for n in 1..services {
        let pod = |m: u16| IpAddr::from(Ipv4Addr::from_bits((10 << 24 | 64 << 16) + n * 8 + u32::from(m)));
        let endpoints: Vec<_> = (0..ENDPOINTS).map(|m| (pod(m), 8080)).collect();
        endpoints.iter().for_each(|(address, _)| cluster.pod(*address, n.into()));
        let target = Target { address: service(n).into(), port: 80, protocol: 6 };
        cluster.service(target, &endpoints, endpoints.len() as u32, None);
    }
    let directory = std::sync::Arc::new(cluster);
    host.node.reconfigure(host.now, |config| config.capture = Some(directory));
}

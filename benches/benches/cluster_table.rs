//! The cluster table of a large cluster: its size, the time to build and to open it, and that of a lookup.
//!
//! 10,000 Services of two ports with 50,000 endpoints each, which are the 50,000 pods.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_benches::{NO_GO, Step, note};
use nebula_cni_contract::cluster_table::{Builder, EndpointState, Found, Layout, ServiceEndpoint, ServicePort, Table};

const SERVICES: u32 = 10_000;
const PODS: u32 = 50_000;
const TCP: u8 = 6;

fn pod(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 244, 0, 0).to_bits() + n).into()
}

fn cluster_ip(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(Ipv4Addr::new(10, 96, 0, 0).to_bits() + n).into()
}

fn cluster() -> Builder {
    let mut builder = Builder::new();
    for n in 0..PODS {
        builder.pod(pod(n), u64::from(n) + 1);
    }
    for n in 0..PODS {
        builder.clear(pod(PODS + n));
    }
    for n in 0..SERVICES {
        for port in [80, 443] {
            let address = cluster_ip(n);
            let service = ServicePort { address, port, protocol: TCP, affinity: None, this_node_only: false };
            let endpoint = |k| ServiceEndpoint {
                address: pod(n * (PODS / SERVICES) + k),
                port: port + 8000,
                state: EndpointState::Ready,
                is_on_this_node: false,
            };
            builder.service(service, (0..PODS / SERVICES).map(endpoint));
        }
    }
    builder
}

/// What the first packet of a flow to a Service asks.
fn choose(table: &Table<'_>, n: u32) -> Option<IpAddr> {
    match table.find(cluster_ip(n % SERVICES), 443, TCP) {
        Found::Service(service) => table.endpoint(service.id, n % service.ready).map(|endpoint| endpoint.address),
        _ => None,
    }
}

fn cluster_table(c: &mut Criterion) {
    let mut group = c.benchmark_group("cluster_table");
    let facts = cluster();
    Step::new("cluster table, build", NO_GO).with(&mut group, "build", || facts.clone(), |facts| facts.finish(7));
    let bytes = facts.finish(7);
    note("cluster table, 10,000 Services and 50,000 pods, bytes", None, Some(bytes.len() as f64), NO_GO);
    Step::new("cluster table, open", NO_GO).repeat(&mut group, "open", || Layout::read(black_box(&bytes)));
    let layout = Layout::read(&bytes).expect("a table");
    let table = layout.table(&bytes);
    // A stride that no prefetcher guesses.
    let mut n = 0_u32;
    let mut next = || {
        n = n.wrapping_add(0x9e37_79b1);
        n >> 8
    };
    Step::new("cluster table, pod", NO_GO).repeat(&mut group, "pod", || {
        assert!(matches!(table.find(pod(next() % PODS), 80, TCP), Found::Enrolled { .. }));
    });
    Step::new("cluster table, Service and endpoint", NO_GO).repeat(&mut group, "service", || {
        assert!(choose(&table, next()).is_some());
    });
    Step::new("cluster table, not enrolled", NO_GO).repeat(&mut group, "clear", || {
        assert_eq!(table.find(pod(PODS + next() % PODS), 80, TCP), Found::Clear);
    });
    Step::new("cluster table, unknown", NO_GO).repeat(&mut group, "unknown", || {
        assert_eq!(table.find(pod(2 * PODS + next() % PODS), 80, TCP), Found::Unknown);
    });
    group.finish();
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = cluster_table);
criterion_main!(benches);

//! A lighthouse that many hosts are connected to: an update, a query, and the memory of a host.

use std::net::{IpAddr, SocketAddr};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use nebula_benches::{Host, connect, is_smoke_test};
use nebula_cert::{Curve, Version};
use nebula_core::Punt;
use nebula_core::simulator::Authority;
use nebula_core::tunnel::LocalIndex;
use nebula_core::wire::header::MessageType;
use nebula_core::wire::messages::{Meta, MetaKind};

struct Served {
    lighthouse: Host,
    hosts: Vec<(LocalIndex, IpAddr, SocketAddr)>,
}

impl Served {
    fn new(count: u32) -> Self {
        let authority = Authority::new(Curve::Curve25519);
        let trust = authority.trust();
        let mut lighthouse = Host::new(&authority, &trust, 1, |config| config.lighthouse.am_lighthouse = true);
        let before = resident();
        let mut hosts = Vec::new();
        for number in 2..count + 2 {
            let mut host = Host::new(&authority, &trust, number, |_| {});
            connect(&mut host, &mut lighthouse);
            let remote = host.node.tunnels()[0].remote_index;
            hosts.push((LocalIndex(remote.0), host.overlay, host.underlay));
        }
        let connected = resident();
        let mut served = Self { lighthouse, hosts };
        for at in 0..served.hosts.len() {
            let update = served.update(at);
            served.take(update);
        }
        let known = resident();
        let per_host = |bytes: usize| bytes / count as usize;
        eprintln!(
            "{count} hosts: {} bytes of memory each for the tunnel, {} for what it reported",
            per_host(connected.saturating_sub(before)),
            per_host(known.saturating_sub(connected)),
        );
        served
    }
    fn message(&self, at: usize, message: &Meta) -> Punt {
        let (tunnel, _, from) = self.hosts[at];
        let plaintext = message.encode().expect("version 2 names everything");
        Punt::Message { tunnel, from: from.into(), kind: MessageType::Lighthouse, plaintext }
    }
    fn update(&self, at: usize) -> Punt {
        let (_, _, from) = self.hosts[at];
        let mut update = Meta::new(MetaKind::HostUpdateNotification, Version::V2, None);
        update.endpoints = vec![from, SocketAddr::from(([192, 168, 1, 7], 4242))];
        self.message(at, &update)
    }
    fn query(&self, at: usize, subject: usize) -> Punt {
        self.message(at, &Meta::new(MetaKind::HostQuery, Version::V2, Some(self.hosts[subject].1)))
    }
    /// Handles a message; returns how many it makes the lighthouse send.
    fn take(&mut self, punt: Punt) -> usize {
        self.lighthouse.node.handle_punt(self.lighthouse.now, punt);
        std::iter::from_fn(|| self.lighthouse.node.poll_transmit()).count()
    }
}

fn lighthouse(c: &mut Criterion) {
    let count = if is_smoke_test() { 50 } else { 100_000 };
    // Made with the first benchmark that is asked for.
    let mut served = None;
    let mut group = c.benchmark_group(format!("lighthouse_{count}_hosts"));
    group.throughput(Throughput::Elements(1));
    group.bench_function("update", |bencher| {
        let served = served.get_or_insert_with(|| Served::new(count));
        // From all over the table, made beforehand.
        let updates: Vec<_> = (0..count as usize).step_by(count as usize / 50).map(|at| served.update(at)).collect();
        let mut next = 0;
        bencher.iter(|| {
            next = (next + 1) % updates.len();
            assert_eq!(served.take(updates[next].clone()), 1, "the acknowledgement");
        });
    });
    group.bench_function("query", |bencher| {
        let served = served.get_or_insert_with(|| Served::new(count));
        let hosts = count as usize;
        let queries = (0..hosts).step_by(hosts / 50).map(|at| served.query(at, (at * 7 + hosts / 2) % hosts));
        let queries: Vec<_> = queries.collect();
        let mut next = 0;
        bencher.iter(|| {
            next = (next + 1) % queries.len();
            assert_eq!(served.take(queries[next].clone()), 2, "the reply and the notice to the subject");
        });
    });
    group.finish();
}

/// Resident memory of this process, in bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).unwrap_or_default() * 4096
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = lighthouse);
criterion_main!(benches);

//! What a packet costs in the firewall: flows known and new, packets refused, with few rules and with many.
//!
//! Each is one small outbound packet. Refused ones are not sealed; the others differ from the first in the firewall only.

use std::net::Ipv4Addr;

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_benches::{network, udp};
use nebula_core::firewall::{Cidr, Policy, PortRange, Protocol, Rule};
use nebula_core::forward::Offload;
use nebula_core::{DropReason, Verdict};

/// Rules that do not fit a packet to port 53, of every sort; and one that fits packets to ports from 54 on.
fn rules(count: u32) -> Vec<Rule> {
    let mut rules: Vec<_> = (0..count - 1)
        .map(|n| {
            let port = 1_000 + (n % 50_000) as u16;
            let rule = Rule { protocol: Protocol::Udp, port: PortRange::Range(port, port + 10), ..Rule::default() };
            match n % 4 {
                0 => Rule { host: Some(format!("other-{n}")), port: PortRange::Any, ..rule },
                1 => Rule { groups: vec![format!("group-{n}"), "pods".to_owned()], port: PortRange::Any, ..rule },
                2 => {
                    let network = format!("{}/24", Ipv4Addr::from_bits(172 << 24 | n << 8)).parse();
                    Rule { cidr: network.ok().map(Cidr::Prefix), port: PortRange::Any, ..rule }
                }
                _ => Rule { host: Some("any".to_owned()), ..rule },
            }
        })
        .collect();
    rules.push(Rule { protocol: Protocol::Udp, port: PortRange::Range(54, 999), ..Rule::any() });
    rules
}

fn firewall(c: &mut Criterion) {
    for count in [10, 10_000] {
        let mut group = c.benchmark_group(format!("{count}_rules"));
        let (mut a, _) = network(|_| {});
        a.node.set_firewall(Policy { outbound: rules(count), ..Policy::default() });
        let mut one = udp(40_000, 54, 36);
        group.bench_function("known_to_the_lane", |bencher| {
            bencher.iter(|| {
                assert_eq!(a.send(&mut one, Offload::default()), Verdict::Transmit);
                a.lane.clear();
            });
        });
        // More flows than a lane keeps at hand, so each is looked for in the table that lanes share.
        let mut many: Vec<_> = (0..4096).map(|n| udp(n, 54, 36)).collect();
        let mut next = 0;
        group.bench_function("known_to_the_node", |bencher| {
            bencher.iter(|| {
                next = (next + 1) % many.len();
                assert_eq!(a.send(&mut many[next], Offload::default()), Verdict::Transmit);
                a.lane.clear();
            });
        });
        let mut flow = 0_u32;
        group.bench_function("new", |bencher| {
            bencher.iter(|| {
                flow += 1;
                one[20..22].copy_from_slice(&(flow as u16).to_be_bytes());
                one[22..24].copy_from_slice(&(54 + (flow >> 16) as u16).to_be_bytes());
                assert_eq!(a.send(&mut one, Offload::default()), Verdict::Transmit);
                a.lane.clear();
            });
        });
        let mut refused = udp(40_000, 53, 36);
        group.bench_function("refused", |bencher| {
            bencher.iter(|| {
                assert_eq!(a.send(&mut refused, Offload::default()), Verdict::Drop(DropReason::NoRule));
            });
        });
        group.finish();
    }
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = firewall);
criterion_main!(benches);

//! Cost of a packet in the firewall: known and new flows and refused packets, with few rules and with many.
//!
//! Each operation handles one small outbound packet. Refused packets are not sealed; the other cases differ from the
//! first in the firewall only. The `decision` group measures the firewall alone, like Go Nebula's figure.

use std::net::Ipv4Addr;

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_benches::{Go, NO_GO, Step, network, udp};
use nebula_core::counters::Direction;
use nebula_core::firewall::{Cidr, Policy, PortRange, Protocol, Rule};
use nebula_core::forward::Offload;
use nebula_core::simulator::Gate;
use nebula_core::{DropReason, Verdict};
use nebula_core::{FlowKey, protocol};

/// Rules of every kind that do not match, and a last one that matches packets to ports 54 to 999.
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
        a.node.reconfigure(a.now, |config| config.firewall = Policy { outbound: rules(count), ..Policy::default() });
        let mut one = udp(40_000, 54, 36);
        group.bench_function("known_to_the_lane", |bencher| {
            bencher.iter(|| {
                assert_eq!(a.send(&mut one, Offload::default()), Verdict::Transmit);
                a.lane.clear();
            });
        });
        // More flows than a lane caches, so each is looked up in the table shared by all lanes.
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

/// Decisions: a conntrack hit in the lane's cache, one in the table shared by all lanes, and a refused packet.
fn decision(c: &mut Criterion) {
    let mut group = c.benchmark_group("decision");
    let (a, b) = network(|_| {});
    let policy = Policy { outbound: rules(10_000), ..Policy::default() };
    let own = ["10.0.0.1/8".parse().expect("a network")];
    let mut gate = Gate::new(&policy, &own, &a.forwarder, a.tunnel(), a.now).expect("the tunnel to b");
    let flow = |local_port: u16, remote_port| FlowKey {
        local: a.overlay,
        remote: b.overlay,
        local_port,
        remote_port,
        protocol: protocol::UDP,
        fragment: false,
    };
    let one = flow(40_000, 54);
    let go = |ns| Go { ns: Some(ns), bytes: None };
    Step::new("conntrack hit, kept by the lane", go(38.0)).repeat(&mut group, "known_to_the_lane", || {
        assert_eq!(gate.check(a.now, Direction::Outbound, &one), Ok(()));
    });
    // More flows than a lane caches.
    let many: Vec<_> = (0..4096).map(|port| flow(port, 54)).collect();
    let mut next = 0;
    Step::new("conntrack hit, shared by all lanes", go(99.0)).repeat(&mut group, "known_to_the_node", || {
        next = (next + 1) % many.len();
        assert_eq!(gate.check(a.now, Direction::Outbound, &many[next]), Ok(()));
    });
    let refused = flow(40_000, 53);
    Step::new("firewall, refused, 10,000 rules", NO_GO).repeat(&mut group, "refused", || {
        assert_eq!(gate.check(a.now, Direction::Outbound, &refused), Err(DropReason::NoRule));
    });
    group.finish();
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = firewall, decision);
criterion_main!(benches);

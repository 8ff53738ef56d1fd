//! Cost of the first packet of a flow, and of a later one: to a pod without capture, and to a Service of a large
//! cluster.

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_benches::{Host, capture, network, readdress, service, udp};
use nebula_core::Verdict;
use nebula_core::forward::Offload;

const SERVICES: u32 = 10_000;

fn flows(c: &mut Criterion) {
    let (mut plain, _) = network(|_| {});
    let (mut captured, server) = network(|_| {});
    capture(&mut captured, &server, SERVICES, 53);
    let hosts = [("to_a_pod", &mut plain, [10, 0, 0, 2]), ("to_a_service", &mut captured, service(0).octets())];
    let mut group = c.benchmark_group("capture");
    for (name, host, destination) in hosts {
        let mut packet = udp(40_000, 53, 36);
        readdress(&mut packet, [10, 0, 0, 1], destination);
        group.bench_function(format!("known_flow_{name}"), |bencher| {
            bencher.iter(|| send(host, &packet));
        });
        let mut flow = 0_u16;
        group.bench_function(format!("new_flow_{name}"), |bencher| {
            bencher.iter(|| {
                flow = flow.wrapping_add(1);
                packet[20..22].copy_from_slice(&flow.to_be_bytes());
                // Far enough from the last time that this port was used.
                if flow == 0 {
                    host.now += std::time::Duration::from_secs(1_000);
                }
                send(host, &packet);
            });
        });
    }
    group.finish();
}

/// Sends a copy: capture changes the packet.
fn send(host: &mut Host, packet: &[u8]) {
    let mut copy = [0; 64];
    let copy = &mut copy[..packet.len()];
    copy.copy_from_slice(packet);
    assert_eq!(host.send(copy, Offload::default()), Verdict::Transmit);
    host.lane.clear();
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = flows);
criterion_main!(benches);

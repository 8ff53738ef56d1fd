//! The packet path, from overlay packet to sealed datagrams and back.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use nebula_benches::{Stream, network, tcp_acknowledgement, tcp_super_packet, udp};
use nebula_core::Verdict;
use nebula_core::forward::{Offload, Received};

/// Payload of a TCP segment with timestamps at an MTU of 1300, and a number of segments that fits well into 64 KiB.
const SEGMENT: u16 = 1248;
const SEGMENTS: usize = 48;

fn outbound(c: &mut Criterion) {
    let mut group = c.benchmark_group("outbound");
    let (mut a, _) = network(|_| {});
    let stream = Stream { port: 40_000, sequence: 1, acknowledgement: 1 };
    let (mut packet, offload) = tcp_super_packet(stream, SEGMENT, SEGMENTS);
    group.throughput(Throughput::Bytes(packet.len() as u64));
    group.bench_function("48_segments", |bencher| {
        bencher.iter(|| {
            assert_eq!(a.send(&mut packet, offload), Verdict::Transmit);
            a.lane.clear();
        });
    });
    for payload in [36, 1200] {
        let mut packet = udp(40_000, 53, payload);
        group.throughput(Throughput::Bytes(packet.len() as u64));
        group.bench_function(format!("{}_bytes", packet.len()), |bencher| {
            bencher.iter(|| {
                assert_eq!(a.send(&mut packet, Offload::default()), Verdict::Transmit);
                a.lane.clear();
            });
        });
    }
    group.finish();
}

fn inbound(c: &mut Criterion) {
    let mut group = c.benchmark_group("inbound");
    let (mut a, mut b) = network(|_| {});
    let stream = Stream { port: 40_000, sequence: 1, acknowledgement: 1 };
    let (mut packet, offload) = tcp_super_packet(stream, SEGMENT, SEGMENTS);
    group.throughput(Throughput::Bytes(packet.len() as u64));
    for (name, join, expected) in [("48_segments_joined", true, 1), ("48_segments_not_joined", false, SEGMENTS)] {
        b.lane.set_coalesce(join, join);
        group.bench_function(name, |bencher| {
            let sealed = || {
                assert_eq!(a.send(&mut packet, offload), Verdict::Transmit);
                a.sent()
            };
            let open = |(mut buffer, slots): (Vec<u8>, Vec<Received>)| {
                b.lane.clear();
                b.receive(&mut buffer, &slots);
                assert_eq!(b.lane.deliveries().len(), expected);
                buffer
            };
            // One input at a time: unlike a single receive buffer, a batch of inputs would not fit into the caches.
            bencher.iter_batched(sealed, open, BatchSize::PerIteration);
        });
    }
    b.lane.set_coalesce(true, true);
    for (name, acknowledged_by) in [("with_other_acks", 40_001), ("with_own_acks", 40_000)] {
        let mut packets = mixed(acknowledged_by);
        group.throughput(Throughput::Bytes(packets.iter().map(|(packet, _)| packet.len() as u64).sum()));
        group.bench_function(name, |bencher| {
            let sealed = || {
                for (packet, offload) in &mut packets {
                    assert_eq!(a.send(packet, *offload), Verdict::Transmit);
                }
                a.sent()
            };
            let open = |(mut buffer, slots): (Vec<u8>, Vec<Received>)| {
                b.lane.clear();
                b.receive(&mut buffer, &slots);
                buffer
            };
            bencher.iter_batched(sealed, open, BatchSize::PerIteration);
        });
        eprintln!("{name}: {} packets in {} deliveries", packets.len(), b.lane.deliveries().len());
    }
    for payload in [36, 1200] {
        let mut packet = udp(40_000, 53, payload);
        group.throughput(Throughput::Bytes(packet.len() as u64));
        group.bench_function(format!("{}_bytes", packet.len()), |bencher| {
            let sealed = || {
                assert_eq!(a.send(&mut packet, Offload::default()), Verdict::Transmit);
                a.sent()
            };
            let open = |(mut buffer, slots): (Vec<u8>, Vec<Received>)| {
                b.lane.clear();
                b.receive(&mut buffer, &slots);
                assert_eq!(b.lane.deliveries().len(), 1);
                buffer
            };
            bencher.iter_batched(sealed, open, BatchSize::NumIterations(64));
        });
    }
    group.finish();
}

/// A stream of 40 segments, with a bare acknowledgement after every second one, of the same connection or another.
fn mixed(acknowledged_by: u16) -> Vec<(Vec<u8>, Offload)> {
    let mut packets = Vec::new();
    for pair in 0..20 {
        let acknowledgement = 1 + pair * 2_000;
        for n in [0, 1] {
            let sequence = 1 + (pair * 2 + n) * u32::from(SEGMENT);
            let own = if acknowledged_by == 40_000 { acknowledgement } else { 1 };
            let stream = Stream { port: 40_000, sequence, acknowledgement: own };
            packets.push(tcp_super_packet(stream, SEGMENT, 1));
        }
        let sequence = if acknowledged_by == 40_000 { 1 + (pair * 2 + 2) * u32::from(SEGMENT) } else { 1 };
        let stream = Stream { port: acknowledged_by, sequence, acknowledgement: acknowledgement + 2_000 };
        packets.push((tcp_acknowledgement(stream), Offload { segment: None, checksum: Some((20, 16)) }));
    }
    packets
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = outbound, inbound);
criterion_main!(benches);

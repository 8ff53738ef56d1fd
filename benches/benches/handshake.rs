//! The three steps of a handshake, each with all that the control plane does about it.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use nebula_benches::Host;
use nebula_cert::Curve;
use nebula_core::simulator::Authority;

fn handshake(c: &mut Criterion) {
    for (name, curve) in [("25519", Curve::Curve25519), ("p256", Curve::P256)] {
        let mut group = c.benchmark_group(format!("handshake_{name}"));
        let authority = Authority::new(curve);
        let trust = authority.trust();
        let [one, two] = [1, 2].map(|number| nebula_benches::identity(&authority, number));
        let hosts = || {
            let a = Host::with_identity(one.clone(), &trust, 1, |_| {});
            (a, Host::with_identity(two.clone(), &trust, 2, |_| {}))
        };
        group.bench_function("start", |bencher| {
            bencher.iter_batched(
                hosts,
                |(mut a, b)| {
                    let first = a.call(&b);
                    (a, b, first)
                },
                BatchSize::SmallInput,
            );
        });
        let called = || {
            let (mut a, b) = hosts();
            let first = a.call(&b);
            (a, b, first)
        };
        group.bench_function("respond", |bencher| {
            bencher.iter_batched(
                called,
                |(a, mut b, first)| {
                    let second = b.handshake(a.underlay, first.datagram).expect("an answer");
                    (a, b, second)
                },
                BatchSize::SmallInput,
            );
        });
        let answered = || {
            let (a, mut b, first) = called();
            let second = b.handshake(a.underlay, first.datagram).expect("an answer");
            (a, b, second)
        };
        group.bench_function("finish", |bencher| {
            bencher.iter_batched(
                answered,
                |(mut a, b, second)| {
                    let _packets_that_waited = a.handshake(b.underlay, second.datagram);
                    assert_eq!(a.node.tunnels().len(), 1);
                    (a, b)
                },
                BatchSize::SmallInput,
            );
        });
        group.finish();
    }
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = handshake);
criterion_main!(benches);

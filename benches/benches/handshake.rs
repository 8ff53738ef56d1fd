//! The four steps of a handshake, each with all of the control plane's work.

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_benches::{Go, Host, NO_GO, Step};
use nebula_cert::Curve;
use nebula_core::simulator::Authority;
use nebula_core::{Config, PostQuantum, Punt, Transmit};

fn handshake(c: &mut Criterion) {
    // Go needs 426 µs for the responder, and 36 kB for both sides together; half of that is taken for one.
    let go = Go { ns: Some(426_000.0), bytes: Some(18_000.0) };
    for (name, curve, go) in [("25519", Curve::Curve25519, go), ("p256", Curve::P256, NO_GO)] {
        let mut group = c.benchmark_group(format!("handshake_{name}"));
        let authority = Authority::new(curve);
        let trust = authority.trust();
        let [one, two] = [1, 2].map(|number| nebula_benches::identity(&authority, number));
        let hosts = || {
            let mut a = Host::with_identity(one.clone(), &trust, 1, |_| {});
            let b = Host::with_identity(two.clone(), &trust, 2, |_| {});
            a.learn(&b);
            (a, b)
        };
        Step::new(format!("handshake on {name}, start"), NO_GO).with(&mut group, "start", hosts, |(mut a, b)| {
            let first = a.call(&b);
            (a, b, first)
        });
        let called = || {
            let (mut a, b) = hosts();
            let first = a.call(&b);
            (a, b, first)
        };
        let respond = Step::new(format!("handshake on {name}, respond"), go);
        respond.with(&mut group, "respond", called, at_b);
        let answered = || at_b(called());
        let finish = Step::new(format!("handshake on {name}, finish"), NO_GO);
        finish.with(&mut group, "finish", answered, |(mut a, b, second)| {
            let _packets_that_waited = a.handshake(b.underlay, second.datagram);
            assert_eq!(a.node.tunnels().len(), 1);
            (a, b)
        });
        let unconfirmed = || {
            let (a, b, _) = answered();
            (a, b)
        };
        let confirm = Step::new(format!("handshake on {name}, confirm"), NO_GO);
        confirm.with(&mut group, "confirm", unconfirmed, |(a, mut b)| {
            let (tunnel, from) = (b.node.half_open()[0], a.underlay.into());
            b.node.handle_punt(b.now, Punt::Confirmed { tunnel, from });
            assert_eq!(b.node.tunnels().len(), 1);
            (a, b)
        });
        group.finish();
    }
}

/// Initiator, responder, and the message between them.
type Between = (Host, Host, Transmit);

/// The responder reads a message and answers.
fn at_b((a, mut b, message): Between) -> Between {
    let answer = b.handshake(a.underlay, message.datagram).expect("an answer");
    (a, b, answer)
}

/// The initiator reads one and goes on.
fn at_a((mut a, b, message): Between) -> Between {
    let next = a.handshake(b.underlay, message.datagram).expect("a message");
    (a, b, next)
}

/// The same with ML-KEM: two more messages, before which there is no tunnel.
fn with_ml_kem(c: &mut Criterion) {
    let mut group = c.benchmark_group("handshake_25519_ml_kem");
    let authority = Authority::new(Curve::Curve25519);
    let trust = authority.trust();
    let [one, two] = [1, 2].map(|number| nebula_benches::identity(&authority, number));
    let on = |config: &mut Config| config.post_quantum = PostQuantum::Prefer;
    let called = || {
        let mut a = Host::with_identity(one.clone(), &trust, 1, on);
        let b = Host::with_identity(two.clone(), &trust, 2, on);
        a.learn(&b);
        let first = a.call(&b);
        (a, b, first)
    };
    let responded = || at_b(called());
    let offered = || at_a(responded());
    let answered = || at_b(offered());
    let step = |name: &str| Step::new(format!("handshake with ML-KEM, {name}"), NO_GO);
    step("respond").with(&mut group, "respond", called, at_b);
    step("offer").with(&mut group, "offer", responded, at_a);
    step("answer").with(&mut group, "answer", offered, at_b);
    step("finish").with(&mut group, "finish", answered, |(mut a, b, fourth)| {
        let _packets_that_waited = a.handshake(b.underlay, fourth.datagram);
        assert!(a.node.tunnels()[0].post_quantum);
        (a, b)
    });
    group.finish();
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = handshake, with_ml_kem);
criterion_main!(benches);

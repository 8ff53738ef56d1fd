//! Benchmarks of sealing and opening in place, and of the replay window.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use nebula_benches::{Go, NO_GO, Step};
use nebula_core::config::Cipher;
use nebula_core::internals::AeadKey;
use nebula_core::internals::{ReplayWindow, Session, SessionKeys};

const HEADER: [u8; 16] = [1; 16];

fn seal_open(c: &mut Criterion) {
    for (name, cipher) in [("aes", Cipher::Aes256Gcm), ("chachapoly", Cipher::ChaCha20Poly1305)] {
        let session = Session::new(SessionKeys { cipher, send: [1; 32], receive: [2; 32] });
        let peer = AeadKey::new(cipher, &[1; 32]);
        for len in [64, 1400, 8800] {
            let mut group = c.benchmark_group(format!("{name}_{len}"));
            group.throughput(Throughput::Bytes(len as u64));
            let mut body = vec![0; len];
            group.bench_function("seal", |bencher| {
                bencher.iter(|| {
                    let counter = session.reserve(1).expect("a new session");
                    session.send_key.seal(counter, &HEADER, &mut body)
                });
            });
            let tag = session.send_key.seal(9, &HEADER, &mut body);
            let sealed = [body.as_slice(), &tag].concat();
            group.bench_function("open", |bencher| {
                let open = |frame: &mut Vec<u8>| assert!(peer.open(9, &HEADER, frame));
                bencher.iter_batched_ref(|| sealed.clone(), open, BatchSize::NumIterations(16));
            });
            group.finish();
        }
    }
}

fn replay_window(c: &mut Criterion) {
    let mut group = c.benchmark_group("replay_window");
    group.throughput(Throughput::Elements(1));
    let (window, mut counter) = (ReplayWindow::new(), 3);
    let go = Go { ns: Some(2.5), bytes: None };
    Step::new("replay window, in order", go).repeat(&mut group, "in_order", || {
        counter += 1;
        window.check(counter) && window.commit(counter)
    });
    Step::new("replay window, reordered", NO_GO).repeat(&mut group, "reordered", || {
        counter += 1;
        let other = counter ^ 0x1f;
        window.check(other) && window.commit(other)
    });
    group.bench_function("replayed", |bencher| bencher.iter(|| window.check(counter - 40)));
    group.finish();
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = seal_open, replay_window);
criterion_main!(benches);

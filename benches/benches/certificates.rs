//! Benchmarks of reading, verifying and signing certificates.

use criterion::{Criterion, criterion_group, criterion_main};
use nebula_cert::{CaPool, Certificate, Curve, PrivateKey, SigningKey, Template, UnixTime, Version};

const NOW: UnixTime = 1_800_000_000;

fn certificates(c: &mut Criterion) {
    for (curve_name, curve) in [("25519", Curve::Curve25519), ("p256", Curve::P256)] {
        for (name, version) in [("v1", Version::V1), ("v2", Version::V2)] {
            let mut group = c.benchmark_group(format!("{name}_{curve_name}"));
            let key = SigningKey::generate(curve).expect("randomness");
            let template = |networks: &[&str], public_key: Vec<u8>| Template {
                version,
                curve,
                networks: networks.iter().map(|text| text.parse().expect("a network")).collect(),
                groups: vec!["pods".to_owned(), "default".to_owned()],
                public_key,
                ..Template::new("host.example", 1_700_000_000..=2_000_000_000)
            };
            let ca = template(&[], Vec::new()).self_sign(&key).expect("a valid CA");
            let public_key = PrivateKey::generate(curve).expect("randomness").public_key();
            let template = template(&["10.0.0.1/8"], public_key.clone());
            let host = template.clone().sign(&ca, &key).expect("a valid host");
            let (pem, short) = (host.to_pem(), host.to_handshake());
            let mut trust = CaPool::new();
            trust.add(ca.clone()).expect("it signed itself");
            group.bench_function("read_pem", |bencher| bencher.iter(|| Certificate::from_pem(pem.as_bytes()).is_ok()));
            group.bench_function("read_handshake", |bencher| {
                bencher.iter(|| Certificate::from_handshake(version, curve, &public_key, &short).is_ok());
            });
            group.bench_function("verify", |bencher| bencher.iter(|| trust.verify(host.clone(), NOW).is_ok()));
            group.bench_function("sign", |bencher| bencher.iter(|| template.clone().sign(&ca, &key).is_ok()));
            group.finish();
            assert!(trust.verify(host, NOW).is_ok());
            assert!(Certificate::from_handshake(version, curve, &public_key, &short).is_ok());
        }
    }
}

criterion_group!(name = benches; config = nebula_benches::criterion(); targets = certificates);
criterion_main!(benches);

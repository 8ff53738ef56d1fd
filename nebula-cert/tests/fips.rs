//! What a FIPS build makes and refuses.

use nebula_cert::{
    BUILD_NOTE, CaPool, Certificate, Curve, Error, PassphraseCost, PrivateKey, SigningKey, Template, UnixTime,
};

const NOW: UnixTime = 1_800_000_000;

#[test]
fn it_signs_and_verifies_with_p256() {
    let ca_key = SigningKey::generate(Curve::USUAL).unwrap();
    assert_eq!(ca_key.curve(), Curve::P256);
    let template = Template::new("net", NOW..=NOW + 1000);
    let ca = template.clone().self_sign(&ca_key).unwrap();
    let key = PrivateKey::generate(Curve::P256).unwrap();
    let networks = vec!["10.0.0.1/24".parse().unwrap()];
    let host = Template { name: "host".into(), networks, public_key: key.public_key(), ..template };
    let host = host.sign(&ca, &ca_key).unwrap();
    let pool = CaPool::from_pem(ca.to_pem().as_bytes()).unwrap();
    assert_eq!(pool.verify(host, NOW + 1).unwrap().name(), "host");
    assert!(BUILD_NOTE.contains("FIPS"));
}

#[test]
fn other_curves_and_passphrases_are_refused_with_what_to_do() {
    let refused = Error::CurveNotInBuild;
    assert_eq!(PrivateKey::generate(Curve::Curve25519).unwrap_err(), refused);
    assert_eq!(PrivateKey::from_bytes(Curve::Curve25519, &[7; 32]).unwrap_err(), refused);
    assert_eq!(SigningKey::generate(Curve::Curve25519).unwrap_err(), refused);
    assert_eq!(SigningKey::from_seed(Curve::Curve25519, &[7; 32]).unwrap_err(), refused);
    // Of a CA that another build made.
    let ca = include_bytes!("../../tests/vectors/certs/v2-25519/ca.crt");
    let parsed = Certificate::from_pem(ca).unwrap();
    assert_eq!(parsed.curve(), Curve::Curve25519);
    assert_eq!(CaPool::from_pem(ca).unwrap_err(), refused);
    assert!(refused.to_string().ends_with("with -curve P256"));
    let key = SigningKey::generate(Curve::P256).unwrap();
    let cost = PassphraseCost { memory_kib: 64, iterations: 1, parallelism: 1 };
    assert_eq!(key.to_encrypted_pem(b"x", cost).unwrap_err(), Error::PassphraseNotInBuild);
}

//! One-time enrolment tokens.

use std::{thread, time::Duration};

use nebula_cert::{Curve, PrivateKey, Version};

use crate::running::{Ca, key, refused, verified};

#[test]
fn a_host_enrols_with_its_token_and_gets_what_the_token_says() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.token(
        "edge",
        "10.42.0.9/16,fd42::9/64",
        &["--groups", "web,admin", "--unsafe-networks", "192.168.1.0/24", "--life", "2h"],
    );
    let key = key();
    let reply = service.caller.enrol(&token, &key).unwrap();
    let certificate = verified(&reply);
    let networks: Vec<String> = certificate.networks().iter().map(ToString::to_string).collect();
    assert_eq!(certificate.name(), "edge");
    assert_eq!(certificate.version(), Version::V2);
    assert_eq!(networks, ["10.42.0.9/16", "fd42::9/64"]);
    assert_eq!(certificate.unsafe_networks(), ["192.168.1.0/24".parse().unwrap()]);
    assert_eq!(certificate.groups(), ["web", "admin"]);
    assert_eq!(certificate.public_key(), key.public_key());
    let life = certificate.not_after() - nebula_ca::now();
    assert!((7_100..=7_200).contains(&life), "{life}");
    assert_eq!(reply.ca, ca.text("ca.crt"));
    assert!(reply.blocklist.is_empty());
}

#[test]
fn the_first_key_owns_the_token_also_after_a_restart() {
    let ca = Ca::init();
    let token = ca.token("edge", "10.42.0.9/16", &[]);
    let (first, second) = (key(), key());
    let service = ca.serve();
    let reply = service.caller.enrol(&token, &first).unwrap();
    service.stop();
    let service = ca.serve();
    assert_eq!(service.caller.enrol(&token, &first).unwrap().certificate, reply.certificate);
    assert_eq!(service.caller.enrol(&token, &second).map(|reply| reply.certificate), refused(409, "token_used"));
}

#[test]
fn an_unused_token_survives_a_restart() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.token("edge", "10.42.0.9/16", &[]);
    service.stop();
    assert!(ca.serve().caller.enrol(&token, &key()).is_ok());
}

#[test]
fn an_expired_or_unknown_token_is_refused() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.token("edge", "10.42.0.9/16", &["--ttl", "1s"]);
    thread::sleep(Duration::from_millis(2_100));
    let expired = service.caller.enrol(&token, &key()).map(|reply| reply.certificate);
    assert_eq!(expired, refused(401, "token_expired"));
    let unknown = service.caller.enrol("nebula-enrol-nonsense", &key()).map(|reply| reply.certificate);
    assert_eq!(unknown, refused(401, "unknown_token"));
}

#[test]
fn of_many_keys_that_race_for_one_token_exactly_one_wins() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.token("edge", "10.42.0.9/16", &[]);
    let racers: Vec<_> = (0..8)
        .map(|_| {
            let (caller, token) = (service.caller.clone(), token.clone());
            thread::spawn(move || caller.enrol(&token, &key()).map(|reply| reply.certificate))
        })
        .collect();
    let outcomes: Vec<_> = racers.into_iter().map(|racer| racer.join().unwrap()).collect();
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == refused(409, "token_used")).count(), 7);
    assert_eq!(ca.json("list", &[]).as_array().unwrap().len(), 1);
}

#[test]
fn a_version_1_and_a_p256_ca_sign_their_own_kind() {
    let v1 = Ca::init_with(&["--version", "1"]);
    let token = v1.token("edge", "10.42.0.9/16", &[]);
    let certificate = verified(&v1.serve().caller.enrol(&token, &key()).unwrap());
    assert_eq!(certificate.version(), Version::V1);

    let p256 = Ca::init_with(&["--curve", "P256"]);
    let token = p256.token("edge", "10.42.0.9/16", &[]);
    let service = p256.serve();
    let wrong = service.caller.enrol(&token, &key()).map(|reply| reply.certificate);
    assert_eq!(wrong, refused(400, "wrong_curve"));
    let right = PrivateKey::generate(Curve::P256).unwrap();
    assert_eq!(verified(&service.caller.enrol(&token, &right).unwrap()).curve(), Curve::P256);
}

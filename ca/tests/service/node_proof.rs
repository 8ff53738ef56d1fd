//! Pods for which a node vouches with the local node token.

use nebula_cert::issuance::Pod;

use crate::running::{Ca, key, pod, refused, verified};

#[test]
fn a_pod_gets_the_identity_the_policy_says() {
    let ca = Ca::init_with(&["--overlay", "10.42.0.0/16,fd42::/96"]);
    let service = ca.serve();
    let key = key();
    let certificate = verified(&service.caller.pod(&ca.text("node.token"), pod(7), &key).unwrap());
    let networks: Vec<String> = certificate.networks().iter().map(ToString::to_string).collect();
    assert_eq!(certificate.name(), "web-7.shop.pod");
    assert_eq!(networks, ["10.42.0.7/16", "fd42::af4:7/96"]);
    assert_eq!(certificate.groups(), ["ns:shop"]);
    assert_eq!(certificate.public_key(), key.public_key());
}

#[test]
fn a_pod_renews_with_a_new_key_and_keeps_name_and_address() {
    let ca = Ca::init();
    let service = ca.serve();
    let ask = || verified(&service.caller.pod(&ca.text("node.token"), pod(7), &key()).unwrap());
    let (first, second) = (ask(), ask());
    assert_eq!((first.name(), first.networks()), (second.name(), second.networks()));
    assert_ne!(first.fingerprint(), second.fingerprint());
}

#[test]
fn wrong_tokens_and_invalid_pods_are_refused_by_name() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.text("node.token");
    let ask = |token: &str, pod| service.caller.pod(token, pod, &key()).map(|reply| reply.certificate);
    assert_eq!(ask("wrong", pod(1)), refused(401, "bad_node_token"));
    assert_eq!(ask("", pod(1)), refused(401, "bad_node_token"));
    assert_eq!(ask(&token, Pod { name: "../etc".into(), ..pod(1) }), refused(400, "invalid_pod"));
    assert_eq!(ask(&token, Pod { namespace: "Shop".into(), ..pod(1) }), refused(400, "invalid_pod"));
    assert_eq!(ask(&token, Pod { uid: "a b".into(), ..pod(1) }), refused(400, "invalid_pod"));
    let loopback = Pod { address: "127.0.0.1".parse().unwrap(), ..pod(1) };
    assert_eq!(ask(&token, loopback), refused(400, "invalid_pod"));
    let v6 = Pod { address: "2001:db8::1".parse().unwrap(), ..pod(1) };
    assert_eq!(ask(&token, v6), refused(403, "no_overlay_address"));
    let refused_lines = ca.text("audit.log").lines().filter(|line| line.contains("\"refused\"")).count();
    assert_eq!(refused_lines, 7);
}

#[test]
fn failed_proofs_are_limited_but_never_in_the_way_of_a_valid_one() {
    let ca = Ca::init();
    let service = ca.serve();
    let fail = || service.caller.pod("wrong", pod(1), &key()).map(|reply| reply.certificate);
    let codes: Vec<_> = (0..30).map(|_| fail()).collect();
    assert_eq!(codes[0], refused(401, "bad_node_token"));
    assert_eq!(codes[29], refused(429, "too_many_failures"));
    assert!(service.caller.pod(&ca.text("node.token"), pod(1), &key()).is_ok());
    assert!(ca.text("audit.log").lines().count() < 25);
}

#[test]
fn without_a_node_token_file_no_node_is_believed() {
    let ca = Ca::init();
    let token = ca.text("node.token");
    std::fs::remove_file(ca.file("node.token")).unwrap();
    let service = ca.serve();
    let outcome = service.caller.pod(&token, pod(1), &key()).map(|reply| reply.certificate);
    assert_eq!(outcome, refused(403, "node_proof_disabled"));
}

#[test]
fn no_secret_reaches_the_logs() {
    let ca = Ca::init();
    let service = ca.serve();
    let (node, token) = (ca.text("node.token"), ca.token("edge", "10.42.0.9/16", &[]));
    service.caller.pod(&node, pod(1), &key()).unwrap();
    service.caller.enrol(&token, &key()).unwrap();
    service.caller.enrol(&token, &key()).unwrap_err();
    service.caller.pod(&format!("{token}x"), pod(1), &key()).unwrap_err();
    let body = format!(r#"{{"public_key":"","proof":{{"type":"{token}"}}}}"#);
    service.caller.post("/v1/certificate", body.as_bytes()).unwrap();
    let logs = format!("{}{}", service.stop(), ca.text("audit.log"));
    assert!(logs.contains("web-1.shop.pod"), "{logs}");
    for secret in [node.trim(), &token] {
        assert!(!logs.contains(secret));
    }
}

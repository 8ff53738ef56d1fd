//! A service that is killed without warning.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
    thread,
    time::Duration,
};

use nebula_cert::issuance::{CERTIFICATE_PATH, Proof, Request};

use crate::running::{Ca, key, pod, verified};

#[test]
fn killed_under_load_it_has_every_certificate_that_anybody_received() {
    let ca = Ca::init();
    let service = ca.serve();
    let (next, token) = (Arc::new(AtomicU16::new(1)), ca.text("node.token"));
    let askers: Vec<_> = (0..4)
        .map(|_| {
            let (caller, next, token) = (service.caller.clone(), Arc::clone(&next), token.clone());
            thread::spawn(move || {
                let mut received = Vec::new();
                loop {
                    let pod = pod(next.fetch_add(1, Ordering::Relaxed));
                    let proof = Proof::Node { token: token.clone(), pod };
                    let request = serde_json::to_vec(&Request { public_key: key().public_pem(), proof }).unwrap();
                    let Ok((200, body)) = caller.post(CERTIFICATE_PATH, &request) else { return received };
                    received.push(verified(&serde_json::from_str(&body).unwrap()).fingerprint().to_string());
                }
            })
        })
        .collect();
    thread::sleep(Duration::from_millis(700));
    service.kill();
    let received: Vec<String> = askers.into_iter().flat_map(|asker| asker.join().unwrap()).collect();
    assert!(!received.is_empty(), "nothing was issued before the kill");

    let listed = ca.json("certificate list", &[]);
    let listed: HashSet<&str> =
        listed.as_array().unwrap().iter().map(|issued| issued["fingerprint"].as_str().unwrap()).collect();
    for fingerprint in &received {
        assert!(listed.contains(fingerprint.as_str()), "{fingerprint} was handed out but is not in the ledger");
    }
    assert!(ca.serve().caller.pod(&token, pod(60_000), &key()).is_ok());
}

#[test]
fn killed_at_any_time_a_token_is_never_good_for_two_keys() {
    let ca = Ca::init();
    for round in 1..=8_u8 {
        let token = ca.token(&format!("host-{round}"), &format!("10.42.0.{round}/16"), &[]);
        let (first, second) = (key(), key());
        let service = ca.serve();
        let asker = {
            let (caller, token, key) = (service.caller.clone(), token.clone(), first.clone());
            let proof = Proof::Token { token };
            let request = serde_json::to_vec(&Request { public_key: key.public_pem(), proof }).unwrap();
            thread::spawn(move || matches!(caller.post(CERTIFICATE_PATH, &request), Ok((200, _))))
        };
        thread::sleep(Duration::from_millis(u64::from(round) * 4));
        service.kill();
        let first_has_it = asker.join().unwrap();

        let service = ca.serve();
        let second_gets_it = service.caller.enrol(&token, &second).is_ok();
        let first_gets_it_again = service.caller.enrol(&token, &first).is_ok();
        assert!(!(first_has_it && second_gets_it), "round {round}: two keys");
        assert_ne!(second_gets_it, first_gets_it_again, "round {round}: nobody, or both");
    }
}

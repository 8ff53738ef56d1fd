//! One-time enrolment tokens.

use std::{thread, time::Duration};

use nebula_cert::{Curve, HostKey, JoinToken, PrivateKey, Version};

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
fn an_address_of_no_network_of_the_policy_is_refused() {
    let ca = Ca::init();
    for network in ["10.43.0.9/16", "192.168.7.9/24", "10.42.0.9/8"] {
        let refused = ca.failure("token create", &["--name", "edge", "--network", network]);
        assert!(refused.contains(network) && refused.contains("10.42.0.0/16"), "{refused}");
    }
    // Nothing is said about the other family.
    ca.token("edge", "10.42.0.9/16,fd42::9/64", &[]);
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
    assert_eq!(ca.json("certificate list", &[]).as_array().unwrap().len(), 1);
}

#[test]
fn a_token_that_is_bound_to_a_key_is_worth_nothing_with_another_one() {
    let ca = Ca::init_with(&["--tls-name", "ca.example", "--tls-name", "127.0.0.1"]);
    let service = ca.serve();
    let (own, thief) = (key(), key());
    let bound = HostKey::of(&own).to_string();
    let join: JoinToken = ca.token("edge", "10.42.0.9/16", &["--key", &bound, "--join"]).parse().unwrap();
    assert_eq!(join.key(), Some(&HostKey::of(&own).sha256()), "the host sees for which key it is");
    assert!(ca.output("token list", &[]).contains(", to one key"));
    for _ in 0..3 {
        let stolen = service.caller.enrol(join.secret(), &thief).map(|reply| reply.certificate);
        assert_eq!(stolen, refused(403, "token_for_other_key"));
    }
    let reply = service.caller.enrol(join.secret(), &own).unwrap();
    assert_eq!(verified(&reply).public_key(), own.public_key());
    assert_eq!(service.caller.enrol(join.secret(), &own).unwrap().certificate, reply.certificate, "once more");
    let stolen = service.caller.enrol(join.secret(), &thief).map(|reply| reply.certificate);
    assert_eq!(stolen, refused(403, "token_for_other_key"), "also once it was used");

    let create = |key: &str| ca.failure("token create", &["--name", "b", "--network", "10.42.0.8/16", "--key", key]);
    assert!(create(&bound[..bound.len() - 1]).contains("copy all of it"), "{}", create(&bound[..bound.len() - 1]));
    assert!(create("AAAA").contains("nebula up -prepare"), "{}", create("AAAA"));
    let other_curve = HostKey::of(&PrivateKey::generate(Curve::P256).unwrap()).to_string();
    assert!(create(&other_curve).contains("-prepare -curve 25519"), "{}", create(&other_curve));
    assert_eq!(ca.json("token list", &[]).as_array().unwrap().len(), 1, "what is refused leaves no token behind");
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

#[test]
fn a_second_open_token_for_an_address_is_refused_and_says_which_one_is_in_the_way() {
    let ca = Ca::init();
    let (service, key) = (ca.serve(), key());
    let first = ca.token("edge", "10.42.0.9/16", &[]);
    let id = ca.json("token list", &[])[0]["id"].as_str().unwrap().to_owned();
    for name in ["edge", "other"] {
        let refused = ca.failure("token create", &["--name", name, "--network", "10.42.0.9/16"]);
        assert!(refused.contains(&format!("nebula-ca token revoke {id}")), "{refused}");
        assert!(refused.contains("10.42.0.9"), "{refused}");
    }
    service.caller.enrol(&first, &key).unwrap();
    ca.token("edge", "10.42.0.9/16", &[]);
    let other = ca.failure("token create", &["--name", "other", "--network", "10.42.0.9/16"]);
    assert!(other.contains("10.42.0.9"), "{other}");
}

#[test]
fn a_host_without_an_address_gets_one_of_the_pool_that_nobody_else_has_until_none_is_left() {
    let ca = Ca::init();
    let missing = ca.failure("token create", &["--name", "a"]);
    assert!(missing.contains("--network") && missing.contains("hosts.pool"), "{missing}");
    let policy = r#"{"hosts": {"pool": ["10.42.200.0/29"], "overlay": ["10.42.0.0/16"], "reserved": ["10.42.200.1"]}}"#;
    std::fs::write(ca.file("policy.jsonc"), policy).unwrap();
    let service = ca.serve();
    let networks = |name: &str| {
        let made = ca.json("token create", &["--name", name]);
        (made["networks"][0].as_str().unwrap().to_owned(), made["token"].as_str().unwrap().to_owned())
    };
    ca.token("fixed", "10.42.200.3/16", &[]);
    for outside in ["10.43.0.9/16", "10.42.0.9/15", "fd42::9/64"] {
        let refused = ca.failure("token create", &["--name", "outside", "--network", outside]);
        assert!(refused.contains("not in the overlay of hosts, 10.42.0.0/16"), "{refused}");
    }
    let (address, token) = networks("a");
    assert_eq!(address, "10.42.200.2/16", "the first that is not reserved, with the length of the overlay");
    let refused = ca.failure("token create", &["--name", "a"]);
    assert!(refused.contains("token revoke"), "one open token for a host: {refused}");
    let certificate = verified(&service.caller.enrol(&token, &key()).unwrap());
    assert_eq!(certificate.networks(), ["10.42.200.2/16".parse().unwrap()]);
    assert_eq!(networks("a").0, "10.42.200.2/16", "a host that enrols again keeps its address");
    let others: Vec<_> = ["b", "c", "d"].into_iter().map(|name| networks(name).0).collect();
    assert_eq!(others, ["10.42.200.4/16", "10.42.200.5/16", "10.42.200.6/16"], "not what an open token has");
    let full = ca.failure("token create", &["--name", "e"]);
    assert!(full.contains("no address is free in 10.42.200.0/29"), "{full}");
}

#[test]
fn a_join_token_has_the_address_the_key_and_the_secret_and_is_for_a_name_that_the_certificate_has() {
    let ca = Ca::init_with(&["--tls-name", "ca.example", "--tls-name", "127.0.0.1"]);
    let create = |name: &str, options: &[&str]| {
        let network = format!("10.42.0.{}/16", name.len());
        let options = [&["--name", name, "--network", &network, "--join"], options].concat();
        ca.run("token create", &options)
    };
    let text = |output: std::process::Output| {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let join: JoinToken = text(create("a", &[])).parse().unwrap();
    assert_eq!(join.url(), "https://ca.example:8443");
    assert_eq!((join.networks(), join.key()), (&["10.42.0.0/16".parse().unwrap()][..], None));
    let fingerprint = nebula_cert::hex::encode(join.fingerprint());
    assert_eq!(ca.json("tls show", &[])["fingerprint"], fingerprint.as_str());
    assert!(ca.serve().caller.enrol(join.secret(), &key()).is_ok());
    let join: JoinToken = text(create("bb", &["--url", "https://127.0.0.1:9"])).parse().unwrap();
    assert_eq!(join.url(), "https://127.0.0.1:9");
    for (url, hint) in [("https://192.0.2.7:8443", "tls add-name 192.0.2.7"), ("http://ca.example", "https://HOST")] {
        let refused = create("ccc", &["--url", url]);
        assert!(!refused.status.success());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(said.contains(hint), "{said}");
    }
    assert_eq!(ca.json("token list", &[]).as_array().unwrap().len(), 2, "what is refused leaves no token behind");
}

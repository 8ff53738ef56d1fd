//! The whole life of certificates: issued, renewed, released, revoked, listed; and the replacement of the CA itself.

use std::{
    fs,
    net::TcpStream,
    os::unix::fs::PermissionsExt,
    thread,
    time::{Duration, Instant},
};

use nebula_cert::{
    CaPool, Certificate, PrivateKey,
    issuance::{Asker, Proof, Reply, Request, Trust},
};
use serde_json::Value;

use crate::running::{Ca, Caller, Service, key, pod, refused, verified};

/// A request that is proved by the certificate in an earlier reply.
pub(crate) fn renewal(reply: &Reply, holder: &PrivateKey, next: &PrivateKey, at: i64) -> Request {
    let public_key = next.public_pem();
    let present = Certificate::from_pem(reply.certificate.as_bytes()).unwrap();
    let renewal_key = reply.renewal_key.as_ref().unwrap();
    let proof = Proof::of_certificate(&present, holder, renewal_key, Some(&public_key), at).unwrap();
    Request { public_key, proof }
}

fn release(reply: &Reply, holder: &PrivateKey) -> Proof {
    let present = Certificate::from_pem(reply.certificate.as_bytes()).unwrap();
    let renewal_key = reply.renewal_key.as_ref().unwrap();
    Proof::of_certificate(&present, holder, renewal_key, None, nebula_ca::now()).unwrap()
}

fn outcome(service: &Service, request: &Request) -> Result<String, (u16, String)> {
    service.caller.request(request).map(|reply| reply.certificate)
}

#[test]
fn a_host_renews_with_the_key_of_its_certificate_and_keeps_what_it_had() {
    let ca = Ca::init();
    let service = ca.serve();
    let token = ca.token("edge", "10.42.0.9/16", &["--groups", "web", "--unsafe-networks", "192.168.7.0/24"]);
    let (first, next) = (key(), key());
    let reply = service.caller.enrol(&token, &first).unwrap();
    let renewed = service.caller.request(&renewal(&reply, &first, &next, nebula_ca::now())).unwrap();
    let (old, new) = (verified(&reply), verified(&renewed));
    assert_eq!((new.name(), new.networks(), new.groups()), (old.name(), old.networks(), old.groups()));
    assert_eq!(new.unsafe_networks(), old.unsafe_networks());
    assert_eq!(new.public_key(), next.public_key());
    // The renewed certificate can be renewed again.
    assert!(service.caller.request(&renewal(&renewed, &next, &key(), nebula_ca::now())).is_ok());
}

#[test]
fn a_renewal_that_was_overheard_or_made_up_is_worth_nothing() {
    let ca = Ca::init();
    let service = ca.serve();
    let (holder, thief) = (key(), key());
    let reply = service.caller.pod(&ca.text("node.token"), pod(7), &holder).unwrap();
    let now = nebula_ca::now();
    let good = renewal(&reply, &holder, &key(), now);
    // A replayed request gets another certificate, but for a key that only the holder has.
    let again = [outcome(&service, &good).unwrap(), outcome(&service, &good).unwrap()];
    let keys = again.map(|pem| Certificate::from_pem(pem.as_bytes()).unwrap().public_key().to_vec());
    assert_eq!(keys[0], keys[1]);

    let for_thief = Request { public_key: thief.public_pem(), proof: good.proof.clone() };
    assert_eq!(outcome(&service, &for_thief), refused(401, "not_the_holder"));
    assert_eq!(outcome(&service, &renewal(&reply, &thief, &thief, now)), refused(401, "not_the_holder"));
    assert_eq!(outcome(&service, &renewal(&reply, &holder, &holder, now - 600)), refused(401, "clock_differs"));
    assert_eq!(outcome(&service, &renewal(&reply, &holder, &holder, now + 600)), refused(401, "clock_differs"));
    assert_eq!(service.caller.release(good.proof), Err((401, "not_the_holder".to_owned())), "a renewal is no release");

    let elsewhere = Ca::init();
    let other = elsewhere.serve();
    let foreign = other.caller.pod(&elsewhere.text("node.token"), pod(7), &holder).unwrap();
    let mixed = Reply { renewal_key: reply.renewal_key.clone(), ..foreign };
    assert_eq!(outcome(&service, &renewal(&mixed, &holder, &holder, now)), refused(401, "certificate_not_valid"));
}

#[test]
fn a_certificate_given_back_is_blocked_and_not_renewed() {
    let ca = Ca::init();
    let service = ca.serve();
    let (token, holder) = (ca.text("node.token"), key());
    let reply = service.caller.pod(&token, pod(7), &holder).unwrap();
    let fingerprint = verified(&reply).fingerprint().to_string();
    assert_eq!(service.caller.release(release(&reply, &holder)).unwrap(), std::slice::from_ref(&fingerprint));
    assert!(service.caller.release(release(&reply, &holder)).unwrap().is_empty());
    assert!(service.caller.get("/v1/trust", "").2.contains(&fingerprint));
    let request = renewal(&reply, &holder, &holder, nebula_ca::now());
    assert_eq!(outcome(&service, &request), refused(403, "certificate_revoked"));

    // The node releases all certificates of a pod.
    for _ in 0..2 {
        service.caller.pod(&token, pod(8), &key()).unwrap();
    }
    let proof = |token: &str| Proof::Node { token: token.into(), pod: pod(8) };
    assert_eq!(service.caller.release(proof("wrong")), Err((401, "bad_node_token".to_owned())));
    assert_eq!(service.caller.release(proof(&token)).unwrap().len(), 2);
    let token = Proof::Token { token: ca.token("edge", "10.42.0.9/16", &[]) };
    assert_eq!(service.caller.release(token), Err((403, "not_releasable".to_owned())));
    let released = ca.text("audit.log").lines().filter(|line| line.contains("\"released\"")).count();
    assert_eq!(released, 3);
}

/// The holder of the certificate in a reply, who asks whom to trust.
fn asker(reply: &Reply, holder: &PrivateKey) -> String {
    let present = Certificate::from_pem(reply.certificate.as_bytes()).unwrap();
    Asker::new(&present, holder, reply.renewal_key.as_ref().unwrap(), nebula_ca::now()).unwrap().to_string()
}

#[test]
fn a_revocation_names_who_does_not_hear_of_it_at_once_and_when_they_do() {
    let ca = Ca::init();
    let service = ca.serve();
    let enrol = |name: &str, last: u8| {
        let holder = key();
        let token = ca.token(name, &format!("10.42.0.{last}/16"), &["--life", "3h"]);
        (Caller::new(service.address, &ca.text("tls.crt")).enrol(&token, &holder).unwrap(), holder)
    };
    let [follower, timer, silent, lost] =
        [("follower", 1), ("timer", 2), ("silent", 3), ("lost", 4)].map(|(name, last)| enrol(name, last));
    // Each asks on a connection of its own, as the program does after a restart.
    let asks = |path: &str, known: &str, asker: &str| {
        Caller::new(service.address, &ca.text("tls.crt")).get_as(path, known, asker).0
    };
    let (_, tag, _) = service.caller.get("/v1/trust", "");
    assert_eq!(asks("/v1/trust?wait=1", &tag, &asker(&follower.0, &follower.1)), 304);
    assert_eq!(asks("/v1/trust", &tag, &asker(&timer.0, &timer.1)), 304);
    // Nobody says that somebody else has asked, and nonsense is answered as silence is.
    for forged in [asker(&silent.0, &timer.1), "nonsense".to_owned(), asker(&timer.0, &silent.1)] {
        assert_eq!(asks("/v1/trust?wait=1", &tag, &forged), 304);
    }

    let revoked = ca.json("certificate revoke", &["lost"]);
    assert_eq!(revoked["fingerprints"], serde_json::json!([verified(&lost.0).fingerprint().to_string()]));
    assert_eq!(revoked["ends"], verified(&lost.0).not_after());
    let unaware = &revoked["unaware"];
    assert_eq!((&unaware["of"], &unaware["more"], &unaware["is_partial"]), (&3.into(), &0.into(), &false.into()));
    let holders = unaware["holders"].as_array().unwrap();
    let mut named: Vec<_> = holders.iter().map(|one| (&one["name"], one["last_asked"].is_null())).collect();
    named.sort_by_key(|(name, _)| name.to_string());
    assert_eq!(named, [(&"silent".into(), true), (&"timer".into(), false)], "{revoked}");
    for holder in holders {
        let left = holder["hears_by"].as_i64().unwrap() - nebula_ca::now();
        assert_eq!(holder["hears"], "when_it_renews");
        assert!((7_100..=7_200).contains(&left), "two thirds of its certificate's life: {holder}");
    }
    // People get a table. A foreign certificate is unknown to the ledger, and all the same not heard of.
    let said = ca.output("certificate revoke", &[&"ab".repeat(32)]);
    assert!(said.contains("1 of 3 other holders hear of it at once"), "{said}");
    let row = said.lines().find(|line| line.starts_with("timer")).unwrap();
    assert!(row.contains("10.42.0.2/16") && row.contains(" ago ") && row.contains("1h59m, when it renews"), "{row}");
    service.stop();
    assert_eq!(ca.json("certificate revoke", &["silent"])["unaware"], Value::Null);
    assert!(ca.output("certificate revoke", &["timer"]).contains("no service runs here"));
}

#[test]
fn whoever_follows_the_trust_hears_of_a_revocation_at_once() {
    let ca = Ca::init();
    let service = ca.serve();
    service.caller.pod(&ca.text("node.token"), pod(7), &key()).unwrap();
    let (_, tag, _) = service.caller.get("/v1/trust", "");
    let waited = Instant::now();
    assert_eq!(service.caller.get("/v1/trust?wait=1", &tag).0, 304);
    assert!(waited.elapsed() >= Duration::from_secs(1));
    let follower = {
        let (caller, tag) = (service.caller.clone(), tag.clone());
        thread::spawn(move || (caller.get("/v1/trust?wait=50", &tag), Instant::now()))
    };
    thread::sleep(Duration::from_millis(300));
    let before = Instant::now();
    ca.output("certificate revoke", &["web-7.shop.pod"]);
    let ((status, new_tag, body), heard) = follower.join().unwrap();
    let trust: Trust = serde_json::from_str(&body).unwrap();
    assert_eq!((status, trust.blocklist.len()), (200, 1));
    assert_ne!(new_tag, tag);
    assert!(heard.duration_since(before) < Duration::from_secs(3), "{:?}", heard.duration_since(before));
}

#[test]
fn followers_do_not_keep_the_service_from_stopping() {
    let ca = Ca::init();
    let service = ca.serve();
    let (_, tag, _) = service.caller.get("/v1/trust", "");
    let followers: Vec<_> = (0..20)
        .map(|_| {
            let (caller, tag) = (service.caller.clone(), tag.clone());
            thread::spawn(move || caller.get("/v1/trust?wait=50", &tag).0)
        })
        .collect();
    thread::sleep(Duration::from_millis(500));
    let start = Instant::now();
    service.stop();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    assert!(followers.into_iter().all(|follower| follower.join().unwrap() == 304));
}

#[test]
fn a_policy_is_reloaded_as_a_whole_or_not_at_all() {
    let ca = Ca::init();
    let service = ca.serve();
    let ask = |number| verified(&service.caller.pod(&ca.text("node.token"), pod(number), &key()).unwrap());
    let bad = r#"{"pods": {"overlay": ["10.42.0.0/16"], "groups": ["new"], "life": "soon", "name": "{what}"}}"#;
    fs::write(ca.file("policy.jsonc"), bad).unwrap();
    let error = ca.failure("reload", &[]);
    for finding in ["nothing was changed", "pods.life", "{what}"] {
        assert!(error.contains(finding), "{error}");
    }
    assert_eq!(ask(1).groups(), ["ns:shop"]);

    let good = r#"{"pods": {"overlay": ["10.42.0.0/16"], "groups": ["new"]}}"#;
    fs::write(ca.file("policy.jsonc"), good).unwrap();
    ca.output("reload", &[]);
    assert_eq!(ask(2).groups(), ["new"]);

    fs::write(ca.file("policy.jsonc"), good.replace("new", "newer")).unwrap();
    assert!(std::process::Command::new("kill").args(["-HUP", &service.pid().to_string()]).status().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(10);
    while ca.text("audit.log").matches("\"reloaded\"").count() < 2 {
        assert!(Instant::now() < deadline, "not reloaded");
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(ask(3).groups(), ["newer"]);
    assert!(ca.text("audit.log").contains("reload_refused"));
    drop(service);
    assert!(ca.failure("reload", &[]).contains("no service runs"));
}

#[test]
fn the_ca_is_replaced_without_a_gap_in_trust() {
    let ca = Ca::init();
    let service = ca.serve();
    let ask = |number| service.caller.pod(&ca.text("node.token"), pod(number), &key()).unwrap();
    let old = ask(1);
    assert!(ca.failure("rollover switch", &[]).contains("no next CA"));
    ca.output("rollover prepare", &[]);
    assert_eq!(fs::metadata(ca.file("next.key")).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(ca.failure("rollover prepare", &[]).contains("switch to it"));
    // All trust the next CA, and the old one still signs.
    let between = ask(2);
    let issuer = |reply: &Reply| Certificate::from_pem(reply.certificate.as_bytes()).unwrap().issuer().unwrap();
    assert_eq!(CaPool::from_pem(between.ca.as_bytes()).unwrap().certificates().count(), 2);
    assert_eq!(issuer(&between), issuer(&old));

    assert!(ca.failure("rollover switch", &[]).contains("--at-once"));
    assert!(ca.failure("rollover finish", &[]).contains("rollover switch"), "nothing would be finished");
    let rows = ca.json("rollover switch", &["--at-once"]);
    let roles: Vec<&str> = rows.as_array().unwrap().iter().map(|row| row["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["signs", "retired"]);
    let new = ask(3);
    assert_ne!(issuer(&new), issuer(&old));
    // A host that fetched the bundle before the switch accepts certificates that were signed after it.
    let pool = CaPool::from_pem(between.ca.as_bytes()).unwrap();
    let certificate = Certificate::from_pem(new.certificate.as_bytes()).unwrap();
    pool.verify(certificate, nebula_ca::now()).unwrap();

    assert!(ca.failure("rollover finish", &[]).contains("2 valid certificates are of a retired CA"));
    for number in [1, 2] {
        ca.output("certificate revoke", &[&format!("web-{number}.shop.pod")]);
    }
    ca.output("rollover finish", &[]);
    assert!(!ca.file("previous.key").exists());
    let trust: Trust = serde_json::from_str(&service.caller.get("/v1/trust", "").2).unwrap();
    assert_eq!(CaPool::from_pem(trust.ca.as_bytes()).unwrap().certificates().count(), 1);
    assert!(ca.output("rollover status", &[]).lines().nth(1).unwrap().starts_with("signs"));
}

#[test]
fn one_pod_cannot_fill_the_ledger() {
    let ca = Ca::init();
    let service = ca.serve();
    let ask = |number| service.caller.pod(&ca.text("node.token"), pod(number), &key()).map(|reply| reply.certificate);
    let codes: Vec<_> = (0..31).map(|_| ask(1)).collect();
    assert!(codes[..30].iter().all(Result::is_ok));
    assert_eq!(codes[30], refused(429, "too_many_certificates"));
    assert!(ask(2).is_ok(), "other pods are not affected");
}

#[test]
fn a_token_is_revoked_as_long_as_nobody_used_it() {
    let ca = Ca::init();
    let service = ca.serve();
    let (open, used) = (ca.token("one", "10.42.0.9/16", &[]), ca.token("two", "10.42.0.10/16", &[]));
    service.caller.enrol(&used, &key()).unwrap();
    let tokens = ca.json("token list", &[]);
    let id = |name: &str| {
        let found = tokens.as_array().unwrap().iter().find(|token| token["name"] == name).unwrap();
        found["id"].as_str().unwrap().to_owned()
    };
    assert!(ca.failure("token revoke", &[&id("two")]).contains("certificate revoke"));
    assert_eq!(ca.json("token revoke", &[&id("one")])["name"], "one");
    assert_eq!(service.caller.enrol(&open, &key()).map(|reply| reply.certificate), refused(401, "unknown_token"));
    assert!(ca.failure("token revoke", &["nobody"]).contains("token list"));
}

#[test]
fn one_certificate_is_shown_by_name_or_fingerprint() {
    let ca = Ca::init();
    let service = ca.serve();
    let reply = service.caller.pod(&ca.text("node.token"), pod(7), &key()).unwrap();
    let fingerprint = verified(&reply).fingerprint().to_string();
    for which in ["web-7.shop.pod", &fingerprint, &fingerprint[..10]] {
        let shown = ca.output("certificate show", &[which]);
        assert!(shown.contains(&fingerprint) && shown.contains(reply.certificate.trim()), "{shown}");
    }
    assert_eq!(ca.json("certificate show", &[&fingerprint])["name"], "web-7.shop.pod");
    assert_eq!(ca.json("certificate revoke", &[&fingerprint])["fingerprints"][0], fingerprint.as_str());
    assert!(ca.output("certificate show", &[&fingerprint]).contains("revoked at"));
    assert!(ca.failure("certificate show", &["nobody"]).contains("certificate list"));
}

#[test]
fn no_file_of_the_service_that_holds_a_secret_is_for_others() {
    let ca = Ca::init();
    let service = ca.serve();
    service.caller.pod(&ca.text("node.token"), pod(7), &key()).unwrap();
    ca.output("rollover prepare", &[]);
    ca.output("rollover switch", &["--at-once"]);
    let public = ["ca.crt", "tls.crt", "policy.jsonc"];
    let mut seen = 0;
    for entry in fs::read_dir(ca.file("")).unwrap() {
        let entry = entry.unwrap();
        let (name, mode) = (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().permissions().mode());
        let expected = if public.contains(&name.as_str()) { 0o644 } else { 0o600 };
        assert_eq!(mode & 0o777, expected, "{name}");
        seen += 1;
    }
    assert_eq!(fs::metadata(ca.file("")).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(seen >= 10, "{seen} files");
    // Secrets appear neither in the logs nor in the store.
    let secrets = ["ca.key", "tls.key", "renewal.key", "previous.key"]
        .map(|name| ca.text(name).lines().nth(1).unwrap().to_owned());
    let logs = format!("{}{}", ca.text("audit.log"), service.stop());
    let store = fs::read(ca.file("store.redb")).unwrap();
    for secret in secrets.iter().map(String::as_str).chain([ca.text("node.token").trim()]) {
        assert!(!logs.contains(secret));
        assert!(!store.windows(secret.len()).any(|window| window == secret.as_bytes()));
    }
}

#[test]
fn clients_of_the_status_page_that_say_nothing_keep_nobody_from_it() {
    let ca = Ca::init();
    let service = ca.serve_with_options(&["--status-listen", "127.0.0.1:0"]);
    let url = service.status.clone().unwrap();
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    // One that must give way at once may see that as an error.
    let silent: Vec<_> = (0..200).filter_map(|_| TcpStream::connect(address).ok()).collect();
    let agent: ureq::Agent = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(3))).build().into();
    for _ in 0..10 {
        assert_eq!(agent.get(format!("{url}readyz")).call().unwrap().status(), 200);
    }
    drop(silent);
    service.stop();
}

#[test]
fn the_state_is_shown_in_plain_http_and_changes_nothing() {
    let ca = Ca::init();
    let service = ca.serve_with_options(&["--status-listen", "127.0.0.1:0"]);
    service.caller.pod(&ca.text("node.token"), pod(7), &key()).unwrap();
    service.caller.pod("wrong", pod(8), &key()).unwrap_err();
    let url = service.status.clone().unwrap();
    let agent: ureq::Agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
    let get = |path: &str| agent.get(format!("{url}{path}")).call().unwrap();
    let mut page = get("");
    let header = |name: &str| page.headers().get(name).unwrap().to_str().unwrap().to_owned();
    assert!(header("content-security-policy").starts_with("default-src 'none'; style-src 'sha256-"));
    assert_eq!(header("x-content-type-options"), "nosniff");
    assert!(page.body_mut().read_to_string().unwrap().contains("web-7.shop.pod"));
    let metrics = get("metrics").body_mut().read_to_string().unwrap();
    for line in [
        "nebula_ca_decisions_total{call=\"certificate\",proof=\"node\",outcome=\"issued\"} 1",
        "nebula_ca_decisions_total{call=\"certificate\",proof=\"node\",outcome=\"bad_node_token\"} 1",
        "nebula_ca_certificates_valid 1",
        "nebula_ca_ready 1",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
    for path in ["healthz", "readyz"] {
        assert_eq!(get(path).body_mut().read_to_string().unwrap(), "ok\n");
    }
    assert_eq!(get("v1/trust").status().as_u16(), 404);
    assert_eq!(agent.post(&url).send("x").unwrap().status().as_u16(), 405);
    let listed: Value = ca.json("certificate list", &[]);
    assert_eq!(listed.as_array().unwrap().len(), 1);
}

//! Revocation by people whom the API server knows: rights, previews, what becomes of the pod, and what the audit log
//! says.

use std::fs;

use nebula_cert::{
    issuance::{Asker, Pod, Proof, Reply, Request as CertificateRequest},
    revocation::{AUDIENCE as OPERATORS, Next, REVOKE_PATH, Request, Revocation, TOKEN_HEADER, Which},
};
use serde_json::{Value, json};

use crate::{
    exhaustion::{self, connect_tls_from, trusting},
    fake_cluster::{AUDIENCE, FakeCluster, Mood},
    running::{Ca, Caller, Service, key, refused, verified},
};

pub(crate) const SHOP: &str = "system:serviceaccount:shop:nebula-operator";
const ALL: &str = "system:serviceaccount:nebula-system:nebula-operator";
const NOBODY: &str = "system:serviceaccount:shop:default";

/// A CA with a pod in `shop`, another one in `pay`, and the accounts of three users.
struct Site {
    cluster: FakeCluster,
    ca: Ca,
}

pub(crate) fn policy(cluster: &FakeCluster) -> Value {
    json!({
        "kubernetes": {"node_account": "shop/app", "audience": AUDIENCE, "kubeconfig": cluster.kubeconfig(),
            "revocation": true},
        "pods": {"overlay": ["10.42.0.0/16"]},
    })
}

/// Tokens of the three users, named like them.
pub(crate) fn users(cluster: &FakeCluster) {
    for user in [SHOP, ALL, NOBODY] {
        cluster.add_user(user, user, OPERATORS);
    }
    cluster.allow(SHOP, "delete", "certificates", "shop");
    cluster.allow(ALL, "delete", "certificates", "");
    // What has nothing to do with it.
    cluster.allow(NOBODY, "get", "certificates", "");
    cluster.allow(NOBODY, "delete", "pods", "");
}

impl Site {
    fn new() -> Self {
        let (cluster, ca) = (FakeCluster::start("1.36.2"), Ca::init());
        cluster.add_pod("web-1", "u-1", |_| {});
        cluster.add_pod_in("pay", "db", "u-2", |_| {});
        users(&cluster);
        fs::write(ca.file("policy.jsonc"), policy(&cluster).to_string()).unwrap();
        Self { cluster, ca }
    }

    fn pod(&self, service: &Service, pod: Pod) -> Result<Reply, (u16, String)> {
        service.caller.pod(&self.cluster.agent_token(), pod, &key())
    }

    /// Fingerprints of the certificates of both pods.
    fn both(&self, service: &Service) -> [String; 2] {
        [web(), db()].map(|pod| verified(&self.pod(service, pod).unwrap()).fingerprint().to_string())
    }

    /// Lines of the audit log with this event.
    fn audit(&self, event: &str) -> Vec<Value> {
        let text = self.ca.text("audit.log");
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["event"] == event).collect()
    }
}

fn pod(namespace: &str, name: &str, uid: &str, address: &str) -> Pod {
    let [namespace, name, uid] = [namespace, name, uid].map(str::to_owned);
    Pod { namespace, name, uid, address: address.parse().unwrap(), other_address: None }
}

pub(crate) fn web() -> Pod {
    pod("shop", "web-1", "u-1", "10.244.0.5")
}

fn db() -> Pod {
    pod("pay", "db", "u-2", "10.244.0.6")
}

pub(crate) fn of_pod(namespace: &str, name: &str) -> Request {
    let which = Which::Pod { namespace: namespace.to_owned(), name: name.to_owned() };
    Request { which, reason: "the key leaked".to_owned(), keep_out: false, dry_run: false }
}

fn of_fingerprint(fingerprint: &str, namespace: Option<&str>) -> Request {
    let which = Which::Fingerprint { fingerprint: fingerprint.to_owned(), namespace: namespace.map(str::to_owned) };
    Request { which, ..of_pod("", "") }
}

fn of_host(name: &str) -> Request {
    Request { which: Which::Host { name: name.to_owned() }, ..of_pod("", "") }
}

/// What is revoked, in short, or the refusal.
fn outcome(caller: &Caller, token: &str, request: &Request) -> Result<String, (u16, String)> {
    caller.revoke(token, request).map(|revocation| format!("{} of {}", revocation.new, revocation.total))
}

fn blocked(service: &Service) -> Vec<String> {
    let trust: Value = serde_json::from_str(&service.caller.get("/v1/trust", "").2).unwrap();
    trust["blocklist"].as_array().unwrap().iter().map(|one| one.as_str().unwrap().to_owned()).collect()
}

#[test]
fn only_whoever_may_delete_certificates_of_the_namespace_revokes_and_nobody_else_learns_what_there_is() {
    let site = Site::new();
    let service = site.ca.serve();
    let [of_web, of_db] = site.both(&service);
    let ask = |token: &str, request: Request| outcome(&service.caller, token, &request);
    let never = "ab".repeat(32);
    let requests = [of_pod("shop", "web-1"), of_pod("shop", "none"), of_fingerprint(&of_web, Some("shop"))];
    for (number, request) in requests.into_iter().enumerate() {
        assert_eq!(ask("", request.clone()), refused(401, "no_operator_token"));
        // What was rejected once is not asked about again for a while.
        let unknown = format!("unknown-{number}");
        assert_eq!(ask(&unknown, request.clone()), refused(401, "token_rejected"));
        assert_eq!(ask(&unknown, request.clone()), refused(429, "too_many_reviews"));
        assert_eq!(ask(NOBODY, request), refused(403, "not_permitted"));
    }
    assert_eq!(ask(&site.cluster.agent_token(), of_pod("shop", "web-1")), refused(401, "wrong_audience"));
    for request in [of_pod("pay", "db"), of_pod("pay", "none"), of_host("edge"), of_fingerprint(&of_web, None)] {
        assert_eq!(ask(SHOP, request), refused(403, "not_permitted"));
    }
    // A fingerprint of another namespace is as unknown as one that never was, to the letter.
    let body = |fingerprint: &str| {
        let request = serde_json::to_vec(&of_fingerprint(fingerprint, Some("shop"))).unwrap();
        service.caller.post_with(REVOKE_PATH, SHOP, &request)
    };
    let (status, said) = body(&of_db);
    assert_eq!((status, said.replace(&of_db, &never)), body(&never));
    assert_eq!(status, 404);
    assert_eq!(ask(SHOP, of_pod("shop", "none")), refused(404, "no_certificate"));
    assert!(blocked(&service).is_empty(), "nothing was revoked so far");

    assert_eq!(ask(SHOP, of_fingerprint(&of_web, Some("shop"))), Ok("1 of 1".to_owned()));
    assert_eq!(ask(ALL, of_fingerprint(&never, None)), refused(404, "no_certificate"));
    assert_eq!(ask(ALL, of_fingerprint(&of_db, None)), Ok("1 of 1".to_owned()));
    let mut both = vec![of_web, of_db];
    both.sort();
    assert_eq!(blocked(&service), both);
}

#[test]
fn a_preview_changes_nothing_and_the_revocation_is_in_the_audit_log_with_its_reason() {
    let site = Site::new();
    let service = site.ca.serve();
    let [of_web, of_db] = site.both(&service);
    let tag = service.caller.get("/v1/trust", "").1;
    let look = Request { dry_run: true, ..of_pod("shop", "web-1") };
    let preview = service.caller.revoke(SHOP, &look).unwrap();
    let one = &preview.certificates[0];
    assert_eq!((preview.dry_run, preview.user.as_str(), preview.new, preview.total), (true, SHOP, 1, 1));
    assert_eq!(
        (one.subject.as_str(), one.name.as_str(), &one.fingerprint),
        ("pod shop/web-1", "web-1.shop.pod", &of_web)
    );
    assert_eq!(
        (one.groups.as_slice(), one.revoked, one.next),
        (&["ns:shop".to_owned()][..], None, Next::AnotherCertificate)
    );
    assert_eq!(one.networks[0].to_string(), "10.42.0.5/16");
    assert_eq!(preview.spread.ends, one.not_after);
    assert_eq!(
        (preview.spread.published_within, preview.spread.others, preview.spread.unaware),
        (0, 1, 1),
        "that of db"
    );
    assert_eq!(service.caller.get("/v1/trust", "").1, tag);
    assert!(site.audit("revoked").is_empty());

    let done = service.caller.revoke(SHOP, &of_pod("shop", "web-1")).unwrap();
    assert_eq!(done, Revocation { dry_run: false, ..preview });
    assert_eq!(blocked(&service), [of_web.as_str()]);
    let lines = site.audit("revoked");
    let line = &lines[0];
    assert_eq!(lines.len(), 1);
    for (field, value) in [
        ("user", json!(SHOP)),
        ("reason", json!("the key leaked")),
        ("subject", json!("pod shop/web-1")),
        ("name", json!("web-1.shop.pod")),
        ("fingerprint", json!(of_web)),
        ("source", json!("127.0.0.1")),
    ] {
        assert_eq!(line[field], value, "{line}");
    }

    // Once more: it was revoked, and says since when.
    let again = service.caller.revoke(SHOP, &of_pod("shop", "web-1")).unwrap();
    assert_eq!((again.new, again.total), (0, 1));
    assert!(again.certificates[0].revoked.is_some());
    assert_eq!((blocked(&service).len(), site.audit("revoked").len()), (1, 1));
    assert!(!blocked(&service).contains(&of_db));

    assert_eq!(outcome(&service.caller, NOBODY, &of_pod("pay", "db")), refused(403, "not_permitted"));
    let lines = site.audit("refused");
    let line = lines.last().unwrap();
    assert_eq!(
        (&line["user"], &line["code"], &line["subject"]),
        (&json!(NOBODY), &json!("not_permitted"), &json!("pod pay/db"))
    );
    assert_eq!(outcome(&service.caller, "stranger", &of_pod("pay", "db")), refused(401, "token_rejected"));
    let lines = site.audit("refused");
    let line = lines.last().unwrap();
    assert!(line["subject"].is_null() && line["reason"].is_null(), "strangers write nothing into it: {line}");
    assert!(!site.ca.text("audit.log").contains("stranger"), "and no token is in it");
}

#[test]
fn a_revoked_pod_gets_another_certificate_unless_it_is_kept_out_and_a_host_needs_a_token() {
    let site = Site::new();
    let edge = site.ca.token("edge", "10.42.9.9/16", &[]);
    let service = site.ca.serve();
    let first = site.pod(&service, web()).unwrap();
    let revoke = |token: &str, request: Request| service.caller.revoke(token, &request).unwrap();
    revoke(SHOP, of_pod("shop", "web-1"));
    let second = site.pod(&service, web()).unwrap();
    assert_ne!(second.certificate, first.certificate, "its node vouches for it still");

    let kept_out = Request { keep_out: true, ..of_pod("shop", "web-1") };
    let look = revoke(SHOP, Request { dry_run: true, ..kept_out.clone() });
    assert_eq!((look.new, look.total, look.certificates[0].next), (1, 2, Next::KeptOut));
    assert_eq!(look.certificates[0].fingerprint, verified(&second).fingerprint().to_string(), "new ones come first");
    let third = site.pod(&service, web()).map(|reply| reply.certificate);
    assert!(third.is_ok(), "a preview keeps nobody out");
    let done = revoke(SHOP, kept_out);
    assert_eq!((done.new, done.total), (2, 3));
    assert_eq!(site.pod(&service, web()).map(|reply| reply.certificate), refused(403, "kept_out"));
    assert_eq!(
        (&site.audit("kept_out")[0]["user"], &site.audit("kept_out")[0]["reason"]),
        (&json!(SHOP), &json!("the key leaked"))
    );
    site.cluster.delete_pod("web-1");
    site.cluster.add_pod("web-1", "u-9", |_| {});
    assert!(site.pod(&service, Pod { uid: "u-9".to_owned(), ..web() }).is_ok(), "the pod that replaces it");

    let holder = key();
    let reply = service.caller.enrol(&edge, &holder).unwrap();
    assert_eq!(revoke(ALL, of_host("edge")).certificates[0].next, Next::NewToken);
    let next = key().public_pem();
    let renewal_key = reply.renewal_key.clone().unwrap();
    let proof = Proof::of_certificate(&verified(&reply), &holder, &renewal_key, Some(&next), nebula_ca::now()).unwrap();
    let renewed = service.caller.request(&CertificateRequest { public_key: next, proof });
    assert_eq!(renewed.map(|reply| reply.certificate), refused(403, "certificate_revoked"));
    let keep_out = Request { keep_out: true, ..of_fingerprint(&verified(&reply).fingerprint().to_string(), None) };
    assert_eq!(outcome(&service.caller, ALL, &keep_out), refused(400, "bad_revocation"));
}

#[test]
fn who_hears_of_it_late_is_counted_and_nobody_is_named() {
    let site = Site::new();
    let service = site.ca.serve();
    site.both(&service);
    let holder = key();
    let reply = service.caller.enrol(&site.ca.token("edge", "10.42.9.9/16", &[]), &holder).unwrap();
    let spread = || {
        let look = Request { dry_run: true, ..of_pod("shop", "web-1") };
        service.caller.revoke(SHOP, &look).unwrap().spread
    };
    assert_eq!((spread().others, spread().unaware), (2, 2));
    let asker = Asker::new(&verified(&reply), &holder, &reply.renewal_key.unwrap(), nebula_ca::now()).unwrap();
    // On a connection of its own: the other one is known as that of a pod.
    Caller::new(service.address, &site.ca.text("tls.crt")).get_as("/v1/trust?wait=30", "", &asker.to_string());
    let now = spread();
    assert_eq!((now.others, now.unaware, now.is_partial), (2, 1, false), "that host follows the service");
    assert!(now.last_hears_by.is_some_and(|at| at > nebula_ca::now()));
}

#[test]
fn a_request_without_a_good_reason_or_name_is_refused_and_writes_nothing_into_a_log() {
    let site = Site::new();
    let service = site.ca.serve();
    site.both(&service);
    for reason in ["", "   ", "two\nlines", "\u{1b}[2J", "\u{202e}x", &"x".repeat(201)] {
        let request = Request { reason: reason.to_owned(), ..of_pod("shop", "web-1") };
        assert_eq!(outcome(&service.caller, SHOP, &request), refused(400, "bad_revocation"), "{reason:?}");
    }
    for (namespace, name) in [("shop", "../x"), ("Shop", "web"), ("shop", ""), ("shop\n", "web-1")] {
        assert_eq!(outcome(&service.caller, SHOP, &of_pod(namespace, name)), refused(400, "bad_revocation"));
    }
    assert_eq!(outcome(&service.caller, ALL, &of_fingerprint("ab", None)), refused(400, "bad_revocation"));
    for body in [
        r#"{"which":{"type":"pod","namespace":"shop","name":"web-1"}}"#,
        "{}",
        "[",
        r#"{"reason":"x","which":{"type":"all"}}"#,
    ] {
        let (status, text) = service.caller.post_with(REVOKE_PATH, SHOP, body.as_bytes());
        assert_eq!((status, crate::running::code(&text).as_str()), (400, "malformed_request"), "{body}");
    }
    assert!(blocked(&service).is_empty());
    let audit = site.ca.text("audit.log");
    assert!(audit.chars().all(|c| c == '\n' || nebula_cert::is_visible(c)), "{audit}");
    assert_eq!(site.audit("refused").len(), 15);
}

#[test]
fn while_the_api_server_does_not_say_so_nothing_is_revoked() {
    let site = Site::new();
    let service = site.ca.serve();
    site.both(&service);
    let ask = || outcome(&service.caller, ALL, &of_pod("shop", "web-1"));
    for mood in [Mood::Failing, Mood::Forbidding, Mood::Garbled] {
        site.cluster.be(mood);
        assert_eq!(ask(), refused(503, "kubernetes_unavailable"), "{mood:?}");
    }
    site.cluster.be(Mood::Well);
    for status in [403, 404, 500] {
        site.cluster.refuse_access_reviews(Some(status));
        assert_eq!(ask(), refused(503, "kubernetes_unavailable"), "{status}");
    }
    assert!(blocked(&service).is_empty());
    site.cluster.refuse_access_reviews(None);
    assert_eq!(ask(), Ok("1 of 1".to_owned()));
}

#[test]
fn a_flood_of_made_up_tokens_asks_the_api_server_little_and_holds_up_no_certificate() {
    let site = Site::new();
    let service = site.ca.serve();
    let before = site.cluster.asked_for("tokenreviews");
    let codes: Vec<String> = (0..300)
        .map(|number| outcome(&service.caller, &format!("junk-{number}"), &of_pod("shop", "web-1")).unwrap_err().1)
        .collect();
    let asked = site.cluster.asked_for("tokenreviews") - before;
    // The minute may end once meanwhile.
    assert!((1..=120).contains(&asked), "{asked}");
    assert!(codes.iter().filter(|code| *code == "too_many_reviews").count() >= 180, "{codes:?}");
    assert!(site.pod(&service, web()).is_ok());
}

#[test]
fn whoever_was_let_in_from_an_address_is_not_kept_out_by_strangers_elsewhere() {
    let site = Site::new();
    let service = site.ca.serve();
    site.both(&service);
    let (tls, body) = (trusting(&site.ca.text("tls.crt")), serde_json::to_vec(&of_pod("shop", "web-1")).unwrap());
    let from = |last: u8, token: &str| {
        let mut stream = connect_tls_from([127, 0, 0, last].into(), service.address.port(), &tls);
        exhaustion::ask(&mut stream, "POST", REVOKE_PATH, &format!("{TOKEN_HEADER}: {token}\r\n"), &body).unwrap().0
    };
    assert_eq!(from(2, SHOP), 200);
    let flood = |round: u8| {
        let statuses: Vec<u16> =
            (0..100).map(|number| from(3 + number % 8, &format!("junk-{round}-{number}"))).collect();
        assert!(statuses.iter().all(|status| [401, 429].contains(status)), "{statuses:?}");
        // A minute of the limit may end at any time, and another one is full at once.
        from(100 + round, SHOP)
    };
    assert!((0..3).any(|round| flood(round) == 429), "a stranger is kept out by others");
    assert_eq!(from(2, SHOP), 200);
}

#[test]
fn a_ca_that_knows_no_api_server_or_was_not_told_to_refuses_with_what_to_do() {
    let alone = Ca::init();
    let service = alone.serve();
    let body = serde_json::to_vec(&of_host("edge")).unwrap();
    let (status, said) = service.caller.post_with(REVOKE_PATH, ALL, &body);
    assert_eq!((status, crate::running::code(&said).as_str()), (403, "revocation_disabled"));
    assert!(said.contains("nebula-ca certificate revoke"), "{said}");

    let site = Site::new();
    let mut off = policy(&site.cluster);
    off["kubernetes"].as_object_mut().unwrap().remove("revocation");
    fs::write(site.ca.file("policy.jsonc"), off.to_string()).unwrap();
    let service = site.ca.serve();
    let asked = site.cluster.asked_for("reviews");
    assert_eq!(outcome(&service.caller, ALL, &of_pod("shop", "web-1")), refused(403, "revocation_disabled"));
    assert_eq!(site.cluster.asked_for("reviews"), asked, "nobody is asked");
}

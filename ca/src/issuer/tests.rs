mod grace;
mod in_cluster;

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicBool, Ordering},
};

use nebula_cert::{
    CaPool, Curve, PassphraseCost, PrivateKey, SigningKey, Template, Version,
    issuance::{Pod, Release},
    rfc3339,
};
use tempfile::TempDir;

use super::*;
use crate::{
    audit::AuditLog,
    authority::Authority,
    cluster::Cluster,
    control::{Command, CommandOutcome, NewToken, Operator},
    directory::{CA_CERTIFICATE, CA_KEY, Directory},
    policy::Policy,
    store::{Beginning, RedbStore, StoreError},
};

const NOW: UnixTime = 1_800_000_000;
const NODE_SECRET: &str = "nebula-node-0123456789012345678901234567890123456789";
/// Where proofs come from, and another address.
const NODE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
const ELSEWHERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
const DERIVE: &str = r#"{"pods": {"overlay": ["10.42.0.0/16"], "reserved": ["10.42.0.1"]}}"#;
const POOL: &str =
    r#"{"pods": {"overlay": ["10.42.0.0/29"], "reserved": ["10.42.0.1"], "address": "pool", "life": "1h"}}"#;

struct Fixture {
    issuer: Issuer,
    audit: AuditLog,
    directory: TempDir,
}

impl Fixture {
    fn new(policy: &str) -> Self {
        Self::with_ca(policy, |ca| ca)
    }

    fn with_ca(policy: &str, change: impl FnOnce(Template) -> Template) -> Self {
        Self::confirmed_by(None, policy, change)
    }

    fn confirmed_by(
        cluster: Option<Arc<dyn Cluster>>,
        policy: &str,
        change: impl FnOnce(Template) -> Template,
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = Directory::new(directory.path());
        let key = SigningKey::generate(Curve::Curve25519).unwrap();
        let ca = change(template()).self_sign(&key).unwrap();
        at.write_new(CA_CERTIFICATE, &ca.to_pem(), 0o644).unwrap();
        at.write_new(CA_KEY, &key.to_pem(), 0o600).unwrap();
        let policy = Policy::parse(policy).unwrap();
        policy.check_against(&ca).unwrap();
        let store = open_store(&at);
        let token = NodeToken::new(NODE_SECRET).unwrap();
        let authority = Authority::read(&at, None).unwrap();
        let renewal_key = RenewalKey::open(&at, ca.curve()).unwrap();
        let rules = Rules { authority, policy, cluster };
        let issuer = Issuer::new(rules, Some(token), renewal_key, store);
        Self { issuer, audit: AuditLog::new(at.file("audit.log")), directory }
    }

    fn obey(&self, command: &Command, now: UnixTime) -> CommandOutcome {
        let rules = self.issuer.rules();
        let authorities = std::slice::from_ref(rules.authority.certificate());
        let store = &*self.issuer.store;
        let directory = Directory::new(self.directory.path());
        let (directory, policy, audit) = (&directory, &rules.policy, &self.audit);
        Operator { directory, store, authorities, policy, audit }.obey(command, now)
    }

    fn token(&self, secret: &str, name: &str, network: &str) -> CommandOutcome {
        self.obey(&Command::CreateToken(new_token(secret, name, network)), NOW)
    }

    fn enrol(&self, secret: &str, key: &PrivateKey, now: UnixTime) -> Result<Issued, Refusal> {
        let proof = Proof::Token { token: secret.to_owned() };
        self.issuer.issue(&Request { public_key: key.public_pem(), proof }, NODE, now)
    }

    fn pod(&self, pod: Pod, now: UnixTime) -> Result<Certificate, Refusal> {
        self.pod_at(NODE, pod, now)
    }

    fn pod_at(&self, node: IpAddr, pod: Pod, now: UnixTime) -> Result<Certificate, Refusal> {
        let proof = Proof::Node { token: NODE_SECRET.to_owned(), pod };
        let issued = self.issuer.issue(&Request { public_key: key().public_pem(), proof }, node, now)?;
        Ok(Certificate::from_pem(issued.reply.certificate.as_bytes()).unwrap())
    }
}

/// The embedded store, or a separate part of the PostgreSQL database that the whole suite runs against.
fn open_store(at: &Directory) -> Box<dyn Store> {
    #[cfg(feature = "postgres")]
    if let Ok(database) = std::env::var(SUITE_DATABASE) {
        use std::sync::atomic::AtomicU32;
        static PARTS: AtomicU32 = AtomicU32::new(0);
        let part = format!("part_{}", PARTS.fetch_add(1, Ordering::Relaxed));
        crate::postgres_server::run(&database, &format!("create schema {part}"));
        let database = format!("{database} options='-c search_path={part}'");
        return Box::new(crate::store::PostgresStore::connect(&database, Beginning::Allowed).unwrap());
    }
    Box::new(RedbStore::open_file(&at.file("store.redb"), Beginning::Allowed).unwrap())
}

#[cfg(feature = "postgres")]
const SUITE_DATABASE: &str = "NEBULA_CA_SUITE_DATABASE";

#[test]
fn a_table_of_several_pages_is_read_whole_and_in_order() {
    let ca = Fixture::new(DERIVE);
    let store = &*ca.issuer.store;
    // One row, and pages that end with the last row and before it.
    for count in 1..=7u8 {
        let secret = format!("secret {count}");
        assert!(matches!(
            ca.token(&secret, &format!("host{count}"), &format!("10.42.9.{count}/16")),
            CommandOutcome::TokenCreated(_)
        ));
        let tokens = store.tokens().unwrap();
        assert_eq!(tokens.len(), usize::from(count));
        assert!(tokens.is_sorted_by(|(one, _), (other, _)| one.as_bytes() < other.as_bytes()));
    }
}

#[test]
#[cfg(feature = "postgres")]
#[ignore = "needs the Debian package postgresql"]
fn the_whole_suite_holds_over_postgresql_too() {
    let server = crate::postgres_server::PostgresServer::start();
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["issuer::tests::", "--skip", "the_store_is_open_once"])
        .env(SUITE_DATABASE, server.database())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}{}", String::from_utf8_lossy(&run.stderr));
    let parts: usize =
        server.query("select count(*) from pg_namespace where nspname like 'part_%'").trim().parse().unwrap();
    assert!(parts >= 25, "only {parts} tests used the database: {text}");
}

fn template() -> Template {
    Template::new("ca", NOW - 1_000..=NOW + 1_000_000)
}

fn new_token(secret: &str, name: &str, network: &str) -> NewToken {
    NewToken {
        hash: TokenHash::of(secret).to_hex(),
        name: name.into(),
        networks: vec![network.parse().unwrap()],
        unsafe_networks: vec![],
        groups: vec!["web".into()],
        ttl: 3_600,
        life: 7_200,
        key: None,
    }
}

fn key() -> PrivateKey {
    PrivateKey::generate(Curve::Curve25519).unwrap()
}

fn pod(uid: &str, name: &str, address: &str) -> Pod {
    let address = address.parse().unwrap();
    Pod { namespace: "shop".into(), name: name.into(), uid: uid.into(), address, other_address: None }
}

fn revoke(which: &str, keep_out: bool) -> Command {
    Command::Revoke { which: which.to_owned(), keep_out }
}

fn code<T>(outcome: Result<T, Refusal>) -> &'static str {
    outcome.err().map_or("issued", |refusal| refusal.code())
}

fn network(certificate: &Certificate) -> String {
    certificate.networks().iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn a_token_gives_exactly_what_it_was_made_for() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    let key = key();
    let issued = ca.enrol("secret", &key, NOW).unwrap();
    let pool = CaPool::from_pem(issued.reply.ca.as_bytes()).unwrap();
    let certificate = Certificate::from_pem(issued.reply.certificate.as_bytes()).unwrap();
    let verified = pool.verify(certificate, NOW).unwrap();
    assert_eq!((verified.name(), network(&verified).as_str()), ("edge", "10.42.0.9/16"));
    assert_eq!(verified.groups(), ["web"]);
    assert_eq!(verified.public_key(), key.public_key());
    assert_eq!(verified.not_after(), NOW + 7_200);
    assert!(verified.not_before() < NOW);
}

#[test]
fn a_token_is_good_for_one_key_and_repeats_its_answer_to_that_key() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    let (first, other) = (key(), key());
    let issued = ca.enrol("secret", &first, NOW).unwrap();
    assert_eq!(code(ca.enrol("secret", &other, NOW)), "token_used");
    let again = ca.enrol("secret", &first, NOW + 10).unwrap();
    assert!(again.is_repeat);
    assert_eq!(again.reply.certificate, issued.reply.certificate);
    assert_eq!(code(ca.enrol("secret", &first, NOW + 3_601)), "token_expired");
    assert_eq!(code(ca.enrol("secret", &other, NOW + 3_601)), "token_used");
}

#[test]
fn tokens_end_with_their_last_second_and_unknown_ones_are_unknown() {
    let ca = Fixture::new(DERIVE);
    ca.token("one", "one", "10.42.0.9/16");
    ca.token("two", "two", "10.42.0.10/16");
    assert_eq!(code(ca.enrol("one", &key(), NOW + 3_600)), "issued");
    assert_eq!(code(ca.enrol("two", &key(), NOW + 3_601)), "token_expired");
    assert_eq!(code(ca.enrol("Two", &key(), NOW)), "unknown_token");
    assert_eq!(code(ca.enrol("", &key(), NOW)), "unknown_token");
}

#[test]
fn a_refused_request_does_not_use_up_the_token() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    let wrong_curve = PrivateKey::generate(Curve::P256).unwrap();
    assert_eq!(code(ca.enrol("secret", &wrong_curve, NOW)), "wrong_curve");
    let proof = Proof::Token { token: "secret".into() };
    assert_eq!(code(ca.issuer.issue(&Request { public_key: "x".into(), proof }, NODE, NOW)), "bad_public_key");
    assert_eq!(code(ca.enrol("secret", &key(), NOW)), "issued");
}

#[test]
fn a_token_whose_address_was_taken_meanwhile_is_refused_and_stays_unused() {
    let ca = Fixture::new(DERIVE);
    ca.token("two", "two", "10.42.0.9/16");
    // As if a replica had created it at the same moment: this service itself creates no second open token for an
    // address.
    let (hash, made) = ca.issuer.store.tokens().unwrap().remove(0);
    assert!(matches!(ca.token("one", "one", "10.42.0.9/16"), CommandOutcome::Failed { .. }));
    ca.issuer.store.remove_token(&hash).unwrap();
    ca.token("one", "one", "10.42.0.9/16");
    ca.issuer.store.add_token(&hash, &made).unwrap();
    assert_eq!(code(ca.enrol("one", &key(), NOW)), "issued");
    assert_eq!(code(ca.enrol("two", &key(), NOW)), "address_conflict");
    let tokens = ca.issuer.store.tokens().unwrap();
    assert!(tokens.iter().any(|(_, token)| token.name == "two" && token.used.is_none()));
}

#[test]
fn a_token_for_a_held_address_is_not_even_made() {
    let ca = Fixture::new(DERIVE);
    ca.token("one", "one", "10.42.0.9/16");
    ca.enrol("one", &key(), NOW).unwrap();
    let CommandOutcome::Failed { message } = ca.token("two", "two", "10.42.0.9/16") else { panic!("made") };
    assert!(message.contains("10.42.0.9 belongs to host one"), "{message}");
    assert!(matches!(ca.token("again", "one", "10.42.0.9/16"), CommandOutcome::TokenCreated(_)));
}

#[test]
fn a_token_the_ca_could_never_honour_is_not_made() {
    let ca = Fixture::with_ca(r#"{"hosts": {"longest_life": "3h"}}"#, |template| Template {
        networks: vec!["10.42.0.0/16".parse().unwrap()],
        groups: vec!["web".into()],
        ..template
    });
    let refused = |change: fn(&mut NewToken)| {
        let mut token = new_token("secret", "edge", "10.42.0.9/16");
        change(&mut token);
        match ca.obey(&Command::CreateToken(token), NOW) {
            CommandOutcome::Failed { message } => message,
            answer => panic!("made: {answer:?}"),
        }
    };
    assert!(refused(|token| token.networks = vec!["10.43.0.9/16".parse().unwrap()]).contains("10.43.0.9/16"));
    assert!(refused(|token| token.groups = vec!["admin".into()]).contains("admin"));
    assert!(refused(|token| token.networks = vec![]).contains("network"));
    assert!(refused(|token| token.name = String::new()).contains("name"));
    assert!(refused(|token| token.name = "a\nb".into()).contains("control"));
    assert!(refused(|token| token.life = 10_801).contains("longest_life"));
    assert!(refused(|token| token.ttl = 0).contains("30d"));
    assert!(refused(|token| token.ttl = i64::MAX).contains("30d"));
    assert!(refused(|token| token.hash = "zz".into()).contains("hex"));
    assert!(matches!(ca.token("secret", "edge", "10.42.0.9/16"), CommandOutcome::TokenCreated(_)));
}

#[test]
fn a_pod_gets_name_groups_and_derived_address() {
    let ca = Fixture::new(DERIVE);
    let certificate = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    assert_eq!((certificate.name(), network(&certificate).as_str()), ("web-0.shop.pod", "10.42.0.5/16"));
    assert_eq!(certificate.groups(), ["ns:shop"]);
    assert_eq!(certificate.not_after(), NOW + 86_400);
}

#[test]
fn a_pod_may_get_an_address_in_each_of_two_overlays() {
    let ca = Fixture::new(r#"{"pods": {"overlay": ["10.42.0.0/16", "fd42::/96"]}}"#);
    let certificate = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    assert_eq!(network(&certificate), "10.42.0.5/16,fd42::af4:5/96");
}

#[test]
fn in_mode_same_a_pod_keeps_its_own_address_and_one_outside_the_overlay_gets_nothing() {
    let ca = Fixture::new(r#"{"pods": {"overlay": ["10.42.0.0/16"], "address": "same"}}"#);
    assert_eq!(network(&ca.pod(pod("u-1", "web", "10.42.3.4"), NOW).unwrap()), "10.42.3.4/16");
    assert_eq!(code(ca.pod(pod("u-2", "db", "10.43.0.1"), NOW)), "outside_overlay");
}

#[test]
fn an_ipv4_address_in_ipv6_clothes_is_the_ipv4_address() {
    let ca = Fixture::new(DERIVE);
    let certificate = ca.pod(pod("u-1", "web-0", "::ffff:10.244.0.5"), NOW).unwrap();
    assert_eq!(network(&certificate), "10.42.0.5/16");
}

#[test]
fn the_same_pod_asking_again_keeps_its_identity() {
    let ca = Fixture::new(DERIVE);
    let first = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    let second = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW + 50_000).unwrap();
    assert_eq!((first.name(), first.networks()), (second.name(), second.networks()));
    assert_ne!(first.public_key(), second.public_key());
}

#[test]
fn the_same_key_gets_the_same_certificate_until_half_of_its_life_is_over() {
    let ca = Fixture::new(DERIVE);
    let (own, other) = (key(), key());
    let ask = |key: &PrivateKey, address: &str, now| {
        let proof = Proof::Node { token: NODE_SECRET.to_owned(), pod: pod("u-1", "web-0", address) };
        ca.issuer.issue(&Request { public_key: key.public_pem(), proof }, NODE, now).unwrap()
    };
    let first = ask(&own, "10.244.0.5", NOW);
    // Far above the limit, and nothing is added to the ledger.
    for _ in 0..100 {
        let again = ask(&own, "10.244.0.5", NOW + 1);
        assert!(again.is_repeat && again.fingerprint == first.fingerprint);
    }
    assert_eq!(ca.issuer.store.all_issued().unwrap().len(), 1);
    assert_ne!(ask(&own, "10.244.0.6", NOW + 2).fingerprint, first.fingerprint, "another address");
    let back = ask(&own, "10.244.0.5", NOW + 3);
    assert_ne!(ask(&own, "10.244.0.5", NOW + 3 + 43_201).fingerprint, back.fingerprint, "half of its life is over");
    ask(&other, "10.244.0.5", NOW + 50_000);
    let blocked = ask(&own, "10.244.0.5", NOW + 50_001);
    ca.issuer.store.revoke(&[blocked.fingerprint.parse().unwrap()], NOW + 50_002).unwrap();
    assert_ne!(ask(&own, "10.244.0.5", NOW + 50_003).fingerprint, blocked.fingerprint, "it was revoked");
}

#[test]
fn a_crash_loop_is_told_when_to_ask_again_and_gets_its_certificate_then() {
    let ca = Fixture::new(DERIVE);
    let ask = |now| ca.pod(pod("u-1", "web-0", "10.244.0.5"), now);
    assert_eq!((0..100).filter(|_| ask(NOW).is_ok()).count(), 30);
    let refused = ask(NOW).unwrap_err();
    assert_eq!((refused.code(), refused.retry_after()), ("too_many_certificates", Some(20)));
    assert!(ask(NOW + 20).is_ok() && ask(NOW + 20).is_err());
    assert!(ca.pod(pod("u-2", "web-1", "10.244.0.6"), NOW).is_ok(), "other pods are not concerned");
}

#[test]
fn a_recreated_sandbox_has_the_same_name_and_the_new_address() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    let moved = ca.pod(pod("u-1", "web-0", "10.244.0.6"), NOW).unwrap();
    assert_eq!((moved.name(), network(&moved).as_str()), ("web-0.shop.pod", "10.42.0.6/16"));
}

#[test]
fn one_uid_cannot_become_another_pod() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    assert_eq!(code(ca.pod(pod("u-1", "web-1", "10.244.0.5"), NOW)), "pod_uid_conflict");
}

#[test]
fn a_new_pod_with_a_reused_address_is_recorded_as_the_holder() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    ca.pod(pod("u-2", "web-1", "10.244.0.5"), NOW + 1).unwrap();
    let holder = ca.issuer.store.holder("10.42.0.5".parse().unwrap()).unwrap().unwrap();
    assert_eq!(holder.subject.to_string(), "pod shop/web-1");
}

#[test]
fn a_new_pod_with_a_reused_address_ends_the_certificates_of_the_pod_before_it() {
    let ca = Fixture::new(DERIVE);
    let moved = ca.pod(pod("u-1", "web-0", "10.244.0.4"), NOW).unwrap();
    let old = [NOW, NOW + 1].map(|now| ca.pod(pod("u-1", "web-0", "10.244.0.5"), now).unwrap());
    assert!(ca.issuer.trust(NOW + 1).unwrap().body.blocklist.is_empty(), "one pod may have several");
    let new = ca.pod(pod("u-2", "web-1", "10.244.0.5"), NOW + 2).unwrap();
    let blocked = |now| -> BTreeSet<String> { ca.issuer.trust(now).unwrap().body.blocklist.into_iter().collect() };
    let expected: BTreeSet<String> = old.iter().map(|old| old.fingerprint().to_string()).collect();
    assert_eq!(blocked(NOW + 2), expected, "and not what it has for another address: {}", moved.fingerprint());
    // Given back to the first pod: now the other one is gone.
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW + 3).unwrap();
    assert!(blocked(NOW + 3).contains(&new.fingerprint().to_string()));
}

#[test]
fn a_node_token_used_elsewhere_takes_no_address_of_a_live_pod() {
    let ca = Fixture::new(DERIVE);
    let victim = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    let thief = |now| code(ca.pod_at(ELSEWHERE, pod("u-2", "web-1", "10.244.0.5"), now));
    assert_eq!(thief(NOW), "address_conflict");
    assert!(ca.issuer.trust(NOW).unwrap().body.blocklist.is_empty());
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW)), "issued");
    // Nor is it enough that one of the two certificates was revoked.
    ca.issuer.store.revoke(&[victim.fingerprint()], NOW).unwrap();
    assert_eq!(thief(NOW), "address_conflict");
    assert_eq!(thief(NOW + 86_401), "issued");
}

/// Nobody but the node can say which of its pods has an address, and its address is all by which it is known.
#[test]
fn without_kubernetes_whoever_comes_from_the_address_of_a_node_disposes_of_its_pods_addresses() {
    let ca = Fixture::new(DERIVE);
    let live = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    let other = ca.pod_at(ELSEWHERE, pod("u-3", "db-0", "10.244.0.6"), NOW).unwrap();
    let next = ca.pod(pod("u-2", "made-up", "10.244.0.5"), NOW).unwrap();
    assert_eq!(next.networks(), live.networks());
    let blocked = ca.issuer.trust(NOW).unwrap().body.blocklist;
    assert_eq!(blocked, [live.fingerprint().to_string()], "and of no pod of another node");
    assert_eq!(code(ca.pod(pod("u-2", "made-up", "10.244.0.6"), NOW)), "address_conflict", "{}", other.name());
}

#[test]
fn an_address_whose_certificates_are_all_given_back_is_free_for_a_pod_of_any_node() {
    let ca = Fixture::new(DERIVE);
    for _ in 0..2 {
        ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    }
    let proof = Proof::Node { token: NODE_SECRET.to_owned(), pod: pod("u-1", "web-0", "10.244.0.5") };
    assert_eq!(ca.issuer.release(&Release { proof }, NODE, NOW).unwrap().fingerprints.len(), 2);
    assert_eq!(code(ca.pod_at(ELSEWHERE, pod("u-2", "web-1", "10.244.0.5"), NOW)), "issued");
}

#[test]
fn a_release_is_judged_by_what_the_ledger_has_for_the_uid() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    let release = |node, pod| {
        let proof = Proof::Node { token: NODE_SECRET.to_owned(), pod };
        ca.issuer.release(&Release { proof }, node, NOW).map(|given_back| given_back.fingerprints.len())
    };
    assert_eq!(code(release(NODE, pod("u-1", "mine", "10.244.0.6"))), "pod_uid_conflict");
    assert_eq!(code(release(ELSEWHERE, pod("u-1", "web-0", "10.244.0.5"))), "pod_on_other_node");
    assert!(ca.issuer.trust(NOW).unwrap().body.blocklist.is_empty());
    assert_eq!(release(ELSEWHERE, pod("u-9", "mine", "10.244.0.6")).unwrap(), 0, "of an unknown pod there is nothing");
    assert_eq!(release(NODE, pod("u-1", "web-0", "10.244.0.5")).unwrap(), 1);
}

#[test]
fn whoever_names_the_uid_of_another_pod_uses_up_nothing_of_it() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    for _ in 0..40 {
        assert_eq!(code(ca.pod_at(ELSEWHERE, pod("u-1", "mine", "10.244.0.6"), NOW)), "pod_uid_conflict");
    }
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW)), "issued");
}

#[test]
fn a_node_is_known_by_the_address_of_its_last_proof() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    // The node got another address, from which its pods renew.
    ca.pod_at(ELSEWHERE, pod("u-1", "web-0", "10.244.0.5"), NOW + 1).unwrap();
    assert_eq!(code(ca.pod(pod("u-2", "web-1", "10.244.0.5"), NOW + 2)), "address_conflict");
    assert_eq!(code(ca.pod_at(ELSEWHERE, pod("u-2", "web-1", "10.244.0.5"), NOW + 2)), "issued");
}

#[test]
fn two_pod_addresses_with_one_overlay_address_are_refused() {
    let ca = Fixture::new(DERIVE);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    assert_eq!(code(ca.pod(pod("u-2", "web-1", "10.245.0.5"), NOW)), "address_conflict");
    assert_eq!(code(ca.pod(pod("u-2", "web-1", "10.245.0.5"), NOW + 86_401)), "issued");
}

#[test]
fn pods_and_hosts_do_not_take_each_others_addresses() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    ca.enrol("secret", &key(), NOW).unwrap();
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.9"), NOW)), "address_conflict");
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.1"), NOW)), "reserved_address");
}

#[test]
fn the_node_proof_needs_its_token_and_a_pods_policy() {
    let with = |fixture: &Fixture, token: &str| {
        let proof = Proof::Node { token: token.into(), pod: pod("u-1", "web-0", "10.244.0.5") };
        code(fixture.issuer.issue(&Request { public_key: key().public_pem(), proof }, NODE, NOW))
    };
    let ca = Fixture::new(DERIVE);
    assert_eq!(with(&ca, "wrong"), "bad_node_token");
    assert_eq!(with(&ca, NODE_SECRET), "issued");
    assert_eq!(with(&Fixture::new("{}"), NODE_SECRET), "pods_disabled");
    // A caller without a token does not learn what the pod description lacks.
    let proof = Proof::Node { token: "wrong".into(), pod: pod("", "", "0.0.0.0") };
    assert_eq!(code(ca.issuer.issue(&Request { public_key: "x".into(), proof }, NODE, NOW)), "bad_node_token");
}

#[test]
fn a_pool_gives_each_pod_its_own_address_and_remembers_it() {
    let ca = Fixture::new(POOL);
    let one = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    let two = ca.pod(pod("u-2", "web-1", "10.244.0.5"), NOW).unwrap();
    let one_again = ca.pod(pod("u-1", "web-0", "10.244.0.7"), NOW + 60).unwrap();
    assert_eq!((network(&one).as_str(), network(&two).as_str()), ("10.42.0.2/29", "10.42.0.3/29"));
    assert_eq!(network(&one_again), network(&one));
}

#[test]
fn a_pool_address_is_free_again_only_after_its_longest_certificate() {
    let ca = Fixture::new(POOL);
    for number in 0..5 {
        ca.pod(pod(&format!("u-{number}"), &format!("web-{number}"), "10.244.0.5"), NOW + number).unwrap();
    }
    assert_eq!(code(ca.pod(pod("u-9", "web-9", "10.244.0.5"), NOW + 3_600)), "pool_exhausted");
    let late = ca.pod(pod("u-9", "web-9", "10.244.0.5"), NOW + 3_601).unwrap();
    assert_eq!(network(&late), "10.42.0.2/29");
}

#[test]
fn the_address_of_a_pod_that_is_gone_is_free_after_a_minute() {
    let ca = Fixture::new(POOL);
    // Many short-lived pods, one after another: far more than the pool has addresses.
    for number in 0..40 {
        let at = NOW + 20 * number;
        let facts = pod(&format!("u-{number}"), &format!("job-{number}"), "10.244.0.5");
        ca.pod(facts.clone(), at).unwrap();
        let proof = Proof::Node { token: NODE_SECRET.to_owned(), pod: facts };
        let given_back = ca.issuer.release(&Release { proof }, NODE, at + 1).unwrap();
        assert_eq!(given_back.fingerprints.len(), 1);
    }
    // All of them are still blocked.
    assert_eq!(ca.issuer.trust(NOW + 800).unwrap().body.blocklist.len(), 40);
}

#[test]
fn an_address_rests_for_a_minute_and_stays_with_a_pod_that_holds_another_certificate() {
    let ca = Fixture::new(POOL);
    let pods = |number: i64| pod(&format!("u-{number}"), &format!("web-{number}"), "10.244.0.5");
    let certificates: Vec<_> = (0..5).map(|number| ca.pod(pods(number), NOW).unwrap()).collect();
    // A pod renews, and its first certificate is revoked: the second one keeps its address.
    ca.pod(pods(0), NOW + 10).unwrap();
    ca.issuer.store.revoke(&[certificates[0].fingerprint(), certificates[1].fingerprint()], NOW + 20).unwrap();
    let refused = ca.pod(pods(9), NOW + 80).unwrap_err();
    assert_eq!(refused.code(), "pool_exhausted");
    assert!(refused.to_string().contains("10.42.0.0/29 of 5 addresses"), "{refused}");
    assert_eq!(network(&ca.pod(pods(9), NOW + 81).unwrap()), network(&certificates[1]));
    assert_eq!(code(ca.pod(pods(10), NOW + 1_000)), "pool_exhausted");
    // The pod whose certificate was revoked comes back while the pool is full.
    assert_eq!(code(ca.pod(pods(1), NOW + 1_000)), "pool_exhausted");
}

#[test]
fn a_pod_that_is_kept_out_gets_no_certificate_until_it_is_readmitted() {
    let ca = Fixture::new(DERIVE);
    let bad = pod("u-1", "web-0", "10.244.0.5");
    let name = ca.pod(bad.clone(), NOW).unwrap().name().to_owned();
    let CommandOutcome::Revoked { kept_out, .. } = ca.obey(&revoke(&name, true), NOW) else { panic!("not revoked") };
    assert_eq!(kept_out.iter().map(|pod| pod.uid.as_str()).collect::<Vec<_>>(), ["u-1"]);
    assert_eq!(code(ca.pod(bad.clone(), NOW + 1)), "kept_out");
    // From another address, and long after its certificate expired.
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.9"), NOW + 90_000)), "kept_out");
    // Its replacement is another pod.
    assert_eq!(code(ca.pod(pod("u-2", "web-0", "10.244.0.6"), NOW + 1)), "issued");
    let readmit = |pod: &str| ca.obey(&Command::Readmit { pod: pod.to_owned() }, NOW);
    assert!(matches!(readmit("u-2"), CommandOutcome::Failed { .. }));
    assert!(matches!(readmit("shop/web-0"), CommandOutcome::Readmitted { pods } if pods[0].uid == "u-1"));
    assert_eq!(code(ca.pod(bad.clone(), NOW + 2)), "issued");
    // Whatever a pod is called by in one command it is called by in the other.
    let fingerprint = ca.pod(bad.clone(), NOW + 3).unwrap().fingerprint().to_string();
    for which in [name.as_str(), "u-1", "shop/web-0", fingerprint.as_str()] {
        let outcome = ca.obey(&revoke(which, true), NOW + 4);
        let CommandOutcome::Revoked { kept_out, .. } = outcome else { panic!("{which}: {outcome:?}") };
        assert!(kept_out.iter().any(|pod| pod.uid == "u-1"), "{which}");
        let outcome = readmit(which);
        let CommandOutcome::Readmitted { pods } = outcome else { panic!("{which}: {outcome:?}") };
        assert!(pods.iter().any(|pod| pod.uid == "u-1"), "{which}");
    }
}

#[test]
fn a_host_is_not_kept_out_and_nothing_is_revoked_by_the_attempt() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    ca.enrol("secret", &key(), NOW).map(drop).unwrap();
    assert!(matches!(ca.obey(&revoke("edge", true), NOW), CommandOutcome::Failed { .. }));
    assert_eq!(ca.issuer.trust(NOW).unwrap().body.blocklist, Vec::<String>::new());
}

#[test]
fn no_certificate_outlives_the_ca() {
    let ca = Fixture::new(DERIVE);
    let end = NOW + 1_000_000;
    let late = ca.pod(pod("u-1", "web-0", "10.244.0.5"), end - 10).unwrap();
    assert_eq!(late.not_after(), end);
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.5"), end + 1)), "ca_expired");
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW - 1_001)), "ca_expired");
    let early = ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW - 1_000).unwrap();
    assert_eq!(early.not_before(), NOW - 1_000);
    assert_eq!(code(ca.issuer.health(end + 1)), "ca_expired");
}

#[test]
fn constraints_of_the_ca_hold_whatever_the_policy_says() {
    let ca = Fixture::with_ca(DERIVE, |template| Template { groups: vec!["ns:bank".into()], ..template });
    assert_eq!(code(ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW)), "ca_constraint");
}

#[test]
fn a_policy_beyond_the_ca_is_refused_at_start() {
    let key = SigningKey::generate(Curve::Curve25519).unwrap();
    let networks = vec!["10.42.0.0/16".parse().unwrap()];
    let ca = Template { networks, groups: vec!["web".into()], ..template() }.self_sign(&key).unwrap();
    let check = |text: &str| Policy::parse(text).unwrap().check_against(&ca);
    assert!(check(r#"{"pods": {"overlay": ["10.43.0.0/16"]}}"#).is_err());
    assert!(check(r#"{"pods": {"overlay": ["10.42.0.0/15"]}}"#).is_err());
    assert!(check(r#"{"pods": {"overlay": ["10.42.0.0/16"], "groups": ["admin"]}}"#).is_err());
    assert!(check(r#"{"pods": {"overlay": ["10.42.0.0/16"], "groups": ["web"]}}"#).is_ok());
    assert!(check("{}").is_ok());
    let v1 = Template { version: Version::V1, ..template() }.self_sign(&key).unwrap();
    let check = |text: &str| Policy::parse(text).unwrap().check_against(&v1);
    assert!(check(r#"{"pods": {"overlay": ["fd42::/64"]}}"#).is_err());
    assert!(check(r#"{"pods": {"overlay": ["10.42.0.0/16", "10.43.0.0/16"]}}"#).is_err());
    assert!(check(r#"{"pods": {"overlay": ["10.42.0.0/16"]}}"#).is_ok());
}

#[test]
fn revocation_blocks_until_expiry_and_is_not_undone_by_the_token() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    let key = key();
    let issued = ca.enrol("secret", &key, NOW).unwrap();
    let before = ca.issuer.trust(NOW).unwrap();
    let CommandOutcome::Revoked { fingerprints, is_foreign, .. } = ca.obey(&revoke("edge", false), NOW) else {
        panic!("not revoked")
    };
    assert_eq!((fingerprints, is_foreign), (vec![issued.fingerprint.clone()], false));
    let after = ca.issuer.trust(NOW).unwrap();
    assert_eq!(after.body.blocklist, [issued.fingerprint]);
    assert_ne!(after.etag, before.etag);
    assert_eq!(code(ca.enrol("secret", &key, NOW)), "certificate_revoked");
    assert!(ca.issuer.trust(NOW + 7_201).unwrap().body.blocklist.is_empty());
}

#[test]
fn a_certificate_signed_elsewhere_can_be_blocked_by_fingerprint() {
    let ca = Fixture::new(DERIVE);
    let which = "ab".repeat(32);
    let answer = ca.obey(&revoke(&which, false), NOW);
    assert!(matches!(answer, CommandOutcome::Revoked { is_foreign: true, .. }));
    assert_eq!(ca.issuer.trust(NOW + 999_999_999).unwrap().body.blocklist, [which]);
    assert!(matches!(ca.obey(&revoke("nobody", false), NOW), CommandOutcome::Failed { .. }));
}

#[test]
fn pruning_forgets_what_is_over_and_nothing_else() {
    let ca = Fixture::new(DERIVE);
    ca.token("old", "old", "10.42.0.9/16");
    ca.enrol("old", &key(), NOW).unwrap();
    ca.obey(&revoke("old", false), NOW);
    ca.pod(pod("u-1", "web-0", "10.244.0.5"), NOW).unwrap();
    ca.issuer.store.prune(NOW + 7_201).unwrap();
    assert!(ca.issuer.store.tokens().unwrap().is_empty());
    let names: Vec<String> = ca.issuer.store.all_issued().unwrap().into_iter().map(|(_, issued)| issued.name).collect();
    assert_eq!(names, ["web-0.shop.pod"]);
    assert!(ca.issuer.store.pod("u-1").unwrap().is_some());
    assert!(ca.issuer.store.holder("10.42.0.9".parse().unwrap()).unwrap().is_none());
    assert!(ca.issuer.store.holder("10.42.0.5".parse().unwrap()).unwrap().is_some());
}

#[test]
fn the_store_is_open_once_and_survives_reopening() {
    let ca = Fixture::new(DERIVE);
    let path = ca.directory.path().join("store.redb");
    assert!(matches!(RedbStore::open_file(&path, Beginning::Allowed), Err(StoreError::InUse)));
    ca.token("secret", "edge", "10.42.0.9/16");
    let Fixture { issuer, directory, .. } = ca;
    drop(issuer);
    assert_eq!(RedbStore::open_file(&path, Beginning::Allowed).unwrap().tokens().unwrap().len(), 1);
    drop(directory);
}

#[test]
fn the_audit_log_has_a_line_of_json_and_no_hash_in_it() {
    let ca = Fixture::new(DERIVE);
    ca.token("secret", "edge", "10.42.0.9/16");
    let text = std::fs::read_to_string(ca.directory.path().join("audit.log")).unwrap();
    let line: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&line["event"], &line["name"]), (&"token_created".into(), &"edge".into()));
    assert_eq!(line["time"], rfc3339(NOW));
    assert!(!text.contains(&TokenHash::of("secret").to_hex()));
}

#[test]
fn an_encrypted_ca_key_needs_its_passphrase() {
    let directory = tempfile::tempdir().unwrap();
    let at = Directory::new(directory.path());
    let key = SigningKey::generate(Curve::P256).unwrap();
    let ca = Template { curve: Curve::P256, ..template() }.self_sign(&key).unwrap();
    let cost = PassphraseCost { memory_kib: 64, iterations: 1, parallelism: 1 };
    at.write_new(CA_CERTIFICATE, &ca.to_pem(), 0o644).unwrap();
    at.write_new(CA_KEY, &key.to_encrypted_pem(b"open sesame", cost).unwrap(), 0o600).unwrap();
    assert!(Authority::read(&at, Some("open sesame")).is_ok());
    let error = |passphrase| Authority::read(&at, passphrase).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error(None).contains("NEBULA_CA_PASSPHRASE"));
    assert!(error(Some("wrong")).contains("cannot be decrypted"));
}

#[test]
fn the_ca_that_matches_the_key_signs_and_the_whole_bundle_is_handed_out() {
    let directory = tempfile::tempdir().unwrap();
    let at = Directory::new(directory.path());
    let (old, new) =
        (SigningKey::generate(Curve::Curve25519).unwrap(), SigningKey::generate(Curve::Curve25519).unwrap());
    let ca = |key: &SigningKey, name: &str| Template { name: name.into(), ..template() }.self_sign(key).unwrap();
    let bundle = format!("{}{}", ca(&old, "old").to_pem(), ca(&new, "new").to_pem());
    at.write_new(CA_CERTIFICATE, &bundle, 0o644).unwrap();
    at.write_new(CA_KEY, &new.to_pem(), 0o600).unwrap();
    let authority = Authority::read(&at, None).unwrap();
    assert_eq!(authority.certificate().name(), "new");
    assert_eq!(CaPool::from_pem(authority.bundle().as_bytes()).unwrap().certificates().count(), 2);
}

#[test]
fn a_key_of_another_ca_is_refused_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let at = Directory::new(directory.path());
    let key = SigningKey::generate(Curve::Curve25519).unwrap();
    let other = SigningKey::generate(Curve::Curve25519).unwrap();
    at.write_new(CA_CERTIFICATE, &template().self_sign(&key).unwrap().to_pem(), 0o644).unwrap();
    at.write_new(CA_KEY, &other.to_pem(), 0o600).unwrap();
    let error = Authority::read(&at, None).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("one CA"), "{error}");
}

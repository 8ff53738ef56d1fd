//! Certificates of hosts that expired while the service was away.

use super::*;

const LIFE: i64 = 7_200;
const DAY: i64 = 86_400;
const HOSTS: &str =
    r#"{"pods": {"overlay": ["10.42.0.0/16"]}, "hosts": {"pool": ["10.42.200.0/24"], "overlay": ["10.42.0.0/16"]}}"#;

/// A host with a certificate that ends at `NOW + LIFE`.
fn enrolled(policy: &str) -> (Fixture, PrivateKey, Issued) {
    let (ca, key) = (Fixture::new(policy), key());
    ca.token("secret", "edge", "10.42.0.9/16");
    let issued = ca.enrol("secret", &key, NOW).unwrap();
    assert_eq!(issued.record.not_after, NOW + LIFE);
    (ca, key, issued)
}

fn renew(ca: &Fixture, issued: &Issued, holder: &PrivateKey, now: UnixTime) -> Result<Issued, Refusal> {
    let present = Certificate::from_pem(issued.reply.certificate.as_bytes()).unwrap();
    let (next, renewal_key) = (key().public_pem(), issued.reply.renewal_key.as_ref().unwrap());
    let proof = Proof::of_certificate(&present, holder, renewal_key, Some(&next), now).unwrap();
    ca.issuer.issue(&Request { public_key: next, proof }, NODE, now)
}

#[test]
fn a_certificate_that_expired_renews_itself_within_the_grace() {
    let (ca, key, issued) = enrolled(DERIVE);
    for late in [1, 3 * DAY, 7 * DAY] {
        let next = renew(&ca, &issued, &key, NOW + LIFE + late).unwrap();
        assert_eq!((&next.record.name, &next.record.networks), (&issued.record.name, &issued.record.networks));
        assert_eq!(next.record.not_after, NOW + LIFE + late + LIFE);
    }
}

#[test]
fn after_the_grace_it_is_refused_and_the_text_says_what_to_do() {
    let (ca, key, issued) = enrolled(DERIVE);
    let refusal = renew(&ca, &issued, &key, NOW + LIFE + 7 * DAY + 1).err().unwrap();
    assert_eq!((refusal.code(), refusal.status()), ("renewal_too_late", 403));
    let text = refusal.to_string();
    assert!(text.contains("hosts.renewal_grace") && text.contains("token create"), "{text}");

    let (ca, key, issued) = enrolled(r#"{"pods": {"overlay": ["10.42.0.0/16"]}, "hosts": {"renewal_grace": "0s"}}"#);
    assert_eq!(code(renew(&ca, &issued, &key, NOW + LIFE + 1)), "renewal_too_late");
    assert!(renew(&ca, &issued, &key, NOW + LIFE).is_ok());
}

#[test]
fn nobody_else_and_nobody_who_was_revoked_renews_in_the_grace() {
    let (ca, holder, issued) = enrolled(DERIVE);
    assert_eq!(code(renew(&ca, &issued, &key(), NOW + LIFE + 1)), "not_the_holder");
    // By its name, although it has expired.
    assert!(matches!(ca.obey(&revoke("edge", false), NOW + LIFE + 1), CommandOutcome::Revoked { .. }));
    assert_eq!(code(renew(&ca, &issued, &holder, NOW + LIFE + 2)), "certificate_revoked");
    // Nothing is kept for it.
    let taken = NewToken { ..new_token("other", "other", "10.42.0.9/16") };
    let answer = ca.obey(&Command::CreateToken(taken), NOW + LIFE + 120);
    assert!(matches!(answer, CommandOutcome::TokenCreated(_)), "{answer:?}");
}

#[test]
fn a_pod_has_no_grace() {
    let ca = Fixture::new(DERIVE);
    let key = key();
    let proof = Proof::Node { token: NODE_SECRET.to_owned(), pod: pod("u-1", "web-0", "10.244.0.5") };
    let issued = ca.issuer.issue(&Request { public_key: key.public_pem(), proof }, NODE, NOW).unwrap();
    assert_eq!(code(renew(&ca, &issued, &key, NOW + DAY + 1)), "certificate_not_valid");
}

#[test]
fn the_address_stays_with_the_name_of_the_host_for_the_grace() {
    let (ca, _, issued) = enrolled(HOSTS);
    let late = NOW + LIFE + 7 * DAY;
    let other = Command::CreateToken(new_token("other", "other", "10.42.0.9/16"));
    let CommandOutcome::Failed { message } = ca.obey(&other, late) else { panic!("given away") };
    assert!(message.contains("belongs to host edge"), "{message}");
    // A token without an address: the name has the one it had.
    let again = NewToken { networks: Vec::new(), ..new_token("again", "edge", "10.42.0.9/16") };
    let CommandOutcome::TokenCreated(made) = ca.obey(&Command::CreateToken(again), late) else { panic!("no token") };
    assert_eq!(made.token.networks, issued.record.networks);
    assert!(matches!(ca.obey(&other, late + 1), CommandOutcome::Failed { .. }), "the open token has it");
    ca.obey(&Command::RevokeToken { id: made.id }, late + 1);
    assert!(matches!(ca.obey(&other, late + 1), CommandOutcome::TokenCreated(_)));
}

#[test]
fn the_ledger_knows_an_expired_certificate_of_a_host_for_the_longest_grace() {
    let (ca, key, issued) = enrolled(DERIVE);
    ca.issuer.store.prune(NOW + LIFE + 7 * DAY).unwrap();
    assert!(renew(&ca, &issued, &key, NOW + LIFE + 7 * DAY).is_ok());
}

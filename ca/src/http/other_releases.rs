//! Callers and answers of other releases.

use std::path::Path;

use axum::body::Bytes;
use nebula_cert::directory::Directory;
use nebula_cert::issuance::{NodeCredential, Refusal as Refused, Release, Released, Reply, Request, Trust};
use nebula_cert::revocation::{self, Revocation};
use nebula_cni_contract::recorded::hold;
use serde::{Deserialize, Serialize};

use super::read;
use crate::refusal::Refusal;

/// One of each message.
#[derive(Serialize, Deserialize)]
struct Messages {
    requests: Vec<Request>,
    release: Release,
    reply: Reply,
    released: Released,
    trust: Trust,
    node_credential: NodeCredential,
    refusal: Refused,
    directory: Directory,
    revocations: Vec<revocation::Request>,
    revocation: Revocation,
}

#[test]
fn the_messages_of_each_release_are_read_and_keep_their_keys() {
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
    hold::<Messages>(&documents, env!("CARGO_PKG_VERSION"), "api.json").unwrap();
}

#[test]
fn a_request_of_a_newer_program_is_refused_as_that() {
    let known = r#"{"public_key":"k","proof":{"type":"token","token":"t"}}"#;
    assert!(read::<Request>(Ok(Bytes::from(known))).is_ok());
    for (from, to) in
        [("\"public_key\"", "\"curve\":\"x\",\"public_key\""), ("\"token\",\"token\"", "\"tpm\",\"token\"")]
    {
        let newer = known.replacen(from, to, 1);
        assert_ne!(newer, known);
        let Err(Refusal::MalformedRequest(why)) = read::<Request>(Ok(Bytes::from(newer))) else { panic!("{to}") };
        assert!(why.contains("where the caller is newer, upgrade nebula-ca"), "{why}");
    }
}

#[test]
fn what_a_newer_service_adds_to_an_answer_is_skipped() {
    let later = r#"{"ca":"x","blocklist":[],"certificate":"c","fingerprints":[],"version":"e-1","full":true,"pods":[],
        "code":"c","message":"m","node":"n","credential":"c","not_after":1,"of_next_year":{"moon":[1]}}"#;
    assert!(serde_json::from_str::<Reply>(later).is_ok() && serde_json::from_str::<Trust>(later).is_ok());
    assert!(serde_json::from_str::<Directory>(later).is_ok() && serde_json::from_str::<Released>(later).is_ok());
    assert!(serde_json::from_str::<NodeCredential>(later).is_ok() && serde_json::from_str::<Refused>(later).is_ok());
}

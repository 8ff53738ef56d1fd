//! Documents of this release and of others.

use super::*;
use crate::recorded::hold;

#[test]
fn the_status_of_each_release_is_read_and_keeps_its_keys() {
    let documents = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/documents");
    hold::<Status>(&documents, env!("CARGO_PKG_VERSION"), "status.json").unwrap();
}

#[test]
fn what_a_later_release_adds_to_a_status_is_skipped() {
    let text = include_str!("../../tests/documents/0.1.0/status.json");
    let known: Status = serde_json::from_str(text).unwrap();
    let later =
        text.replace("\"peer\": [", "\"moon\": {\"phase\": 3}, \"peer\": [").replacen('{', "{\"later\": [1],", 1);
    assert_eq!(serde_json::from_str::<Status>(&later).unwrap(), known);
    let words = text.replace("\"used\"", "\"borrowed\"").replace("\"running\"", "\"resting\"");
    let words: Status = serde_json::from_str(&words).unwrap();
    assert_eq!((words.state, words.table.unwrap().state), (InstanceState::Unknown, TableState::Unknown));
}

#[test]
fn the_agreed_status_document_is_understood() {
    let status: Status = serde_json::from_str(
        r#"{"pod":"a/b","uid":"u","device":"nebula0","overlay":["fd42::7/64","10.42.0.7/16"],"groups":[],
            "certificate":{"name":"n","fingerprint":"f","not_before":1,"not_after":2},"state":"running",
            "port":4242,"tunnels":[],"counters":{},"pid":123}"#,
    )
    .unwrap();
    assert_eq!(status.counterpart("10.4.0.7".parse().unwrap()), "10.42.0.7".parse().ok());
    assert_eq!(status.counterpart("fd00::1".parse().unwrap()), "fd42::7".parse().ok());
    assert_eq!((status.pid, status.certificate.unwrap().not_after), (Some(123), 2));
    assert_eq!(status.state, InstanceState::Running);
    let waiting: Status = serde_json::from_str(r#"{"state":"waiting","certificate":null}"#).unwrap();
    assert!(waiting.certificate.is_none());
    assert_eq!(waiting.counterpart("10.4.0.7".parse().unwrap()), None);
}

#[test]
fn a_state_of_another_release_is_unknown_and_so_is_none() {
    let state = |text: &str| serde_json::from_str::<Status>(text).unwrap().state;
    assert_eq!(state(r#"{"state":"draining","certificate":null}"#), InstanceState::Unknown);
    assert_eq!(state(r#"{"pid":7,"certificate":null}"#), InstanceState::Unknown);
    let all = [
        InstanceState::Running,
        InstanceState::Provisional,
        InstanceState::Waiting,
        InstanceState::Closed,
        InstanceState::Unknown,
    ];
    for known in all {
        assert_eq!(serde_json::to_value(known).unwrap(), known.word(), "what is written is the word that is shown");
        assert_eq!(state(&format!(r#"{{"state":"{}"}}"#, known.word())), known);
    }
}

#[test]
fn the_documents_of_earlier_releases_are_understood() {
    // Without own_token, init_overdue and settings; then without settings; then without reloads and what waits.
    for (text, own_token, contract) in [
        (r#"{"pid":1,"uid":"u","state":"closed","closed":"revoked","last_error":null,"denied":true}"#, None, None),
        (r#"{"pid":1,"uid":"u","state":"closed","own_token":false,"init_overdue":true}"#, Some(false), None),
        (r#"{"state":"closed","own_token":true,"settings":{"contract":"c","device_mtu":1300}}"#, Some(true), Some("c")),
    ] {
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!((status.state, status.own_token), (InstanceState::Closed, own_token), "{text}");
        assert_eq!(status.settings.map(|settings| settings.contract).as_deref(), contract, "{text}");
    }
}

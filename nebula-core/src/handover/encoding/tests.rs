use std::path::Path;
use std::time::Duration;

use nebula_cert::protobuf::Writer;
use nebula_cert::{Certificate, Version};
use proptest::prelude::*;
use zeroize::Zeroizing;

use super::*;
use crate::capture::{Endpoint, FlowState, HandedOverAffinity, HandedOverCourse, Target};
use crate::counters::Direction;
use crate::firewall::HandedOverFlow;
use crate::handover::{Flow, Hop, MeasuredPath, Peer, Session};
use crate::index::{LocalIndex, RelayIndex};
use crate::tunnel::cipher::Cipher;
use crate::tunnel::{Opening, ReplayRecord};
use crate::wire::ip::FlowKey;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/");

fn certificate(name: &str) -> Certificate {
    Certificate::from_pem(&std::fs::read(format!("{VECTORS}certs/v2-25519/{name}.crt")).unwrap()).unwrap()
}

fn flow(port: u16) -> FlowKey {
    let (local, remote) = ("10.1.0.2".parse().unwrap(), "10.1.0.3".parse().unwrap());
    FlowKey { local, remote, local_port: port, remote_port: 80, protocol: 6, fragment: false }
}

/// Something of everything.
fn state() -> State {
    let path =
        MeasuredPath { mtu: 1420, confirmed: 1340, limit: Some(1340), round_trip: Duration::from_micros(12_345) };
    let peer = |name: &str| Peer {
        certificate: certificate(name),
        endpoint: None,
        relay: None,
        idle: Duration::ZERO,
        path: None,
    };
    let near = Peer { endpoint: Some("192.0.2.1:4242".parse().unwrap()), path: Some(path), ..peer("host-plain") };
    let far = Peer { relay: Some("fd00::1".parse().unwrap()), idle: Duration::from_millis(1234), ..peer("host-multi") };
    let session = |peer: u32, cipher, highest: u64| Session {
        peer,
        index: LocalIndex(0xdead_0000 + peer),
        opening: Opening {
            cipher,
            key: Zeroizing::new([7 + peer as u8; 32]),
            replay: ReplayRecord::new(highest, &[0x0f0f_0f0f, 0xff]),
        },
        age: Duration::from_millis(u64::from(peer) * 100),
    };
    let known = |port, direction, answered| HandedOverFlow {
        flow: flow(port),
        direction,
        answered,
        ended: false,
        idle: Duration::from_millis(55),
    };
    let pod = Endpoint { address: "10.1.0.3".parse().unwrap(), port: 8080, incarnation: u64::MAX };
    let course = |state| HandedOverCourse {
        original: flow(9),
        endpoint: pod,
        port: 40_000,
        state,
        idle: Duration::from_secs(7),
    };
    let states = [
        FlowState::New,
        FlowState::Resumed,
        FlowState::Answered,
        FlowState::Closing,
        FlowState::Reset,
        FlowState::Gone,
    ];
    let service = Target { address: "10.96.0.7".parse().unwrap(), port: 80, protocol: 17 };
    let ended = HandedOverFlow { ended: true, ..known(3, Direction::Inbound, true) };
    State {
        made: Duration::from_millis(1_800_000_000_123),
        peers: vec![near, far],
        sessions: vec![session(0, Cipher::Aes256Gcm, 40), session(1, Cipher::ChaCha20Poly1305, 100_000)],
        hops: vec![Hop { index: RelayIndex(77), session: LocalIndex(0xdead_0001) }],
        flows: vec![
            Flow { peer: 0, known: known(1, Direction::Inbound, true) },
            Flow { peer: 1, known: known(2, Direction::Outbound, false) },
            Flow { peer: 0, known: ended },
        ],
        courses: states.map(course).to_vec(),
        affinities: vec![
            HandedOverAffinity { service, endpoint: Some(pod), lasts: Duration::from_secs(10) },
            HandedOverAffinity { service, endpoint: None, lasts: Duration::from_secs(20) },
        ],
        counters: [("packets_in".to_owned(), 5), ("of a later release".to_owned(), 6)].into(),
        attached: b"of the program".to_vec(),
    }
}

/// Panics unless both say the same.
fn expect_same(one: &State, other: &State) {
    assert_eq!((one.made, &one.peers, &one.hops), (other.made, &other.peers, &other.hops));
    assert_eq!((&one.flows, &one.courses), (&other.flows, &other.courses));
    assert_eq!((&one.affinities, &one.counters), (&other.affinities, &other.counters));
    assert_eq!(one.attached(), other.attached());
    let sessions = |state: &State| -> Vec<_> {
        let parts =
            |it: &Session| (it.peer, it.index, it.opening.cipher, *it.opening.key, it.opening.replay.clone(), it.age);
        state.sessions.iter().map(parts).collect()
    };
    assert_eq!(sessions(one), sessions(other));
}

/// A document with these fields after the magic.
fn document(major: u64, body: &[u8]) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.bytes(1, MAGIC);
    writer.number(2, major);
    writer.number(3, 99);
    writer.bytes(4, body);
    writer.bytes(90, b"whatever a later release adds");
    writer.finish()
}

/// The body of a document.
fn body(document: &[u8]) -> Vec<u8> {
    let field = Fields::new(document).find_map(|field| match field.unwrap() {
        (4, Value::Bytes(body)) => Some(body.to_vec()),
        _ => None,
    });
    field.unwrap()
}

#[test]
fn what_is_written_is_read_back() {
    let state = state();
    expect_same(&State::decode(&state.encode().unwrap()).unwrap(), &state);
    assert!(State::decode(&document(MAJOR, &[])).is_ok_and(|state| state.peers() == 0 && !state.has_keys()));
}

#[test]
fn the_recorded_document_of_this_version_is_read_and_written_byte_for_byte() {
    let path = Path::new(VECTORS).join("handover/version-1.1");
    let written = state().encode().unwrap();
    if std::env::var_os("RECORD").is_some() {
        std::fs::write(&path, &*written).unwrap();
    }
    let recorded = std::fs::read(&path).unwrap();
    expect_same(&State::decode(&recorded).unwrap(), &state());
    assert_eq!(recorded, *written, "a new field needs a new minor version, and a document of its own");
}

#[test]
fn the_recorded_document_of_the_version_before_is_read_without_what_is_new() {
    let recorded = std::fs::read(Path::new(VECTORS).join("handover/version-1.0")).unwrap();
    let mut before = state();
    before.flows.retain(|flow| !flow.known.ended);
    before.attached.clear();
    expect_same(&State::decode(&recorded).unwrap(), &before);
}

#[test]
fn what_a_later_release_adds_is_skipped_everywhere() {
    /// Adds a field to a message, and to the messages in these fields of it.
    fn extend(message: &[u8], nested: &[u32]) -> Vec<u8> {
        let mut writer = Writer::default();
        for field in Fields::new(message) {
            match field.unwrap() {
                (field, Value::Varint(n)) => writer.number(field, n),
                (field, Value::Bytes(inner)) if nested.contains(&field) => writer.bytes(field, &extend(inner, &[])),
                (field, Value::Bytes(inner)) => writer.bytes(field, inner),
                (_, Value::Fixed) => {}
            }
        }
        writer.number(100, 12_345);
        writer.message(101, |inner| inner.number(1, 1));
        writer.finish()
    }
    let later = document(MAJOR, &extend(&body(&state().encode().unwrap()), &[2, 3, 4, 5, 6, 7, 8]));
    expect_same(&State::decode(&later).unwrap(), &state());
}

#[test]
fn an_entry_with_a_value_that_only_a_later_release_knows_is_left_out() {
    let with = |field: u32, write: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::default();
        writer.message(field, write);
        State::decode(&document(MAJOR, &writer.finish())).unwrap()
    };
    let session = with(3, &|it| {
        it.number(3, 9);
        it.bytes(4, &[1; 32]);
    });
    let course = with(6, &|it| it.number(4, 200));
    let flow = with(5, &|it| it.number(3, 3));
    assert_eq!((session.sessions.len(), course.courses.len(), flow.flows.len()), (0, 0, 0));
}

#[test]
fn another_major_version_is_refused_with_its_number() {
    for major in [2, 77, u64::MAX] {
        let error = State::decode(&document(major, &body(&state().encode().unwrap()))).unwrap_err();
        assert_eq!(error, DecodeError::Version { major });
        assert!(error.to_string().contains(&format!("version {major}")), "{error}");
    }
    assert_eq!(State::decode(&document(0, &[])).unwrap_err(), DecodeError::Foreign);
}

#[test]
fn a_document_that_is_cut_off_anywhere_is_refused() {
    let whole = state().encode().unwrap();
    for length in 0..whole.len() {
        assert!(State::decode(&whole[..length]).is_err(), "{length}");
    }
}

#[test]
fn more_of_something_than_a_node_has_is_refused() {
    let mut writer = Writer::default();
    for _ in 0..=MAX_HOPS {
        writer.message(4, |hop| hop.number(1, 5));
    }
    assert_eq!(State::decode(&document(MAJOR, &writer.finish())).unwrap_err(), DecodeError::TooMany("relay hops"));
    assert_eq!(State::decode(&vec![0; MAX_DOCUMENT + 1]).unwrap_err(), DecodeError::TooLong);
    let mut writer = Writer::default();
    writer.bytes(9, &vec![0; MAX_ATTACHED + 1]);
    let error = State::decode(&document(MAJOR, &writer.finish())).unwrap_err();
    assert_eq!(state().attach(vec![0; MAX_ATTACHED + 1]).unwrap_err(), error);
}

#[test]
fn of_too_many_flows_those_with_the_latest_traffic_are_kept() {
    let mut state = state();
    let with = |n: usize| {
        let idle = Duration::from_millis((n as u64 * 7919) % (MAX_FLOWS as u64 + 1000));
        let known =
            HandedOverFlow { flow: flow(1), direction: Direction::Inbound, answered: false, ended: false, idle };
        Flow { peer: 0, known }
    };
    state.flows = (0..MAX_FLOWS + 1000).map(with).collect();
    let state = state.bounded();
    assert_eq!(state.flows(), MAX_FLOWS);
    assert!(state.flows.iter().all(|flow| flow.known.idle <= Duration::from_millis(MAX_FLOWS as u64)));
}

#[test]
fn nothing_prints_a_key() {
    let state = state();
    let shown = format!("{state:?} {:?}", state.sessions);
    assert!(!shown.contains("7, 7") && !shown.contains("0707"), "{shown}");
}

#[test]
fn a_certificate_of_another_version_keeps_its_version() {
    let mut state = state();
    let pem = std::fs::read(format!("{VECTORS}certs/v1-25519/host-plain.crt")).unwrap();
    state.peers[0].certificate = Certificate::from_pem(&pem).unwrap();
    let again = State::decode(&state.encode().unwrap()).unwrap();
    assert_eq!(again.peers[0].certificate, state.peers[0].certificate);
    assert_eq!(again.peers[0].certificate.version(), Version::V1);
}

proptest! {
    #[test]
    fn random_bytes_and_damaged_documents_are_no_panic(
        random in prop::collection::vec(any::<u8>(), 0..300),
        at: prop::sample::Index,
        byte: u8,
    ) {
        let _ = State::decode(&random);
        let _ = State::decode(&document(MAJOR, &random));
        let mut damaged = state().encode().unwrap().to_vec();
        let at = at.index(damaged.len());
        damaged[at] = byte;
        if let Ok(state) = State::decode(&damaged) {
            let again = state.encode().unwrap();
            expect_same(&State::decode(&again).unwrap(), &state);
        }
    }
}

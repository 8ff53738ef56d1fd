//! The fuzz targets: one function per parser, and some that drive whole nodes. The fuzzer and the corpus replay test
//! run the same functions.

mod captured;
mod console;
mod differential;
mod handover;
mod join;
mod network;
mod pair;
mod policy;
mod proxy;
mod transport;
mod trio;

use std::collections::BTreeMap;
use std::net::IpAddr;

use base64::Engine as _;
use nebula_cert::{CaPool, Certificate, Curve, PassphraseCost, PrivateKey, SigningKey, Version};
use nebula_core::MessageType;
use nebula_core::internals::header::Header;
use nebula_core::internals::ip;
use nebula_core::internals::messages::{HandshakePayload, MAX_ENDPOINTS, MAX_RELAYS, Meta};
use nebula_core::internals::path_probe::{Answerer, PathProbe, PathReply};
use nebula_core::internals::test_body::only_measures;

/// What a target does with one input.
pub type Run = fn(&[u8]);

/// The fuzz targets by name; each has a corpus in `corpus/<name>`.
pub const TARGETS: &[(&str, Run)] = &[
    ("cert_pem", cert_pem),
    ("cert_v1", cert_v1),
    ("cert_v2", cert_v2),
    ("key_pem", key_pem),
    ("encrypted_key", encrypted_key),
    ("header", header),
    ("inner_ip", inner_ip),
    ("handshake", handshake),
    ("lighthouse", lighthouse),
    ("path_probe", path_probe),
    ("relay_control", trio::relay_control),
    ("overlay_packet", pair::overlay_packet),
    ("captured_packet", captured::captured_packet),
    ("underlay", pair::underlay),
    ("node", network::node),
    ("handover", handover::handover),
    ("config", config),
    ("console", console::console),
    ("cni_request", cni_request),
    ("launch_spec", launch_spec),
    ("flow_records", flow_records),
    ("why", why),
    ("issuance", issuance),
    ("join", join::join),
    ("ca_answers", nebula_enrolment::fuzzing::ca_answer),
    ("cluster_table", cluster_table),
    ("table_events", nebula_agent::table::fuzzing::events),
    ("policy_program", policy::program),
    ("policy_objects", policy::objects),
    ("dbus", nebula_cni_plugin::fuzzing::dbus),
    ("netlink", netlink),
    ("proxy_header", proxy::header),
    ("socks_association", nebula_proxy::fuzzing::association),
    ("socks_message", proxy::message),
    ("tcp_segment", transport::segment),
    ("transport", transport::transport),
    ("differential", differential::differential),
];

/// Returns the function of a target.
pub fn target(name: &str) -> Option<Run> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, run)| *run)
}

/// PEM bundles: a certificate that parses must be the same after it is encoded and parsed again.
fn cert_pem(data: &[u8]) {
    let Ok(certificates) = Certificate::bundle_from_pem(data) else { return };
    for certificate in certificates {
        let again = Certificate::from_pem(certificate.to_pem().as_bytes()).expect("what we wrote reads");
        assert_eq!(again.fingerprint(), certificate.fingerprint());
    }
    let _ = CaPool::from_pem(data);
}

fn cert_v1(data: &[u8]) {
    certificate(Version::V1, data);
}

fn cert_v2(data: &[u8]) {
    certificate(Version::V2, data);
}

/// A certificate that parses has a stable encoding, and an empty pool does not trust it.
fn certificate(version: Version, data: &[u8]) {
    if let Ok(certificate) = Certificate::from_bytes(version, data) {
        let bytes = certificate.to_bytes();
        let again = Certificate::from_bytes(version, &bytes).expect("what we wrote reads");
        assert_eq!(again.fingerprint(), certificate.fingerprint());
        assert_eq!(again.to_bytes(), bytes);
        assert!(CaPool::new().verify(certificate, 1_800_000_000).is_err());
    }
    for curve in [Curve::Curve25519, Curve::P256] {
        let (key, rest) = data.split_at(data.len().min(if curve == Curve::P256 { 65 } else { 32 }));
        let _ = Certificate::from_handshake(version, curve, key, rest);
    }
}

fn key_pem(data: &[u8]) {
    let _ = PrivateKey::from_pem(data);
    let _ = SigningKey::from_pem(data);
    let _ = nebula_cert::public_key_from_pem(data);
}

/// Uses the input as a whole file and as the contents of the PEM block, so that the fuzzer need not discover base64.
fn encrypted_key(data: &[u8]) {
    let _ = SigningKey::from_encrypted_pem_within(data, PASSPHRASE, CHEAP);
    for curve in ["ED25519", "ECDSA P256"] {
        let body = base64::engine::general_purpose::STANDARD.encode(data);
        let label = format!("NEBULA {curve} ENCRYPTED PRIVATE KEY");
        let pem = format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n");
        if let Ok(key) = SigningKey::from_encrypted_pem_within(pem.as_bytes(), PASSPHRASE, CHEAP) {
            let again = SigningKey::from_pem(key.to_pem().as_bytes()).expect("what we wrote reads");
            assert_eq!(again.public_key(), key.public_key());
        }
    }
}

const PASSPHRASE: &[u8] = b"passphrase";
/// Cheap enough for thousands of inputs per second, instead of one in two seconds.
const CHEAP: PassphraseCost = PassphraseCost { memory_kib: 64, iterations: 2, parallelism: 4 };

/// A header that parses is encoded to the same bytes, except for the reserved field.
fn header(data: &[u8]) {
    let Ok(header) = Header::parse(data) else { return };
    let mut expected = data[..16].to_vec();
    expected[2..4].fill(0);
    assert_eq!(header.to_bytes().as_slice(), expected);
}

/// Both directions must see the same flow with its ends swapped.
fn inner_ip(data: &[u8]) {
    let (out, inn) = (ip::outbound_flow(data), ip::inbound_flow(data));
    match (out, inn) {
        (Ok(out), Ok(inn)) => {
            assert_eq!((out.local, out.remote), (inn.remote, inn.local));
            assert_eq!((out.protocol, out.fragment), (inn.protocol, inn.fragment));
        }
        (out, inn) => assert_eq!(out.is_ok(), inn.is_ok()),
    }
}

fn handshake(data: &[u8]) {
    if let Ok(payload) = HandshakePayload::parse(data) {
        let bytes = payload.encode();
        assert_eq!(HandshakePayload::parse(&bytes).expect("what we wrote reads"), payload);
    }
    pair::handshake_payload(data);
}

fn lighthouse(data: &[u8]) {
    if let Ok(meta) = Meta::parse(data) {
        assert!(meta.endpoints.len() <= MAX_ENDPOINTS && meta.relays.len() <= MAX_RELAYS);
        if let Ok(bytes) = meta.encode() {
            let again = Meta::parse(&bytes).expect("what we wrote reads");
            // An IPv4-mapped address is read from the IPv6 list and written to the IPv4 list.
            let of = |v4: bool| meta.endpoints.iter().filter(move |endpoint| endpoint.is_ipv4() == v4);
            let expected: Vec<_> = of(true).chain(of(false)).copied().collect();
            assert_eq!((again.kind, again.endpoints), (meta.kind, expected));
        }
    }
    pair::lighthouse_message(data);
}

/// The body of a test request or reply. What is read is written to the same bytes, and the node that measures answers
/// a probe with one datagram at most.
fn path_probe(data: &[u8]) {
    let (probe, reply) = (PathProbe::read(data), PathReply::read(data));
    let same = |written: &[u8]| {
        let mut read = data[..written.len()].to_vec();
        // Seven bits of the flag are for later versions.
        read[4] &= 1;
        assert_eq!(read, written);
    };
    if let Some(probe) = probe {
        same(&probe.request());
        let echoed = reply.expect("Go Nebula returns the request");
        assert_eq!((echoed.by, echoed.number), (Answerer::Echoes, probe.number));
    } else if let Some(reply) = reply {
        let probe = PathProbe { number: reply.number, in_use: false, span: u16::from(reply.missing.is_some()) };
        same(&probe.reply(reply.by == Answerer::Leads, reply.missing.unwrap_or_default()));
    }
    let is_measurement = [MessageType::TestRequest, MessageType::TestReply].map(|kind| only_measures(kind, data));
    // Any body of this length answers a challenge.
    let (answers, challenges) = (data.len() == 15, data.len() == 15 && data.starts_with(b"here"));
    assert_eq!(is_measurement[0], challenges || probe.is_some_and(|probe| !probe.in_use));
    assert_eq!(is_measurement[1], answers || probe.is_none() && reply.is_some());
    pair::test_message(data);
}

fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(tree) = nebula_config::parse(text) else { return };
    let _ = nebula_config::Settings::read_without_pki(&tree);
    let _ = tree.to_yaml();
}

/// The first line is the environment (`K=V` separated by NUL), the rest is standard input.
fn cni_request(data: &[u8]) {
    use nebula_cni_plugin::request::{self, Env};
    let cut = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (first, stdin) = data.split_at(cut);
    let pairs: BTreeMap<String, String> = first
        .split(|byte| *byte == 0)
        .filter_map(|pair| {
            let text = String::from_utf8_lossy(pair).into_owned();
            text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()))
        })
        .collect();
    let env: Env = pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
    let (version, request) = request::read(&env, stdin);
    if let Err(error) = request {
        let _ = error.to_json(&version);
    }
}

fn launch_spec(data: &[u8]) {
    let Ok(spec) = serde_json::from_slice::<nebula_cni_contract::launch::LaunchSpec>(data) else { return };
    let bytes = serde_json::to_vec(&spec).expect("a launch contract is JSON");
    let again: nebula_cni_contract::launch::LaunchSpec = serde_json::from_slice(&bytes).expect("what we wrote reads");
    assert_eq!(again, spec);
}

/// What an instance answers about flows: it is read within bounds, and reads the same again once it was.
fn flow_records(data: &[u8]) {
    use nebula_cni_contract::flow_records::{Filter, MAX_RECORDS, read_answer};
    let Ok(read) = read_answer(data) else { return };
    assert!(read.records.len() <= MAX_RECORDS);
    let filter = Filter { peer: Some("10.42.0.1".to_owned()), port: Some(80), ..Filter::default() };
    for record in &read.records {
        let _ = (filter.matches(record), record.duration_ms());
    }
    let body = serde_json::to_string(&read).expect("records are JSON");
    let again = read_answer(format!("HTTP/1.1 200 OK\r\n\r\n{body}").as_bytes()).expect("what we wrote reads");
    assert_eq!(again, read);
}

/// What another node says of a flow: something follows from whatever it is, and it reads the same again.
fn why(data: &[u8]) {
    use nebula_cni_contract::why::{Facts, Report};
    let Ok(facts) = serde_json::from_slice::<Facts>(data) else { return };
    let report = Report::of(&facts);
    assert!(report.cause.is_none_or(|cause| report.steps.last().is_some_and(|step| step.link == cause.link())));
    assert!(report.text().lines().count() <= report.steps.len() + 3, "each step is one line");
    let mut both = facts.clone();
    both.add(facts);
    let again = serde_json::to_vec(&both).expect("facts are JSON");
    assert_eq!(serde_json::from_slice::<Facts>(&again).expect("what we wrote reads"), both);
}

fn issuance(data: &[u8]) {
    use nebula_cert::issuance::{Refusal, Reply, Request};
    if let Ok(request) = serde_json::from_slice::<Request>(data) {
        let shown = format!("{request:?}");
        assert!(!shown.contains("token\":"), "a secret is printed");
        let _ = nebula_cert::public_key_from_pem(request.public_key.as_bytes());
    }
    let _ = serde_json::from_slice::<Reply>(data);
    let _ = serde_json::from_slice::<Refusal>(data);
    if let Ok(request) = serde_json::from_slice::<nebula_cert::revocation::Request>(data)
        && request.check().is_ok()
    {
        let shown = format!("{} {}", request.which, request.reason);
        assert!(shown.chars().all(nebula_cert::is_visible), "a log would show {shown:?}");
    }
    let _ = serde_json::from_slice::<nebula_cert::revocation::Revocation>(data);
}

/// The cluster table that an instance maps. Addresses are looked up that its own bytes contain, from their end
/// on.
fn cluster_table(data: &[u8]) {
    use nebula_cni_contract::cluster_table::contents::Contents;
    use nebula_cni_contract::cluster_table::{Found, Layout};
    let Ok(layout) = Layout::read(data) else { return };
    let table = layout.table(data);
    // As the plugin shows it.
    let contents = Contents::of(&table);
    assert!(contents.enrolled.len() + contents.services.len() <= data.len());
    let _ = contents.to_string();
    let questions = data.rchunks(19).take(64);
    let known = [[10, 244, 0, 1], [10, 244, 0, 2], [10, 96, 0, 1]].map(|octets| (IpAddr::from(octets), 80, 6));
    let asked = questions.filter_map(|bytes| {
        let (octets, rest) = bytes.split_first_chunk::<16>()?;
        let [high, low, protocol] = *rest.first_chunk()?;
        let address = IpAddr::V6((*octets).into()).to_canonical();
        Some((address, u16::from_be_bytes([high, low]), protocol))
    });
    for (address, port, protocol) in known.into_iter().chain(asked) {
        let _ = table.incarnation(address);
        let Found::Service(service) = table.find(address, port, protocol) else { continue };
        assert!(service.ready > 0 || service.clear > 0);
        for n in [0, 1, service.ready.saturating_sub(1), service.ready, u32::MAX] {
            let endpoint = table.endpoint(service.id, n);
            assert!(endpoint.is_none() || n < service.ready);
            if let Some(endpoint) = endpoint {
                let _ = table.serves(service.id, endpoint.address, endpoint.port);
            }
        }
    }
}

/// Messages from the kernel: replies to requests, including those to nf_tables, and route notifications.
fn netlink(data: &[u8]) {
    nebula_instance::fuzzing::netlink(data);
    nebula_cni_contract::fuzzing::netlink(data);
    nebula_cni_plugin::fuzzing::netlink(data);
}

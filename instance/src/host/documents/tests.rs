//! The answers of a daemon of before these types, to `nebula ctl --json`: `tests/documents` of the crate.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{Certificates, Facts, Found, Gateways, Identity, Known, Peers, Probe, Status, Trace, Tunnels};

/// Reads a document as a type, and asserts that writing it says the same.
fn hold<T: Serialize + DeserializeOwned>(name: &str, document: &str) -> T {
    let document: Value = serde_json::from_str(document).unwrap();
    let read: T = serde_json::from_value(document.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(serde_json::to_value(&read).unwrap(), document, "{name}");
    read
}

macro_rules! documents {
    ($($name:ident: $kind:ty = $file:literal;)+) => {$(
        #[test]
        fn $name() {
            let of_a_daemon = include_str!(concat!("../../../tests/documents/", $file));
            hold::<$kind>($file, of_a_daemon);
        }
    )+};
}

documents! {
    the_status_of_before_is_read: Status = "status.json";
    facts_of_a_healthy_host_of_before_are_read: Facts = "doctor.json";
    facts_of_a_lost_peer_of_before_are_read: Facts = "doctor-lost.json";
    facts_about_a_peer_of_before_are_read: Facts = "why.json";
    facts_about_a_lost_peer_of_before_are_read: Facts = "why-lost.json";
    peers_of_before_are_read: Peers = "peers.json";
    gateways_of_before_are_read: Gateways = "gateways.json";
    an_identity_of_before_is_read: Identity = "whois.json";
    tunnels_of_before_are_read: Tunnels = "tunnel.json";
    tunnels_of_a_lighthouse_of_before_are_read: Tunnels = "tunnel-lh.json";
    answers_of_lighthouses_of_before_are_read: Known = "query.json";
    certificates_of_before_are_read: Certificates = "cert.json";
    an_outbound_trace_of_before_is_read: Trace = "trace.json";
    an_inbound_trace_of_before_is_read: Trace = "trace-in.json";
}

#[test]
fn what_another_release_adds_or_lacks_is_no_error() {
    let status: Status = serde_json::from_value(json!({"name": "web", "moon": {"phase": 3}})).unwrap();
    assert_eq!(status, Status { name: Some("web".to_owned()), ..Status::default() });
    let probe: Probe = serde_json::from_value(json!({"found": "something_else"})).unwrap();
    assert_eq!(probe.found, Found::Unknown);
}

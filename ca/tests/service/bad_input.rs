//! Malformed requests and floods of refused ones.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use nebula_cert::issuance::{Proof, Request};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::running::{Ca, code, key, pod};

#[test]
fn malformed_json_is_refused_without_repeating_it() {
    let ca = Ca::init();
    let service = ca.serve();
    let bodies: [&[u8]; 8] = [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        br#"{"public_key":"x"}"#,
        br#"{"public_key":"x","proof":{"type":"sesame","token":"t"}}"#,
        br#"{"public_key":"x","proof":{"type":"token","token":"t"},"more":1}"#,
    ];
    for body in bodies {
        let (status, text) = service.caller.post("/v1/certificate", body).unwrap();
        assert_eq!((status, code(&text).as_str()), (400, "malformed_request"), "{body:?}");
        assert!(!text.contains("sesame"), "{text}");
    }
    let nested = [b"[".repeat(30_000), b"]".repeat(30_000)].concat();
    assert_eq!(service.caller.post("/v1/certificate", &nested).unwrap().0, 400);
}

#[test]
fn a_stranger_who_is_refused_all_the_time_does_not_fill_the_audit_log() {
    let ca = Ca::init();
    let service = ca.serve();
    for _ in 0..200 {
        let made_up = Proof::Token { token: "nobody made this".to_owned() };
        assert_eq!(service.caller.release(made_up).unwrap_err(), (403, "not_releasable".to_owned()));
    }
    service.stop();
    let audit = ca.text("audit.log");
    let refused = audit.lines().filter(|line| line.contains("\"refused\"")).count();
    // The minute of the limit may end while they are sent.
    assert!((60..=120).contains(&refused), "{refused}");
    let left_out = audit.lines().filter_map(|line| line.split_once("\"left_out\":")?.1.strip_suffix('}'));
    let left_out: usize = left_out.map(|count| count.parse::<usize>().unwrap()).sum();
    assert_eq!(refused + left_out, 200, "the rest is counted");
}

#[test]
fn a_body_that_is_too_large_is_refused_and_the_service_lives_on() {
    let ca = Ca::init();
    let service = ca.serve();
    let (status, text) = service.caller.post("/v1/certificate", &vec![b' '; 64 * 1024 + 1]).unwrap();
    assert_eq!((status, code(&text).as_str()), (413, "body_too_large"));
    // The service stops reading, so a caller that keeps sending may see its connection closed instead of the answer.
    let _ = service.caller.post("/v1/certificate", &vec![b' '; 20 << 20]);
    assert_eq!(service.caller.get("/healthz", "").0, 200);
}

#[test]
fn other_paths_and_methods_get_a_refusal_too() {
    let ca = Ca::init();
    let service = ca.serve();
    let (status, _, body) = service.caller.get("/", "");
    assert_eq!((status, code(&body).as_str()), (404, "not_found"));
    let (status, _, body) = service.caller.get("/v1/certificate", "");
    assert_eq!((status, code(&body).as_str()), (405, "wrong_method"));
}

#[test]
fn callers_that_say_nothing_do_not_keep_others_out() {
    let ca = Ca::init();
    let service = ca.serve();
    let silent: Vec<TcpStream> = (0..300).map(|_| TcpStream::connect(service.address).unwrap()).collect();
    assert!(service.caller.pod(&ca.text("node.token"), pod(1), &key()).is_ok());
    drop(silent);
}

#[test]
fn plain_text_and_noise_on_the_tls_port_end_with_the_connection() {
    let ca = Ca::init();
    let service = ca.serve();
    for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[0x16, 3, 1, 0xff, 0xff, 1]] {
        let mut stream = TcpStream::connect(service.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let _ = stream.write_all(noise);
        let mut rest = Vec::new();
        // Whatever alert the service sends, it must also close the connection.
        let _ = stream.take(1 << 16).read_to_end(&mut rest);
        assert!(!rest.starts_with(b"HTTP"));
    }
    assert_eq!(service.caller.get("/healthz", "").2, "ok\n");
}

#[test]
fn a_request_under_way_when_the_service_stops_is_answered() {
    let ca = Ca::init();
    let service = ca.serve();
    let proof = Proof::Node { token: ca.text("node.token"), pod: pod(1) };
    let body = serde_json::to_vec(&Request { public_key: key().public_pem(), proof }).unwrap();
    let head = format!("POST /v1/certificate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut stream = tls_stream(&ca, service.address);
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(&body[..10]).unwrap();
    stream.flush().unwrap();
    thread::sleep(Duration::from_millis(300));
    let stopping = thread::spawn(move || service.stop());
    thread::sleep(Duration::from_millis(300));
    stream.write_all(&body[10..]).unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    // What is recorded of an enrolment stays closed, too.
    let group = stream.conn.negotiated_key_exchange_group().map(|group| group.name());
    assert_eq!(group, Some(rustls::NamedGroup::X25519MLKEM768));
    drop(stream);
    assert!(stopping.join().unwrap().contains("stopping connections=1"));
    assert_eq!(ca.json("certificate list", &[]).as_array().unwrap().len(), 1);
}

fn tls_stream(ca: &Ca, address: SocketAddr) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.text("tls.crt").as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let connection = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    StreamOwned::new(connection, stream)
}

//! Requests for another node, which an agent forwards to the agent of that one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use nebula_cni_contract::agent_api::{AUDIENCE, FORWARDED_HEADER, NodeStatus, Refused, TOKEN_HEADER};
use rustls::ServerConfig;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::client::TlsStream;

use super::fake_reviews::{FakeReviews, agent_pod};
use super::site::{Site, record};
use super::{OPERATOR, VIEWER, ask_at, flows, unverified};

/// Somebody who listens, and should not be reached.
struct Decoy(std::net::TcpListener, SocketAddr);

impl Decoy {
    fn start() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        Self(listener, address)
    }

    fn was_reached(&self) -> bool {
        self.0.accept().is_ok()
    }
}

async fn two() -> (FakeReviews, Site, Site) {
    let reviews = FakeReviews::default();
    let (first, second) = (Site::start(&reviews, "n1").await, Site::start(&reviews, "n2").await);
    (reviews, first, second)
}

fn error(body: &str) -> String {
    serde_json::from_str::<Refused>(body).unwrap().error
}

/// A stream of what is recorded on `n2`, as it comes from this agent, after its first line.
async fn follow(address: SocketAddr, token: &str) -> Result<TlsStream<TcpStream>, String> {
    let mut stream = unverified::connect(address).await.unwrap();
    let head = format!("GET /v1/nodes/n2/flows?follow=true HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {token}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("}\n") {
        if stream.read_buf(&mut seen).await.unwrap() == 0 {
            break;
        }
    }
    let seen = String::from_utf8(seen).unwrap();
    if seen.starts_with("HTTP/1.1 200") { Ok(stream) } else { Err(seen) }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_forwards_to_the_agent_of_the_node_that_is_named_which_judges_the_token() {
    let (reviews, first, second) = two().await;
    for resource in ["nodes", "flows"] {
        reviews.allow(VIEWER, "get", resource, "*");
    }
    reviews.allow(OPERATOR, "update", "upgrades", "*");
    let token = reviews.token(VIEWER, AUDIENCE);
    second.keep("shop", vec![record(1, "outbound", 80)]);
    for address in [first.address, second.address] {
        let (status, body) = ask_at(address, "GET", "/v1/nodes/n2/status", Some(&token)).await;
        let node: NodeStatus = serde_json::from_str(&body).unwrap();
        assert_eq!((status, node.node.as_str()), (200, "n2"), "{body}");
        let (status, body) = ask_at(address, "GET", "/v1/nodes/n2/flows?namespace=shop&port=80", Some(&token)).await;
        assert_eq!((status, flows(&body)), (200, (vec!["shop".to_owned()], true)));
        let (status, body) = ask_at(address, "GET", "/v1/nodes/n2/flows?port=x", Some(&token)).await;
        assert_eq!(status, 400, "the query came with it: {body}");
        let (status, body) = ask_at(address, "POST", "/v1/nodes/n2/upgrade/pause", Some(&token)).await;
        let refused: Refused = serde_json::from_str(&body).unwrap();
        assert_eq!((status, refused.lacking.unwrap().resource.as_str()), (403, "upgrades"));
    }
    assert_eq!(reviews.lists(), 1, "where the other agent is was asked for once");
    let taken = second.take_request();
    let operator = reviews.token(OPERATOR, AUDIENCE);
    let (status, body) = ask_at(first.address, "POST", "/v1/nodes/n2/upgrade/pause", Some(&operator)).await;
    assert_eq!(status, 200, "{body}");
    assert!(taken.join().unwrap().contains("pause"));
}

#[tokio::test]
async fn without_an_accepted_token_nothing_is_forwarded() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    let decoy = Decoy::start();
    reviews.agent("n2", decoy.1);
    let (other, expired) = (reviews.token(VIEWER, "https://kubernetes.default.svc"), reviews.token(VIEWER, AUDIENCE));
    let good = reviews.token(VIEWER, AUDIENCE);
    reviews.expire(&expired);
    for token in [None, Some("x"), Some("a b"), Some(&*other), Some(&*expired)] {
        for node in ["n1", "n2", "n3"] {
            let (status, body) = ask_at(site.address, "GET", &format!("/v1/nodes/{node}/status"), token).await;
            assert_eq!(status, 401, "{node} {token:?}: {body}");
        }
    }
    reviews.is_away(true);
    assert_eq!(ask_at(site.address, "GET", "/v1/nodes/n2/status", Some(&good)).await.0, 503);
    assert!(!decoy.was_reached() && reviews.lists() == 0);
}

#[tokio::test]
async fn what_was_forwarded_is_not_forwarded_again() {
    let (reviews, first, _second) = two().await;
    reviews.allow(VIEWER, "get", "nodes", "*");
    let token = reviews.token(VIEWER, AUDIENCE);
    let mut stream = unverified::connect(first.address).await.unwrap();
    let head = format!(
        "GET /v1/nodes/n2/status HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {token}\r\n{FORWARDED_HEADER}: 1\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = Vec::new();
    let _ = stream.read_to_end(&mut text).await;
    let text = String::from_utf8(text).unwrap();
    assert!(text.starts_with("HTTP/1.1 502") && text.contains("addresses have changed"), "{text}");
    assert_eq!(reviews.lists(), 0);
    // The address of n3's agent is that of n1's by now: one step, and no circle.
    reviews.agent("n3", first.address);
    let (status, body) = ask_at(first.address, "GET", "/v1/nodes/n3/status", Some(&token)).await;
    assert_eq!(status, 502, "{body}");
    assert!(error(&body).contains("for node n3 was forwarded to an agent of another node"), "{body}");
}

#[tokio::test]
async fn a_name_that_is_no_node_reaches_nothing() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    let decoy = Decoy::start();
    let token = reviews.token(VIEWER, AUDIENCE);
    let port = decoy.1.port();
    let at = format!("127.0.0.1:{port}");
    for name in [
        "",
        ".",
        "..",
        "../n1",
        "..%2Fn1",
        "%2e%2e",
        "n1%2F..%2Fn2",
        "n1%00",
        &at,
        &format!("n1@{at}"),
        &format!("{at}%23"),
        "[::1]",
        "N1",
        "n1%20",
        "n1&limit=1",
        "n1,n2",
        "n1%3Dx",
    ] {
        let (status, body) = ask_at(site.address, "GET", &format!("/v1/nodes/{name}/status"), Some(&token)).await;
        assert_eq!(status, 404, "{name}: {body}");
    }
    for rest in ["/status/../../x", "/%2e%2e/x", "//status", "/status%3Fx", "/status;x", "/STATUS"] {
        let (status, body) = ask_at(site.address, "GET", &format!("/v1/nodes/n2{rest}"), Some(&token)).await;
        assert!(matches!(status, 404 | 502), "{rest}: {status} {body}");
    }
    // Pods that are no agents, or not of the namespace of agents.
    reviews.pod("shop", agent_pod("n8", decoy.1));
    let mut other = agent_pod("n9", decoy.1);
    other["metadata"]["labels"] = json!({"app.kubernetes.io/name": "web"});
    reviews.pod("default", other);
    for name in ["127.0.0.1", "localhost", "n8", "n9"] {
        let (status, body) = ask_at(site.address, "GET", &format!("/v1/nodes/{name}/status"), Some(&token)).await;
        assert_eq!(status, 502, "{name}: {body}");
        assert!(error(&body).contains(&format!("no agent of Nebula is on a node {name}")), "{body}");
    }
    assert!(!decoy.was_reached());
}

#[tokio::test]
async fn a_node_without_an_agent_or_with_a_dead_one_is_named() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    let token = reviews.token(VIEWER, AUDIENCE);
    let closed = Decoy::start().1;
    let mut pending = agent_pod("n3", closed);
    pending["status"] = json!({"phase": "Pending"});
    reviews.pod("default", pending);
    let mut silent = agent_pod("n4", closed);
    silent["spec"]["containers"] = json!([]);
    reviews.pod("default", silent);
    reviews.agent("n5", closed);
    for (node, said) in [
        ("n2", "no agent of Nebula is on a node n2".to_owned()),
        ("n3", "the agent of node n3 does not run: pod default/agent-n3 is Pending".to_owned()),
        ("n4", "the agent of node n4 has no API for kubectl: agent.api.port".to_owned()),
        ("n5", format!("the agent of node n5 gives no answer at {closed}: ")),
    ] {
        for _ in 0..3 {
            let (status, body) = ask_at(site.address, "GET", &format!("/v1/nodes/{node}/status"), Some(&token)).await;
            assert!(status == 502 && error(&body).contains(&said), "{node}: {status} {body}");
        }
    }
    assert!(reviews.lists() < 12, "it is remembered for a moment: {}", reviews.lists());
    let large = format!("POST /v1/nodes/n5/upgrade/pause HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {token}\r\n");
    let mut stream = unverified::connect(site.address).await.unwrap();
    stream.write_all(format!("{large}Content-Length: 300000\r\n\r\n").as_bytes()).await.unwrap();
    let mut text = Vec::new();
    let (mut read, mut write) = tokio::io::split(stream);
    let _ = tokio::join!(read.read_to_end(&mut text), async { write.write_all(&vec![0; 300_000]).await });
    assert!(String::from_utf8_lossy(&text).starts_with("HTTP/1.1 413"), "{}", String::from_utf8_lossy(&text));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_forwarded_until_its_client_leaves() {
    let (reviews, first, second) = two().await;
    reviews.allow(VIEWER, "get", "flows", "*");
    second.keep("shop", vec![record(1, "outbound", 80)]);
    let token = reviews.token(VIEWER, AUDIENCE);
    let mut streams = Vec::new();
    let refused = loop {
        match follow(first.address, &token).await {
            Ok(stream) => streams.push(stream),
            Err(refused) => break refused,
        }
    };
    assert!(streams.len() == 16 && refused.starts_with("HTTP/1.1 429"), "{}: {refused}", streams.len());
    second.keep("shop", vec![record(2, "outbound", 81)]);
    let mut seen = String::new();
    while !seen.contains("\"port\":81") {
        let mut bytes = [0; 4096];
        let read = tokio::time::timeout(Duration::from_secs(10), streams[3].read(&mut bytes)).await.unwrap().unwrap();
        assert!(read > 0, "it ended: {seen}");
        seen.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
    }
    drop(streams);
    // Long before the streams would have noticed by themselves, which say something every quarter of a minute.
    let free = async {
        while follow(first.address, &token).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(8), free).await.unwrap();
}

/// An agent that answers without end. Returns how many bytes it could send until nobody took any for a while.
async fn endless(listener: TcpListener) -> usize {
    let made = rcgen::generate_simple_self_signed(vec!["x".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key).unwrap();
    let (stream, _) = listener.accept().await.unwrap();
    let mut stream = TlsAcceptor::from(Arc::new(config)).accept(stream).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        assert!(stream.read_buf(&mut head).await.unwrap() > 0);
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.contains(FORWARDED_HEADER) && !head.contains("x-mine"), "{head}");
    stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
    let (chunk, mut sent) = (vec![b'x'; 64 << 10], 0);
    while let Ok(written) = tokio::time::timeout(Duration::from_secs(2), stream.write(&chunk)).await {
        sent += written.unwrap();
        assert!(sent < 256 << 20, "somebody keeps it");
    }
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_is_forwarded_as_fast_as_it_is_taken() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    reviews.agent("n2", listener.local_addr().unwrap());
    let token = reviews.token(VIEWER, AUDIENCE);
    let sending = tokio::spawn(endless(listener));
    let mut stream = unverified::connect(site.address).await.unwrap();
    let head = format!("GET /v1/nodes/n2/pods HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {token}\r\nx-mine: 1\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let sent = sending.await.unwrap();
    assert!(sent < 64 << 20, "{sent} bytes wait somewhere");
}

//! The agent's API over TLS, beside a fake that reviews tokens and permissions.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]

mod fake_reviews;
mod forwarded;
mod policies;
mod site;
mod unverified;
mod why;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use nebula_cni_contract::agent_api::{
    AUDIENCE, Finding, Findings, FlowLine, Lacking, NodeStatus, PodStates, Refused, TOKEN_HEADER, TrustedCa, on_node,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use fake_reviews::FakeReviews;
use site::{Site, record};

const VIEWER: &str = "system:serviceaccount:shop:nebula-viewer";
const OPERATOR: &str = "system:serviceaccount:nebula-system:nebula-operator";

/// Status and body of an answer for the node `n1`.
async fn ask(address: SocketAddr, method: &str, path: &str, token: Option<&str>) -> (u16, String) {
    ask_at(address, method, &on_node("n1", path), token).await
}

/// The same, for the path as it is.
async fn ask_at(address: SocketAddr, method: &str, path: &str, token: Option<&str>) -> (u16, String) {
    let mut stream = unverified::connect(address).await.unwrap();
    let token = token.map(|token| format!("{TOKEN_HEADER}: {token}\r\n")).unwrap_or_default();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\n{token}Content-Length: 0\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut text = Vec::new();
    // Whoever is disconnected has what came before.
    let _ = stream.read_to_end(&mut text).await;
    let text = String::from_utf8(text).unwrap();
    let status = text.split_whitespace().nth(1).unwrap_or("0").parse().unwrap();
    (status, text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
}

/// The records of an answer, in the namespaces of those who wrote them, and whether there is a last line.
fn flows(body: &str) -> (Vec<String>, bool) {
    let lines: Vec<FlowLine> = body.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let is_whole = lines.last().and_then(|line| line.state.as_ref()).is_some_and(|state| state.is_last);
    let records = lines.into_iter().filter_map(|line| line.flow);
    let namespace = |pod: &String| pod.split('/').next().unwrap().to_owned();
    (records.map(|record| record.own_end().pod.as_ref().map(namespace).unwrap()).collect(), is_whole)
}

#[tokio::test]
async fn without_a_token_for_agents_nothing_is_answered() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.allow(VIEWER, "get", "nodes", "*");
    reviews.allow(VIEWER, "update", "upgrades", "*");
    let (good, other) = (reviews.token(VIEWER, AUDIENCE), reviews.token(VIEWER, "https://kubernetes.default.svc"));
    let expired = reviews.token(VIEWER, AUDIENCE);
    reviews.expire(&expired);
    for path in [
        "/v1/status",
        "/v1/pods",
        "/v1/flows",
        "/v1/upgrade",
        "/v1/pods?namespace=shop",
        "/v1/doctor",
        "/v1/policy/seen?namespace=shop",
    ] {
        for token in [None, Some("x"), Some("a b"), Some(&*other), Some(&*expired)] {
            let (status, body) = ask(site.address, "GET", path, token).await;
            assert_eq!(status, 401, "{path} {token:?}: {body}");
            let refused: Refused = serde_json::from_str(&body).unwrap();
            assert!(refused.lacking.is_none() && !body.contains("n1"), "{body}");
        }
    }
    assert_eq!(ask(site.address, "POST", "/v1/upgrade/pause", Some(&other)).await.0, 401);
    let cas = vec![TrustedCa { name: "corp".to_owned(), fingerprint: "ab".repeat(32), not_after: 7 }];
    site.node.cas.send_replace(cas.clone());
    let (status, body) = ask(site.address, "GET", "/v1/status", Some(&good)).await;
    let node: NodeStatus = serde_json::from_str(&body).unwrap();
    assert_eq!(node.cas, cas);
    assert_eq!((status, node.node.as_str(), node.pods.protected, node.pods.unprotected), (200, "n1", 1, 1));
    assert_eq!(node.first_to_expire.unwrap().pod, "shop/web");
    assert!(node.parts.len() > 10 && !node.is_ready, "nothing is looked at in this test");
    let (tokens, _) = reviews.asked();
    assert_eq!(tokens, 4, "each token that could be one is asked about once, and remembered");
}

#[tokio::test]
async fn while_the_api_server_gives_no_review_nothing_is_answered() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.allow(VIEWER, "get", "nodes", "*");
    let token = reviews.token(VIEWER, AUDIENCE);
    reviews.is_away(true);
    let (status, body) = ask(site.address, "GET", "/v1/status", Some(&token)).await;
    assert_eq!(status, 503, "{body}");
    reviews.is_away(false);
    assert_eq!(ask(site.address, "GET", "/v1/status", Some(&token)).await.0, 200, "a failure is not remembered");
    reviews.is_away(true);
    let (status, body) = ask(site.address, "GET", "/v1/upgrade", Some(&token)).await;
    assert_eq!(status, 503, "its user is remembered, the permission was never asked for: {body}");
}

#[tokio::test]
async fn who_may_look_at_one_namespace_may_not_look_at_others_or_at_all() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    site.keep("shop", vec![record(1, "outbound", 80)]);
    site.keep("pay", vec![record(1, "inbound", 80)]);
    for resource in ["flows", "pods"] {
        reviews.allow(VIEWER, "get", resource, "shop");
    }
    let token = reviews.token(VIEWER, AUDIENCE);
    let get = async |path: &str| ask(site.address, "GET", path, Some(&token)).await;
    let (status, body) = get("/v1/flows?namespace=shop").await;
    assert_eq!((status, flows(&body)), (200, (vec!["shop".to_owned()], true)));
    let (status, body) = get("/v1/pods?namespace=shop").await;
    let pods: PodStates = serde_json::from_str(&body).unwrap();
    assert_eq!((status, pods.pods.len(), pods.pods[0].is_unprotected), (200, 1, true));
    for (path, resource, namespace) in [
        ("/v1/flows?namespace=pay", "flows", Some("pay")),
        ("/v1/flows", "flows", None),
        ("/v1/pods", "pods", None),
        ("/v1/pods?namespace=pay", "pods", Some("pay")),
        ("/v1/doctor?namespace=pay", "pods", Some("pay")),
        ("/v1/doctor", "pods", None),
        ("/v1/status", "nodes", None),
        ("/v1/upgrade", "upgrades", None),
    ] {
        let (status, body) = get(path).await;
        let refused: Refused = serde_json::from_str(&body).unwrap();
        let lacking = Lacking {
            user: VIEWER.to_owned(),
            verb: "get".to_owned(),
            resource: resource.to_owned(),
            namespace: namespace.map(str::to_owned),
        };
        assert_eq!((status, refused.lacking), (403, Some(lacking)), "{path}");
    }
    let (status, _) = ask(site.address, "POST", "/v1/upgrade/pause", Some(&token)).await;
    assert_eq!(status, 403);
    for path in [
        "/v1/flows?namespace=",
        "/v1/pods?namespace=",
        "/v1/flows?namespace=shop&namespace=pay",
        "/v1/flows?namespace=pay&namespace=shop",
        "/v1/flows?namespace=..%2Fpay",
        "/v1/pods?namespace=*",
        "/v1/doctor?namespace=",
        "/v1/doctor?pod=web",
        "/v1/doctor?namespace=shop&pod=..%2Fx",
        "/v1/flows?namespace=shop&port=x",
        "/v1/flows?namespace=shop&limit=0",
        "/v1/flows?namespace=shop&limit=10001",
        "/v1/flows?namespace=shop&follow=maybe",
    ] {
        let (status, body) = get(path).await;
        assert_eq!(status, 400, "{path}: {body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_is_answered_for_all_or_for_the_pods_of_one_namespace() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    let closed = |why: &str| serde_json::json!({"state": "closed", "closed": why});
    site.attach("shop", "web", &closed("it was revoked"));
    site.attach("pay", "db", &closed("it has expired"));
    reviews.allow(VIEWER, "get", "pods", "shop");
    let token = reviews.token(VIEWER, AUDIENCE);
    let get = async |path: &str, token: &str| {
        let (status, body) = ask(site.address, "GET", path, Some(token)).await;
        assert_eq!(status, 200, "{path}: {body}");
        let found: Findings = serde_json::from_str(&body).unwrap();
        let of = |finding: &Finding| format!("{} {}", finding.about, finding.code);
        (found.findings.iter().map(of).collect::<Vec<_>>(), found.pods, body)
    };
    let (found, pods, body) = get("/v1/doctor?namespace=shop", &token).await;
    assert_eq!(found, ["shop/old unprotected", "shop/web tunnel_closed"], "{body}");
    assert!(pods == 2 && !body.contains("pay") && !body.contains("node"), "{body}");
    let (found, pods, _) = get("/v1/doctor?namespace=shop&pod=web", &token).await;
    assert_eq!((found, pods), (vec!["shop/web tunnel_closed".to_owned()], 1));
    let (found, pods, _) = get("/v1/doctor?namespace=shop&pod=none", &token).await;
    assert_eq!((found.len(), pods), (0, 0));
    // The right to all pods is not enough for everything: the right to nodes is named.
    reviews.allow(OPERATOR, "get", "pods", "*");
    let token = reviews.token(OPERATOR, AUDIENCE);
    let (status, body) = ask(site.address, "GET", "/v1/doctor", Some(&token)).await;
    assert!(status == 403 && body.contains("may not get nodes.nebula-cni in the whole cluster"), "{body}");
    reviews.allow(OPERATOR, "get", "nodes", "*");
    // A refusal is remembered for five seconds, by token.
    let (found, _, body) = get("/v1/doctor", &reviews.token(OPERATOR, AUDIENCE)).await;
    for finding in ["node chain", "node ca", "pay/db tunnel_closed", "shop/old unprotected", "shop/web tunnel_closed"] {
        assert!(found.iter().any(|found| found == finding), "{finding}: {body}");
    }
}

#[tokio::test]
async fn other_versions_paths_and_methods_are_refused_with_a_sentence() {
    let site = Site::start(&FakeReviews::default(), "n1").await;
    for (method, path) in [
        ("GET", "/v2/status"),
        ("GET", "/"),
        ("GET", "/v1/nodes/n1/status"),
        ("POST", "/v1/status"),
        ("GET", "/v1/upgrade/pause"),
    ] {
        let (status, body) = ask(site.address, method, path, None).await;
        assert_eq!(status, 404, "{method} {path}");
        assert!(body.contains("version v1 of the API"), "{body}");
    }
    for path in ["/v1/status", "/v1/pods?namespace=shop", "/v1/nodes/n1", "/v1/nodes/n1/"] {
        let (status, body) = ask_at(site.address, "GET", path, None).await;
        assert_eq!(status, 404, "without a node, nobody knows whose answer it would be: {path}: {body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_pauses_upgrades_and_a_viewer_does_not() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.allow(OPERATOR, "update", "upgrades", "*");
    let token = reviews.token(OPERATOR, AUDIENCE);
    let taken = site.take_request();
    let (status, body) = ask(site.address, "POST", "/v1/upgrade/pause", Some(&token)).await;
    assert_eq!(status, 200, "{body}");
    assert!(taken.join().unwrap().contains("pause"), "what `nebula-cni-agent upgrade pause` asks for");
}

#[tokio::test]
async fn tokens_without_number_ask_the_api_server_a_hundred_times_and_keep_nobody_out() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.allow(VIEWER, "get", "nodes", "*");
    let token = reviews.token(VIEWER, AUDIENCE);
    assert_eq!(ask(site.address, "GET", "/v1/status", Some(&token)).await.0, 200);
    let mut said = BTreeMap::<u16, usize>::new();
    let began = tokio::time::Instant::now();
    for number in 0..500 {
        let (status, _) = ask(site.address, "GET", "/v1/status", Some(&format!("made-up.{number}"))).await;
        *said.entry(status).or_default() += 1;
    }
    let (tokens, permissions) = reviews.asked();
    let minutes = usize::try_from(began.elapsed().as_secs() / 60).unwrap() + 1;
    assert!(tokens <= minutes * 120 && permissions == 1, "{tokens} and {permissions} in {minutes} minutes");
    assert_eq!(said.keys().copied().collect::<Vec<_>>(), [401, 429], "{said:?}");
    assert_eq!(ask(site.address, "GET", "/v1/status", Some(&token)).await.0, 200, "who is known is not kept out");
}

#[tokio::test]
async fn slow_clients_and_large_heads_keep_nobody_out() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.allow(VIEWER, "get", "nodes", "*");
    let token = reviews.token(VIEWER, AUDIENCE);
    let mut slow = Vec::new();
    for number in 0..200 {
        // Half of them do not even shake hands.
        if number % 2 == 0 {
            slow.push(Err(tokio::net::TcpStream::connect(site.address).await.unwrap()));
        } else if let Ok(mut stream) = unverified::connect(site.address).await {
            let _ = stream.write_all(b"GET /v1/status HTT").await;
            slow.push(Ok(stream));
        }
    }
    let asked = ask(site.address, "GET", "/v1/status", Some(&token));
    let (status, _) = tokio::time::timeout(Duration::from_secs(5), asked).await.unwrap();
    assert_eq!(status, 200);
    drop(slow);
    let (status, _) = ask(site.address, "GET", &format!("/v1/flows?peer={}", "x".repeat(40 << 10)), Some(&token)).await;
    assert!(matches!(status, 0 | 400 | 414 | 431), "{status}");
    let (status, body) = ask(site.address, "GET", "/v1/status", Some(&"x".repeat(9000))).await;
    assert_eq!(status, 401, "no such token is sent to the API server: {body}");
}

#[tokio::test]
async fn a_stream_goes_on_with_what_is_recorded_until_the_permission_is_taken_away() {
    let reviews = FakeReviews::default();
    let site = Site::start(&reviews, "n1").await;
    reviews.allow(VIEWER, "get", "flows", "shop");
    site.keep("shop", vec![record(1, "outbound", 80)]);
    let token = reviews.token(VIEWER, AUDIENCE);
    let mut stream = unverified::connect(site.address).await.unwrap();
    let head = format!(
        "GET /v1/nodes/n1/flows?namespace=shop&follow=true HTTP/1.1\r\nHost: x\r\n{TOKEN_HEADER}: {token}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut seen = String::new();
    let mut until = async |text: &str| {
        let mut bytes = [0; 4096];
        while !seen.contains(text) {
            let read = tokio::time::timeout(Duration::from_secs(20), stream.read(&mut bytes)).await.unwrap().unwrap();
            assert!(read > 0, "it ended: {seen}");
            seen.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
        }
        seen.clone()
    };
    until("\"newest\":1").await;
    site.keep("pay", vec![record(1, "outbound", 81)]);
    site.keep("shop", vec![record(2, "outbound", 82)]);
    let seen = until("\"newest\":3").await;
    assert!(seen.contains("\"port\":82") && !seen.contains("\"port\":81") && !seen.contains("pay"), "{seen}");
    assert!(!seen.contains("\"is_last\":true"), "{seen}");
    // It is looked for again after half a minute. Meanwhile there are signs of life.
    reviews.forbid(VIEWER, "get", "flows", "shop");
    let seen = until("\"is_last\":true").await;
    assert!(seen.contains("may not get flows.nebula-cni in namespace shop"), "{seen}");
    assert!(seen.matches("\"newest\":3").count() >= 2, "{seen}");
}

/// Whatever is in the store, and whatever else is asked for: a viewer of a namespace sees the records that instances of
/// its pods wrote, all of them that meet the conditions, and no others.
#[test]
fn a_viewer_of_one_namespace_sees_its_flows_and_no_others() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let namespaces = ["shop", "pay", "shop-2", "sh"];
    let records = prop::collection::vec((0..namespaces.len(), any::<bool>(), 79_u16..82, 0..namespaces.len()), 0..40);
    let conditions = (prop::option::of(79_u16..82), prop::option::of(Just("from_pod")), any::<bool>());
    let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(records, conditions), |(records, (port, from, is_follow_off))| {
        let failed = |text: String| TestCaseError::fail(text);
        runtime.block_on(async {
            let reviews = FakeReviews::default();
            let site = Site::start(&reviews, "n1").await;
            site.keep("other", vec![record(1, "outbound", 1)]);
            for (of, namespace) in namespaces.iter().enumerate() {
                let own = records.iter().enumerate().filter(|(_, (writer, ..))| *writer == of);
                let written = own.map(|(number, (_, is_outbound, port, far))| {
                    let mut one = record(number as u64 + 1, if *is_outbound { "outbound" } else { "inbound" }, *port);
                    // What an instance says of the other end.
                    let far_end = one.far_end_mut();
                    far_end.name = Some(format!("web.{}.pod", namespaces[*far]));
                    far_end.pod = Some(format!("{}/web", namespaces[*far]));
                    far_end.groups = vec![format!("ns:{}", namespaces[*far])];
                    one
                });
                site.keep(namespace, written.collect());
            }
            for (of, namespace) in namespaces.iter().enumerate() {
                let user = format!("system:serviceaccount:{namespace}:nebula-viewer");
                reviews.allow(&user, "get", "flows", namespace);
                let token = reviews.token(&user, AUDIENCE);
                let port_is = port.map(|port| format!("&port={port}")).unwrap_or_default();
                let from_is = from.map(|key| format!("&{key}={namespace}%2Fweb")).unwrap_or_default();
                let more = if is_follow_off { "&follow=false&later=1" } else { "" };
                let path = format!("/v1/flows?namespace={namespace}{port_is}{from_is}{more}");
                let (status, body) = ask(site.address, "GET", &path, Some(&token)).await;
                if status != 200 {
                    return Err(failed(format!("{path}: {status} {body}")));
                }
                let expected = records.iter().filter(|(writer, is_outbound, at, far)| {
                    let is_from = if *is_outbound { true } else { *far == of };
                    *writer == of && port.is_none_or(|port| port == *at) && (from.is_none() || is_from)
                });
                let expected = vec![(*namespace).to_owned(); expected.count()];
                prop_assert_eq!(flows(&body), (expected, true), "{}", path);
            }
            Ok(())
        })
    });
    outcome.unwrap();
}

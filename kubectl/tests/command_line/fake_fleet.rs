//! A fake fleet: an API server with forty agents that are made up, and answer for two thousand identities. Unlike those
//! of the fake cluster, no agent of ours is behind it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use nebula_cni_contract::agent_api::{
    ExpiringCertificate, FailedUpgrade, FlowLine, FlowsState, NodeStatus, PartState, PodCounts, TrustedCa,
    UpgradePause, UpgradeState,
};
use nebula_cni_contract::flow_records::{Amount, FlowEnd, FlowRecord, PolicyDecision};
use serde_json::{Value, json};

use super::fake_cluster::{json_of, write_kubeconfig};
use super::site::now_ms;

/// A name that a browser, a terminal or a reader could be led astray by.
pub(crate) const HOSTILE: &str = "<img src=x onerror=document.title='owned'>\u{1b}[2J\u{202e}edge";
pub(crate) const NODES: u64 = 40;
const PODS: u64 = 1900;
const HOSTS: u64 = 100;
const RECORDS: u64 = 500;

pub(crate) struct FakeFleet {
    pub(crate) folder: tempfile::TempDir,
    asked: Arc<AtomicUsize>,
}

impl FakeFleet {
    pub(crate) async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let folder = tempfile::tempdir().unwrap();
        write_kubeconfig(folder.path(), &format!("http://{}", listener.local_addr().unwrap()));
        let asked = Arc::new(AtomicUsize::new(0));
        let router = Router::new().fallback(answer).with_state(Arc::clone(&asked));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { folder, asked }
    }

    /// How often agents were asked.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

async fn answer(State(asked): State<Arc<AtomicUsize>>, request: Request) -> Response {
    let words: Vec<&str> = request.uri().path().split('/').collect();
    match words[..] {
        ["", "api", "v1", "namespaces", _, "serviceaccounts", _, "token"] => {
            json_of(StatusCode::CREATED, &json!({"status": {"token": "x"}}))
        }
        ["", "api", "v1", "namespaces", _, "pods"] => {
            let pod = |node: u64| {
                json!({"metadata": {"name": format!("agent-{node}")}, "status": {"phase": "Running"},
                    "spec": {"nodeName": name(node), "containers": [{"ports": [{"name": "api", "containerPort": 1}]}]}})
            };
            let items: Vec<Value> = (0..NODES).map(pod).collect();
            json_of(StatusCode::OK, &json!({"kind": "PodList", "items": items}))
        }
        ["", "api", "v1", "namespaces", _, "services", _, "proxy", "v1", "nodes", asked_for, what] => {
            asked.fetch_add(1, Ordering::Relaxed);
            let node = (0..NODES).find(|node| name(*node) == asked_for).unwrap();
            match what {
                "status" if node == 13 => json_of(StatusCode::FORBIDDEN, &json!({"error": "may not"})),
                "status" => json_of(StatusCode::OK, &serde_json::to_value(status(node)).unwrap()),
                _ => flows(node, request.uri().query().unwrap_or_default()).into_response(),
            }
        }
        _ => StatusCode::NOT_FOUND.into_response(),
    }
}

fn name(node: u64) -> String {
    format!("node-{node:02}.zone-{}.example", node % 3)
}

fn status(node: u64) -> NodeStatus {
    let part = |name: &str, ok, reason: &str, advice: &str| PartState {
        name: name.to_owned(),
        ok,
        is_required: name == "ca",
        reason: reason.to_owned(),
        advice: advice.to_owned(),
    };
    let is_bad = node == 7;
    let mut parts = vec![
        part("chain", true, "the plugin is in the chain of containerd", ""),
        part("ca", !is_bad, "the CA answers", "kubectl -n nebula-system logs deploy/nebula-ca"),
        part("policies", node != 9, "every policy is enforced", ""),
    ];
    if is_bad {
        parts[1].reason = format!("the CA does not answer: {HOSTILE}");
    }
    let failed = FailedUpgrade {
        pod: "ns-3/pod-17".to_owned(),
        outcome: "rolled_back".to_owned(),
        why: "it did not answer within 10 s".to_owned(),
    };
    let is_rolling = node % 5 == 1;
    let pause = UpgradePause { by_operator: false, why: "a canary was rolled back".to_owned(), since: 1 };
    let left = i64::try_from(node * 700).unwrap() + if node == 4 { -9000 } else { 900 };
    NodeStatus {
        node: name(node),
        version: "0.1.0".to_owned(),
        is_ready: !is_bad,
        parts,
        pods: PodCounts { protected: 47, unprotected: usize::from(is_bad) * 2, ..PodCounts::default() },
        first_to_expire: Some(ExpiringCertificate {
            pod: format!("ns-{}/pod-{node}", node % 50),
            not_before: i64::try_from(now_ms() / 1000).unwrap() - 3600,
            not_after: i64::try_from(now_ms() / 1000).unwrap() + left,
        }),
        cas: vec![TrustedCa {
            name: format!("corp {HOSTILE}"),
            fingerprint: "cd".repeat(32),
            not_after: i64::try_from(now_ms() / 1000).unwrap() + 20 * 86_400 + 60,
        }],
        upgrade: UpgradeState {
            stage: if node == 6 {
                "paused"
            } else if is_rolling {
                "rolling"
            } else {
                "current"
            }
            .to_owned(),
            why: if is_rolling { "12 of 47 instances have the program" } else { "every instance has the program" }
                .to_owned(),
            program: Some("5f3a9c".repeat(11)),
            version: "0.1.0".to_owned(),
            paused: (node == 6).then_some(pause),
            instances: 47,
            outdated: if is_rolling { 35 } else { 0 },
            upgraded: 12,
            under_way: if is_rolling { vec![format!("ns-1/pod-{node}")] } else { Vec::new() },
            failed: if node == 6 { vec![failed] } else { Vec::new() },
            ..UpgradeState::default()
        },
    }
}

/// The records after a number: all of them, or nothing new.
fn flows(node: u64, query: &str) -> String {
    let number = |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(key)?.parse::<u64>().ok());
    let (after, now_ms) = (number("after=").unwrap_or(0), now_ms());
    let mut lines: Vec<_> = (after + 1..=RECORDS)
        .map(|id| FlowLine { flow: Some(Box::new(record(node, id, now_ms))), ..FlowLine::default() })
        .collect();
    let state = FlowsState { is_last: true, newest: RECORDS, ..FlowsState::default() };
    lines.push(FlowLine { state: Some(state), ..FlowLine::default() });
    lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect()
}

fn pod(number: u64) -> FlowEnd {
    let number = number % PODS;
    let namespace = match number % 50 {
        0 => "shop".to_owned(),
        1 => "pay".to_owned(),
        of => format!("ns-{of}"),
    };
    let name = if number == 49 { HOSTILE.to_owned() } else { format!("pod-{number}") };
    FlowEnd {
        address: Some([10, 42, u8::try_from(number / 200).unwrap(), u8::try_from(number % 200).unwrap()].into()),
        name: Some(format!("{name}.{namespace}.pod")),
        pod: Some(format!("{namespace}/{name}")),
        ..FlowEnd::default()
    }
}

fn host(number: u64) -> FlowEnd {
    let number = number % HOSTS;
    let name = if number == 3 { HOSTILE.to_owned() } else { format!("db-{number}.example") };
    FlowEnd { address: Some([10, 1, 0, u8::try_from(number).unwrap()].into()), name: Some(name), ..FlowEnd::default() }
}

/// Every pod and host is an end of some.
fn record(node: u64, id: u64, now_ms: u64) -> FlowRecord {
    let number = node * RECORDS + id;
    let seconds = (RECORDS - id) * 4;
    let last_ms = now_ms - seconds * 1000;
    // Each namespace speaks with some, and some of what four namespaces ask for is refused.
    let turned = number + number / 50;
    let mut destination = if id.is_multiple_of(9) { host(number / 9) } else { pod(turned * 7 + turned / 950) };
    let is_refused = [0, 4, 11, 23].contains(&(turned % 50)) && turned.is_multiple_of(3);
    destination.port = Some([443, 5432, 8080, 53][usize::try_from(id % 4).unwrap()]);
    let bytes = (number * 7919) % 3_000_000;
    FlowRecord {
        number: id,
        id,
        event: if is_refused { "refused" } else { "updated" }.to_owned(),
        verdict: if is_refused {
            "refused"
        } else if id % 40 == 1 {
            "audit"
        } else {
            "allowed"
        }
        .to_owned(),
        reason: is_refused.then(|| "policy".to_owned()),
        direction: "outbound".to_owned(),
        protocol: if id % 4 == 3 { 17 } else { 6 },
        source: pod(turned),
        destination,
        forward: Amount { packets: 12, bytes: bytes / 9 },
        reply: Amount { packets: 20, bytes },
        policy: Some(PolicyDecision {
            reason: "rule".to_owned(),
            tier: Some("networkpolicy".to_owned()),
            policy: Some("ns-1/allow-web".to_owned()),
            rule: Some(2),
            ..PolicyDecision::default()
        }),
        path: (!is_refused).then(|| "direct".to_owned()),
        started_ms: last_ms - 60_000,
        last_ms,
        ..FlowRecord::default()
    }
}

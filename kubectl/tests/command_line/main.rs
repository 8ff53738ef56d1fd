//! The command line against a fake API server, and the real API of agents behind its proxy.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]

mod fake_cluster;
#[path = "../../../agent/tests/api/fake_reviews.rs"]
#[allow(dead_code, reason = "the tests of the agent use more of it")]
mod fake_reviews;
#[path = "../../../agent/tests/api/site.rs"]
mod site;
#[path = "../../../agent/tests/api/unverified.rs"]
mod unverified;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nebula_cni_contract::agent_api::{NodeStatus, PodState};
use nebula_cni_contract::flow_records::FlowRecord;
use nebula_cni_contract::why::{Document, PodEnd};
use serde_json::{Value, json};

use fake_cluster::{FakeCluster, OWN_SECRET};
use site::{now_ms, record};

const VIEWER: &str = "system:serviceaccount:shop:nebula-viewer";
const CLUSTER_VIEWER: &str = "system:serviceaccount:nebula-system:nebula-viewer";
const OPERATOR: &str = "system:serviceaccount:nebula-system:nebula-operator";

/// With the accounts and bindings of the chart, and the view of `shop` for its team.
async fn cluster(has_pending: bool) -> FakeCluster {
    let cluster = FakeCluster::start(has_pending).await;
    for account in ["shop/nebula-viewer", "nebula-system/nebula-viewer", "nebula-system/nebula-operator"] {
        cluster.account(account);
    }
    for resource in ["flows", "pods", "nodes", "upgrades"] {
        cluster.reviews.allow(CLUSTER_VIEWER, "get", resource, "*");
        cluster.reviews.allow(OPERATOR, "get", resource, "*");
        // As a RoleBinding to the same ClusterRole gives it.
        cluster.reviews.allow(VIEWER, "get", resource, "shop");
    }
    cluster.reviews.allow(OPERATOR, "update", "upgrades", "*");
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn the_viewer_of_one_namespace_sees_its_flows_of_all_nodes_in_the_order_of_time() {
    let cluster = cluster(false).await;
    let at = |seconds: u64, number| FlowRecord { last_ms: now_ms() - seconds * 1000, ..record(number, "outbound", 80) };
    cluster.agents[0].keep("shop", vec![at(3000, 1), at(1000, 2)]);
    cluster.agents[1].keep("shop", vec![at(2000, 1)]);
    cluster.agents[1].keep("pay", vec![at(500, 1)]);
    let (code, out, notes) = cluster.run(&["flows", "-o", "json"]).await;
    assert_eq!((code, notes.as_str()), (0, ""), "{out}");
    let lines: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.iter().map(|line| line["node"].as_str().unwrap()).collect::<Vec<_>>(), ["n1", "n2", "n1"]);
    assert!(lines.iter().all(|line| line["source"]["pod"] == "shop/web"), "{out}");
    serde_json::from_str::<FlowRecord>(out.lines().next().unwrap()).unwrap();
    let (code, out, _) = cluster.run(&["flows", "-o", "wide", "--since", "1500s"]).await;
    assert_eq!((code, out.lines().count()), (0, 2), "{out}");
    assert!(out.starts_with("NODE  SEEN") && out.lines().nth(1).unwrap().starts_with("n1    "), "{out}");
    let (code, out, notes) = cluster.run(&["flows", "--limit", "1", "-o", "yaml"]).await;
    assert_eq!((code, out.matches("---\n").count()), (0, 1), "{out}");
    assert!(notes.contains("left out (--limit)"), "{notes}");
    let (code, out, notes) = cluster.run(&["flows", "-A"]).await;
    assert_eq!((code, out.lines().count(), notes.as_str()), (0, 5, ""), "the account of the release sees all: {out}");
    for head in cluster.forwarded() {
        assert!(!head.contains(OWN_SECRET) && head.contains("x-nebula-token: secret-"), "{head}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_rbac_forbids_is_said_with_the_command_that_gives_it() {
    let cluster = cluster(false).await;
    for (arguments, said) in [
        (&["flows", "-A", "--service-account", "shop/nebula-viewer"][..], "--clusterrole=nebula-viewer"),
        (
            &["flows", "-n", "pay", "--service-account", "shop/nebula-viewer"],
            "kubectl create rolebinding -n pay nebula-viewer",
        ),
        (&["status", "--service-account", "shop/nebula-viewer"], "may not get nodes.nebula-cni in the whole cluster"),
        (&["upgrade", "pause", "--service-account", "shop/nebula-viewer"], "--clusterrole=nebula-operator"),
        (&["pods", "-n", "pay"], "kubectl create serviceaccount -n pay nebula-viewer"),
        (&["pods", "-n", "../x"], "is no name of a namespace"),
    ] {
        let (code, _, notes) = cluster.run(arguments).await;
        assert!(code == 1 && notes.contains(said), "{arguments:?}: {code} {notes}");
    }
    cluster.has_proxy_right(false);
    let (code, _, notes) = cluster.run(&["pods"]).await;
    assert!(code == 1 && notes.contains("--role=nebula-kubectl"), "{notes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_answer_is_shown_and_the_exit_code_says_so() {
    let cluster = cluster(true).await;
    let (code, out, notes) = cluster.run(&["status"]).await;
    assert_eq!(code, 1, "{out}{notes}");
    assert!(out.lines().any(|line| line.starts_with("n3    no answer")), "{out}");
    assert!(out.contains("2 of 3 agents answer; 2 pods are protected, 2 run without protection."), "{out}");
    assert!(notes.contains("n3: its agent does not run (pod agent-n3 is Pending)"), "{notes}");
    cluster.agents[0].keep("shop", vec![record(1, "outbound", 80)]);
    let (code, out, notes) = cluster.run(&["flows"]).await;
    assert_eq!((code, out.lines().count()), (1, 2), "{out}");
    assert!(notes.contains("n2: its agent refuses: no flow records are kept on this node"), "{notes}");
    let (code, out, notes) = cluster.run(&["check"]).await;
    assert_eq!(code, 79, "{out}{notes}");
    assert!(
        out.contains("✗ n3: its agent does not run") && out.contains("✗ n1: 1 pods run without protection"),
        "{out}"
    );
    assert!(
        out.contains("✓ the API server is v1.33.1") && !out.contains('\u{1b}'),
        "no colour without a terminal: {out}"
    );
    let (code, out, _) = cluster.run(&["check", "--only", "kubernetes", "-o", "json"]).await;
    assert_eq!((code, out.lines().count()), (0, 1), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_and_nodes_are_findings_where_something_is_wrong() {
    let cluster = cluster(false).await;
    let (code, out, notes) = cluster.run(&["pods"]).await;
    assert_eq!((code, notes.as_str()), (79, ""), "{out}");
    assert!(out.starts_with("NODE  POD       STATE") && out.contains("n2    shop/old  UNPROTECTED"), "{out}");
    let (_, out, _) = cluster.run(&["pods", "-o", "json"]).await;
    let pod: PodState = serde_json::from_str(out.lines().next().unwrap()).unwrap();
    assert!(pod.is_unprotected && pod.node.as_deref() == Some("n1"), "{out}");
    let (code, out, _) = cluster.run(&["status", "-o", "json"]).await;
    let nodes: Vec<NodeStatus> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((code, nodes.len(), nodes[1].node.as_str()), (79, 2, "n2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_pauses_the_nodes_that_are_named() {
    let cluster = cluster(false).await;
    let taken = cluster.agents[1].take_request();
    let (code, out, notes) = cluster.run(&["upgrade", "pause", "n2", "n9"]).await;
    assert!(taken.join().unwrap().contains("pause"));
    assert!(out.lines().count() == 2 && out.lines().nth(1).unwrap().starts_with("n2 "), "{out}");
    assert!(code == 1 && notes.contains("n9: no agent of Nebula is on such a node"), "{notes}");
    // What did not arrive is sent to another agent.
    cluster.lose(3);
    let (code, out, _) = cluster.run(&["upgrade", "status", "-o", "json"]).await;
    assert_eq!((code, out.lines().count()), (0, 2), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn following_goes_on_with_what_any_node_records() {
    let cluster = cluster(false).await;
    cluster.agents[0].keep("shop", vec![record(1, "outbound", 80)]);
    cluster.agents[1].keep("shop", vec![record(1, "outbound", 81)]);
    let mut child = cluster.command(&["flows", "-f", "-o", "json"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut take = |count: usize| -> Vec<(Value, Value)> {
        let ports = |line: Value| (line["node"].clone(), line["destination"]["port"].clone());
        let read =
            || lines.by_ref().take(count).map(|line| ports(serde_json::from_str(&line.unwrap()).unwrap())).collect();
        tokio::task::block_in_place(read)
    };
    let mut seen = take(2);
    cluster.agents[1].keep("shop", vec![record(2, "outbound", 82)]);
    seen.extend(take(1));
    assert_eq!(seen[2], ("n2".into(), 82.into()), "{seen:?}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn why_asks_the_agents_of_both_nodes_and_shows_a_team_its_own_end() {
    let cluster = cluster(false).await;
    for (namespace, name, node, address) in
        [("shop", "web", "n1", "10.244.0.7"), ("shop", "db", "n2", "10.244.1.7"), ("pay", "db", "n2", "10.244.1.8")]
    {
        let pod = json!({"metadata": {"namespace": namespace, "name": name}, "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        cluster.reviews.pod(namespace, pod);
    }
    let (code, out, notes) = cluster.run(&["why", "shop/web", "shop/db:80", "-o", "json"]).await;
    assert_eq!((code, notes.as_str()), (1, ""), "nothing is prepared on these nodes, so not all is known: {out}");
    let document: Document = serde_json::from_str(&out).unwrap();
    let node = |end: Option<PodEnd>| end.unwrap().node;
    assert_eq!(node(document.facts.source_end), "n1");
    assert_eq!(node(document.facts.destination_end), "n2");
    let (_, out, _) = cluster.run(&["why", "shop/web", "shop/db:80"]).await;
    assert!(out.lines().any(|line| line.starts_with("ok") && line.ends_with("pod shop/web runs on node n1")), "{out}");
    let (code, out, notes) = cluster.run(&["why", "shop/web", "pay/db:80"]).await;
    assert!(code == 1 && out.contains("not shown") && !out.contains("10.244.1.8"), "{out}");
    assert!(
        notes.contains("may not get pods.nebula-cni in namespace pay") && notes.contains("rolebinding -n pay"),
        "{notes}"
    );
    let (code, out, notes) = cluster.run(&["why", "-A", "shop/web", "pay/db:80"]).await;
    assert!(code == 1 && out.contains("10.244.1.8") && notes.is_empty(), "{out}{notes}");
    let (code, out, notes) = cluster.run(&["why", "shop/web", "shop/gone:80"]).await;
    assert_eq!((code, notes.as_str()), (79, ""), "{out}");
    assert!(out.contains("target-unknown: "), "{out}");
    let (code, _, notes) =
        cluster.run(&["why", "-n", "shop", "--service-account", "shop/nebula-viewer", "pay/db", "shop/web"]).await;
    assert!(code == 1 && notes.contains("rolebinding -n pay nebula-viewer"), "{notes}");
    let (code, _, notes) = cluster.run(&["why", "web", "shop/db"]).await;
    assert!(code == 64 && notes.contains("is no end of a flow"), "{notes}");
}

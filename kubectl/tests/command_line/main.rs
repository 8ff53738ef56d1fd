//! The command line against a fake API server, and the real API of agents behind its proxy.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]

mod browser;
mod fake_ca;
mod fake_cluster;
mod fake_fleet;
#[path = "../../../agent/tests/api/fake_reviews.rs"]
#[allow(dead_code, reason = "the tests of the agent use more of it")]
mod fake_reviews;
mod page;
mod policies;
mod revoke;
#[path = "../../../agent/tests/api/site.rs"]
mod site;
#[path = "../../../agent/tests/api/unverified.rs"]
mod unverified;

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use nebula_agent::readiness::{Part, Standing};
use nebula_cni_contract::agent_api::{Finding, NodeStatus, PodState};
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
        (
            &["pods", "-n", "pay", "--service-account", "pay/nebula-viewer"],
            "kubectl create serviceaccount -n pay nebula-viewer",
        ),
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
async fn a_namespace_without_an_account_is_shown_to_those_who_may_look_at_all_and_to_no_others() {
    let everywhere = cluster(false).await;
    everywhere.agents[1].attach("pay", "db", &hostile("waiting"));
    let (code, out, notes) = everywhere.run(&["pods", "-n", "pay"]).await;
    assert!(code == 79 && out.contains("pay/db") && !out.contains("shop/") && notes.is_empty(), "{out}{notes}");

    let team = FakeCluster::start(false).await;
    team.account("shop/nebula-viewer");
    let (code, _, notes) = team.run(&["pods", "-n", "pay"]).await;
    assert!(code == 1 && notes.contains("kubectl create serviceaccount -n pay nebula-viewer"), "{notes}");
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

/// The status of an instance whose texts would control a terminal, or a page.
fn hostile(state: &str) -> Value {
    let text = "no\u{1b}[2J\n\u{202e}<script>alert(1)</script>";
    serde_json::json!({"state": state, "closed": text, "last_error": text, "overlay": ["10.1.0.7/16"], "groups": [text],
        "certificate": {"name": text, "fingerprint": "ab12", "issuer": text, "not_before": 1, "not_after": i64::MAX / 2}})
}

fn assert_visible(text: &str) {
    assert!(text.chars().all(|c| c == '\n' || nebula_cert::is_visible(c)), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_what_is_wrong_on_all_nodes_and_the_viewer_of_a_namespace_only_its_own_pods() {
    let cluster = cluster(false).await;
    cluster.agents[0].attach("shop", "web", &hostile("closed"));
    cluster.agents[1].attach("pay", "db", &hostile("waiting"));
    let (code, out, notes) = cluster.run(&["doctor"]).await;
    assert_eq!((code, notes.as_str()), (79, ""), "{out}");
    assert_visible(&out);
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("SEVERITY  NODE   ABOUT"), "{out}");
    assert!(lines.iter().any(|line| line.starts_with("ERROR     n1,n2  node      chain ")), "{out}");
    assert!(lines.iter().any(|line| line.starts_with("ERROR     n1     shop/web  tunnel_closed ")), "{out}");
    assert!(
        out.contains("  n2     pay/db    ") && out.contains("2 of 2 agents answer; 5 pods were looked at"),
        "{out}"
    );
    let (code, out, _) = cluster.run(&["doctor", "-o", "json"]).await;
    let found: Vec<Finding> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(code == 79 && found.iter().all(|one| one.node.is_some() && !one.remedy.is_empty()), "{out}");
    assert_visible(&out);
    for arguments in [&["doctor", "-n", "shop", "-o", "json"][..], &["doctor", "shop/web", "-o", "json"]] {
        let (code, out, notes) = cluster.run(arguments).await;
        let found: Vec<Finding> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert!(code == 79 && found.iter().all(|one| one.about.starts_with("shop/")), "{out}{notes}");
    }
    for (arguments, said) in [
        (
            &["doctor", "-n", "pay", "--service-account", "shop/nebula-viewer"][..],
            "may not get pods.nebula-cni in namespace pay",
        ),
        (&["doctor", "--service-account", "shop/nebula-viewer"], "may not get pods.nebula-cni in the whole cluster"),
        (&["doctor", "none"], "shop/none: no such pod has a tunnel"),
        (&["doctor", "../x"], "names no pod"),
    ] {
        let (code, _, notes) = cluster.run(arguments).await;
        assert!(code == 1 && notes.contains(said), "{arguments:?}: {notes}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_of_an_earlier_release_is_named_with_it_and_the_others_are_shown() {
    let cluster = cluster(true).await;
    cluster.is_old("n1");
    let (code, out, notes) = cluster.run(&["doctor"]).await;
    assert_eq!(code, 1, "{out}{notes}");
    assert!(
        notes.contains("n1: its agent refuses: this agent has no such path") && notes.contains("release 0.0.9"),
        "{notes}"
    );
    assert!(notes.contains("n3: its agent does not run") && out.contains("  n2    node  "), "{out}{notes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_shown_with_what_expires_first_above() {
    let cluster = cluster(false).await;
    let now = i64::try_from(now_ms() / 1000).unwrap();
    let with = |left: i64| {
        let certificate = serde_json::json!({"name": "x.shop.pod", "fingerprint": "ab".repeat(32), "issuer": "cd".repeat(32),
            "not_before": now - 1000, "not_after": now + left});
        serde_json::json!({"state": "running", "certificate": certificate, "groups": ["ns:shop"], "overlay": ["10.1.0.7/16"]})
    };
    cluster.agents[0].attach("shop", "web", &with(80_000));
    cluster.agents[1].attach("shop", "db", &with(50_000));
    cluster.agents[1].attach("pay", "db", &hostile("running"));
    let (code, out, notes) = cluster.run(&["cert"]).await;
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((code, notes.as_str()), (79, ""), "pods without a tunnel have no certificate: {out}");
    let at = |text: &str| lines.iter().position(|line| line.contains(text)).unwrap();
    assert!(at("shop/old") < at("shop/db") && at("shop/db") < at("shop/web"), "{out}");
    assert!(lines[at("shop/web")].contains("ns:shop") && lines[at("shop/web")].contains("  due in "), "{out}");
    let (code, out, _) = cluster.run(&["cert", "web", "-o", "json"]).await;
    let one: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &one["fingerprint"], &one["is_bad"]), (0, &"ab".repeat(32).into(), &false.into()), "{out}");
    let (code, out, _) = cluster.run(&["cert", "-A", "-o", "wide"]).await;
    assert!(code == 79 && out.contains("FAILING") && out.contains("pay/db"), "{out}");
    assert_visible(&out);
    let (code, _, notes) = cluster.run(&["cert", "none"]).await;
    assert!(code == 1 && notes.contains("shop/none: no such pod"), "{notes}");
}

/// Secrets as they may stand in texts, and what must not be found of them.
fn planted() -> (String, Vec<String>) {
    let mut words: Vec<String> = (0..8).map(|number| format!("Q{number}zX").repeat(11)).collect();
    let block = |label: &str, body: &str| format!("-----BEGIN {label}-----\n{body}\n-----END {label}-----\n");
    let mut text = block("NEBULA X25519 PRIVATE KEY", &words[0]);
    text += &block("NEBULA ED25519 PRIVATE KEY", &words[1]);
    text += &block("NEBULA ED25519 ENCRYPTED PRIVATE KEY", &words[2]);
    text += &block("NEBULA ECDSA P256 PRIVATE KEY", &words[3]);
    text += &block("PRIVATE KEY", &format!("{}\nshortline0=", words[4]));
    text += &format!("key: {} and one cut off\nshortline1=\n-----END RSA PRIVATE KEY-----\n", words[5]);
    let web_token = format!("eyJhbGciOiJSUzI1NiJ9.{}.c2ln", "eyJzdWIiOiJ4In0");
    text += &format!("Authorization: Bearer opaque-bearer\ngot token={web_token} and {web_token}\n");
    text += "x-nebula-token: secret-0.of-a-test\nconnect postgres://nebula:hunter2@db/nebula password='open sesame'\n";
    text += &format!("-----BEGIN NEBULA X25519 PRIVATE KEY-----\n{}", words[6]);
    words.pop();
    let short = ["shortline", "eyJzdWIiOiJ4In0", "opaque-bearer", "of-a-test", "hunter2", "open sesame"];
    words.extend(short.map(str::to_owned));
    (text, words)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_has_what_is_known_and_no_secret_wherever_it_was() {
    let cluster = cluster(true).await;
    let (text, words) = planted();
    cluster.plant(&text);
    cluster.agents[0].attach(
        "shop",
        "web",
        &serde_json::json!({"state": "closed", "closed": text, "last_error": text}),
    );
    cluster.agents[0].node.readiness.set(Part::Ca, Standing::bad(text.clone()).advice(text.clone()));
    let mut refused = FlowRecord { verdict: "refused".into(), reason: Some(text.clone()), ..record(1, "inbound", 80) };
    refused.far_end_mut().name = Some(text.clone());
    cluster.agents[0].keep("shop", vec![refused]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.tar.gz");
    let name = file.to_str().unwrap();
    let (code, out, notes) = cluster.run(&["bundle", "--file", name]).await;
    assert_eq!(code, 1, "a node does not answer: {out}{notes}");
    assert!(out.starts_with(name) && notes.contains("reading "), "{out}{notes}");
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let unpacked =
        std::process::Command::new("tar").arg("-xzf").arg(&file).arg("-C").arg(folder.path()).status().unwrap();
    assert!(unpacked.success());
    let read = |name: &str| std::fs::read_to_string(folder.path().join("nebula-bundle").join(name)).unwrap();
    for (name, word) in [
        ("about.json", env!("CARGO_PKG_VERSION")),
        ("nodes.jsonl", "\"node\":\"n2\""),
        ("pods.jsonl", "shop/old"),
        ("doctor.jsonl", "tunnel_closed"),
        ("upgrades.jsonl", "\"stage\""),
        ("flows-refused.jsonl", "\"verdict\":\"refused\""),
        ("kubernetes/version.json", "v1.33.1"),
        ("kubernetes/workloads.jsonl", "numberReady"),
        ("kubernetes/config-nebula-cni-agent.txt", "# agent.json"),
        ("kubernetes/events-of-agents.jsonl", "NebulaUnprotected"),
        ("kubernetes/pods.jsonl", "agent-n1"),
        ("logs/00-agent-n1-agent.log", "first line"),
        ("missing.txt", "nodes.jsonl: n3: its agent does not run"),
        ("missing.txt", "kubernetes/workloads.jsonl: GET /apis/apps/v1/namespaces/nebula-system/deployments/nebula-ca"),
        ("missing.txt", "events beyond the first"),
    ] {
        assert!(read(name).contains(word), "{name} lacks {word}: {}", read(name));
    }
    for word in &words {
        let mut search = std::process::Command::new("grep");
        search.args(["-r", "-F", "--", word]).arg(folder.path().join("nebula-bundle"));
        let found = search.output().unwrap();
        assert!(found.stdout.is_empty(), "{word}: {}", String::from_utf8_lossy(&found.stdout));
        assert!(!out.contains(word) && !notes.contains(word), "{out}{notes}");
    }
    assert!(cluster.asked().iter().all(|path| !path.contains("secrets")), "{:?}", cluster.asked());
    let (code, _, notes) = cluster.run(&["bundle", "--file", name]).await;
    assert!(code == 1 && notes.contains("is there already"), "{notes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_of_somebody_with_few_rights_says_what_is_missing() {
    let cluster = cluster(false).await;
    cluster.is_old("n2");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.tar.gz");
    let arguments = ["bundle", "-n", "shop", "-o", "json", "--file", file.to_str().unwrap()];
    let (code, out, notes) = cluster.run(&arguments).await;
    assert_eq!(code, 1, "{out}{notes}");
    let written: Value = serde_json::from_str(&out).unwrap();
    let missing = written["missing"].as_array().unwrap();
    let is_missing =
        |words: &[&str]| missing.iter().any(|line| words.iter().all(|word| line.as_str().unwrap().contains(word)));
    for words in [
        &["nodes.jsonl: n1", "may not get nodes.nebula-cni in the whole cluster"][..],
        &["doctor.jsonl: n2", "release 0.0.9"],
        &["logs/00-agent-n1-agent.log", "pods/log is forbidden"],
    ] {
        assert!(is_missing(words), "{words:?}: {out}");
    }
    let listed = std::process::Command::new("tar")
        .args(["-xzOf"])
        .arg(&file)
        .arg("nebula-bundle/doctor.jsonl")
        .output()
        .unwrap();
    let found = String::from_utf8(listed.stdout).unwrap();
    assert!(found.contains("shop/old") && !found.contains("\"about\":\"node\""), "{found}");
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

//! `policy test` and `policy suggest` against the agents of two nodes.

use nebula_cni_contract::policy_test::{Document, Outcome};
use nebula_cni_contract::seen::{Peer, Seen};
use serde_json::{Value, json};

use super::fake_cluster::FakeCluster;
use super::site::{pod, to};
use super::{assert_visible, cluster};

const WEB: &str = "10.244.0.7";
const DB: &str = "10.244.1.7";
const PAY: &str = "10.244.1.8";
const AS_TEAM: [&str; 2] = ["--service-account", "shop/nebula-viewer"];
const AS_ADMINISTRATOR: [&str; 2] = ["--service-account", "nebula-system/nebula-viewer"];

/// `web` of `shop` is on the first node; `db` of `shop` and that of `pay` are on the second one.
async fn with_pods(has_pending: bool) -> FakeCluster {
    let cluster = cluster(has_pending).await;
    let hostile = json!({"app": "web", "note": "no\u{1b}[2J\n\u{202e}\"quoted\""});
    for (namespace, name, node, address, labels) in [
        ("shop", "web", "n1", WEB, &hostile),
        ("shop", "web-2", "n2", "10.244.1.6", &hostile),
        ("shop", "db", "n2", DB, &json!({"app": "db"})),
        ("pay", "db", "n2", PAY, &json!({"app": "secret-of-pay"})),
    ] {
        cluster.reviews.pod(namespace, pod(namespace, name, node, address, labels));
    }
    let pods = [("shop", WEB), ("shop", DB), ("pay", PAY)];
    cluster.agents[0].know(&pods, &[WEB]);
    cluster.agents[1].know(&pods, &[DB, PAY]);
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn both_nodes_are_asked_about_a_flow_and_the_exit_code_says_what_comes_out() {
    let cluster = with_pods(false).await;
    let (code, out, notes) = cluster.run(&["policy", "test", "shop/web", "shop/db:80"]).await;
    assert_eq!((code, notes.as_str()), (0, ""), "{out}");
    assert_eq!(
        out,
        "shop/web -> shop/db:80: allowed\n  egress of shop/web (node n1, table version 3): allowed: no policy decides\n  \
         ingress of shop/db (node n2, table version 3): allowed: no policy decides\n"
    );
    let (code, out, notes) = cluster.run(&["policy", "test", "-A", "web.shop", "db.pay:5432", "-o", "json"]).await;
    let Document { outcome, tested } = serde_json::from_str(&out).unwrap();
    assert_eq!((code, outcome, notes.as_str()), (0, Outcome::Allowed, ""), "{out}");
    let (egress, ingress) = (tested.egress.unwrap(), tested.ingress.unwrap());
    assert_eq!((egress.node.as_str(), ingress.node.as_str()), ("n1", "n2"));
    let decision = ingress.said.unwrap().decision;
    assert_eq!((decision.policy.as_deref(), decision.rule), (Some("pay/from-shop"), Some(0)));

    let (code, out, notes) = cluster.run(&["policy", "test", "192.0.2.7", "pay/db:5432"]).await;
    assert_eq!((code, notes.as_str()), (79, ""), "{out}");
    assert!(out.contains("192.0.2.7 -> pay/db:5432: refused\n") && out.contains("pay/from-shop isolates"), "{out}");
    assert!(out.contains("egress of 192.0.2.7: allowed: no pod has this address"), "{out}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_known_or_not_shown_of_a_flow_is_said_and_decides_nothing() {
    let cluster = with_pods(false).await;
    let (code, out, notes) = cluster.run(&["policy", "test", "shop/web", "pay/db:5432"]).await;
    assert!(code == 1 && out.contains("undecided") && out.contains("ingress of pay/db:5432: not shown"), "{out}");
    assert!(
        notes.contains("may not get pods.nebula-cni in namespace pay") && notes.contains("rolebinding -n pay"),
        "{notes}"
    );
    assert!(!out.contains("n2"), "{out}");
    let (_, same, _) = cluster.run(&["policy", "test", "shop/web", "pay/nothing:5432"]).await;
    assert_eq!(out, same.replace("pay/nothing", "pay/db"), "whether there is such a pod is not said");
    let (code, out, notes) = cluster.run(&["policy", "test", "shop/web", "shop/gone:80"]).await;
    assert!(code == 1 && out.contains("neither a pod nor a Service of this name") && notes.is_empty(), "{out}{notes}");
    let (code, _, notes) = cluster.run(&[&["policy", "test", WEB, "shop/db:80"][..], &AS_TEAM].concat()).await;
    assert!(code == 1 && notes.contains("may not get pods.nebula-cni in the whole cluster"), "{notes}");
    let (code, _, notes) = cluster.run(&["policy", "test", "web", "shop/db"]).await;
    assert!(code == 64 && notes.contains("is no end of a flow"), "{notes}");

    cluster.is_old("n2");
    let (code, out, notes) = cluster.run(&["policy", "test", "shop/web", "shop/db:80"]).await;
    assert!(code == 1 && out.contains("ingress of shop/db: node n2 has not said"), "{out}");
    assert!(notes.contains("n2: its agent refuses: this agent has no such path"), "{notes}");
    // A refusal that is known counts, whatever the other end would say.
    cluster.agents[0].know(&[("pay", WEB), ("shop", DB)], &[WEB]);
    let (_, out, _) = cluster.run(&["policy", "test", "-A", "shop/db", "shop/web:80", "-o", "json"]).await;
    assert_eq!(serde_json::from_str::<Document>(&out).unwrap().outcome, Outcome::Undecided, "{out}");
    let (code, out, _) = cluster.run(&["policy", "test", "-A", "192.0.2.7", "shop/web:80"]).await;
    assert_eq!(code, 79, "{out}");
}

/// The objects in an answer, as a server reads them.
fn objects(text: &str) -> Vec<Value> {
    text.split("---\n").skip(1).map(|document| serde_saphyr::from_str(document).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_all_nodes_saw_becomes_policies_without_labels_of_other_namespaces() {
    let cluster = with_pods(false).await;
    cluster.agents[0].attach_seen("shop", "web", &[to(PAY, "pay/db", 5432), to(DB, "shop/db", 80)]);
    cluster.agents[1].attach_seen("shop", "web-2", &[to(DB, "shop/db", 80)]);
    cluster.agents[1].attach_seen("pay", "db", &[to(WEB, "shop/web", 9999)]);
    let (code, out, notes) = cluster.run(&["policy", "suggest", "-n", "shop"]).await;
    assert_eq!(code, 0, "{out}{notes}");
    assert_visible(&out);
    assert!(out.starts_with("# Suggested from the flows in tunnels that 2 pod(s) of shop were seen with.\n"), "{out}");
    assert!(out.contains("{protocol: TCP, port: 80}  # 4 flow(s), the last one at 20"), "of both nodes: {out}");
    assert!(out.contains("# wider than what was seen: all pods of pay, "), "{out}");
    assert!(!out.contains("secret-of-pay") && !out.contains("of-dns") && !out.contains("port: 9999"), "{out}");
    for part in [
        "Labels of pods in kube-system, pay are not shown",
        "kubectl create rolebinding -n pay nebula-viewer",
        "instances have forgotten 2 flow(s)",
    ] {
        assert!(notes.contains(part), "{part}: {notes}");
    }
    let policies = objects(&out);
    assert_eq!((policies.len(), &policies[0]["metadata"]["namespace"]), (1, &json!("shop")), "{out}");
    let note = policies[0]["spec"]["podSelector"]["matchLabels"]["note"].as_str().unwrap();
    assert_eq!(note, "no\u{1b}[2J\n\u{202e}\"quoted\"");

    let as_administrator = [&["policy", "suggest", "-n", "shop", "-o", "json"][..], &AS_ADMINISTRATOR].concat();
    let (code, out, notes) = cluster.run(&as_administrator).await;
    assert!(code == 0 && !notes.contains("Labels of pods"), "{notes}");
    assert_visible(&out);
    let seen = Seen::read(&out, "stdout", "shop").unwrap();
    assert_eq!((seen.pods, seen.lost, seen.known.len()), (2, 2, 2));
    let of_pay = |peer: &Peer| matches!(peer, Peer::Pod { labels, .. } if labels["app"] == "secret-of-pay");
    assert!(seen.flows.iter().any(|flow| of_pay(&flow.peer)), "{out}");
    let document: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(document["policies"].as_array().map(Vec::len), Some(1));

    // What one node printed by hand is added; what was seen long ago is not.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.json");
    std::fs::write(&file, &out).unwrap();
    let file = file.to_str().unwrap();
    let (code, out, _) = cluster.run(&["policy", "suggest", "-n", "shop", "--with", file, "--since", "1h"]).await;
    assert!(code == 0 && out.contains("# 8 flow(s), the last one at 20") && out.contains("secret-of-pay"), "{out}");
    let (code, _, notes) = cluster.run(&["policy", "suggest", "-n", "pay", "--with", file]).await;
    assert!(code == 1 && notes.contains("it is of the namespace \"shop\""), "{notes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_in_a_suggestion_is_said_in_it_and_beside_it() {
    let cluster = with_pods(true).await;
    cluster.agents[0].attach_seen("shop", "web", &[to(DB, "shop/db", 80)]);
    // An instance of an earlier release.
    cluster.agents[1].attach("shop", "db", &json!({"state": "running"}));
    let (code, out, notes) = cluster.run(&["policy", "suggest", "-n", "shop"]).await;
    assert_eq!((code, objects(&out).len()), (1, 1), "{out}{notes}");
    for part in ["# INCOMPLETE: shop/db: ", "# INCOMPLETE: node n3: its agent does not run"] {
        assert!(out.contains(part), "{part}: {out}");
    }
    assert!(notes.contains("shop/db: ") && notes.contains("n3: its agent does not run"), "{notes}");
    for (arguments, said) in [
        (&["policy", "suggest", "-A"][..], "name it with -n"),
        (&["policy", "suggest", "--with", "/none"], "cannot read /none"),
    ] {
        let (code, out, notes) = cluster.run(arguments).await;
        assert!(code == 1 && out.is_empty() && notes.contains(said), "{arguments:?}: {out}{notes}");
    }
    let (code, out, notes) = cluster.run(&[&["policy", "suggest", "-n", "pay"][..], &AS_TEAM].concat()).await;
    assert!(code == 1 && notes.contains("may not get flows.nebula-cni in namespace pay"), "{out}{notes}");
}

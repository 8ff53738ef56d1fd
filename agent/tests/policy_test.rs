//! `nebula-cni-agent policy test` and its neighbours as they are typed: what they print, and their exit codes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]

use std::fs;
use std::net::IpAddr;
use std::process::{Command, Output};

use nebula_cni_contract::cluster_table::Builder;
use nebula_cni_contract::launch::CLUSTER_TABLE;
use nebula_cni_policy::compile::{Cluster, Subject};
use nebula_cni_policy::model::{Direction, Labels, NetworkPolicy, Peer, PodSelector, Profile, Rule};
use serde_json::{Value, json};

const WEB: &str = "10.244.1.7";
const DB: &str = "10.244.1.8";
const FAR: &str = "10.244.2.9";

/// A node with a table in which `db` of `pay` is reached by pods of `shop`, of which `web` is one.
struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let table = dir.path().join(CLUSTER_TABLE.trim_start_matches('/'));
        fs::create_dir_all(table.parent().unwrap()).unwrap();
        fs::write(table, bytes()).unwrap();
        let config = json!({"ca": {"service": "nebula-system/nebula-ca"}, "hostRoot": dir.path()});
        fs::write(dir.path().join("agent.json"), config.to_string()).unwrap();
        Self(dir)
    }

    fn ask(&self, arguments: &[&str]) -> Output {
        self.run(&["policy", "test"], arguments)
    }

    fn run(&self, verb: &[&str], arguments: &[&str]) -> Output {
        let agent = Command::new(env!("CARGO_BIN_EXE_nebula-cni-agent"))
            .args(verb)
            .arg("--config")
            .arg(self.0.path().join("agent.json"))
            .args(arguments)
            .env_remove("KUBERNETES_SERVICE_HOST")
            .output();
        agent.unwrap()
    }
}

fn bytes() -> Vec<u8> {
    let mut cluster = Cluster::new();
    let mut number = |space: &str| {
        let profile = Profile::new(space, Labels::new(), Labels::new(), Vec::new()).unwrap();
        cluster.identify(profile).unwrap()
    };
    let pods = [(WEB, number("shop")), (DB, number("pay")), (FAR, number("pay"))];
    let shop = Rule { peers: vec![Peer::Pods(PodSelector::namespace("shop"))], ports: vec![] };
    cluster.set_policy(&NetworkPolicy { ingress: vec![shop], ..NetworkPolicy::new("pay", "from-shop") });
    let mut builder = Builder::new();
    for (address, identity) in pods {
        let address: IpAddr = address.parse().unwrap();
        builder.pod(address, 7);
        builder.identity(address, Some(identity.number()));
        if address != FAR.parse::<IpAddr>().unwrap() {
            let subject = Subject { identity, addresses: vec![address], node: Vec::new() };
            builder.programs(address, Direction::ALL.map(|direction| cluster.compile(&subject, direction).bytes));
        }
    }
    builder.finish(1)
}

#[test]
fn verdict_policy_and_rule_are_printed_and_the_exit_code_says_the_verdict() {
    let node = Node::new();
    let (to_db, from_far) = (format!("{DB}:5432"), format!("{FAR}:80/udp"));
    let allowed = node.ask(&[WEB, &to_db]);
    let text = String::from_utf8(allowed.stdout).unwrap();
    assert_eq!(allowed.status.code(), Some(0), "{text}");
    assert!(text.starts_with(&format!("{WEB} -> {DB} tcp/5432: allowed (table version 1)\n")), "{text}");
    assert!(text.contains(": allowed by rule 0 of pay/from-shop, tier NetworkPolicy\n"), "{text}");

    let refused = node.ask(&["--json", FAR, &to_db]);
    let answer: Value = serde_json::from_slice(&refused.stdout).unwrap();
    assert_eq!(refused.status.code(), Some(3), "{answer}");
    let expected = json!({"allowed": false, "reason": "isolated", "tier": "NetworkPolicy", "policy": "pay/from-shop"});
    assert_eq!((&answer["ingress"], &answer["egress"]), (&expected, &Value::Null));

    let undecided = node.ask(&[WEB, &from_far]);
    let text = String::from_utf8(undecided.stdout).unwrap();
    assert_eq!(undecided.status.code(), Some(4), "{text}");
    assert!(text.contains("this node has no program of it; ask the agent of its node"), "{text}");
}

#[test]
fn what_cannot_be_asked_is_an_error_that_says_what_to_do() {
    let node = Node::new();
    for (arguments, says) in [
        ([WEB, "db:5432"], "expected an address, POD.NAMESPACE or NAMESPACE/POD"),
        (["web.shop", DB], "its address can be given instead"),
        (["shop/web", DB], "cannot ask where web.shop is"),
    ] {
        let output = node.ask(&arguments);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && said.contains(says), "{said}");
    }
    fs::remove_dir_all(node.0.path().join("run")).unwrap();
    let output = node.ask(&[WEB, DB]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && said.contains("is the agent running, with pods captured?"), "{said}");
}

#[test]
fn suggestions_need_a_namespace_a_time_and_documents_of_that_namespace() {
    let node = Node::new();
    let says = |arguments: &[&str]| {
        let said = node.run(&["policy", "suggest"], arguments);
        assert!(!said.status.success() && said.stdout.is_empty(), "{said:?}");
        String::from_utf8(said.stderr).unwrap()
    };
    assert!(says(&[]).contains("--namespace"));
    assert!(says(&["-n", "shop", "--since", "1y"]).contains("\"1y\" is no time"));
    let other = node.0.path().join("other.json");
    fs::write(&other, json!({"seen": {"namespace": "pay"}}).to_string()).unwrap();
    let other = other.to_str().unwrap();
    assert!(says(&["-n", "shop", "--with", other]).contains("it is of the namespace \"pay\""));
    assert!(says(&["-n", "shop", "--with", "/none"]).contains("cannot read /none"));
    // Outside of a pod there are no credentials.
    assert!(says(&["-n", "pay", "--with", other]).contains("no credentials for an API server"));
}

#[test]
fn the_status_of_a_pod_that_is_not_here_says_so() {
    let said = Node::new().run(&["status"], &["shop/web"]);
    assert_eq!(said.status.code(), Some(1));
    assert!(String::from_utf8(said.stderr).unwrap().contains("no pod shop/web with a tunnel on this node"));
}

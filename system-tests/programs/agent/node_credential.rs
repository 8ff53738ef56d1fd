//! A pod whose node's agent is away, towards a CA that refuses the agent's token.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nebula_cert::issuance::{NODE_CREDENTIAL_PATH, NodeCredential, Pod};
use nebula_cni_contract::launch::CaAccess;
use nebula_enrolment::ca_client::{CaClient, Error, Prover};
use nebula_linux::clock::unix_now;
use nebula_linux::netns::NamespaceExecutor;

use serde_json::{Value, json};

use crate::fake_ca::{Ca, NODE_CREDENTIAL};
use crate::fake_cluster::{AUDIENCE, FakeCluster};
use crate::world::cluster::Cluster;
use crate::world::enter;

fn access(dir: &Path, ca: &Ca) -> CaAccess {
    fs::write(dir.join("tls.crt"), &ca.tls).unwrap();
    fs::write(dir.join("token"), "of the agent that is gone").unwrap();
    let (tls_ca_file, token_file) = (dir.join("tls.crt"), dir.join("token"));
    CaAccess { url: ca.token.url().to_owned(), tls_ca_file, token_file, server_name: None }
}

fn ask(client: &CaClient) -> Result<String, (String, String)> {
    let (name, namespace, uid) = ("web-1".to_owned(), "shop".to_owned(), "u-1".to_owned());
    let pod = Pod { namespace, name, uid, address: [10, 244, 0, 5].into(), other_address: None };
    match client.request(&[Prover::Node(pod)], Duration::from_secs(5), unix_now()) {
        Ok(issued) => Ok(issued.identity.primary().name().to_owned()),
        Err(Error::Denied { code, message }) => Err((code, message)),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn where_the_agents_token_is_refused_the_credential_of_the_node_is_shown() {
    let (ca, dir) = (Ca::new(None), tempfile::tempdir().unwrap());
    let client = || CaClient::new(access(dir.path(), &ca), NamespaceExecutor::Here);
    assert_eq!(ask(&client()), Err(("token_rejected".to_owned(), "no more".to_owned())), "there is none");
    let credential = CaAccess::credential_beside(&dir.path().join("token"));
    fs::write(&credential, format!("{NODE_CREDENTIAL}\n")).unwrap();
    assert_eq!(ask(&client()), Ok("host".to_owned()));
    // What a program opened before it changed its user.
    let mut held = client();
    held.hold_files(true).unwrap();
    assert_eq!(ask(&held), Ok("host".to_owned()));
    fs::write(&credential, "expired").unwrap();
    let (code, message) = ask(&client()).unwrap_err();
    assert_eq!(code, "token_rejected", "the next agent's token helps");
    assert!(message.contains("nor does the node credential help: no more (node_credential_expired)"), "{message}");
}

/// Of the node in the recorded review of the agent's token.
const NODE_UID: &str = "61ff46fd-f6f7-4f51-b6b1-5dd107e3549e";

#[test]
#[ignore = "needs root, network namespaces and a release build"]
fn add_succeeds_without_the_agent_as_long_as_its_node_is_there() {
    let mut cluster = Cluster::new();
    let mut node = cluster.node("n1", "1.0.0");
    let control = cluster.world.namespace_of("control");
    // Its sockets and threads are of the namespace in which it is started.
    let api = thread::spawn(move || {
        enter(&control);
        FakeCluster::start("1.36.2")
    });
    let api = api.join().unwrap();
    api.make_node(NODE_UID);
    for pod in ["web", "db", "late"] {
        api.add_pod(pod, &format!("uid-{pod}"), |_| {});
    }
    cluster.change_policy(|policy| {
        policy["kubernetes"] =
            json!({"node_account": "shop/app", "audience": AUDIENCE, "kubeconfig": api.kubeconfig()});
    });
    let token = cluster.world.write("token", &api.agent_token());
    node.conf["plugins"][1]["ca"]["tokenFile"] = token.display().to_string().into();
    node.conf["plugins"][1]["timeoutSeconds"] = 5.into();
    node.add_pods(&mut cluster.world, &["web"]);
    cluster.world.namespace("db");
    cluster.world.namespace("late");

    let (roots, bearer) = (cluster.ca_file("tls.crt"), format!("authorization: Bearer {}", api.agent_token()));
    let url = format!("{}{NODE_CREDENTIAL_PATH}", cluster.ca_url());
    let said = cluster.world.run("n1", &["curl", "-sS", "--cacert", &roots, "-X", "POST", "-H", &bearer, &url]);
    let made: NodeCredential = serde_json::from_str(&said).unwrap();
    api.revoke_token(&api.agent_token());
    api.delete_pod("p2");
    let refused = |pod: &str| {
        let output = node.chain(&cluster.world, "add", pod);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(!output.status.success(), "{said}");
        let error: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(error["code"], 119, "{error}");
        // As a runtime does after an ADD that failed.
        node.chain_ok(&cluster.world, "del", pod);
        error["details"].as_str().unwrap().to_owned()
    };
    assert!(refused("db").contains("service_token_expired"));
    fs::write(CaAccess::credential_beside(&token), &made.credential).unwrap();
    node.chain_ok(&cluster.world, "add", "db");
    cluster.world.ping("db", &node.overlay("web"), Duration::from_secs(10));

    api.delete_node();
    let why = refused("late");
    assert!(why.contains("service_token_expired") && why.contains("node_gone"), "{why}");
    node.delete_pods(&cluster.world, &["web", "db"]);
    assert_eq!(node.leftovers(), Vec::<PathBuf>::new());
}

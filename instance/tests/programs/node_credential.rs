//! A pod whose node's agent is away, towards a CA that refuses the agent's token.

use std::fs;
use std::path::Path;
use std::time::Duration;

use nebula_cert::issuance::Pod;
use nebula_cni_plugin::launch::CaAccess;
use nebula_instance::ca_client::{CaClient, Error, Prover};
use nebula_instance::linux::clock::unix_now;
use nebula_instance::linux::netns::NamespaceExecutor;

use crate::fake_ca::{Ca, NODE_CREDENTIAL};

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

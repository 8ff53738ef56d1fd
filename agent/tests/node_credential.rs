//! The node credential as the agent obtains it from a real CA, which asks a fake API server.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on must fail where it stands")]

#[path = "../../ca/tests/service/fake_cluster.rs"]
#[allow(dead_code, clippy::disallowed_methods, reason = "the tests of the CA use more of it, and it waits")]
mod fake_cluster;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nebula_agent::ca::Target;
use nebula_agent::config::{NODE_CREDENTIAL_FILE, TLS_CA_FILE, TOKEN_FILE};
use nebula_agent::host_root::HostRoot;
use nebula_agent::node_credential::{NodeCredentialError, renew};
use nebula_ca::{Directory, NewCa, Server, ServerSettings};
use nebula_cert::issuance::{CERTIFICATE_PATH, Pod, Proof, Refusal, Request};
use nebula_cert::{Curve, PrivateKey, Version};
use tokio::sync::{mpsc, oneshot};

use fake_cluster::{AUDIENCE, FakeCluster};

/// Of the node in the recorded review of the agent's token.
const NODE_UID: &str = "61ff46fd-f6f7-4f51-b6b1-5dd107e3549e";

struct Site {
    dir: tempfile::TempDir,
    target: Target,
    _stop: oneshot::Sender<()>,
}

impl Site {
    async fn new(cluster: &FakeCluster) -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let new = NewCa {
            name: "ca".to_owned(),
            version: Version::V2,
            curve: Curve::Curve25519,
            life: 86_400,
            networks: Vec::new(),
            overlay: vec!["10.42.0.0/16".parse().unwrap()],
            tls_names: vec!["127.0.0.1".to_owned()],
        };
        let directory = Directory::new(dir.path().join("ca"));
        directory.make().unwrap();
        new.make(&directory, nebula_ca::now()).unwrap();
        let policy = serde_json::json!({
            "kubernetes": {"node_account": "shop/app", "audience": AUDIENCE, "kubeconfig": cluster.kubeconfig()},
            "pods": {"overlay": ["10.42.0.0/16"]},
        });
        fs::write(directory.file("policy.jsonc"), policy.to_string()).unwrap();
        let (tls, listen) = (directory.file("tls.crt"), "127.0.0.1:0".parse().unwrap());
        let settings = ServerSettings {
            directory,
            listen,
            status_listen: None,
            tls_names: Vec::new(),
            new_ledger: false,
            passphrase: None,
        };
        let server = Server::open(settings).await.unwrap();
        let target = Target { url: format!("https://{}", server.address().unwrap()), server_name: None };
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(async move {
            let (_reload, reloads) = mpsc::channel(1);
            server.run(async move { drop(stopped.await) }, reloads).await;
        });
        let site = Self { dir, target, _stop: stop };
        fs::create_dir_all(site.file(TOKEN_FILE).parent().unwrap()).unwrap();
        fs::copy(tls, site.file(TLS_CA_FILE)).unwrap();
        fs::write(site.file(TOKEN_FILE), cluster.agent_token()).unwrap();
        site
    }

    fn host(&self) -> HostRoot {
        HostRoot::new(Some(self.dir.path().join("host")))
    }

    fn file(&self, path: &str) -> PathBuf {
        self.host().resolve(Path::new(path))
    }

    async fn renew(&self) -> Result<(), NodeCredentialError> {
        let (target, host) = (self.target.clone(), self.host());
        tokio::task::spawn_blocking(move || renew(&target, &host)).await.unwrap()
    }

    /// What an instance does with a file of the agent; the code of a refusal.
    async fn ask_with(&self, path: &str) -> Result<(), String> {
        let token = fs::read_to_string(self.file(path)).unwrap();
        let (namespace, name, uid) = ("shop".into(), "web-1".into(), "u-1".into());
        let pod = Pod { namespace, name, uid, address: [10, 244, 0, 5].into(), other_address: None };
        let public_key = PrivateKey::generate(Curve::Curve25519).unwrap().public_pem();
        let body = serde_json::to_vec(&Request { public_key, proof: Proof::Node { token, pod } }).unwrap();
        let (url, roots) = (format!("{}{CERTIFICATE_PATH}", self.target.url), self.file(TLS_CA_FILE));
        let asked = tokio::task::spawn_blocking(move || {
            let root = ureq::tls::Certificate::from_pem(&fs::read(roots).unwrap()).unwrap();
            let roots = ureq::tls::RootCerts::new_with_certs(&[root]);
            let provider = rustls::crypto::aws_lc_rs::default_provider().into();
            let tls = ureq::tls::TlsConfig::builder().root_certs(roots).unversioned_rustls_crypto_provider(provider);
            let agent: ureq::Agent =
                ureq::Agent::config_builder().tls_config(tls.build()).http_status_as_error(false).build().into();
            let mut answer = agent.post(url).send(&body[..]).unwrap();
            (answer.status().as_u16(), answer.body_mut().read_to_string().unwrap())
        });
        match asked.await.unwrap() {
            (200, _) => Ok(()),
            (_, text) => Err(serde_json::from_str::<Refusal>(&text).unwrap().code),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_start_by_what_the_agent_left_on_the_node_when_it_is_gone() {
    let cluster = FakeCluster::start("1.36.2");
    cluster.make_node(NODE_UID);
    cluster.add_pod("web-1", "u-1", |_| {});
    let site = Site::new(&cluster).await;
    site.renew().await.unwrap();
    let mode = |path: &str| fs::metadata(site.file(path)).unwrap().mode() & 0o7777;
    assert_eq!(mode(NODE_CREDENTIAL_FILE), 0o600);
    let first = fs::read(site.file(NODE_CREDENTIAL_FILE)).unwrap();

    cluster.revoke_token(&cluster.agent_token());
    cluster.delete_pod("p2");
    assert_eq!(site.ask_with(TOKEN_FILE).await, Err("service_token_expired".to_owned()));
    assert_eq!(site.ask_with(NODE_CREDENTIAL_FILE).await, Ok(()));
    // What is there is worth more than nothing.
    let refused = site.renew().await;
    assert!(matches!(&refused, Err(NodeCredentialError::Refused { code, .. }) if code == "service_token_expired"));
    assert_eq!(fs::read(site.file(NODE_CREDENTIAL_FILE)).unwrap(), first);
    cluster.delete_node();
    assert_eq!(site.ask_with(NODE_CREDENTIAL_FILE).await, Err("node_gone".to_owned()));
}

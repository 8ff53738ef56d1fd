//! Label queries to an API server over TLS. The server is a fake that knows one pod and one namespace, and requires a
//! token or a client certificate.

#![allow(clippy::unwrap_used, reason = "in the helpers of tests too, a panic is the report")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use nebula_cni_contract::labels::{Answer, Question};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use crate::loopback::built;

const TOKEN: &str = "a-token";
const POD: &str =
    r#"{"kind":"Pod","metadata":{"name":"web-0","uid":"u-1","labels":{"app":"web"},"annotations":{}},"spec":{}}"#;
const STATIC: &str = r#"{"metadata":{"uid":"u-9","annotations":{"kubernetes.io/config.mirror":"hash"}}}"#;
const NAMESPACE: &str = r#"{"kind":"Namespace","metadata":{"name":"shop","uid":"n","labels":{"mesh":"on"}}}"#;

/// A fake API server, and the files needed to query it.
struct FakeApiServer {
    dir: tempfile::TempDir,
    address: SocketAddr,
}

impl FakeApiServer {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ca_key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&ca_key).unwrap();
        let issuer = Issuer::new(params, ca_key);
        let sign = |name: &str| {
            let key = KeyPair::generate().unwrap();
            (CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap(), key)
        };
        let (server, server_key) = sign("127.0.0.1");
        let (client, client_key) = sign("node");
        for (name, text) in
            [("ca.crt", ca.pem()), ("client.crt", client.pem()), ("client.key", client_key.serialize_pem())]
        {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let mut roots = RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .unwrap();
        let chain: Vec<CertificateDer<'static>> = vec![server.der().clone()];
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, PrivateKeyDer::try_from(server_key.serialize_der()).unwrap())
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let config = Arc::new(config);
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let config = Arc::clone(&config);
                std::thread::spawn(move || serve(StreamOwned::new(ServerConnection::new(config).unwrap(), socket)));
            }
        });
        Self { dir, address }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn kubeconfig(&self, user: &str) -> PathBuf {
        self.kubeconfig_for(user, &format!("server: https://{}, certificate-authority: ca.crt", self.address))
    }

    fn kubeconfig_for(&self, user: &str, cluster: &str) -> PathBuf {
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts:\n- {{name: c, context: {{cluster: k, user: u}}}}\n\
             clusters:\n- {{name: k, cluster: {{{cluster}}}}}\nusers:\n- {{name: u, user: {{{user}}}}}\n"
        );
        std::fs::write(self.path("kubeconfig"), text).unwrap();
        self.path("kubeconfig")
    }
}

fn serve(mut stream: StreamOwned<ServerConnection, std::net::TcpStream>) {
    let mut request = Vec::new();
    let mut piece = [0; 4096];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(length) => request.extend_from_slice(&piece[..length]),
        }
    }
    let text = String::from_utf8_lossy(&request).to_lowercase();
    let known =
        text.contains(&format!("authorization: bearer {TOKEN}\r\n")) || stream.conn.peer_certificates().is_some();
    let path = text.split(' ').nth(1).unwrap_or_default();
    let (status, body) = match path {
        _ if !known => ("401 Unauthorized", "{}"),
        "/api/v1/namespaces/shop/pods/web-0" => ("200 OK", POD),
        "/api/v1/namespaces/shop/pods/static-0" => ("200 OK", STATIC),
        "/api/v1/namespaces/shop/pods/garbage-0" => ("200 OK", "[1"),
        "/api/v1/namespaces/shop/pods/huge-0" => ("200 OK", ""),
        "/api/v1/namespaces/shop/pods/slow-0" => return std::thread::sleep(Duration::from_secs(20)),
        "/api/v1/namespaces/shop" => ("200 OK", NAMESPACE),
        _ => ("404 Not Found", "{}"),
    };
    let body = if path.ends_with("huge-0") { "x".repeat(5 << 20) } else { body.to_owned() };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(format!("{head}{body}").as_bytes()).and_then(|()| stream.flush());
}

fn ask(kubeconfig: PathBuf, name: &str, uid: &str) -> Answer {
    let question = Question {
        kubeconfig,
        namespace: "shop".to_owned(),
        name: name.to_owned(),
        uid: uid.to_owned(),
        of_pod: true,
        of_namespace: true,
        within_ms: 2000,
    };
    let mut child = Command::new(built("nebula-cni-instance"))
        .arg("--labels")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&serde_json::to_vec(&question).unwrap()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

fn undecided(answer: Answer) -> String {
    match answer {
        Answer::Undecided(why) => why,
        other => panic!("decided: {other:?}"),
    }
}

#[test]
fn labels_come_with_a_token_a_token_file_or_a_client_certificate() {
    let server = FakeApiServer::start();
    std::fs::write(server.path("token"), format!("{TOKEN}\n")).unwrap();
    for user in [
        format!("token: {TOKEN}"),
        "tokenFile: token".to_owned(),
        "client-certificate: client.crt, client-key: client.key".to_owned(),
    ] {
        let Answer::Labels(labels) = ask(server.kubeconfig(&user), "web-0", "u-1") else { panic!("{user}") };
        assert_eq!((labels.pod["app"].as_str(), labels.namespace["mesh"].as_str()), ("web", "on"), "{user}");
    }
}

#[test]
fn a_pod_that_is_gone_or_another_one_is_told_apart() {
    let server = FakeApiServer::start();
    let user = format!("token: {TOKEN}");
    assert_eq!(ask(server.kubeconfig(&user), "web-9", "u-1"), Answer::NoSuchPod);
    assert_eq!(ask(server.kubeconfig(&user), "web-0", "u-2"), Answer::OtherPod { uid: "u-1".to_owned() });
    assert!(matches!(ask(server.kubeconfig(&user), "static-0", "hash"), Answer::Labels(_)), "a static pod's mirror");
    assert!(matches!(ask(server.kubeconfig(&user), "web-0", ""), Answer::Labels(_)), "an old runtime names no uid");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures a process")]
fn whatever_keeps_the_answer_away_is_said_within_the_time_and_names_no_secret() {
    let server = FakeApiServer::start();
    let good = format!("token: {TOKEN}");
    let elsewhere = FakeApiServer::start();
    let stranger = format!("server: https://{}, certificate-authority: ca.crt", elsewhere.address);
    let began = std::time::Instant::now();
    for (user, cluster, pod, expected) in [
        ("token: wrong", None, "web-0", "401"),
        ("username: x", None, "web-0", "neither token nor client certificate"),
        (good.as_str(), Some("server: https://127.0.0.1:1, certificate-authority: ca.crt"), "web-0", "cannot ask"),
        (&good, Some("server: http://127.0.0.1:1, certificate-authority: ca.crt"), "web-0", "https"),
        (&good, Some("server: https://127.0.0.1:1, insecure-skip-tls-verify: true"), "web-0", "insecure-skip-tls"),
        (&good, Some("server: https://127.0.0.1:1"), "web-0", "certificate-authority"),
        (&good, Some(stranger.as_str()), "web-0", "cannot ask"),
        (&good, None, "garbage-0", "no object"),
        (&good, None, "huge-0", "cannot read the answer"),
        (&good, None, "slow-0", "cannot ask"),
    ] {
        let kubeconfig = match cluster {
            Some(cluster) => server.kubeconfig_for(user, cluster),
            None => server.kubeconfig(user),
        };
        let why = undecided(ask(kubeconfig, pod, "u-1"));
        assert!(why.contains(expected), "{pod} {cluster:?}: {why}");
        assert!(!why.contains(TOKEN), "{why}");
    }
    assert!(undecided(ask("/nonexistent/kubeconfig".into(), "web-0", "")).contains("/nonexistent/kubeconfig"));
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
}

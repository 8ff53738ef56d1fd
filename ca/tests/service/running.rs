//! A CA in a temporary directory, its running process, and a client that pins its TLS certificate.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

use nebula_cert::{
    CaPool, Certificate, Curve, PrivateKey, VerifiedCertificate,
    issuance::{ASKER_HEADER, NODE_CREDENTIAL_PATH, NodeCredential, Pod, Proof, Release, Released, Reply, Request},
    revocation::{self, REVOKE_PATH, Revocation, TOKEN_HEADER},
};
use serde_json::Value;
use tempfile::TempDir;
use ureq::tls::{RootCerts, TlsConfig};

/// A directory created by `nebula-ca init`.
pub(crate) struct Ca {
    directory: TempDir,
}

impl Ca {
    pub(crate) fn init() -> Self {
        Self::init_with(&[])
    }

    pub(crate) fn init_with(options: &[&str]) -> Self {
        let ca = Self { directory: tempfile::tempdir().unwrap() };
        let made = ca.run("init", options);
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        ca
    }

    /// The path of a directory that does not exist yet.
    pub(crate) fn empty() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    /// Another directory with the same files, as a replica has them.
    #[cfg(feature = "postgres")]
    pub(crate) fn copy_of(other: &Self) -> Self {
        let ca = Self::empty();
        let copied = Command::new("cp").arg("-a").arg(other.file("")).arg(ca.file("")).status().unwrap();
        assert!(copied.success());
        ca
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join("ca").join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap()
    }

    /// Runs one command on this directory, for example `token create`.
    pub(crate) fn run(&self, verb: &str, options: &[&str]) -> Output {
        Command::new(PROGRAM)
            .args(verb.split(' '))
            .arg("--dir")
            .arg(self.file(""))
            .args(options)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Standard output of a command that must succeed.
    pub(crate) fn output(&self, verb: &str, options: &[&str]) -> String {
        let output = self.run(verb, options);
        assert!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// Standard error of a command that must fail.
    pub(crate) fn failure(&self, verb: &str, options: &[&str]) -> String {
        let output = self.run(verb, options);
        assert_eq!(output.status.code(), Some(1), "{verb} succeeded");
        String::from_utf8(output.stderr).unwrap()
    }

    pub(crate) fn json(&self, verb: &str, options: &[&str]) -> Value {
        let options = [options, &["--json"]].concat();
        serde_json::from_str(&self.output(verb, &options)).unwrap()
    }

    pub(crate) fn token(&self, name: &str, network: &str, options: &[&str]) -> String {
        let options = [&["--name", name, "--network", network], options].concat();
        self.output("token create", &options).trim().to_owned()
    }

    /// Standard error of a service that must not start.
    pub(crate) fn refused_start(&self) -> String {
        let mut line = Command::new("timeout");
        line.args(["20", PROGRAM, "serve", "--listen", "127.0.0.1:0", "--dir"]).arg(self.file(""));
        let output = line.env_remove("RUST_LOG").stdin(Stdio::null()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "it started");
        String::from_utf8(output.stderr).unwrap()
    }

    /// What the service warns of before it listens.
    pub(crate) fn warnings(&self) -> String {
        self.serve().early.clone()
    }

    pub(crate) fn serve(&self) -> Service {
        self.serve_with(&[])
    }

    /// Starts the service with environment variables.
    pub(crate) fn serve_with(&self, variables: &[(&str, &Path)]) -> Service {
        self.spawn(variables, &[], &[])
    }

    pub(crate) fn serve_with_options(&self, options: &[&str]) -> Service {
        self.spawn(&[], &[], options)
    }

    /// Starts the service as the last argument of another program.
    pub(crate) fn serve_under(&self, before: &[&str]) -> Service {
        self.spawn(&[], before, &[])
    }

    fn spawn(&self, variables: &[(&str, &Path)], before: &[&str], options: &[&str]) -> Service {
        let line = [before, &[PROGRAM]].concat();
        let mut child = Command::new(line[0])
            .args(&line[1..])
            .args(["serve", "--listen", "127.0.0.1:0", "--dir"])
            .arg(self.file(""))
            .args(options)
            .env_remove("RUST_LOG")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let (sender, lines) = mpsc::channel();
        // Keeps reading after the address is known, so that the service never blocks on a full pipe.
        thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut log = Vec::new();
        let (address, status) = loop {
            let line = lines.recv_timeout(Duration::from_secs(30)).unwrap_or_else(|_| panic!("not started: {log:?}"));
            if let Some((_, tail)) = line.split_once("address=") {
                let status = line.split_once("status=\"").map(|(_, tail)| tail.split('"').next().unwrap().to_owned());
                break (tail.split(' ').next().unwrap().parse().unwrap(), status);
            }
            log.push(line);
        };
        Service {
            child,
            address,
            status,
            early: log.into_iter().filter(|line: &String| line.contains(" WARN ")).collect(),
            caller: Caller::new(address, &self.text("tls.crt")),
            lines: Mutex::new(lines),
        }
    }
}

/// A running `nebula-ca serve`; killed when dropped.
pub(crate) struct Service {
    child: Child,
    pub(crate) address: SocketAddr,
    /// Address of the status page, if it is served.
    pub(crate) status: Option<String>,
    pub(crate) caller: Caller,
    /// Warnings before that.
    early: String,
    lines: Mutex<mpsc::Receiver<String>>,
}

impl Service {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The page that it shows, in plain HTTP.
    pub(crate) fn page(&self) -> String {
        ureq::get(self.status.as_ref().unwrap()).call().unwrap().body_mut().read_to_string().unwrap()
    }

    /// Sends SIGKILL, so that the service cannot clean up.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Sends SIGTERM; the exit status must be 0. Returns everything that was logged since the start.
    pub(crate) fn stop(mut self) -> String {
        let killed = Command::new("kill").arg(self.pid().to_string()).status().unwrap();
        assert!(killed.success());
        assert!(self.child.wait().unwrap().success());
        self.lines.lock().unwrap().iter().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends HTTPS requests to a service and trusts only its certificate.
#[derive(Clone)]
pub(crate) struct Caller {
    agent: ureq::Agent,
    url: String,
}

impl Caller {
    pub(crate) fn new(address: SocketAddr, certificate: &str) -> Self {
        let root = ureq::tls::Certificate::from_pem(certificate.as_bytes()).unwrap();
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::new_with_certs(&[root]))
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .build();
        let agent = ureq::Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(30)))
            .build()
            .into();
        Self { agent, url: format!("https://{address}") }
    }

    /// Returns status, ETag and body.
    pub(crate) fn get(&self, path: &str, known: &str) -> (u16, String, String) {
        self.get_as(path, known, "")
    }

    /// The same, of a caller who says who it is.
    pub(crate) fn get_as(&self, path: &str, known: &str, asker: &str) -> (u16, String, String) {
        let request = self.agent.get(format!("{}{path}", self.url)).header("if-none-match", known);
        let request = if asker.is_empty() { request } else { request.header(ASKER_HEADER, asker) };
        let mut reply = request.call().unwrap();
        let tag = reply.headers().get("etag").map_or("", |tag| tag.to_str().unwrap()).to_owned();
        (reply.status().as_u16(), tag, reply.body_mut().read_to_string().unwrap())
    }

    /// Returns status and body.
    pub(crate) fn get_with_token(&self, path: &str, token: &str) -> (u16, String) {
        let request = self.agent.get(format!("{}{path}", self.url)).header("authorization", format!("Bearer {token}"));
        let mut reply = request.call().unwrap();
        (reply.status().as_u16(), reply.body_mut().read_to_string().unwrap())
    }

    /// Returns status and body.
    pub(crate) fn post(&self, path: &str, body: &[u8]) -> Result<(u16, String), ureq::Error> {
        let mut reply = self.agent.post(format!("{}{path}", self.url)).send(body)?;
        let mut text = String::new();
        reply.body_mut().as_reader().read_to_string(&mut text)?;
        Ok((reply.status().as_u16(), text))
    }

    /// Returns status and body of a request with the token of somebody who revokes; an empty one is left out.
    pub(crate) fn post_with(&self, path: &str, token: &str, body: &[u8]) -> (u16, String) {
        let request = self.agent.post(format!("{}{path}", self.url));
        let request = if token.is_empty() { request } else { request.header(TOKEN_HEADER, token) };
        let mut reply = request.send(body).unwrap();
        (reply.status().as_u16(), reply.body_mut().read_to_string().unwrap())
    }

    /// Revokes certificates.
    pub(crate) fn revoke(&self, token: &str, request: &revocation::Request) -> Result<Revocation, (u16, String)> {
        let (status, text) = self.post_with(REVOKE_PATH, token, &serde_json::to_vec(request).unwrap());
        match status {
            200 => Ok(serde_json::from_str(&text).unwrap()),
            _ => Err((status, code(&text))),
        }
    }

    /// The credential that the agent with this token gets for its node.
    pub(crate) fn node_credential(&self, token: &str) -> Result<NodeCredential, (u16, String)> {
        let url = format!("{}{NODE_CREDENTIAL_PATH}", self.url);
        let mut reply = self.agent.post(url).header("authorization", format!("Bearer {token}")).send_empty().unwrap();
        let text = reply.body_mut().read_to_string().unwrap();
        match reply.status().as_u16() {
            200 => Ok(serde_json::from_str(&text).unwrap()),
            status => Err((status, code(&text))),
        }
    }

    pub(crate) fn request(&self, request: &Request) -> Result<Reply, (u16, String)> {
        let body = serde_json::to_vec(request).unwrap();
        let (status, text) = self.post(nebula_cert::issuance::CERTIFICATE_PATH, &body).unwrap();
        match status {
            200 => Ok(serde_json::from_str(&text).unwrap()),
            _ => Err((status, code(&text))),
        }
    }

    pub(crate) fn enrol(&self, token: &str, key: &PrivateKey) -> Result<Reply, (u16, String)> {
        self.request(&Request { public_key: key.public_pem(), proof: Proof::Token { token: token.into() } })
    }

    pub(crate) fn pod(&self, token: &str, pod: Pod, key: &PrivateKey) -> Result<Reply, (u16, String)> {
        self.request(&Request { public_key: key.public_pem(), proof: Proof::Node { token: token.into(), pod } })
    }
}

impl Caller {
    /// Releases certificates; returns their fingerprints.
    pub(crate) fn release(&self, proof: Proof) -> Result<Vec<String>, (u16, String)> {
        let body = serde_json::to_vec(&Release { proof }).unwrap();
        let (status, text) = self.post(nebula_cert::issuance::RELEASE_PATH, &body).unwrap();
        match status {
            200 => Ok(serde_json::from_str::<Released>(&text).unwrap().fingerprints),
            _ => Err((status, code(&text))),
        }
    }
}

/// The code of a refusal, after checking that the body is one.
pub(crate) fn code(body: &str) -> String {
    let refusal: nebula_cert::issuance::Refusal =
        serde_json::from_str(body).unwrap_or_else(|_| panic!("not a refusal: {body:?}"));
    assert!(!refusal.message.is_empty() && !refusal.message.contains('\n'), "{refusal:?}");
    refusal.code
}

pub(crate) fn refused(status: u16, code: &str) -> Result<String, (u16, String)> {
    Err((status, code.to_owned()))
}

/// The certificate of a reply, verified as a peer does it.
pub(crate) fn verified(reply: &Reply) -> VerifiedCertificate {
    let pool = CaPool::from_pem(reply.ca.as_bytes()).unwrap();
    let certificate = Certificate::from_pem(reply.certificate.as_bytes()).unwrap();
    pool.verify(certificate, nebula_ca::now()).unwrap()
}

pub(crate) fn key() -> PrivateKey {
    PrivateKey::generate(Curve::Curve25519).unwrap()
}

pub(crate) fn pod(number: u16) -> Pod {
    let [high, low] = number.to_be_bytes();
    Pod {
        namespace: "shop".into(),
        name: format!("web-{number}"),
        uid: format!("00000000-0000-0000-0000-{number:012}"),
        address: [10, 244, high, low].into(),
        other_address: None,
    }
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_nebula-ca");

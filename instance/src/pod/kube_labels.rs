//! Fetches the labels of a pod and its namespace from a Kubernetes API server, as configured by a kubeconfig. Runs as a
//! separate process next to the CNI plugin, which stays small and starts fast without it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use nebula_cni_contract::labels::{Answer, Labels, Question};
use serde::Deserialize;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, TlsProvider};
use zeroize::Zeroizing;

/// Answers the plugin's question.
#[must_use]
pub fn answer(question: &Question) -> Answer {
    match Server::from_kubeconfig(&question.kubeconfig).and_then(|server| server.answer(question)) {
        Ok(answer) => answer,
        Err(error) => Answer::Undecided(error.to_string()),
    }
}

/// Why the labels are unknown.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("kubeconfig {}: {source}", path.display())]
    Syntax { path: PathBuf, source: Cause },
    #[error("kubeconfig {} is empty", .0.display())]
    Empty(PathBuf),
    #[error("kubeconfig {}: {cause}", path.display())]
    KubeConfig { path: PathBuf, cause: String },
    #[error("kubeconfig: {what}: {source}")]
    Credential { what: String, source: Cause },
    #[error("kubeconfig: {0}")]
    Credentials(String),
    #[error("cannot ask {url}: {source}")]
    Ask { url: String, source: Box<ureq::Error> },
    #[error("cannot read the answer of {url}: {source}")]
    Answer { url: String, source: Box<ureq::Error> },
    #[error("{url} answers with status {status}")]
    Status { url: String, status: u16 },
    #[error("the answer of {url} is no object: {source}")]
    NotAnObject { url: String, source: serde_json::Error },
    #[error("the API server knows no namespace {0:?}")]
    NoNamespace(String),
}

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// An API server and the credentials for it.
struct Server {
    url: String,
    agent_tls: TlsConfig,
    token: Option<Zeroizing<String>>,
}

impl Server {
    fn from_kubeconfig(path: &Path) -> Result<Self, Error> {
        let refuse = |cause: String| Error::KubeConfig { path: path.to_owned(), cause };
        let text = read(path)?;
        if text.trim().is_empty() {
            return Err(Error::Empty(path.to_owned()));
        }
        // An error shows no part of the file: it has secrets.
        let options = serde_saphyr::options! { strict_booleans: true, with_snippet: false };
        let config: KubeConfig = serde_saphyr::from_str_with_options(&text, options)
            .map_err(|error| Error::Syntax { path: path.to_owned(), source: error.into() })?;
        let named = |what: &str, name: &str| refuse(format!("no {what} {name:?}"));
        let name = &config.current_context;
        let context = find(&config.contexts, name).ok_or_else(|| named("context", name))?.context.clone();
        let cluster =
            &find(&config.clusters, &context.cluster).ok_or_else(|| named("cluster", &context.cluster))?.cluster;
        let user = &find(&config.users, &context.user).ok_or_else(|| named("user", &context.user))?.user;
        if cluster.skip_verify {
            return Err(refuse("insecure-skip-tls-verify: whoever answers could enrol pods".to_owned()));
        }
        if !cluster.server.starts_with("https://") {
            return Err(refuse(format!("server {:?} is not https://HOST:PORT", cluster.server)));
        }
        let dir = path.parent().unwrap_or_else(|| Path::new("/"));
        let roots = pem(dir, "certificate-authority", &cluster.ca_file, &cluster.ca_data)?
            .ok_or_else(|| refuse("the cluster has no certificate-authority".to_owned()))?;
        let chain = pem(dir, "client-certificate", &user.certificate_file, &user.certificate_data)?;
        let key = pem(dir, "client-key", &user.key_file, &user.key_data)?;
        let token = match (&user.token, &user.token_file) {
            (Some(token), _) if !token.is_empty() => Some(Zeroizing::new(token.clone())),
            (_, Some(path)) => Some(Zeroizing::new(read(&dir.join(path))?.trim().to_owned())),
            _ => None,
        };
        if token.is_none() && chain.is_none() {
            return Err(refuse(format!("user {:?} has neither token nor client certificate", context.user)));
        }
        let tls = TlsConfig::builder()
            .provider(TlsProvider::Rustls)
            .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
            .root_certs(RootCerts::Specific(Arc::new(certificates("certificate-authority", &roots)?)))
            .client_cert(client_certificate(chain.as_deref(), key.as_deref().map(String::as_str))?)
            .build();
        Ok(Self { url: cluster.server.trim_end_matches('/').to_owned(), agent_tls: tls, token })
    }

    fn answer(&self, question: &Question) -> Result<Answer, Error> {
        let Question { namespace, name, .. } = question;
        let agent = self.agent(Duration::from_millis(question.within_ms));
        let mut labels = Labels::default();
        if question.of_pod {
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
            let Some(pod) = self.get(&agent, &path)? else { return Ok(Answer::NoSuchPod) };
            let uid = &question.uid;
            let mirrored = MIRROR_ANNOTATIONS.iter().any(|key| pod.metadata.annotations.get(*key) == Some(uid));
            // On the node a static pod has another UID than its mirror pod in the API, which names it in an annotation.
            if !uid.is_empty() && pod.metadata.uid != *uid && !mirrored {
                return Ok(Answer::OtherPod { uid: pod.metadata.uid });
            }
            labels.pod = pod.metadata.labels;
        }
        if question.of_namespace {
            let found = self.get(&agent, &format!("/api/v1/namespaces/{namespace}"))?;
            labels.namespace = found.ok_or_else(|| Error::NoNamespace(namespace.clone()))?.metadata.labels;
        }
        Ok(Answer::Labels(labels))
    }

    /// Fetches an object; `None` if it does not exist.
    fn get(&self, agent: &ureq::Agent, path: &str) -> Result<Option<Object>, Error> {
        let url = format!("{}{path}", self.url);
        let mut request = agent.get(&url).header("Accept", "application/json");
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {}", token.as_str()));
        }
        let mut response =
            request.call().map_err(|source| Error::Ask { url: url.clone(), source: Box::new(source) })?;
        match response.status().as_u16() {
            200 => {}
            404 => return Ok(None),
            status => return Err(Error::Status { url, status }),
        }
        let body = response.body_mut().with_config().limit(MAX_OBJECT_BYTES).read_to_vec();
        let body = body.map_err(|source| Error::Answer { url: url.clone(), source: Box::new(source) })?;
        serde_json::from_slice(&body).map(Some).map_err(|source| Error::NotAnObject { url, source })
    }

    fn agent(&self, within: Duration) -> ureq::Agent {
        let config = ureq::Agent::config_builder()
            .tls_config(self.agent_tls.clone())
            .https_only(true)
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .user_agent(concat!("nebula-cni-plugin/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(within))
            .build();
        ureq::Agent::new_with_config(config)
    }
}

#[derive(Deserialize)]
struct Object {
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default)]
    uid: String,
    #[serde(default)]
    labels: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct KubeConfig {
    current_context: String,
    contexts: Vec<NamedContext>,
    clusters: Vec<NamedCluster>,
    users: Vec<NamedUser>,
}

#[derive(Deserialize)]
struct NamedContext {
    name: String,
    context: Context,
}

#[derive(Deserialize, Clone)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Deserialize)]
struct NamedCluster {
    name: String,
    cluster: Cluster,
}

#[derive(Deserialize)]
struct Cluster {
    server: String,
    #[serde(rename = "certificate-authority")]
    ca_file: Option<PathBuf>,
    #[serde(rename = "certificate-authority-data")]
    ca_data: Option<String>,
    #[serde(rename = "insecure-skip-tls-verify", default)]
    skip_verify: bool,
}

#[derive(Deserialize)]
struct NamedUser {
    name: String,
    user: User,
}

#[derive(Deserialize)]
struct User {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    #[serde(rename = "client-certificate")]
    certificate_file: Option<PathBuf>,
    #[serde(rename = "client-certificate-data")]
    certificate_data: Option<String>,
    #[serde(rename = "client-key")]
    key_file: Option<PathBuf>,
    #[serde(rename = "client-key-data")]
    key_data: Option<String>,
}

trait Named {
    fn name(&self) -> &str;
}

macro_rules! named {
    ($($kind:ty),*) => { $(impl Named for $kind { fn name(&self) -> &str { &self.name } })* };
}
named!(NamedContext, NamedCluster, NamedUser);

fn find<'a, T: Named>(list: &'a [T], name: &str) -> Option<&'a T> {
    list.iter().find(|item| item.name() == name)
}

/// The PEM text of a setting that names a file or holds the text in base64.
fn pem(
    dir: &Path,
    what: &str,
    file: &Option<PathBuf>,
    data: &Option<String>,
) -> Result<Option<Zeroizing<String>>, Error> {
    if let Some(data) = data {
        let bytes = STANDARD.decode(data.trim()).map_err(|error| credential(&format!("{what}-data"), error))?;
        let text = String::from_utf8(bytes).map_err(|_| Error::Credentials(format!("{what}-data is not PEM")))?;
        return Ok(Some(Zeroizing::new(text)));
    }
    file.as_ref().map(|file| read(&dir.join(file))).transpose()
}

fn credential(what: &str, error: impl Into<Cause>) -> Error {
    Error::Credential { what: what.to_owned(), source: error.into() }
}

fn certificates(what: &str, text: &str) -> Result<Vec<Certificate<'static>>, Error> {
    let mut found = Vec::new();
    for item in ureq::tls::parse_pem(text.as_bytes()) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| credential(what, error))? {
            found.push(certificate);
        }
    }
    if found.is_empty() { Err(Error::Credentials(format!("{what} holds no certificate"))) } else { Ok(found) }
}

fn client_certificate(chain: Option<&String>, key: Option<&str>) -> Result<Option<ClientCert>, Error> {
    match (chain, key) {
        (None, _) => Ok(None),
        (Some(_), None) => Err(Error::Credentials("client-certificate without client-key".to_owned())),
        (Some(chain), Some(key)) => {
            let chain = certificates("client-certificate", chain)?;
            let key = PrivateKey::from_pem(key.as_bytes()).map_err(|error| credential("client-key", error))?;
            Ok(Some(ClientCert::new_with_certs(&chain, key)))
        }
    }
}

fn read(path: &Path) -> Result<Zeroizing<String>, Error> {
    let refuse = |source: std::io::Error| Error::Read { path: path.to_owned(), source };
    if fs::metadata(path).map_err(refuse)?.len() > MAX_FILE_BYTES {
        return Err(refuse(std::io::Error::other("longer than 1 MiB")));
    }
    fs::File::open(path).and_then(|file| nebula_cert::text::read(file, 0)).map_err(refuse)
}

const MIRROR_ANNOTATIONS: [&str; 2] = ["kubernetes.io/config.mirror", "kubernetes.io/config.hash"];
const MAX_FILE_BYTES: u64 = 1 << 20;
// etcd accepts objects of up to 1.5 MiB.
const MAX_OBJECT_BYTES: u64 = 4 << 20;

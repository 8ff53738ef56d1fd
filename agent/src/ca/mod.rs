//! The CA service as the node reaches it: its address, which becomes part of the chain entry, and whether it answers.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use nebula_cert::issuance::{MAX_REPLY, TRUST_PATH, Trust};
use nebula_cert::{Certificate, client};
use nebula_cni_contract::agent_api::TrustedCa;
use nebula_cni_contract::launch::request_url;
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::api::{self, ApiError};
use crate::config::{Ca, TLS_CA_FILE};
use crate::durable;
use crate::node::Node;
use crate::readiness::{Part, Standing};

/// How nodes reach the CA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// `https://host:port`; the host of a Service is its ClusterIP, since nodes do not resolve names of Services.
    pub url: String,
    /// The name in its TLS certificate, if not the URL's host.
    pub server_name: Option<String>,
}

/// Why the CA cannot be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaError {
    /// The Service cannot be read.
    #[error("cannot read Service {namespace}/{name}: {source}")]
    Service {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Why.
        source: ApiError,
    },
    /// The Service has no address that nodes could use.
    #[error("Service {namespace}/{name} has no ClusterIP")]
    Headless {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// The TLS roots cannot be used.
    #[error("cannot use the TLS roots {path}: {source}")]
    Roots {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It does not answer.
    #[error("cannot reach the CA at {url}: {source}")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        source: Box<ureq::Error>,
    },
    /// It answers that it cannot issue certificates.
    #[error("the CA at {url} is not ready: {answer}")]
    NotReady {
        /// Where.
        url: String,
        /// What it said.
        answer: String,
    },
}

impl Target {
    /// The address of a Service, given as the API server's JSON.
    ///
    /// # Errors
    /// Returns an error if it has no ClusterIP.
    pub fn of_service(service: &Value, namespace: &str, name: &str, port: u16) -> Result<Self, CaError> {
        let address: IpAddr = service["spec"]["clusterIP"]
            .as_str()
            .and_then(|address| address.parse().ok())
            .ok_or_else(|| CaError::Headless { namespace: namespace.to_owned(), name: name.to_owned() })?;
        let url = format!("https://{}", SocketAddr::new(address, port));
        Ok(Self { url, server_name: Some(format!("{name}.{namespace}.svc")) })
    }

    /// Asks whether it can issue certificates; trusts only the TLS roots in `roots`. Blocks.
    ///
    /// # Errors
    /// Returns why not.
    pub fn probe(&self, roots: &Path) -> Result<(), CaError> {
        let agent = self.agent(roots)?;
        let unreachable = |source| CaError::Unreachable { url: self.url.clone(), source: Box::new(source) };
        let mut answer = agent.get(self.request_url("/readyz")).call().map_err(unreachable)?;
        if answer.status().is_success() {
            return Ok(());
        }
        let body = answer.body_mut().with_config().limit(MAX_ANSWER).read_to_string().unwrap_or_default();
        let first = body.lines().next().unwrap_or_default().chars().filter(|c| !c.is_control()).take(200);
        let answer = format!("{} {}", answer.status().as_u16(), first.collect::<String>());
        Err(CaError::NotReady { url: self.url.clone(), answer })
    }

    /// Which CAs the CA says are trusted, and where the lighthouses are. Blocks.
    ///
    /// # Errors
    /// Returns why it does not say.
    pub fn trust(&self, roots: &Path) -> Result<Trust, CaError> {
        let agent = self.agent(roots)?;
        let unreachable = |source| CaError::Unreachable { url: self.url.clone(), source: Box::new(source) };
        let mut answer = agent.get(self.request_url(TRUST_PATH)).call().map_err(unreachable)?;
        let body = answer.body_mut().with_config().limit(MAX_REPLY as u64).read_to_vec().map_err(unreachable)?;
        serde_json::from_slice(&body).map_err(|error| CaError::NotReady {
            url: self.url.clone(),
            answer: format!("{} and no trust: {error}", answer.status().as_u16()),
        })
    }

    /// The URL of a request for `path`.
    pub(crate) fn request_url(&self, path: &str) -> String {
        request_url(&self.url, self.server_name.as_deref(), path)
    }

    /// An HTTPS client that trusts only the TLS roots in `path`.
    pub(crate) fn agent(&self, path: &Path) -> Result<ureq::Agent, CaError> {
        let unusable = |source| CaError::Roots { path: path.to_owned(), source };
        let pem = durable::read_bounded(path, MAX_ROOTS).map_err(unusable)?;
        let roots = client::roots(&pem).map_err(|error| unusable(io::Error::new(io::ErrorKind::InvalidData, error)))?;
        let tls = client::tls(roots, Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let config = client::config(tls, concat!("nebula-cni-agent/", env!("CARGO_PKG_VERSION")));
        let config = config.timeout_global(Some(PROBE_TIMEOUT)).build();
        Ok(client::agent(config, self.server_name.is_some().then_some(&self.url)))
    }
}

/// The CAs of a PEM bundle up to the first one that cannot be read, the first to expire above.
pub(crate) fn trusted(bundle: &str) -> Vec<TrustedCa> {
    let (certificates, _) = Certificate::readable_from_pem(bundle.as_bytes());
    let ca = |certificate: &Certificate| TrustedCa {
        name: certificate.name().to_owned(),
        fingerprint: certificate.fingerprint().to_string(),
        not_after: certificate.not_after(),
    };
    let mut cas: Vec<_> = certificates.iter().take(MOST_CAS).map(ca).collect();
    cas.sort_by_key(|ca| ca.not_after);
    cas
}

/// Learns the CA's address: at once if it is configured, else from the Service, again and again in case it is replaced.
pub async fn follow(node: &Node, target: watch::Sender<Option<Target>>) {
    let publish = |found: Target| {
        target.send_if_modified(|known| {
            let is_new = known.as_ref() != Some(&found);
            *known = Some(found);
            is_new
        });
    };
    let (namespace, name, port) = match node.config.ca.clone() {
        Ca::Url { url, server_name } => return publish(Target { url, server_name }),
        Ca::Service { namespace, name, port } => (namespace, name, port),
    };
    loop {
        let pause = match of_service(&namespace, &name, port).await {
            Ok(found) => {
                publish(found);
                LOOK_AGAIN
            }
            Err(error) => {
                if target.borrow().is_none() {
                    let standing = Standing::bad(error.to_string()).advice(match error {
                        CaError::Headless { .. } => "give the Service a ClusterIP: nodes reach the CA through it",
                        _ => "is the CA installed, and may the agent's account read its Service?",
                    });
                    node.readiness.set(Part::Ca, standing);
                }
                RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn of_service(namespace: &str, name: &str, port: u16) -> Result<Target, CaError> {
    let failed = |source| CaError::Service { namespace: namespace.to_owned(), name: name.to_owned(), source };
    let client = api::open(None).await.map_err(failed)?;
    let path = format!("/api/v1/namespaces/{namespace}/services/{name}");
    let service = api::ask(&client, Method::GET, &path, None).await.map_err(failed)?;
    Target::of_service(&service, namespace, name, port)
}

/// Asks the CA from time to time. One that has answered within the last minutes counts as there: instances renew long
/// before they must, and a short absence must not empty the node.
pub async fn watch_health(node: &Node, mut target: watch::Receiver<Option<Target>>) {
    let readiness = &node.readiness;
    let roots = node.config.host_root.resolve(Path::new(TLS_CA_FILE));
    let mut answered: Option<Instant> = None;
    loop {
        let Some(now) = target.borrow_and_update().clone() else {
            if target.changed().await.is_err() {
                return;
            }
            continue;
        };
        if answered.is_none() && !readiness.is_good(Part::Credentials) {
            readiness.set(Part::Ca, Standing::bad("waits for the TLS roots"));
            tokio::time::sleep(SOON).await;
            continue;
        }
        let (asked, path, url) = (now.clone(), roots.clone(), now.url);
        let probed = tokio::task::spawn_blocking(move || asked.probe(&path)).await;
        let pause = match probed {
            Ok(Ok(())) => {
                answered = Some(Instant::now());
                readiness.set(Part::Ca, Standing::good(format!("{url} answers")));
                ASK_EVERY
            }
            Ok(Err(error)) => {
                if answered.is_none_or(|at| at.elapsed() > STILL_GOOD) {
                    readiness.set(Part::Ca, Standing::bad(explain(&error)).advice(advice(&error)));
                } else {
                    tracing::warn!(%error, "the CA does not answer");
                }
                RETRY
            }
            Err(_) => RETRY,
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A configured address never changes: its sender is gone.
            Ok(()) = target.changed() => {}
        }
    }
}

fn explain(error: &CaError) -> String {
    let mut text = error.to_string();
    if let CaError::Unreachable { source, .. } = error
        && let ureq::Error::Timeout(_) = **source
    {
        text.push_str(" (no answer)");
    }
    text
}

fn advice(error: &CaError) -> &'static str {
    match error {
        CaError::Unreachable { source, .. } if is_about_tls(source) => {
            "its certificate must be for the name that is asked for, and tls.crt of the ConfigMap nebula-trust its root"
        }
        CaError::Unreachable { .. } => {
            "is nebula-ca running, and does a network policy or firewall keep nodes from it?"
        }
        CaError::Roots { .. } => "the CA writes the ConfigMap nebula-trust when it starts",
        CaError::NotReady { .. } => "look at the log of nebula-ca",
        CaError::Service { .. } | CaError::Headless { .. } => "is the CA installed?",
    }
}

/// An invalid certificate arrives as an error of the stream.
fn is_about_tls(error: &ureq::Error) -> bool {
    match error {
        ureq::Error::Rustls(_) | ureq::Error::Tls(_) => true,
        ureq::Error::Io(error) => error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()),
        _ => false,
    }
}

const ASK_EVERY: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(3);
const SOON: Duration = Duration::from_millis(200);
const LOOK_AGAIN: Duration = Duration::from_secs(60);
const STILL_GOOD: Duration = Duration::from_secs(5 * 60);
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_ANSWER: u64 = 4 << 10;
const MAX_ROOTS: u64 = 256 << 10;
/// More are not shown.
const MOST_CAS: usize = 100;

#[cfg(test)]
mod tests {
    use nebula_cert::{Curve, SigningKey, Template};

    use super::*;

    fn service(address: &str) -> Value {
        serde_json::json!({"spec": {"clusterIP": address}})
    }

    #[test]
    fn a_service_is_reached_by_its_address_and_checked_by_its_name() {
        let target = Target::of_service(&service("10.96.0.7"), "nebula-system", "nebula-ca", 8443).unwrap();
        assert_eq!(target.url, "https://10.96.0.7:8443");
        assert_eq!(target.request_url(""), "https://nebula-ca.nebula-system.svc:8443");
        assert_eq!(Target::of_service(&service("fd00::7"), "a", "b", 1).unwrap().url, "https://[fd00::7]:1");
        for headless in ["None", ""] {
            assert!(Target::of_service(&service(headless), "a", "b", 1).is_err());
        }
    }

    #[test]
    fn the_ca_that_expires_first_is_above_and_the_bundle_ends_with_what_cannot_be_read() {
        let ca = |name: &str, not_after| {
            let key = SigningKey::generate(Curve::Curve25519).unwrap();
            Template::new(name, 0..=not_after).self_sign(&key).unwrap()
        };
        let (old, new) = (ca("old", 1_000), ca("new", 2_000));
        let broken = "-----BEGIN NEBULA CERTIFICATE V2-----\nAAAA\n-----END NEBULA CERTIFICATE V2-----\n";
        let cas = trusted(&[&new.to_pem(), &old.to_pem(), broken, &new.to_pem()].concat());
        let shown: Vec<_> = cas.iter().map(|ca| (ca.name.as_str(), ca.not_after)).collect();
        assert_eq!(shown, [("old", 1_000), ("new", 2_000)]);
        assert_eq!(cas[0].fingerprint, old.fingerprint().to_string());
        assert_eq!(trusted("no PEM"), []);
    }

    #[test]
    fn without_usable_roots_nothing_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        let roots = dir.path().join("tls.crt");
        let target = Target { url: "https://127.0.0.1:1".into(), server_name: None };
        for text in [None, Some(""), Some("-----BEGIN CERTIFICATE-----\n")] {
            if let Some(text) = text {
                std::fs::write(&roots, text).unwrap();
            }
            assert!(matches!(target.probe(&roots), Err(CaError::Roots { .. })), "{text:?}");
        }
        std::fs::write(&roots, "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n").unwrap();
        let error = target.probe(&roots).unwrap_err();
        assert!(error.to_string().contains("https://127.0.0.1:1"), "{error}");
    }
}

//! The API server, asked through the `kube` client with the user's credentials of every kind.

use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
pub(crate) use nebula_cni_contract::agent_api::is_name;
use serde_json::Value;

use crate::cli::Place;

/// A cluster, and what is looked at there.
pub struct Cluster {
    client: Client,
    /// The namespace; `None`: all.
    pub namespace: Option<String>,
}

/// Why the API server does not do what it is asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// There are no usable credentials.
    #[error("no credentials for an API server: {0}")]
    Credentials(String),
    /// It cannot be reached.
    #[error("{what}: {why}")]
    Unreachable {
        /// What was asked.
        what: String,
        /// Why.
        why: String,
    },
    /// It answers with an error.
    #[error("{what}: the API server answers {status}: {message}{}", if hint.is_empty() { String::new() } else { format!("\n{hint}") })]
    Refused {
        /// What was asked.
        what: String,
        /// The HTTP status.
        status: u16,
        /// What it says.
        message: String,
        /// What would help.
        hint: String,
    },
    /// It answers something else.
    #[error("{0}: the answer is not what it should be")]
    Odd(String),
    /// A name cannot be one.
    #[error("{0:?} is no name of a namespace")]
    Name(String),
    /// A text names no pod.
    #[error("{0:?} names no pod: it is NAMESPACE/NAME, or NAME in the namespace that is looked at")]
    Pod(String),
}

impl ClusterError {
    /// The HTTP status of the answer, if there was one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        if let Self::Refused { status, .. } = self { Some(*status) } else { None }
    }

    /// Says what would help.
    #[must_use]
    pub fn hint(mut self, text: String) -> Self {
        if let Self::Refused { hint, .. } = &mut self {
            *hint = text;
        }
        self
    }

    pub(crate) fn odd(what: &str) -> Self {
        Self::Odd(what.to_owned())
    }
}

impl Cluster {
    /// Reads the credentials. Sends no request yet, but a plugin of the kubeconfig may.
    ///
    /// # Errors
    /// Returns an error if there are no usable credentials.
    pub async fn open(place: &Place) -> Result<Self, ClusterError> {
        let refused = |error: &dyn std::error::Error| ClusterError::Credentials(with_causes(error));
        let options = KubeConfigOptions { context: place.context.clone(), ..KubeConfigOptions::default() };
        let config = match &place.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| refused(&error))?;
                Config::from_custom_kubeconfig(file, &options).await
            }
            None => Config::from_kubeconfig(&options).await,
        };
        let mut config = config.map_err(|error| refused(&error))?;
        config.connect_timeout = Some(CONNECT_WITHIN);
        // Longer than a stream of flows is silent.
        config.read_timeout = Some(SILENT_FOR);
        // It would wait longer and longer for an agent that is gone, and send changes twice.
        config.default_retry = false;
        let own = place.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        for name in [&own, &place.system_namespace] {
            if !is_name(name) {
                return Err(ClusterError::Name(name.clone()));
            }
        }
        let client = Client::try_from(config).map_err(|error| refused(&error))?;
        Ok(Self { client, namespace: (!place.all_namespaces).then_some(own) })
    }

    /// Asks for a document.
    ///
    /// # Errors
    /// Returns an error for every status but 2xx.
    pub async fn get(&self, path: &str) -> Result<Value, ClusterError> {
        self.ask("GET", path, None).await
    }

    /// Makes something.
    ///
    /// # Errors
    /// Returns an error for every status but 2xx.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, ClusterError> {
        self.ask("POST", path, Some(body)).await
    }

    /// Looks at the namespace of this pod from now on: NAMESPACE/NAME, or NAME in the one that is looked at. Returns
    /// the name of the pod.
    ///
    /// # Errors
    /// Returns an error for what can be no name.
    pub(crate) fn narrow(&mut self, pod: &str) -> Result<String, ClusterError> {
        let (namespace, name) = match (pod.split_once('/'), &self.namespace) {
            (Some((namespace, name)), _) => (namespace.to_owned(), name),
            (None, Some(namespace)) => (namespace.clone(), pod),
            (None, None) => return Err(ClusterError::Pod(pod.to_owned())),
        };
        if !is_name(&namespace) || !is_name(name) {
            return Err(ClusterError::Pod(pod.to_owned()));
        }
        self.namespace = Some(namespace);
        Ok(name.to_owned())
    }

    /// Looks at this namespace from now on, unless one was named on the command line, or all were.
    pub(crate) fn look_at(&mut self, namespace: &str, has_namespace: bool) {
        if !has_namespace && self.namespace.is_some() {
            self.namespace = Some(namespace.to_owned());
        }
    }

    async fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, ClusterError> {
        let what = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let mut answer = self.raw(method, path, None, body.clone(), MAX_ANSWER).await?;
        for _ in 0..BUSY_ATTEMPTS {
            if answer.0 != BUSY {
                break;
            }
            tokio::time::sleep(BUSY_FOR).await;
            answer = self.raw(method, path, None, body.clone(), MAX_ANSWER).await?;
        }
        let (status, bytes) = answer;
        let document: Option<Value> = serde_json::from_slice(&bytes).ok();
        if (200..300).contains(&status) {
            return document.ok_or_else(|| ClusterError::odd(&what));
        }
        let said = document.as_ref().and_then(|status| status["message"].as_str()).map(str::to_owned);
        let message = said.unwrap_or_else(|| String::from_utf8_lossy(&bytes).chars().take(200).collect());
        Err(ClusterError::Refused { what, status, message, hint: String::new() })
    }

    /// Sends a request, and reads an answer whatever its status is.
    pub(crate) async fn raw(
        &self,
        method: &str,
        path: &str,
        header: Option<(&str, &str)>,
        body: Vec<u8>,
        most: usize,
    ) -> Result<(u16, Vec<u8>), ClusterError> {
        let what = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let unreachable = |why: String| ClusterError::Unreachable { what: what.clone(), why };
        let asked = async {
            let (status, body) = self.open_stream(method, path, header, body).await?;
            let bytes = Limited::new(body, most).collect().await;
            Ok((status, bytes.map_err(|error| unreachable(error.to_string()))?.to_bytes().to_vec()))
        };
        let late = |_| unreachable(format!("no answer within {} s", ANSWER_WITHIN.as_secs()));
        tokio::time::timeout(ANSWER_WITHIN, asked).await.map_err(late)?
    }

    /// Sends a request whose answer is a stream. It has no end in time.
    pub(crate) async fn open_stream(
        &self,
        method: &str,
        path: &str,
        header: Option<(&str, &str)>,
        body: Vec<u8>,
    ) -> Result<(u16, Body), ClusterError> {
        let what = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let unreachable = |why: String| ClusterError::Unreachable { what: what.clone(), why };
        let mut request = hyper::Request::builder()
            .method(method)
            .uri(path)
            .header("accept", "application/json")
            .header("content-type", "application/json");
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let mut request = request.body(Body::from(body)).map_err(|error| unreachable(error.to_string()))?;
        request.headers_mut().values_mut().for_each(|value| value.set_sensitive(true));
        let answer = self.client.send(request).await.map_err(|error| unreachable(with_causes(&error)))?;
        Ok((answer.status().as_u16(), answer.into_body()))
    }
}

/// Whether the API server could not forward a request, so that it may be sent again. Where that is not certain enough
/// for what could change something, it must say that it had no connection.
pub(crate) fn may_send_again(status: u16, message: &str, is_look: bool) -> bool {
    status >= 500 && (is_look || message.contains("dial tcp"))
}

/// An error with its causes, each of which the one before does not name already.
fn with_causes(error: &dyn std::error::Error) -> String {
    let (mut text, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        let further = error.to_string();
        if !text.contains(&further) {
            text = format!("{text}: {further}");
        }
        cause = error.source();
    }
    text
}

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const SILENT_FOR: Duration = Duration::from_secs(60);
/// Too many requests: the API server has not looked at this one.
const BUSY: u16 = 429;
const BUSY_ATTEMPTS: usize = 3;
const BUSY_FOR: Duration = Duration::from_secs(1);
const MAX_ANSWER: usize = 64 << 20;

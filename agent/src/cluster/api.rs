//! The API server, asked through the `kube` client, which handles credentials and TLS. Every request is bounded in
//! time.

use std::path::Path;
use std::time::Duration;

use axum::http::{Method, Request, header};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
pub use nebula_cni_contract::agent_api::is_name;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Why the API server did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ApiError {
    /// There are no usable credentials.
    #[error("no credentials for an API server: {0}")]
    Credentials(String),
    /// It cannot be reached, or gives no usable answer.
    #[error("{what}: {source}")]
    Request {
        /// What was asked.
        what: String,
        /// Why it failed.
        #[source]
        source: Box<kube::Error>,
    },
    /// It did not answer in time.
    #[error("{0}: no answer in time")]
    Timeout(String),
    /// The request could not be made.
    #[error("{0}: no valid request")]
    Malformed(String),
}

impl ApiError {
    /// The HTTP status of the answer, if there was one.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Request { source, .. } => match &**source {
                kube::Error::Api(status) => Some(status.code),
                _ => None,
            },
            _ => None,
        }
    }
}

/// Reads the credentials from `kubeconfig`, or those that every pod gets. Sends no request yet. Must be called within a
/// runtime.
///
/// # Errors
/// Returns an error if there are no usable credentials.
pub async fn open(kubeconfig: Option<&Path>) -> Result<Client, ApiError> {
    let refused = |error: &dyn std::error::Error| ApiError::Credentials(error.to_string());
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(|error| refused(&error))?;
            let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
            config.map_err(|error| refused(&error))?
        }
        None => Config::incluster().map_err(|error| refused(&error))?,
    };
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Longer than a watch is silent.
    config.read_timeout = Some(WATCH_TIMEOUT);
    Client::try_from(config).map_err(|error| refused(&error))
}

/// Sends a request and reads a JSON answer. Names in `path` must have been checked.
///
/// # Errors
/// Returns an error for every status but 2xx.
pub async fn ask(client: &Client, method: Method, path: &str, body: Option<(&str, &Value)>) -> Result<Value, ApiError> {
    ask_for(client, method, path, body).await
}

/// As [`ask`], for an answer of which only some fields count.
///
/// # Errors
/// As [`ask`].
pub(crate) async fn ask_for<T: DeserializeOwned>(
    client: &Client,
    method: Method,
    path: &str,
    body: Option<(&str, &Value)>,
) -> Result<T, ApiError> {
    let what = format!("{method} {path}");
    let (kind, bytes) = match body {
        Some((kind, body)) => (kind, body.to_string().into_bytes()),
        None => (JSON, Vec::new()),
    };
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::ACCEPT, JSON)
        .header(header::CONTENT_TYPE, kind)
        .body(bytes)
        .map_err(|_| ApiError::Malformed(what.clone()))?;
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.request::<T>(request)).await;
    let answer = answer.map_err(|_| ApiError::Timeout(what.clone()))?;
    answer.map_err(|source| ApiError::Request { what, source: Box::new(source) })
}

/// The object of this name in a collection such as `/api/v1/namespaces/shop/pods`. The agent may list objects, and not
/// get one.
///
/// # Errors
/// As [`ask`].
pub async fn named(client: &Client, collection: &str, name: &str) -> Result<Option<Value>, ApiError> {
    let path = format!("{collection}?fieldSelector=metadata.name%3D{name}");
    let mut list = ask(client, Method::GET, &path, None).await?;
    let items = list["items"].as_array_mut().map(std::mem::take).unwrap_or_default();
    Ok(items.into_iter().find(|object| object["metadata"]["name"] == name))
}

/// Content type of objects.
pub const JSON: &str = "application/json";
/// Content type of patches that test what they change.
pub const JSON_PATCH: &str = "application/json-patch+json";
/// Content type of patches that are merged.
pub const MERGE_PATCH: &str = "application/merge-patch+json";
/// Content type of patches that say what their sender wants (server-side apply).
pub const APPLY_PATCH: &str = "application/apply-patch+yaml";
/// Content type of patches whose lists are merged by a key of their items.
pub const STRATEGIC_MERGE_PATCH: &str = "application/strategic-merge-patch+json";

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
const WATCH_TIMEOUT: Duration = Duration::from_secs(330);

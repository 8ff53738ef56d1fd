//! One request to the API server, and how its answer is read.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, header};
use kube::Client;
use nebula_cert::with_causes;
use serde::{Deserialize, de::DeserializeOwned};

use super::ClusterError;

/// One request.
pub(super) struct Ask {
    method: Method,
    path: String,
    accept: &'static str,
    content: &'static str,
    body: String,
}

impl Ask {
    pub(super) fn get(path: String) -> Self {
        Self { method: Method::GET, path, accept: JSON, content: JSON, body: String::new() }
    }

    pub(super) fn post(path: &str, body: String) -> Self {
        Self { method: Method::POST, path: path.to_owned(), accept: JSON, content: JSON, body }
    }

    /// A server-side apply.
    pub(super) fn apply(path: String, body: String) -> Self {
        // JSON is YAML.
        Self { method: Method::PATCH, path, accept: JSON, content: "application/apply-patch+yaml", body }
    }

    /// A list of metadata only, without specs and statuses: a tenth of the size.
    pub(super) fn metadata(path: String) -> Self {
        Self {
            accept: "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json",
            ..Self::get(path)
        }
    }

    pub(super) fn into_http(self) -> Result<Request<kube::client::Body>, ClusterError> {
        Request::builder()
            .method(self.method)
            .uri(self.path)
            .header(header::ACCEPT, self.accept)
            .header(header::CONTENT_TYPE, self.content)
            .body(kube::client::Body::from(self.body.into_bytes()))
            .map_err(|error| ClusterError::Unreachable(error.to_string()))
    }
}

/// Sends one request; a 404 is `None`.
pub(super) async fn answer<T: DeserializeOwned>(
    client: &Client,
    what: &'static str,
    request: Ask,
) -> Result<Option<T>, ClusterError> {
    let exchange = async {
        let response = client.send(request.into_http()?).await.map_err(|error| unreachable(&error))?;
        let status = response.status();
        let body = to_bytes(Body::new(response.into_body()), MAX_ANSWER_BYTES).await;
        let body = body.map_err(|_| ClusterError::TooLong(what))?;
        match status.as_u16() {
            200..=299 => {
                serde_json::from_slice(&body).map(Some).map_err(|error| ClusterError::Malformed { what, error })
            }
            404 => Ok(None),
            status => Err(ClusterError::Status { status, what, message: message_of(&body) }),
        }
    };
    tokio::time::timeout(ANSWER_WITHIN, exchange).await.unwrap_or(Err(ClusterError::Timeout))
}

/// The message of a Kubernetes `Status`, as one short line.
pub(super) fn message_of(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Status {
        #[serde(default)]
        message: String,
    }
    let message = serde_json::from_slice::<Status>(body).map(|status| status.message).unwrap_or_default();
    super::one_line(&message)
}

pub(super) fn unreachable(error: &kube::Error) -> ClusterError {
    ClusterError::Unreachable(super::one_line(&with_causes(error)))
}

pub(super) fn url_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

const JSON: &str = "application/json";
/// Shorter than our callers' timeout, which leaves room for two answers.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(4);
/// In bytes. A pod in etcd may have 1.5 MB; a page of 500 metadata objects takes a few MB.
const MAX_ANSWER_BYTES: usize = 16 << 20;

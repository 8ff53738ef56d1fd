//! The API server, asked through the `kube` client, which handles credentials and TLS; limits and data types are ours.

use std::{collections::HashSet, net::IpAddr, path::Path, sync::OnceLock, time::Duration};

use axum::body::{Body, to_bytes};
use axum::http::{Method, Request, header};
use ipnet::IpNet;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use nebula_cert::with_causes;
use serde::{Deserialize, de::DeserializeOwned};
use tokio::runtime::Handle;

use super::{
    Asker, Cluster, ClusterError, ConfigData, Metadata, Pod, PodId, Review, Taken, follow::Followed, occupancy::Node,
};

/// A client of one API server. Its methods block, so call them only on threads that may.
pub(crate) struct ApiServer {
    client: Client,
    runtime: Handle,
    /// Set once somebody wants to know who has an address.
    followed: OnceLock<Followed>,
}

impl ApiServer {
    /// Reads the credentials from `kubeconfig`, or those that every pod gets. Sends no request yet. Must be called
    /// within a runtime.
    ///
    /// # Errors
    /// Returns an error text for people if there are no usable credentials.
    pub(crate) async fn open(kubeconfig: Option<&Path>) -> Result<Self, String> {
        let mut config = match kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| with_causes(&error))?;
                let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
                config.map_err(|error| with_causes(&error))?
            }
            None => Config::incluster().map_err(|error| {
                format!("{}; outside a pod, name a kubeconfig in kubernetes.kubeconfig", with_causes(&error))
            })?,
        };
        config.connect_timeout = Some(CONNECT_WITHIN);
        // Each request has our own timeout. This one would also close idle connections, sometimes just as the next
        // request is sent.
        config.read_timeout = None;
        config.write_timeout = Some(ANSWER_WITHIN);
        let client = Client::try_from(config).map_err(|error| with_causes(&error))?;
        Ok(Self { client, runtime: Handle::current(), followed: OnceLock::new() })
    }

    /// Sends one request; a 404 is `None`.
    fn ask<T: DeserializeOwned>(&self, what: &'static str, request: Ask) -> Result<Option<T>, ClusterError> {
        self.runtime.block_on(Self::answer(&self.client, what, request))
    }

    /// As [`ApiServer::ask`], within a runtime.
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

    fn followed(&self) -> &Followed {
        self.followed.get_or_init(|| {
            let _within = self.runtime.enter();
            Followed::start(&self.client)
        })
    }
}

impl Cluster for ApiServer {
    fn review(&self, token: &str, audience: &str) -> Result<Review, ClusterError> {
        #[derive(Deserialize)]
        struct Answer {
            #[serde(default)]
            status: Review,
        }
        let body = serde_json::json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        });
        let what = "a TokenReview";
        let request = Ask::post("/apis/authentication.k8s.io/v1/tokenreviews", body.to_string());
        let answer: Option<Answer> = self.ask(what, request)?;
        let missing = || ClusterError::Status { status: 404, what, message: "no such path".to_owned() };
        answer.map(|answer| answer.status).ok_or_else(missing)
    }

    fn pod(&self, namespace: &str, name: &str) -> Result<Option<Pod>, ClusterError> {
        // Both were checked to be valid names, so no character in them has a special meaning in a path.
        self.ask("GET pod", Ask::get(format!("/api/v1/namespaces/{namespace}/pods/{name}")))
    }

    fn node_ranges(&self, name: &str) -> Result<Vec<IpNet>, ClusterError> {
        let node: Option<Node> = self.ask("GET node", Ask::get(format!("/api/v1/nodes/{name}")))?;
        let spec = node.unwrap_or_default().spec;
        Ok(spec.all.into_iter().chain(spec.one).collect())
    }

    fn node_uid(&self, name: &str) -> Result<Option<String>, ClusterError> {
        #[derive(Deserialize)]
        struct Item {
            #[serde(default)]
            metadata: Metadata,
        }
        let node: Option<Item> = self.ask("GET node", Ask::get(format!("/api/v1/nodes/{name}")))?;
        Ok(node.map(|node| node.metadata.uid))
    }

    fn follow(&self) {
        self.followed();
    }

    fn taken(&self, address: IpAddr, asker: &Asker<'_>) -> Result<Option<Taken>, ClusterError> {
        Ok(self.runtime.block_on(self.followed().occupancy())?.taken(address, asker))
    }

    fn all_pods(&self) -> Result<HashSet<PodId>, ClusterError> {
        #[derive(Deserialize)]
        struct List {
            #[serde(default)]
            metadata: ListMetadata,
            #[serde(default)]
            items: Vec<Item>,
        }
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct ListMetadata {
            r#continue: String,
        }
        #[derive(Deserialize)]
        struct Item {
            metadata: Metadata,
        }
        let what = "LIST pods";
        let (mut pods, mut next) = (HashSet::new(), String::new());
        for _ in 0..MAX_PAGES {
            let page = format!("/api/v1/pods?limit=500&continue={}", url_encoded(&next));
            let list: Option<List> = self.ask(what, Ask::metadata(page))?;
            let missing = || ClusterError::Status { status: 404, what, message: "no such path".to_owned() };
            let list = list.ok_or_else(missing)?;
            for Item { metadata } in list.items {
                let id = |uid: &str| (metadata.namespace.clone(), metadata.name.clone(), uid.to_owned());
                pods.extend(metadata.static_uid(None).map(id));
                pods.insert(id(&metadata.uid));
            }
            next = list.metadata.r#continue;
            if next.is_empty() {
                return Ok(pods);
            }
        }
        Err(ClusterError::TooLong(what))
    }

    fn config_map(&self, namespace: &str, name: &str) -> Result<Option<ConfigData>, ClusterError> {
        #[derive(Deserialize)]
        struct ConfigMap {
            #[serde(default)]
            data: ConfigData,
        }
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}");
        let found: Option<ConfigMap> = self.ask("GET configmap", Ask::get(path))?;
        Ok(found.map(|found| found.data))
    }

    fn apply_config_map(&self, namespace: &str, name: &str, data: &ConfigData) -> Result<(), ClusterError> {
        let body = serde_json::json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace},
            "data": data,
        });
        let what = "PATCH configmap";
        let path = format!("/api/v1/namespaces/{namespace}/configmaps/{name}?fieldManager=nebula-ca&force=true");
        let applied: Option<serde_json::Value> = self.ask(what, Ask::apply(path, body.to_string()))?;
        let missing = || ClusterError::Status { status: 404, what, message: "no such namespace".to_owned() };
        applied.map(drop).ok_or_else(missing)
    }
}

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

    fn post(path: &str, body: String) -> Self {
        Self { method: Method::POST, path: path.to_owned(), accept: JSON, content: JSON, body }
    }

    /// A server-side apply.
    fn apply(path: String, body: String) -> Self {
        // JSON is YAML.
        Self { method: Method::PATCH, path, accept: JSON, content: "application/apply-patch+yaml", body }
    }

    /// A list of metadata only, without specs and statuses: a tenth of the size.
    fn metadata(path: String) -> Self {
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
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Shorter than our callers' timeout, which leaves room for two answers.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);
/// In bytes. A pod in etcd may have 1.5 MB; a page of 500 metadata objects takes a few MB.
const MAX_ANSWER_BYTES: usize = 16 << 20;
/// With 500 pods per page, this is above what Kubernetes supports.
const MAX_PAGES: usize = 600;

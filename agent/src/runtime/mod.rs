//! The container runtime, asked over its unix socket (CRI v1; containerd serves it since 1.6, CRI-O since 1.20). Every
//! answer is bounded in size and time.

pub mod loaded;
mod messages;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

use crate::host_root::HostRoot;

/// A client of one runtime; cheap to clone. It connects when it is first asked, and again whenever the runtime was
/// away.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    channel: Channel,
    within: Duration,
}

/// What a runtime says about itself.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// `None`, or why the runtime's network is not ready.
    pub network_problem: Option<String>,
    /// Details by name, mostly JSON; what they are depends on the runtime.
    pub info: HashMap<String, String>,
}

/// One pod sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// Its id: CNI_CONTAINERID.
    pub id: String,
    /// The pod's name.
    pub name: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's uid as the kubelet passed it; for static pods not that of the mirror pod in the API.
    pub uid: String,
    /// How often the pod's sandbox was recreated.
    pub attempt: u32,
    /// Whether it runs.
    pub is_ready: bool,
    /// The pod's labels, as the kubelet passed them.
    pub labels: HashMap<String, String>,
    /// The pod's annotations, as the kubelet passed them.
    pub annotations: HashMap<String, String>,
}

/// One pod sandbox with its network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxStatus {
    /// Which sandbox.
    pub sandbox: Sandbox,
    /// Whether the pod uses the node's own network.
    pub has_host_network: bool,
    /// Path of the pod's network namespace, as the node names it.
    pub netns: Option<PathBuf>,
    /// What the CNI plugins said when the pod started, as containerd sums it up (JSON); null if the runtime does not
    /// tell.
    pub cni_result: Value,
}

/// Why the runtime did not answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RuntimeError {
    /// No socket of a runtime.
    #[error("no container runtime at {0}; name its socket with \"runtimeEndpoint\" in agent.json")]
    NotFound(String),
    /// It cannot be reached, or answers with an error.
    #[error("container runtime at {socket}: {call}: {cause}")]
    Call {
        /// Its socket.
        socket: PathBuf,
        /// What was asked.
        call: &'static str,
        /// Why it failed.
        cause: String,
    },
}

impl Client {
    /// A client of the runtime at `socket`, a path as the agent sees it. Does not connect yet.
    #[must_use]
    pub fn new(socket: &Path) -> Self {
        let path = socket.to_owned();
        let connect = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The host is not used; a path as `:authority` is refused by some servers.
        let channel = Endpoint::from_static("http://localhost")
            .connect_timeout(CONNECT_TIMEOUT)
            .connect_with_connector_lazy(connect);
        Self { socket: socket.to_owned(), channel, within: ANSWER_TIMEOUT }
    }

    /// The configured runtime, or the first of the usual sockets that exists. Must run inside a tokio runtime.
    ///
    /// # Errors
    /// Returns [`RuntimeError::NotFound`] if no socket exists.
    pub fn find(configured: Option<&Path>, host: &HostRoot) -> Result<Self, RuntimeError> {
        let usual = USUAL_SOCKETS.map(Path::new);
        let candidates: &[&Path] = configured.as_ref().map_or(&usual, std::slice::from_ref);
        let found = candidates.iter().map(|socket| host.resolve(socket)).find(|socket| socket.exists());
        found.map(|socket| Self::new(&socket)).ok_or_else(|| {
            let tried: Vec<String> = candidates.iter().map(|socket| socket.display().to_string()).collect();
            RuntimeError::NotFound(tried.join(", "))
        })
    }

    /// Path of its socket, as the agent sees it.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its state with all details.
    ///
    /// # Errors
    /// Returns an error if it does not answer in time.
    pub async fn status(&self) -> Result<Status, RuntimeError> {
        let answer: messages::StatusResponse = self.call("Status", messages::StatusRequest { verbose: true }).await?;
        let conditions = answer.status.unwrap_or_default().conditions;
        let network = conditions.into_iter().find(|condition| condition.kind == "NetworkReady");
        let network_problem = match network {
            Some(network) if network.status => None,
            Some(network) => Some(format!("{}: {}", network.reason, network.message)),
            None => Some("it does not tell whether its network is ready".to_owned()),
        };
        Ok(Status { network_problem, info: answer.info })
    }

    /// All pod sandboxes, also those that no longer run.
    ///
    /// # Errors
    /// Returns an error if it does not answer in time.
    pub async fn sandboxes(&self) -> Result<Vec<Sandbox>, RuntimeError> {
        let answer: messages::ListPodSandboxResponse =
            self.call("ListPodSandbox", messages::ListPodSandboxRequest {}).await?;
        let sandbox =
            |item: messages::PodSandbox| sandbox(item.id, item.metadata, item.state, item.labels, item.annotations);
        Ok(answer.items.into_iter().map(sandbox).collect())
    }

    /// One sandbox with its network.
    ///
    /// # Errors
    /// Returns an error if it does not answer in time, or knows no such sandbox.
    pub async fn sandbox(&self, id: &str) -> Result<SandboxStatus, RuntimeError> {
        let request = messages::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: true };
        let answer: messages::PodSandboxStatusResponse = self.call("PodSandboxStatus", request).await?;
        let status = answer.status.unwrap_or_default();
        let options = status.linux.and_then(|linux| linux.namespaces).and_then(|namespaces| namespaces.options);
        let mut details =
            answer.info.get("info").and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null);
        Ok(SandboxStatus {
            has_host_network: options.is_some_and(|options| options.network == HOST_NETWORK),
            netns: netns_path(&details),
            sandbox: sandbox(status.id, status.metadata, status.state, status.labels, status.annotations),
            cni_result: details.get_mut("cniResult").map(Value::take).unwrap_or_default(),
        })
    }

    async fn call<Q, A>(&self, call: &'static str, request: Q) -> Result<A, RuntimeError>
    where
        Q: prost::Message + Send + Sync + 'static,
        A: prost::Message + Default + Send + Sync + 'static,
    {
        let failed = |cause: String| RuntimeError::Call { socket: self.socket.clone(), call, cause };
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{call}"))
            .map_err(|error| failed(error.to_string()))?;
        let mut grpc = Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_ANSWER);
        let asked = async {
            grpc.ready().await.map_err(|error| failed(with_sources(&error)))?;
            let codec = tonic_prost::ProstCodec::<Q, A>::default();
            grpc.unary(tonic::Request::new(request), path, codec).await.map_err(|status| match status.code() {
                tonic::Code::Unimplemented => failed("it does not serve CRI v1; containerd does since 1.6".to_owned()),
                code => failed(format!("{}: {}", code.description(), status.message())),
            })
        };
        let answered = tokio::time::timeout(self.within, asked).await;
        answered
            .map_err(|_| failed(format!("no answer within {} s", self.within.as_secs())))?
            .map(tonic::Response::into_inner)
    }
}

fn sandbox(
    id: String,
    metadata: Option<messages::PodSandboxMetadata>,
    state: i32,
    labels: HashMap<String, String>,
    annotations: HashMap<String, String>,
) -> Sandbox {
    let messages::PodSandboxMetadata { name, uid, namespace, attempt } = metadata.unwrap_or_default();
    Sandbox { id, name, namespace, uid, attempt, is_ready: state == READY, labels, annotations }
}

/// The path of the network namespace in the details of containerd and CRI-O, both of which show the OCI specification.
fn netns_path(details: &Value) -> Option<PathBuf> {
    let namespaces = details["runtimeSpec"]["linux"]["namespaces"].as_array()?;
    let network = namespaces.iter().find(|namespace| namespace["type"] == "network")?;
    network["path"].as_str().filter(|path| path.starts_with('/')).map(PathBuf::from)
}

fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

const READY: i32 = 0;
const HOST_NETWORK: i32 = 2;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
// What the kubelet allows too.
const MAX_ANSWER: usize = 16 << 20;
const USUAL_SOCKETS: [&str; 5] = [
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/var/run/crio/crio.sock",
    "/run/k0s/containerd.sock",
];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_namespace_is_found_in_the_specification_of_the_sandbox() {
        let details = json!({"pid": 7, "runtimeSpec": {"linux": {"namespaces": [
            {"type": "pid"}, {"type": "network", "path": "/var/run/netns/cni-1"}]}}});
        assert_eq!(netns_path(&details), Some(PathBuf::from("/var/run/netns/cni-1")));
        for hostile in [json!(null), json!({"runtimeSpec": []}), json!({"runtimeSpec": {"linux": {"namespaces": [7]}}})]
        {
            assert_eq!(netns_path(&hostile), None);
        }
    }

    #[tokio::test]
    async fn a_runtime_that_is_away_or_silent_is_an_error_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cri.sock");
        let error = Client::find(Some(&socket), &HostRoot::default()).unwrap_err().to_string();
        assert!(error.contains("cri.sock") && error.contains("runtimeEndpoint"), "{error}");
        let error = Client::new(&socket).status().await.unwrap_err().to_string();
        assert!(error.contains("cri.sock") && error.contains("Status"), "{error}");
    }

    #[tokio::test]
    async fn a_runtime_that_never_answers_does_not_block_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cri.sock");
        let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let client = Client { within: Duration::from_millis(200), ..Client::new(&socket) };
        assert!(client.status().await.unwrap_err().to_string().contains("no answer"));
    }
}

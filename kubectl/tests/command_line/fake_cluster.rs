//! A fake cluster: an API server that makes and reviews tokens, lists agents and forwards requests to them as the proxy
//! for their Service does, and the real API of each agent behind it.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::fake_reviews::{FakeReviews, agent_pod};
use super::site::Site;
use super::unverified;

/// What the user shows the API server, and nobody else may see.
pub(crate) const OWN_SECRET: &str = "secret-of-the-user";

pub(crate) struct FakeCluster {
    pub(crate) reviews: FakeReviews,
    pub(crate) agents: Arc<Vec<Site>>,
    server: Arc<Mutex<Server>>,
    folder: tempfile::TempDir,
}

#[derive(Default)]
struct Server {
    /// Names of nodes and the addresses of their agents; those without one do not run.
    agents: Vec<(String, Option<std::net::SocketAddr>)>,
    accounts: Vec<String>,
    has_proxy_right: bool,
    forwarded: Vec<String>,
    /// How often an agent was picked, and how many of the first ones are gone.
    picked: usize,
    lost: usize,
    reviews: FakeReviews,
}

impl FakeCluster {
    /// Agents on `n1` and `n2`, and one on `n3` that does not run if `has_pending`.
    pub(crate) async fn start(has_pending: bool) -> Self {
        let reviews = FakeReviews::default();
        let agents = vec![Site::start(&reviews, "n1").await, Site::start(&reviews, "n2").await];
        let mut known: Vec<_> =
            agents.iter().zip(["n1", "n2"]).map(|(site, node)| (node.to_owned(), Some(site.address))).collect();
        if has_pending {
            known.push(("n3".to_owned(), None));
        }
        let server = Server { agents: known, has_proxy_right: true, reviews: reviews.clone(), ..Server::default() };
        let server = Arc::new(Mutex::new(server));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let router = reviews.router().merge(Router::new().fallback(answer).with_state(Arc::clone(&server)));
        tokio::spawn(async move { axum::serve(listener, router).await });
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "shop"}}],
            "clusters": [{"name": "k", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": OWN_SECRET}}],
        });
        std::fs::write(folder.path().join("config"), config.to_string()).unwrap();
        Self { reviews, agents: Arc::new(agents), server, folder }
    }

    pub(crate) fn account(&self, account: &str) {
        self.server.lock().unwrap().accounts.push(account.to_owned());
    }

    pub(crate) fn has_proxy_right(&self, has: bool) {
        self.server.lock().unwrap().has_proxy_right = has;
    }

    /// The next agents that the proxy picks are gone.
    pub(crate) fn lose(&self, number: usize) {
        let mut server = self.server.lock().unwrap();
        server.lost = server.picked + number;
    }

    /// Heads of the requests that agents got.
    pub(crate) fn forwarded(&self) -> Vec<String> {
        self.server.lock().unwrap().forwarded.clone()
    }

    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-nebula"));
        command.args(arguments).env("KUBECONFIG", self.kubeconfig()).env("TERM", "xterm");
        command
    }

    fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("config")
    }

    /// Runs the program until it ends.
    pub(crate) async fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = self.command(arguments);
        let output: Output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }
}

async fn answer(State(server): State<Arc<Mutex<Server>>>, request: Request) -> Response {
    let is_own = |value: &axum::http::HeaderValue| value.to_str().is_ok_and(|value| value.ends_with(OWN_SECRET));
    assert!(request.headers().get("authorization").is_some_and(is_own), "the user shows its credentials");
    let path = request.uri().path().to_owned();
    let words: Vec<&str> = path.split('/').collect();
    match words[..] {
        ["", "version"] => json_of(StatusCode::OK, &json!({"gitVersion": "v1.33.1", "major": "1", "minor": "33"})),
        ["", "api", "v1", "namespaces", namespace, "serviceaccounts", name, "token"] => {
            let server = server.lock().unwrap();
            if !server.accounts.contains(&format!("{namespace}/{name}")) {
                return refused(StatusCode::NOT_FOUND, "serviceaccounts not found");
            }
            let user = format!("system:serviceaccount:{namespace}:{name}");
            let token = server.reviews.token(&user, nebula_cni_contract::agent_api::AUDIENCE);
            json_of(StatusCode::CREATED, &json!({"status": {"token": token}}))
        }
        ["", "api", "v1", "namespaces", "nebula-system", "pods"] => {
            let server = server.lock().unwrap();
            let pod = |(node, address): &(String, Option<std::net::SocketAddr>)| {
                let nowhere = std::net::SocketAddr::from(([192, 0, 2, 1], 9478));
                let mut pod = agent_pod(node, address.unwrap_or(nowhere));
                pod["status"]["phase"] = if address.is_some() { "Running" } else { "Pending" }.into();
                pod
            };
            let items: Vec<Value> = server.agents.iter().map(pod).collect();
            json_of(StatusCode::OK, &json!({"kind": "PodList", "items": items}))
        }
        ["", "api", "v1", "namespaces", "nebula-system", "services", service, "proxy", ..] => {
            let address = {
                let mut server = server.lock().unwrap();
                if !server.has_proxy_right || service != "https:nebula-cni-agent-api:api" {
                    return refused(StatusCode::FORBIDDEN, "services/proxy is forbidden");
                }
                // The real one picks any.
                server.picked += 1;
                if server.picked <= server.lost {
                    return refused(
                        StatusCode::SERVICE_UNAVAILABLE,
                        "error trying to reach service: dial tcp: refused",
                    );
                }
                let running: Vec<_> = server.agents.iter().filter_map(|(_, address)| *address).collect();
                running[server.picked % running.len()]
            };
            forward(&server, address, request).await
        }
        ["", "apis", "apps", "v1", "namespaces", "nebula-system", "daemonsets", "nebula-cni-agent"] => {
            json_of(StatusCode::OK, &json!({"status": {"desiredNumberScheduled": 2, "numberReady": 2}}))
        }
        _ => refused(StatusCode::NOT_FOUND, "the server could not find the requested resource"),
    }
}

/// As the API server does: without what the user showed, and with the answer as it comes.
async fn forward(server: &Mutex<Server>, address: std::net::SocketAddr, request: Request) -> Response {
    let path = request.uri().path_and_query().unwrap().as_str().split_once("/proxy").unwrap().1;
    let mut head = format!("{} {path} HTTP/1.0\r\nhost: x\r\n", request.method());
    for (name, value) in
        request.headers().iter().filter(|(name, _)| !["authorization", "host"].contains(&name.as_str()))
    {
        head.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap()));
    }
    head.push_str("\r\n");
    server.lock().unwrap().forwarded.push(head.clone());
    let mut stream = unverified::connect(address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut read = Vec::new();
    let at = loop {
        if let Some(at) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            break at;
        }
        assert!(stream.read_buf(&mut read).await.unwrap() > 0);
    };
    let status = std::str::from_utf8(&read[..at]).unwrap().split_whitespace().nth(1).unwrap().parse::<u16>().unwrap();
    let first = Bytes::copy_from_slice(&read[at + 4..]);
    let body = stream::unfold((Some(first), stream), |(first, mut stream)| async move {
        if let Some(first) = first {
            return Some((Ok::<_, std::io::Error>(first), (None, stream)));
        }
        let mut bytes = vec![0; 8192];
        let read = stream.read(&mut bytes).await.unwrap_or_default();
        bytes.truncate(read);
        (read > 0).then(|| (Ok(Bytes::from(bytes)), (None, stream)))
    });
    (StatusCode::from_u16(status).unwrap(), Body::from_stream(body)).into_response()
}

fn refused(status: StatusCode, message: &str) -> Response {
    json_of(status, &json!({"kind": "Status", "status": "Failure", "message": message, "code": status.as_u16()}))
}

fn json_of(status: StatusCode, value: &Value) -> Response {
    (status, [("content-type", "application/json")], value.to_string()).into_response()
}

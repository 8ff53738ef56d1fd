//! A fake cluster: an API server that makes and reviews tokens, lists agents and forwards requests to them as the proxy
//! for their Service does, and the real API of each agent behind it.

use std::path::Path;
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

use super::fake_ca::FakeCa;
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
    /// Nodes whose agents know no path of later releases.
    old: Vec<String>,
    /// What is in logs, events, ConfigMaps and the specifications of pods.
    planted: String,
    /// Paths that the user asked for.
    asked: Vec<String>,
    may_read_logs: bool,
    forwarded: Vec<String>,
    /// How often an agent was picked, and how many of the first ones are gone.
    picked: usize,
    lost: usize,
    reviews: FakeReviews,
    ca: FakeCa,
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
        write_kubeconfig(folder.path(), &url);
        Self { reviews, agents: Arc::new(agents), server, folder }
    }

    pub(crate) fn account(&self, account: &str) {
        self.server.lock().unwrap().accounts.push(account.to_owned());
    }

    pub(crate) fn has_proxy_right(&self, has: bool) {
        self.server.lock().unwrap().has_proxy_right = has;
    }

    /// The agent of this node knows what the first release with an API knew, and nothing else.
    pub(crate) fn is_old(&self, node: &str) {
        self.server.lock().unwrap().old.push(node.to_owned());
    }

    /// Puts a text wherever the API server has texts of others.
    pub(crate) fn plant(&self, text: &str) {
        let mut server = self.server.lock().unwrap();
        (server.planted, server.may_read_logs) = (text.to_owned(), true);
    }

    pub(crate) fn asked(&self) -> Vec<String> {
        self.server.lock().unwrap().asked.clone()
    }

    /// Changes the CA, or looks at it.
    pub(crate) fn ca<T>(&self, change: impl FnOnce(&mut FakeCa) -> T) -> T {
        change(&mut self.server.lock().unwrap().ca)
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
        command(self.folder.path(), arguments)
    }

    /// Runs the program until it ends.
    pub(crate) async fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = self.command(arguments);
        let output: Output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
    }
}

/// The program, with the credentials in a folder.
pub(crate) fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-nebula"));
    command.args(arguments).env("KUBECONFIG", folder.join("config")).env("TERM", "xterm");
    command
}

/// Credentials for an API server, in a folder.
pub(crate) fn write_kubeconfig(folder: &Path, url: &str) {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "shop"}}],
        "clusters": [{"name": "k", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": OWN_SECRET}}],
    });
    std::fs::write(folder.join("config"), config.to_string()).unwrap();
}

async fn answer(State(server): State<Arc<Mutex<Server>>>, request: Request) -> Response {
    let is_own = |value: &axum::http::HeaderValue| value.to_str().is_ok_and(|value| value.ends_with(OWN_SECRET));
    assert!(request.headers().get("authorization").is_some_and(is_own), "the user shows its credentials");
    let path = request.uri().path().to_owned();
    server.lock().unwrap().asked.push(path.clone());
    let words: Vec<&str> = path.split('/').collect();
    match words[..] {
        ["", "version"] => json_of(StatusCode::OK, &json!({"gitVersion": "v1.33.1", "major": "1", "minor": "33"})),
        ["", "api", "v1", "namespaces", namespace, "serviceaccounts", name, "token"] => {
            let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
            let asked: Value = serde_json::from_slice(&body).unwrap();
            let audience = asked["spec"]["audiences"][0].as_str().unwrap().to_owned();
            let mut server = server.lock().unwrap();
            if !server.accounts.contains(&format!("{namespace}/{name}")) {
                return refused(StatusCode::NOT_FOUND, "serviceaccounts not found");
            }
            let user = format!("system:serviceaccount:{namespace}:{name}");
            let token = server.reviews.token(&user, &audience);
            server.ca.tokens.push((token.clone(), [user, audience]));
            json_of(StatusCode::CREATED, &json!({"status": {"token": token}}))
        }
        ["", "api", "v1", "namespaces", "nebula-system", "pods"] => {
            let server = server.lock().unwrap();
            let pod = |(node, address): &(String, Option<std::net::SocketAddr>)| {
                let nowhere = std::net::SocketAddr::from(([192, 0, 2, 1], 9478));
                let mut pod = agent_pod(node, address.unwrap_or(nowhere));
                pod["status"]["phase"] = if address.is_some() { "Running" } else { "Pending" }.into();
                pod["metadata"]["annotations"] = json!({"x": server.planted});
                pod["spec"]["containers"][0]["name"] = "agent".into();
                pod["spec"]["containers"][0]["env"] = json!([{"value": server.planted}]);
                pod
            };
            let items: Vec<Value> = server.agents.iter().map(pod).collect();
            json_of(StatusCode::OK, &json!({"kind": "PodList", "items": items}))
        }
        [
            "",
            "api",
            "v1",
            "namespaces",
            "nebula-system",
            "services",
            "https:nebula-ca:https",
            "proxy",
            "v1",
            "revoke",
        ] => {
            assert_eq!(request.method(), "POST");
            let headers = request.headers().clone();
            let body = axum::body::to_bytes(request.into_body(), 1 << 20).await.unwrap();
            let mut server = server.lock().unwrap();
            if !server.has_proxy_right {
                return refused(StatusCode::FORBIDDEN, "services/proxy is forbidden");
            }
            server.ca.answer(&headers, &body)
        }
        ["", "api", "v1", "namespaces", "nebula-system", "services", service, "proxy", ..] => {
            let address = {
                let mut server = server.lock().unwrap();
                if !server.has_proxy_right || service != "https:nebula-cni-agent-api:api" {
                    return refused(StatusCode::FORBIDDEN, "services/proxy is forbidden");
                }
                let known = ["status", "pods", "flows", "upgrade"];
                if let ["v1", "nodes", node, .., last] = &words[8..]
                    && server.old.iter().any(|old| old == node)
                    && !known.contains(last)
                {
                    let error = "this agent has no such path: it answers version v1 of the API, of release 0.0.9";
                    return json_of(StatusCode::NOT_FOUND, &json!({"error": error}));
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
        ["", "api", "v1", "namespaces", "nebula-system", "pods", _, "log"] => {
            let server = server.lock().unwrap();
            match server.may_read_logs {
                true => format!("first line\n{}\nlast line\n", server.planted).into_response(),
                false => refused(StatusCode::FORBIDDEN, "pods/log is forbidden"),
            }
        }
        ["", "api", "v1", .., "events"] => {
            let note = server.lock().unwrap().planted.clone();
            let event = json!({"reason": "NebulaUnprotected", "message": note, "involvedObject": {"name": "web"}});
            json_of(StatusCode::OK, &json!({"items": [event], "metadata": {"continue": "more"}}))
        }
        [
            "",
            "api",
            "v1",
            "namespaces",
            "nebula-system",
            "configmaps",
            name @ ("nebula-cni-agent" | "nebula-trust"),
        ] => {
            let text = server.lock().unwrap().planted.clone();
            json_of(StatusCode::OK, &json!({"metadata": {"name": name}, "data": {"agent.json": text, "token": text}}))
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

pub(crate) fn refused(status: StatusCode, message: &str) -> Response {
    json_of(status, &json!({"kind": "Status", "status": "Failure", "message": message, "code": status.as_u16()}))
}

pub(crate) fn json_of(status: StatusCode, value: &Value) -> Response {
    (status, [("content-type", "application/json")], value.to_string()).into_response()
}

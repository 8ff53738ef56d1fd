//! The agents of the nodes, asked through the API server's proxy for pods.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use kube::client::Body;
use nebula_cni_contract::agent_api::{PORT_NAME, Refused, TOKEN_HEADER};
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Mutex;
use zeroize::Zeroizing;

use crate::cli::Place;
use crate::cluster::{Cluster, ClusterError, is_name};
use crate::identity::{Account, Role};
use crate::outcome::ToolError;

/// All agents of a cluster, and a token for them.
pub(crate) struct Agents<'a> {
    pub cluster: &'a Cluster,
    account: Account,
    token: Mutex<(Zeroizing<String>, Instant)>,
    /// Sorted by node.
    pub all: Vec<Agent>,
}

/// The agent of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Agent {
    pub node: String,
    namespace: String,
    pod: String,
    phase: String,
    port: Option<u16>,
    pub is_ready: bool,
}

/// Why an agent gives no answer.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum AgentError {
    /// Its pod does not run.
    #[error("its agent does not run (pod {pod} is {phase})")]
    NotRunning {
        /// Its pod.
        pod: String,
        /// What it does instead.
        phase: String,
    },
    /// It has no API.
    #[error(
        "its agent has no API for kubectl: agent.api.port of the chart turns it on (helm upgrade --set agent.api.port=9478)"
    )]
    NoApi,
    /// The API server cannot be reached.
    #[error("{0}")]
    Unreachable(String),
    /// The API server refuses to forward.
    #[error("{}", forbidden(.namespace, .message))]
    Forbidden {
        /// Of the agents.
        namespace: String,
        /// What it says.
        message: String,
    },
    /// The API server, or its way to the node, fails.
    #[error("the API server cannot forward the request ({status}): {message}")]
    Proxy {
        /// The HTTP status.
        status: u16,
        /// What it says.
        message: String,
    },
    /// It refuses.
    #[error("{}", refused(.0))]
    Refused(String, Option<String>),
    /// It says something else.
    #[error("what its agent answers cannot be read; is it of another release? (this one is {})", env!("CARGO_PKG_VERSION"))]
    Odd,
    /// It stopped in the middle.
    #[error("its agent stopped answering in the middle")]
    CutOff,
}

fn forbidden(namespace: &str, message: &str) -> String {
    format!(
        "you may not use the API server's proxy to the agents: {message}\nWhoever administers the cluster gives it: kubectl create \
         rolebinding -n {namespace} nebula-kubectl-YOU --role=nebula-kubectl --user=YOU"
    )
}

fn refused(error: &str) -> String {
    format!("its agent refuses: {error}")
}

impl<'a> Agents<'a> {
    /// Finds the agents, and asks for a token.
    pub(crate) async fn find(cluster: &'a Cluster, place: &Place, role: Role) -> Result<Self, ToolError> {
        let all = list(cluster, &place.system_namespace).await?;
        if all.is_empty() {
            return Err(ToolError::NoAgents { namespace: place.system_namespace.clone() });
        }
        let account = Account::choose(place, cluster.namespace.as_deref(), role);
        let token = Mutex::new((account.token(cluster).await?, SystemClock.now()));
        Ok(Self { cluster, account, token, all })
    }

    /// A token that is good for some more minutes.
    async fn token(&self) -> Result<Zeroizing<String>, ClusterError> {
        let mut token = self.token.lock().await;
        if SystemClock.now().saturating_duration_since(token.1) > RENEW_AFTER {
            *token = (self.account.token(self.cluster).await?, SystemClock.now());
        }
        Ok(token.0.clone())
    }

    /// Asks some agents at a time. Answers are sorted by node.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        agents: &[Agent],
        method: &str,
        path: &str,
    ) -> Vec<(String, Result<T, AgentError>)> {
        let asked =
            stream::iter(agents).map(async |agent| (agent.node.clone(), self.ask_one(agent, method, path).await));
        let mut answers: Vec<_> = asked.buffer_unordered(AT_A_TIME).collect().await;
        answers.sort_by(|(a, _), (b, _)| a.cmp(b));
        answers
    }

    async fn ask_one<T: DeserializeOwned>(&self, agent: &Agent, method: &str, path: &str) -> Result<T, AgentError> {
        let url = agent.url(path)?;
        let token = self.token().await.map_err(|error| AgentError::Unreachable(error.to_string()))?;
        let header = Some((TOKEN_HEADER, token.as_str()));
        let (status, bytes) =
            self.cluster.raw(method, &url, header, Vec::new(), MAX_ANSWER).await.map_err(unreachable)?;
        if (200..300).contains(&status) {
            return serde_json::from_slice(&bytes).map_err(|_| AgentError::Odd);
        }
        Err(agent.error(status, &bytes))
    }

    /// Opens a stream.
    pub(crate) async fn stream(&self, agent: &Agent, path: &str) -> Result<Body, AgentError> {
        let url = agent.url(path)?;
        let token = self.token().await.map_err(|error| AgentError::Unreachable(error.to_string()))?;
        let opened = self.cluster.open_stream("GET", &url, Some((TOKEN_HEADER, &token)), Vec::new());
        let opened = tokio::time::timeout(OPENS_WITHIN, opened).await;
        let late = |_| AgentError::Unreachable(format!("no answer within {} s", OPENS_WITHIN.as_secs()));
        let (status, body) = opened.map_err(late)?.map_err(unreachable)?;
        if (200..300).contains(&status) {
            return Ok(body);
        }
        let bytes = http_body_util::BodyExt::collect(http_body_util::Limited::new(body, MAX_ERROR)).await;
        Err(agent.error(status, &bytes.map(|bytes| bytes.to_bytes().to_vec()).unwrap_or_default()))
    }
}

/// The agents in this namespace, whether they run or not.
pub(crate) async fn list(cluster: &Cluster, namespace: &str) -> Result<Vec<Agent>, ClusterError> {
    let path = format!("/api/v1/namespaces/{namespace}/pods?labelSelector=app.kubernetes.io%2Fname%3Dnebula-cni-agent");
    let pods = cluster.get(&path).await.map_err(|error| match error.status() {
        Some(403) => {
            let hint = format!(
                "you may not list the agents' pods. Whoever administers the cluster gives it: kubectl create rolebinding -n \
                 {namespace} nebula-kubectl-YOU --role=nebula-kubectl --user=YOU"
            );
            error.hint(hint)
        }
        _ => error,
    })?;
    let mut all: Vec<_> =
        pods["items"].as_array().into_iter().flatten().filter_map(|pod| Agent::of(pod, namespace)).collect();
    // While one replaces another, that which runs counts.
    all.sort_by_key(|agent| (agent.node.clone(), agent.phase != RUNNING, !agent.is_ready));
    all.dedup_by(|a, b| a.node == b.node);
    Ok(all)
}

impl Agent {
    fn of(pod: &Value, namespace: &str) -> Option<Self> {
        let name = pod["metadata"]["name"].as_str().filter(|name| is_name(name))?;
        let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
        let mut ports = containers.flat_map(|container| container["ports"].as_array().into_iter().flatten());
        let port = ports.find(|port| port["name"] == PORT_NAME).and_then(|port| port["containerPort"].as_u64());
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let is_ending = pod["metadata"]["deletionTimestamp"].is_string();
        let phase = if is_ending { "ending" } else { pod["status"]["phase"].as_str().unwrap_or("unknown") };
        Some(Self {
            node: pod["spec"]["nodeName"].as_str().unwrap_or("(no node)").to_owned(),
            namespace: namespace.to_owned(),
            pod: name.to_owned(),
            phase: phase.to_owned(),
            port: port.and_then(|port| u16::try_from(port).ok()),
            is_ready: { conditions }.any(|one| one["type"] == "Ready" && one["status"] == "True"),
        })
    }

    /// Where the API server's proxy has a path of the agent.
    fn url(&self, path: &str) -> Result<String, AgentError> {
        if self.phase != RUNNING {
            return Err(AgentError::NotRunning { pod: self.pod.clone(), phase: self.phase.clone() });
        }
        let port = self.port.ok_or(AgentError::NoApi)?;
        Ok(format!("/api/v1/namespaces/{}/pods/https:{}:{port}/proxy{path}", self.namespace, self.pod))
    }

    fn error(&self, status: u16, body: &[u8]) -> AgentError {
        let document: Value = serde_json::from_slice(body).unwrap_or_default();
        if document["kind"] == "Status" {
            let message = document["message"].as_str().unwrap_or_default().to_owned();
            return match status {
                403 => AgentError::Forbidden { namespace: self.namespace.clone(), message },
                _ => AgentError::Proxy { status, message },
            };
        }
        match serde_json::from_value::<Refused>(document) {
            Ok(Refused { error, lacking }) if !error.is_empty() => {
                AgentError::Refused(error, lacking.and_then(|lacking| lacking.remedy()))
            }
            _ => {
                let message = String::from_utf8_lossy(body).trim().chars().take(200).collect();
                AgentError::Proxy { status, message }
            }
        }
    }
}

fn unreachable(error: ClusterError) -> AgentError {
    AgentError::Unreachable(error.to_string())
}

/// The nodes that did not answer, those with the same reason together: one line for each, and what would help.
pub(crate) fn remarks<'b>(failed: impl IntoIterator<Item = (&'b str, &'b AgentError)>) -> Vec<String> {
    let mut by_reason: BTreeMap<&AgentError, Vec<&str>> = BTreeMap::new();
    for (node, error) in failed {
        by_reason.entry(error).or_default().push(node);
    }
    let mut lines = Vec::new();
    for (error, nodes) in by_reason {
        let shown = nodes.iter().take(NAMED).copied().collect::<Vec<_>>().join(", ");
        let more = nodes.len().saturating_sub(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        lines.push(format!("{shown}{more}: {error}"));
        if let AgentError::Refused(_, Some(remedy)) = error {
            lines.push(format!("  with the right to: {remedy}"));
        }
    }
    lines
}

const RUNNING: &str = "Running";
const AT_A_TIME: usize = 16;
const NAMED: usize = 5;
/// Of ten minutes.
const RENEW_AFTER: Duration = Duration::from_secs(7 * 60);
const OPENS_WITHIN: Duration = Duration::from_secs(30);
const MAX_ANSWER: usize = 64 << 20;
const MAX_ERROR: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn agent() -> Agent {
        let pod = json!({"metadata": {"name": "nebula-cni-agent-x"}, "status": {"phase": "Running"},
            "spec": {"nodeName": "n1", "containers": [{"ports": [{"name": "metrics", "containerPort": 1},
                {"name": "api", "containerPort": 9478}]}]}});
        Agent::of(&pod, "nebula-system").unwrap()
    }

    #[test]
    fn an_agent_is_reached_by_its_pod_and_port_and_otherwise_the_reason_is_said() {
        let path = "/api/v1/namespaces/nebula-system/pods/https:nebula-cni-agent-x:9478/proxy/v1/status";
        assert_eq!(agent().url("/v1/status").unwrap(), path);
        assert_eq!(Agent { port: None, ..agent() }.url("/"), Err(AgentError::NoApi));
        let pending = Agent { phase: "Pending".to_owned(), ..agent() };
        assert!(pending.url("/").unwrap_err().to_string().contains("is Pending"));
        assert_eq!(Agent::of(&json!({"metadata": {"name": "../x"}}), "n"), None);
    }

    #[test]
    fn whether_the_agent_or_the_api_server_refuses_is_told_apart() {
        let said = |status, body: Value| agent().error(status, body.to_string().as_bytes());
        let forbidden = said(403, json!({"kind": "Status", "message": "pods is forbidden"}));
        assert!(forbidden.to_string().contains("--role=nebula-kubectl"), "{forbidden}");
        let lacking = json!({"user": "system:serviceaccount:a:b", "verb": "get", "resource": "flows"});
        let refused = said(403, json!({"error": "may not", "lacking": lacking}));
        assert_eq!(refused.to_string(), "its agent refuses: may not");
        let lines = remarks([("n1", &refused), ("n2", &refused)]);
        assert!(
            lines[0].starts_with("n1, n2: ") && lines[1].contains("kubectl create clusterrolebinding"),
            "{lines:?}"
        );
        let html = agent().error(502, b"<h1>bad gateway</h1>");
        assert_eq!(html, AgentError::Proxy { status: 502, message: "<h1>bad gateway</h1>".to_owned() });
    }
}

//! The agents of the nodes, asked through the API server's proxy for one Service. Whichever agent it picks forwards a
//! request to the agent of the node that the request names.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, stream};
use http_body_util::{BodyExt, Limited};
use kube::client::Body;
use nebula_cni_contract::agent_api::{
    AUDIENCE, AgentPod, Lacking, PORT_NAME, Refused, SELECTOR, SERVICE, TOKEN_HEADER, on_node,
};
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Mutex;
use zeroize::Zeroizing;

use crate::cli::Place;
use crate::cluster::{Cluster, ClusterError, is_name, may_send_again};
use crate::identity::{Account, Role};
use crate::outcome::ToolError;
use crate::shown::Printer;

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
    of: AgentPod,
}

/// What agents say about a flow.
pub(crate) struct Heard<T> {
    /// Of the first one that answered: it also knows where both pods are.
    pub first: T,
    /// Of the others, with their nodes.
    pub others: Vec<(String, T)>,
    pub failed: Vec<(String, AgentError)>,
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
    /// There is no Service for the way to it.
    #[error(
        "there is no Service {namespace}/{SERVICE}, which leads to the agents: agent.api.port of the chart makes it ({message})"
    )]
    NoService {
        /// Of the agents.
        namespace: String,
        /// What the API server says.
        message: String,
    },
    /// Another agent was asked, and cannot forward the request.
    #[error("{0}")]
    Away(String),
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
        let namespace = cluster.namespace.as_deref();
        let (account, token) = Account::with_token(cluster, place, namespace, role, AUDIENCE).await?;
        Ok(Self { cluster, account, token: Mutex::new((token, SystemClock.now())), all })
    }

    /// A token that is good for some more minutes.
    async fn token(&self) -> Result<Zeroizing<String>, ClusterError> {
        let mut token = self.token.lock().await;
        if SystemClock.now().saturating_duration_since(token.1) > RENEW_AFTER {
            *token = (self.account.token(self.cluster, AUDIENCE).await?, SystemClock.now());
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

    /// The path of an answer about a flow between two ends.
    pub(crate) fn flow_path(path: &str, from: &str, to: &str) -> String {
        let ends = [("from", from), ("to", to)];
        format!("{path}?{}", form_urlencoded::Serializer::new(String::new()).extend_pairs(ends).finish())
    }

    /// Asks an agent about a flow, and then those of the nodes that it names. `None`: none answers, which was said.
    pub(crate) async fn ask_both_nodes<T: DeserializeOwned>(
        &self,
        path: &str,
        nodes: impl Fn(&T) -> Vec<String>,
        printer: &mut Printer<'_>,
    ) -> Result<Option<Heard<T>>, ToolError> {
        let Some((asked, first)) = self.ask_any::<T>(path, printer).await? else { return Ok(None) };
        let mut nodes = nodes(&first);
        nodes.retain(|node| !node.is_empty() && *node != asked);
        nodes.sort();
        nodes.dedup();
        let wanted: Vec<Agent> = self.all.iter().filter(|agent| nodes.contains(&agent.node)).cloned().collect();
        for node in nodes.iter().filter(|node| !wanted.iter().any(|agent| agent.node == **node)) {
            printer.note(&format!("{node}: no agent of Nebula is on such a node"))?;
        }
        let (mut others, mut failed) = (Vec::new(), Vec::new());
        for (node, answer) in self.ask::<T>(&wanted, "GET", path).await {
            match answer {
                Ok(answer) => others.push((node, answer)),
                Err(error) => failed.push((node, error)),
            }
        }
        Ok(Some(Heard { first, others, failed }))
    }

    /// What the first agent that answers says, with its node.
    async fn ask_any<T: DeserializeOwned>(
        &self,
        path: &str,
        printer: &mut Printer<'_>,
    ) -> Result<Option<(String, T)>, ToolError> {
        let mut failed: Vec<(String, AgentError)> = Vec::new();
        for agent in self.all.iter().take(ANY_OF) {
            for (node, answer) in self.ask::<T>(std::slice::from_ref(agent), "GET", path).await {
                match answer {
                    Ok(answer) => return Ok(Some((node, answer))),
                    Err(error) => failed.push((node, error)),
                }
            }
            // Others say the same.
            if matches!(failed.last(), Some((_, AgentError::Refused(_, Some(_))))) {
                break;
            }
        }
        note_failed(&failed, printer)?;
        Ok(None)
    }

    async fn ask_one<T: DeserializeOwned>(&self, agent: &Agent, method: &str, path: &str) -> Result<T, AgentError> {
        let asked = async {
            let body = Limited::new(self.open(agent, method, path).await?, MAX_ANSWER);
            let bytes = body.collect().await.map_err(|_| AgentError::CutOff)?.to_bytes();
            serde_json::from_slice(&bytes).map_err(|_| AgentError::Odd)
        };
        tokio::time::timeout(ANSWER_WITHIN, asked).await.map_err(late)?
    }

    /// Opens a stream.
    pub(crate) async fn stream(&self, agent: &Agent, path: &str) -> Result<Body, AgentError> {
        tokio::time::timeout(ANSWER_WITHIN, self.open(agent, "GET", path)).await.map_err(late)?
    }

    /// Sends a request until its answer begins. The API server picks any agent as the first one, also one that is
    /// gone: then another attempt meets another agent. What could change something is sent once, unless it cannot
    /// have arrived.
    async fn open(&self, agent: &Agent, method: &str, path: &str) -> Result<Body, AgentError> {
        let url = agent.url(path)?;
        let token = self.token().await.map_err(unreachable)?;
        let mut attempts = FuturesUnordered::new();
        let (mut left, is_look) = (ATTEMPTS, method == "GET");
        loop {
            if left > 0 && attempts.len() < if is_look { AT_ONCE } else { 1 } {
                left -= 1;
                attempts.push(self.attempt(agent, method, &url, &token));
            }
            let outcome = tokio::time::timeout(NEXT_AFTER, attempts.next()).await;
            let is_last = left == 0 && attempts.is_empty();
            match outcome {
                Ok(Some(Err(error))) if !is_last && error.is_on_the_way(is_look) => {}
                Ok(Some(outcome)) => return outcome,
                Ok(None) => return Err(AgentError::CutOff),
                Err(_) => {}
            }
        }
    }

    async fn attempt(&self, agent: &Agent, method: &str, url: &str, token: &str) -> Result<Body, AgentError> {
        let opened = self.cluster.open_stream(method, url, Some((TOKEN_HEADER, token)), Vec::new());
        let (status, body) = opened.await.map_err(unreachable)?;
        if (200..300).contains(&status) {
            return Ok(body);
        }
        let bytes = Limited::new(body, MAX_ERROR).collect().await;
        Err(agent.error(status, &bytes.map(|bytes| bytes.to_bytes().to_vec()).unwrap_or_default()))
    }
}

/// The agents in this namespace, whether they run or not.
pub(crate) async fn list(cluster: &Cluster, namespace: &str) -> Result<Vec<Agent>, ClusterError> {
    let path = format!("/api/v1/namespaces/{namespace}/pods?{SELECTOR}");
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
    let agent = |of: AgentPod| {
        let node = if of.node.is_empty() { "(no node)".to_owned() } else { of.node.clone() };
        Agent { node, namespace: namespace.to_owned(), of }
    };
    Ok(AgentPod::all(&pods).into_iter().map(agent).collect())
}

impl Agent {
    /// Where the API server's proxy has a path of the agent.
    fn url(&self, path: &str) -> Result<String, AgentError> {
        let AgentPod { node, pod, phase, port, .. } = &self.of;
        if !self.of.is_running() || !is_name(node) {
            return Err(AgentError::NotRunning { pod: pod.clone(), phase: phase.clone() });
        }
        port.ok_or(AgentError::NoApi)?;
        let of_service = format!("/api/v1/namespaces/{}/services/https:{SERVICE}:{PORT_NAME}/proxy", self.namespace);
        Ok(of_service + &on_node(node, path))
    }

    fn error(&self, status: u16, body: &[u8]) -> AgentError {
        let document: Value = serde_json::from_slice(body).unwrap_or_default();
        if document["kind"] == "Status" {
            let message = document["message"].as_str().unwrap_or_default().to_owned();
            return match status {
                403 => AgentError::Forbidden { namespace: self.namespace.clone(), message },
                404 => AgentError::NoService { namespace: self.namespace.clone(), message },
                _ => AgentError::Proxy { status, message },
            };
        }
        match serde_json::from_value::<Refused>(document) {
            Ok(Refused { error, .. }) if !error.is_empty() && status == 502 => AgentError::Away(error),
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

impl AgentError {
    /// Whether the request did not get from the API server to an agent.
    fn is_on_the_way(&self, is_look: bool) -> bool {
        match self {
            Self::Proxy { status, message } => may_send_again(*status, message, is_look),
            _ => false,
        }
    }
}

fn unreachable(error: ClusterError) -> AgentError {
    AgentError::Unreachable(error.to_string())
}

fn late(_: tokio::time::error::Elapsed) -> AgentError {
    AgentError::Unreachable(format!("no answer within {} s", ANSWER_WITHIN.as_secs()))
}

/// Says which agents did not answer, and why.
pub(crate) fn note_failed(failed: &[(String, AgentError)], printer: &mut Printer<'_>) -> Result<(), ToolError> {
    for line in remarks(failed.iter().map(|(node, error)| (node.as_str(), error))) {
        printer.note(&line)?;
    }
    Ok(())
}

/// Says why agents do not show the destination of a flow.
pub(crate) fn note_hidden(lacking: Option<&Lacking>, printer: &mut Printer<'_>) -> Result<(), ToolError> {
    let Some(lacking) = lacking else { return Ok(()) };
    printer.note(&format!("The destination is not shown: {lacking}"))?;
    lacking.remedy().map_or(Ok(()), |remedy| printer.note(&format!("  with the right to: {remedy}")))
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

const AT_A_TIME: usize = 16;
/// Any agent knows where both pods of a flow are.
const ANY_OF: usize = 5;
const NAMED: usize = 5;
/// Of ten minutes.
const RENEW_AFTER: Duration = Duration::from_secs(7 * 60);
const ANSWER_WITHIN: Duration = Duration::from_secs(30);
const ATTEMPTS: usize = 8;
/// Attempts for one answer, of which the others have not failed yet.
const AT_ONCE: usize = 3;
/// The API server waits long for a node that is gone.
const NEXT_AFTER: Duration = Duration::from_secs(4);
const MAX_ANSWER: usize = 64 << 20;
const MAX_ERROR: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn agent() -> Agent {
        let (node, namespace) = ("n1".to_owned(), "nebula-system".to_owned());
        let of = AgentPod {
            node: node.clone(),
            pod: "nebula-cni-agent-x".to_owned(),
            phase: "Running".to_owned(),
            address: None,
            port: Some(9478),
            is_ready: false,
        };
        Agent { node, namespace, of }
    }

    #[test]
    fn an_agent_is_reached_by_the_service_and_its_node_and_otherwise_the_reason_is_said() {
        let path = "/api/v1/namespaces/nebula-system/services/https:nebula-cni-agent-api:api/proxy/v1/nodes/n1/status";
        assert_eq!(agent().url("/v1/status").unwrap(), path);
        let other = |change: fn(&mut AgentPod)| {
            let mut agent = agent();
            change(&mut agent.of);
            agent.url("/v1/status").unwrap_err()
        };
        assert_eq!(other(|of| of.port = None), AgentError::NoApi);
        assert!(other(|of| of.phase = "Pending".to_owned()).to_string().contains("is Pending"));
        for bad in ["", "../x", "n1/../n2", "n1%2f", "n1?x", "n1@h"] {
            let of = AgentPod { node: bad.to_owned(), ..agent().of };
            assert!(matches!(Agent { of, ..agent() }.url("/"), Err(AgentError::NotRunning { .. })), "{bad}");
        }
    }

    #[test]
    fn only_what_did_not_reach_an_agent_is_sent_to_another_one_and_a_change_only_if_that_is_certain() {
        let proxy = |status, message: &str| AgentError::Proxy { status, message: message.to_owned() };
        let refused = proxy(503, "error trying to reach service: dial tcp 192.0.2.7:9478: connect: connection refused");
        let cut_off = proxy(502, "error trying to reach service: EOF");
        assert_eq!([&refused, &cut_off].map(|error| error.is_on_the_way(true)), [true, true]);
        assert_eq!([&refused, &cut_off].map(|error| error.is_on_the_way(false)), [true, false]);
        let others = [AgentError::Away("x".to_owned()), AgentError::Refused("x".to_owned(), None), proxy(405, "")];
        assert!(!others.iter().any(|error| error.is_on_the_way(true)));
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
        let away = said(502, json!({"error": "the agent of node n1 gives no answer"}));
        assert_eq!(away, AgentError::Away("the agent of node n1 gives no answer".to_owned()));
        let missing = said(404, json!({"kind": "Status", "message": "services \"nebula-cni-agent-api\" not found"}));
        assert!(missing.to_string().contains("agent.api.port"), "{missing}");
        let html = agent().error(502, b"<h1>bad gateway</h1>");
        assert_eq!(html, AgentError::Proxy { status: 502, message: "<h1>bad gateway</h1>".to_owned() });
    }
}

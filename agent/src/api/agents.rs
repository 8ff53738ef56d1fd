//! Where the agents of other nodes are, as the API server says: only pods of agents in the agent's own namespace count,
//! and each only for the node that it is on.

use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Method;
use kube::Client;
use nebula_cni_contract::agent_api::{AgentPod, SELECTOR};
use nebula_cni_contract::clock::{Clock, SystemClock};

use super::denied::Denied;
use super::recent::Recent;
use crate::cluster::api::ask;
use crate::cluster::throttle::Quota;

/// Why a request does not reach the agent of a node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Away {
    /// No agent is there.
    #[error(
        "no agent of Nebula is on a node {node}: kubectl get nodes names all, and the DaemonSet says on which it is"
    )]
    None { node: String },
    /// Its pod does not run.
    #[error(
        "the agent of node {node} does not run: pod {namespace}/{pod} is {phase} (kubectl -n {namespace} describe pod {pod})"
    )]
    NotRunning { node: String, namespace: String, pod: String, phase: String },
    /// It has no API.
    #[error("the agent of node {node} has no API for kubectl: agent.api.port of the chart turns it on")]
    NoApi { node: String },
    /// It gives no answer.
    #[error(
        "the agent of node {node} gives no answer at {address}: {why}. Does the node run, and do the other nodes reach this port?"
    )]
    Unreachable { node: String, address: SocketAddr, why: String },
    /// Another agent has its address.
    #[error(
        "the request for node {node} was forwarded to an agent of another node, because addresses have changed; try again"
    )]
    Astray { node: String },
}

/// Asks for agents by their nodes, and remembers the answers for a moment.
pub(super) struct Agents {
    client: Client,
    state: Mutex<State>,
}

struct State {
    known: Recent<String, Result<SocketAddr, Away>>,
    quota: Quota,
}

impl Agents {
    pub(super) fn new(client: Client) -> Self {
        let state = State { known: Recent::new(MOST_KNOWN), quota: Quota::new(LOOKUPS, Duration::from_secs(60)) };
        Self { client, state: Mutex::new(state) }
    }

    /// The address at which the agent of a node has its API. The name must have been checked.
    pub(super) async fn find(&self, node: &str) -> Result<SocketAddr, Denied> {
        let now = SystemClock.now();
        {
            let mut state = self.state();
            if let Some(known) = state.known.get(&node.to_owned(), now) {
                return known.map_err(Denied::Away);
            }
            if !state.quota.take(now) {
                return Err(Denied::Busy);
            }
        }
        let namespace = self.client.default_namespace();
        // Version 0: from the API server's memory.
        let of_node = format!("fieldSelector=spec.nodeName%3D{node}&resourceVersion=0");
        let path = format!("/api/v1/namespaces/{namespace}/pods?{SELECTOR}&{of_node}");
        let list = ask(&self.client, Method::GET, &path, None).await.map_err(|error| {
            tracing::warn!(%error, node, "cannot ask the API server for the agent of a node");
            Denied::NoLookup
        })?;
        let found = AgentPod::all(&list).into_iter().find(|agent| agent.node == node);
        let answer = address(node, namespace, found);
        self.remember(node, answer.clone(), if answer.is_ok() { HOLDS } else { ABSENCE_HOLDS });
        answer.map_err(Denied::Away)
    }

    /// The agent gives no answer: others need not wait for it, too.
    pub(super) fn is_silent(&self, node: &str, address: SocketAddr, why: String) -> Denied {
        let away = Away::Unreachable { node: node.to_owned(), address, why };
        self.remember(node, Err(away.clone()), ABSENCE_HOLDS);
        Denied::Away(away)
    }

    fn remember(&self, node: &str, answer: Result<SocketAddr, Away>, holds: Duration) {
        let now: Instant = SystemClock.now();
        self.state().known.put(node.to_owned(), answer, now + holds, now);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No step leaves it in between.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn address(node: &str, namespace: &str, found: Option<AgentPod>) -> Result<SocketAddr, Away> {
    let node = node.to_owned();
    let Some(agent) = found else { return Err(Away::None { node }) };
    let AgentPod { pod, phase, address, port, .. } = &agent;
    match (agent.is_running(), address, port) {
        (true, Some(address), Some(port)) => Ok(SocketAddr::new(*address, *port)),
        (true, Some(_), None) => Err(Away::NoApi { node }),
        _ => Err(Away::NotRunning {
            node,
            namespace: namespace.to_owned(),
            pod: pod.clone(),
            phase: if agent.is_running() { "without an address" } else { phase }.to_owned(),
        }),
    }
}

const HOLDS: Duration = Duration::from_secs(10);
const ABSENCE_HOLDS: Duration = Duration::from_secs(2);
const MOST_KNOWN: usize = 1024;
/// Of all callers together, in a minute.
const LOOKUPS: usize = 3000;

//! Agents as the list of their pods shows them, to those that look for the agent of a node.

use std::net::IpAddr;

use serde_json::Value;

use super::PORT_NAME;

/// The pod of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentPod {
    /// The node; empty while the pod has none.
    pub node: String,
    /// Name of the pod.
    pub pod: String,
    /// Its phase, or `ending`.
    pub phase: String,
    /// Its address, once it has one.
    pub address: Option<IpAddr>,
    /// The port of its API, if it has one.
    pub port: Option<u16>,
    /// Whether its node is ready for pods.
    pub is_ready: bool,
}

impl AgentPod {
    /// The agents in a list of pods: one for each node, sorted by it. While one pod replaces another, that which runs
    /// counts.
    #[must_use]
    pub fn all(list: &Value) -> Vec<Self> {
        let mut all: Vec<_> = list["items"].as_array().into_iter().flatten().filter_map(Self::of).collect();
        let key = |agent: &Self| (agent.node.clone(), !agent.is_running(), !agent.is_ready);
        all.sort_by_cached_key(key);
        all.dedup_by(|a, b| a.node == b.node);
        all
    }

    fn of(pod: &Value) -> Option<Self> {
        let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
        let mut ports = containers.flat_map(|container| container["ports"].as_array().into_iter().flatten());
        let port = ports.find(|port| port["name"] == PORT_NAME).and_then(|port| port["containerPort"].as_u64());
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let is_ending = pod["metadata"]["deletionTimestamp"].is_string();
        let phase = if is_ending { "ending" } else { pod["status"]["phase"].as_str().unwrap_or("unknown") };
        Some(Self {
            node: pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
            pod: pod["metadata"]["name"].as_str()?.to_owned(),
            phase: phase.to_owned(),
            address: pod["status"]["podIP"].as_str().and_then(|address| address.parse().ok()),
            port: port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port != 0),
            is_ready: { conditions }.any(|one| one["type"] == "Ready" && one["status"] == "True"),
        })
    }

    /// Whether it runs, ready or not.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.phase == "Running"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_the_pods_of_a_node_the_one_that_runs_is_its_agent() {
        let pod = |name: &str, node: &str, phase: &str, metadata: Value| {
            let mut pod = json!({"metadata": metadata, "status": {"phase": phase, "podIP": "192.0.2.7"},
                "spec": {"nodeName": node, "containers": [{"name": "c"}, {"ports": [{"name": "metrics", "containerPort": 1},
                    {"name": "api", "containerPort": 9478}]}]}});
            pod["metadata"]["name"] = name.into();
            pod
        };
        let ending = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let mut silent = pod("d", "n2", "Running", json!({}));
        silent["spec"]["containers"][1]["ports"] = Value::Null;
        let list = json!({"items": [
            silent,
            pod("a", "n1", "Pending", json!({})),
            pod("b", "n1", "Running", json!({})),
            pod("c", "n1", "Running", ending),
            {"spec": {"nodeName": "n0"}},
        ]});
        let all = AgentPod::all(&list);
        assert_eq!(all.iter().map(|agent| (&*agent.node, &*agent.pod)).collect::<Vec<_>>(), [("n1", "b"), ("n2", "d")]);
        assert_eq!((all[0].address, all[0].port), ("192.0.2.7".parse().ok(), Some(9478)));
        assert_eq!((all[1].port, all[1].is_running(), all[1].is_ready), (None, true, false));
    }
}

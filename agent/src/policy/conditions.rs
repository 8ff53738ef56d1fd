//! Says in the status of each ClusterNetworkPolicy whether it is enforced as it is written.
//!
//! All agents know the same, so any of them may write it, and one is enough: each waits for a time of its own, writes
//! only what nobody has written meanwhile, and names the version of the object that it has seen, so that of two that
//! write at the same time the second is refused. What was written of a generation stays, whichever release wrote it:
//! agents of two releases do not contradict each other again and again.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Method;
use k8s_openapi::jiff::Timestamp;
use kube::api::DynamicObject;
use kube::{Client, ResourceExt};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_policy::compile::Cluster;
use nebula_cni_policy::model::Problem;
use serde_json::json;

use super::said::{Stated, Weighed};
use crate::cluster::api::{APPLY_PATCH, ApiError, ask, is_name};

/// What is to be written, from the watch to the writer. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Conditions {
    /// Name of this node.
    node: Arc<str>,
    wanted: Arc<Mutex<BTreeMap<String, Wanted>>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    /// Of the object as it was seen.
    version: String,
    generation: i64,
    due: Instant,
    /// Why it is not enforced as it is written.
    problems: Vec<String>,
}

impl Conditions {
    pub(crate) fn new(node: &str) -> Self {
        Self { node: node.into(), wanted: Arc::default() }
    }

    /// Takes an object as the API server shows it now.
    pub(crate) fn seen(&self, object: &DynamicObject, now: Instant) {
        let (name, generation) = (object.name_any(), object.metadata.generation.unwrap_or_default());
        let conditions = object.data["status"]["conditions"].as_array().into_iter().flatten();
        let mut ours = conditions.filter(|condition| condition["type"] == TYPE);
        let is_written = ours.any(|condition| condition["observedGeneration"].as_i64() >= Some(generation));
        let mut all = self.lock();
        let wanted = match Weighed::cluster_policy(object).stated {
            Stated::Read(policy) if !is_written && is_name(&name) => {
                // On its own: whatever the node knows of others must not make a difference.
                let problems = Cluster::new().set_cluster_policy(&policy).unwrap_or_default();
                let version = object.resource_version().unwrap_or_default();
                let hash = fnv1a(&[&self.node, "/", &name, "/", &generation.to_string()]);
                let due = now + Duration::from_millis(hash % SPREAD.as_millis() as u64);
                // A change by somebody else in between does not put it off.
                let due =
                    all.get(&name).filter(|before| before.generation == generation).map_or(due, |before| before.due);
                Some(Wanted { version, generation, due, problems: named(&problems) })
            }
            // The version before stays in force, and its condition says which generation it is about.
            _ => None,
        };
        match wanted {
            Some(wanted) if all.len() < MAX_WAITING => drop(all.insert(name, wanted)),
            _ => drop(all.remove(&name)),
        }
    }

    /// Writes what is due, until the task is cancelled.
    pub(crate) async fn keep(self, client: Client) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = SystemClock.now();
            let due: Vec<(String, Wanted)> = {
                let mut all = self.lock();
                let names: Vec<String> = all
                    .iter()
                    .filter(|(_, wanted)| wanted.due <= now)
                    .take(AT_ONCE)
                    .map(|(name, _)| name.clone())
                    .collect();
                // Whatever comes of it: the watch shows what is there then, and asks again if that is not ours.
                names.into_iter().filter_map(|name| all.remove_entry(&name)).collect()
            };
            for (name, wanted) in due {
                match write(&client, &name, &wanted).await {
                    Ok(()) => tracing::debug!(policy = name, "wrote the status of a ClusterNetworkPolicy"),
                    // Another agent was faster, or the policy is gone.
                    Err(error) if matches!(error.status(), Some(404 | 409)) => {}
                    Err(error) => {
                        tracing::warn!(policy = name, %error, "cannot write the status of a ClusterNetworkPolicy");
                        let due = SystemClock.now() + RETRY;
                        self.lock().entry(name).or_insert(Wanted { due, ..wanted });
                    }
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Wanted>> {
        // Each change is complete before the lock is given back.
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn named(problems: &[Problem]) -> Vec<String> {
    problems.iter().take(MAX_PROBLEMS).map(ToString::to_string).collect()
}

async fn write(client: &Client, name: &str, wanted: &Wanted) -> Result<(), ApiError> {
    let now = Timestamp::from_second(SystemClock.unix_seconds()).unwrap_or_default().to_string();
    let (status, reason, message) = match wanted.problems.is_empty() {
        true => ("True", "Enforced", "enforced in the tunnels of captured pods".to_owned()),
        false => ("False", "PartlyEnforced", format!("not enforced as it is written: {}", wanted.problems.join("; "))),
    };
    let condition = json!({"type": TYPE, "status": status, "reason": reason, "message": message,
        "observedGeneration": wanted.generation, "lastTransitionTime": now});
    let patch = json!({"apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
        "metadata": {"name": name, "resourceVersion": wanted.version}, "status": {"conditions": [condition]}});
    let path = format!(
        "/apis/policy.networking.k8s.io/v1alpha2/clusternetworkpolicies/{name}/status?fieldManager=nebula-cni-agent&force=true"
    );
    ask(client, Method::PATCH, &path, Some((APPLY_PATCH, &patch))).await.map(drop)
}

/// The condition's type.
const TYPE: &str = "nebula-cni/Enforced";
/// The writes of all nodes are spread over this time; the first of them is enough.
const SPREAD: Duration = Duration::from_secs(120);
const LOOK_EVERY: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 1000 });
/// Of each node.
const AT_ONCE: usize = 4;
const RETRY: Duration = Duration::from_secs(600);
/// More than there can be policies.
const MAX_WAITING: usize = 4096;
const MAX_PROBLEMS: usize = 8;

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::cluster::fake_api_server::FakeApiServer;

    fn policy(generation: i64, observed: Option<i64>, peers: Value) -> DynamicObject {
        let rule = json!({"action": "Accept", "to": peers});
        let ours = observed.map(|observed| json!({"type": TYPE, "observedGeneration": observed}));
        let others = json!({"type": "Other", "observedGeneration": 99});
        let conditions: Vec<Value> = [Some(others), ours].into_iter().flatten().collect();
        serde_json::from_value(json!({
            "apiVersion": "policy.networking.k8s.io/v1alpha2", "kind": "ClusterNetworkPolicy",
            "metadata": {"name": "guard", "generation": generation, "resourceVersion": "77"},
            "spec": {"tier": "Admin", "priority": 1, "subject": {"namespaces": {}}, "egress": [rule]},
            "status": {"conditions": conditions},
        }))
        .unwrap()
    }

    fn due(conditions: &Conditions) -> Option<Instant> {
        conditions.lock().get("guard").map(|wanted| wanted.due)
    }

    #[test]
    fn each_node_waits_for_a_time_of_its_own_and_for_nothing_that_is_written() {
        let start = SystemClock.now();
        let all = || json!([{"namespaces": {}}]);
        let times: Vec<Instant> = (0..1000)
            .map(|n| {
                let conditions = Conditions::new(&format!("node-{n}"));
                conditions.seen(&policy(3, Some(2), all()), start);
                due(&conditions).unwrap()
            })
            .collect();
        for tenth in 0..10 {
            let of = |time: &&Instant| (**time - start) * 10 / SPREAD.as_secs() as u32 >= Duration::from_secs(tenth);
            let later = times.iter().filter(of).count();
            assert!((later as i64 - (1000 - 100 * tenth as i64)).abs() < 60, "{tenth}: {later}");
        }
        let conditions = Conditions::new("n1");
        conditions.seen(&policy(3, None, all()), start);
        let first = due(&conditions);
        conditions.seen(&policy(3, Some(2), all()), start + SPREAD);
        assert!(first.is_some() && due(&conditions) == first, "another change does not put it off");
        conditions.seen(&policy(3, Some(3), all()), start);
        assert_eq!(due(&conditions), None, "another agent has written it");
    }

    #[tokio::test]
    async fn it_is_written_once_with_the_version_that_was_seen() {
        let (server, conditions) = (FakeApiServer::default(), Conditions::new("n1"));
        let client = server.clone().start().await;
        let long_ago = SystemClock.now().checked_sub(SPREAD).unwrap();
        conditions.seen(&policy(5, None, json!([{"domainNames": ["*.example.com"]}])), long_ago);
        let task = tokio::spawn(conditions.clone().keep(client));
        tokio::time::sleep(20 * LOOK_EVERY).await;
        let asked = server.asked("clusternetworkpolicies/guard/status");
        let [(method, _, body)] = &asked[..] else { panic!("{asked:?}") };
        assert_eq!((method.as_str(), &body["metadata"]["resourceVersion"]), ("PATCH", &"77".into()));
        let condition = &body["status"]["conditions"][0];
        assert_eq!((&condition["status"], &condition["reason"]), (&"False".into(), &"PartlyEnforced".into()));
        assert!(condition["message"].as_str().unwrap().contains("domain"), "{condition}");
        assert_eq!(condition["observedGeneration"], 5);

        server.is_away(true);
        conditions.seen(&policy(6, Some(5), json!([{"namespaces": {}}])), long_ago);
        let is_put_off = || due(&conditions).is_some_and(|due| due > SystemClock.now() + RETRY / 2);
        for _ in 0..500 {
            if is_put_off() {
                break;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        assert!(is_put_off(), "a failure is tried again much later");
        assert_eq!(server.asked("clusternetworkpolicies").len(), 1);
        task.abort();
    }
}

//! Removes the taint of a node whose agent is ready, and puts it back where an agent is gone. The latter is done by one
//! agent of the cluster, which holds a Lease.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::http::Method;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use nebula_cni_contract::clock::{Clock, SystemClock};
use serde_json::{Value, json};

use super::api::{ApiError, JSON_PATCH, ask, is_name};
use super::heartbeat::Heartbeats;
use super::taint;
use crate::readiness::{self, Readiness};

/// Keeps the taint of one node, and leads if nobody else does.
pub struct TaintKeeper {
    /// The API server.
    pub client: Client,
    /// This node.
    pub node: String,
    /// The namespace of the Leases.
    pub namespace: String,
    /// Whether this node is ready.
    pub readiness: Readiness,
    /// How long an agent may be away before its node is tainted.
    pub grace: Duration,
}

impl TaintKeeper {
    /// Works until the task is cancelled.
    pub async fn run(self) {
        let mut beats = Heartbeats::default();
        let mut leader = Seen::default();
        let mut tick = tokio::time::interval(INTERVAL);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            if let Err(error) = self.once(&mut beats, &mut leader).await {
                tracing::warn!(%error, "cannot keep the taint of nodes");
            }
        }
    }

    async fn once(&self, beats: &mut Heartbeats, leader: &mut Seen) -> Result<(), ApiError> {
        if readiness::verdict(&self.readiness.now()).is_ok() {
            self.renew().await?;
            // It is removed whenever it reappears: registration of the node adds it too.
            remove(&self.client, &self.node).await?;
        }
        if !self.leads(leader).await? {
            *beats = Heartbeats::default();
            return Ok(());
        }
        for node in beats.overdue(&self.listed().await?, SystemClock.now(), self.grace) {
            match add(&self.client, &node).await {
                Ok(true) => tracing::warn!(node, "the agent of this node is gone: the node is tainted"),
                Ok(false) => {}
                // The node itself may be gone.
                Err(error) if error.status() == Some(404) => self.forget(&node).await?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Renews this node's Lease.
    async fn renew(&self) -> Result<(), ApiError> {
        let spec = json!({"holderIdentity": self.node, "leaseDurationSeconds": self.grace.as_secs(), "renewTime": micro_time()});
        let patch = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": self.lease_name(), "labels": {COMPONENT.0: COMPONENT.1}}, "spec": spec});
        let apply = PatchParams::apply("nebula-cni-agent").force();
        let done = self.leases().patch(&self.lease_name(), &apply, &Patch::Apply(&patch)).await;
        done.map(drop).map_err(|source| failed("renew the agent's Lease", source))
    }

    /// Whether this agent leads; tries to, if nobody does.
    async fn leads(&self, seen: &mut Seen) -> Result<bool, ApiError> {
        let leases = self.leases();
        let found = leases.get_opt(LEADER).await.map_err(|source| failed("read the leader's Lease", source))?;
        let now = SystemClock.now();
        let Some(mut lease) = found else {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(LEADER.into()), ..ObjectMeta::default() },
                spec: Some(self.leadership()),
            };
            return taken(leases.create(&PostParams::default(), &lease).await);
        };
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        let version = lease.resource_version().unwrap_or_default();
        // As with heartbeats, only what changes in front of our eyes counts.
        if seen.0.as_ref().is_none_or(|(before, _)| *before != version) {
            seen.0 = Some((version, now));
        }
        let is_stale = seen.0.as_ref().is_some_and(|(_, since)| now.saturating_duration_since(*since) > LEADER_AWAY);
        if holder != self.node && !is_stale && !holder.is_empty() {
            return Ok(false);
        }
        lease.spec = Some(self.leadership());
        // It carries the version that was read, so that only one of several takes over.
        taken(leases.replace(LEADER, &PostParams::default(), &lease).await)
    }

    fn leadership(&self) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.node.clone()),
            lease_duration_seconds: i32::try_from(LEADER_AWAY.as_secs()).ok(),
            renew_time: Some(micro_time()),
            ..LeaseSpec::default()
        }
    }

    /// The last renewal of each agent, by node.
    async fn listed(&self) -> Result<BTreeMap<String, String>, ApiError> {
        let list = ListParams::default().labels(&format!("{}={}", COMPONENT.0, COMPONENT.1));
        let found = self.leases().list(&list).await.map_err(|source| failed("list the agents' Leases", source))?;
        let entry = |lease: Lease| {
            let version = lease.resource_version().unwrap_or_default();
            Some((lease.spec?.holder_identity.filter(|node| is_name(node))?, version))
        };
        Ok(found.items.into_iter().filter_map(entry).collect())
    }

    async fn forget(&self, node: &str) -> Result<(), ApiError> {
        let done = self.leases().delete(&format!("{LEASE_PREFIX}{node}"), &kube::api::DeleteParams::default()).await;
        done.map(drop).map_err(|source| failed("delete the Lease of a node that is gone", source))
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn lease_name(&self) -> String {
        format!("{LEASE_PREFIX}{}", self.node)
    }
}

/// The version of the leader's Lease, and since when it has been that.
#[derive(Debug, Default)]
struct Seen(Option<(String, std::time::Instant)>);

/// Removes the taint from a node; returns whether it had one.
///
/// # Errors
/// Returns the API server's error; 409 or 422 if somebody changed the node meanwhile.
pub async fn remove(client: &Client, node: &str) -> Result<bool, ApiError> {
    change(client, node, taint::removal).await
}

/// Adds the taint to a node; returns whether it had none.
///
/// # Errors
/// As [`remove`].
pub async fn add(client: &Client, node: &str) -> Result<bool, ApiError> {
    change(client, node, taint::addition).await
}

/// Removes the taint from every node that this agent may change, and the Leases by which it would be put back: for the
/// uninstallation, which runs on every node. Where the API server holds agents to their own nodes, as the chart asks it
/// to, the others are left to their own agents, and the last one removes the leader's Lease.
///
/// # Errors
/// Returns the last error after everything was tried.
pub async fn remove_for_good(client: &Client, namespace: &str, own: Option<&str>) -> Result<usize, ApiError> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    let list = ListParams::default().labels(&format!("{}={}", COMPONENT.0, COMPONENT.1));
    let found = leases.list(&list).await.map_err(|source| failed("list the agents' Leases", source))?;
    let mut outcome = Ok(());
    for name in found.items.iter().map(ResourceExt::name_any) {
        if let Err(error) = delete(&leases, &name).await {
            outcome = Err(error);
        }
    }
    let nodes = ask(client, Method::GET, "/api/v1/nodes", None).await?;
    let (mut count, mut left) = (0, 0_usize);
    for node in nodes["items"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let Some(name) = node["metadata"]["name"].as_str() else { continue };
        match remove(client, name).await {
            Ok(had_one) => count += usize::from(had_one),
            Err(error) if error.status() == Some(403) && own.is_some_and(|own| own != name) => left += 1,
            Err(error) => outcome = Err(error),
        }
    }
    outcome?;
    if left > 0 {
        return Ok(count);
    }
    // Last, because it tells that there may be something to remove.
    delete(&leases, LEADER).await.map(|()| count)
}

async fn delete(leases: &Api<Lease>, name: &str) -> Result<(), ApiError> {
    match leases.delete(name, &kube::api::DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(source) => Err(failed("delete the agents' Leases", source)),
    }
}

/// With `taint` off: takes back what agents set while it was on, as [`remove_for_good`] does, and returns from how many
/// nodes. The leader's Lease tells that there is something to take back; it is gone once that is done. Until all agents
/// have the new configuration, one with the old may lead again, and the next agent with the new takes that back too.
///
/// # Errors
/// As [`remove_for_good`].
pub async fn turn_off(client: &Client, namespace: &str, own: &str) -> Result<usize, ApiError> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), namespace);
    match leases.get_opt(LEADER).await {
        Ok(Some(_)) => remove_for_good(client, namespace, Some(own)).await,
        Ok(None) => Ok(0),
        // The agent has the rights only if `taint` is on, or was on at the last upgrade.
        Err(kube::Error::Api(status)) if status.code == 403 => Ok(0),
        Err(source) => Err(failed("read the leader's Lease", source)),
    }
}

/// Calls [`turn_off`] until it succeeds. `own` is this agent's node.
pub async fn turn_off_for_good(client: Client, own: String) {
    let mut tick = tokio::time::interval(INTERVAL);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut tried = 0u32;
    loop {
        tick.tick().await;
        match turn_off(&client, client.default_namespace(), &own).await {
            Ok(0) => return,
            Ok(nodes) => {
                tracing::info!(nodes, "\"taint\" is off: removed {} from nodes", taint::KEY);
                return;
            }
            Err(error) => {
                tried += 1;
                if tried.is_power_of_two() {
                    let advice = format!("kubectl taint nodes --all {}-", taint::KEY);
                    tracing::warn!(%error, advice, "\"taint\" is off, but the taint of earlier agents cannot be removed");
                }
            }
        }
    }
}

async fn change(client: &Client, node: &str, patch: fn(&Value) -> Option<Value>) -> Result<bool, ApiError> {
    if !is_name(node) {
        return Err(ApiError::Malformed(node.to_owned()));
    }
    let path = format!("/api/v1/nodes/{node}");
    let mut tries = 3;
    loop {
        let Some(patch) = patch(&ask(client, Method::GET, &path, None).await?) else { return Ok(false) };
        match ask(client, Method::PATCH, &path, Some((JSON_PATCH, &patch))).await {
            Ok(_) => return Ok(true),
            // Somebody changed the node meanwhile, and the test failed.
            Err(error) if tries > 1 && matches!(error.status(), Some(409 | 422)) => tries -= 1,
            Err(error) => return Err(error),
        }
    }
}

fn taken(outcome: Result<Lease, kube::Error>) -> Result<bool, ApiError> {
    match outcome {
        Ok(_) => Ok(true),
        // Somebody else was faster.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
        Err(source) => Err(failed("take the leader's Lease", source)),
    }
}

fn failed(what: &str, source: kube::Error) -> ApiError {
    ApiError::Request { what: what.to_owned(), source: Box::new(source) }
}

fn micro_time() -> MicroTime {
    MicroTime(Timestamp::from_second(SystemClock.unix_seconds()).unwrap_or_default())
}

/// Default of [`TaintKeeper::grace`].
pub const GRACE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_secs(10);
const LEADER_AWAY: Duration = Duration::from_secs(30);
const LEADER: &str = "nebula-cni-agent-leader";
const LEASE_PREFIX: &str = "nebula-cni-agent-node-";
const COMPONENT: (&str, &str) = ("nebula-cni/component", "agent-heartbeat");

//! Takes tasks from the queue and performs them: creates Events, evicts and labels pods, and reports the node's own
//! state.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_contract::launch::Pod;
use serde_json::json;
use tokio::sync::{mpsc, watch};

use super::api::{ApiError, JSON, MERGE_PATCH, ask, is_name};
use super::evict::{Spared, may_evict};
use super::notice::Notice;
use super::pods::Known;
use super::queue::{ApiQueue, ApiTask};
use super::throttle::{Quota, Throttle};
use crate::metrics::Metrics;
use crate::node::Unenforced;
use crate::readiness::{Part, Readiness, Standing, Standings};
use crate::table::member::incarnation;

/// Speaks with the API server for the agent of one node.
pub struct Worker {
    client: Client,
    node: String,
    known: Arc<Known>,
    throttle: Throttle,
    evictions: Quota,
    metrics: Arc<Metrics>,
}

/// Starts to follow the pods of `node` and to work on the queue, in tasks of the current Tokio runtime.
#[must_use]
pub fn start(
    client: &Client,
    node: &str,
    metrics: &Arc<Metrics>,
    (readiness, unenforced): (&Readiness, &Unenforced),
) -> ApiQueue {
    let known = Arc::new(Known::default());
    let (api_queue, tasks) = ApiQueue::new(Arc::clone(&known) as Arc<_>, Arc::clone(&known.changed));
    let worker = Worker {
        client: client.clone(),
        node: node.to_owned(),
        known: Arc::clone(&known),
        throttle: Throttle::default(),
        evictions: Quota::new(EVICTIONS_IN_A_MINUTE, Duration::from_secs(60)),
        metrics: Arc::clone(metrics),
    };
    tokio::spawn(worker.run(tasks));
    tokio::spawn(report_parts(api_queue.clone(), readiness.watch()));
    tokio::spawn(report_unenforced(api_queue.clone(), Arc::clone(&known), unenforced.watch()));
    let (pods, follower, node) = (client.clone(), Arc::clone(&known), node.to_owned());
    tokio::spawn(async move { follower.follow_pods(pods, &node).await });
    let namespaces = client.clone();
    tokio::spawn(async move { known.follow_namespaces(namespaces).await });
    api_queue
}

/// Reports parts that were ready and no longer are.
async fn report_parts(api_queue: ApiQueue, mut standings: watch::Receiver<Standings>) {
    let mut before: Standings = standings.borrow_and_update().clone();
    while standings.changed().await.is_ok() {
        let now = standings.borrow_and_update().clone();
        let was_good = |part: &Part| before.get(part).is_some_and(|standing: &Standing| standing.ok);
        for (part, standing) in now.iter().filter(|(part, standing)| !standing.ok && was_good(part)) {
            api_queue.report(Notice::of_part(*part, standing));
        }
        before = now;
    }
}

/// Reports pods whose network policies nothing enforces: when they are found, and every minute for those that the queue
/// had no room for. The same Event about a pod is not repeated for a while.
async fn report_unenforced(api_queue: ApiQueue, known: Arc<Known>, mut unenforced: watch::Receiver<BTreeSet<u64>>) {
    loop {
        if !matches!(tokio::time::timeout(REMIND_AFTER, unenforced.changed()).await, Ok(Ok(())) | Err(_)) {
            return;
        }
        let pods = unenforced.borrow_and_update().clone();
        for pod in known.with_uid(|uid| pods.contains(&incarnation(uid))) {
            api_queue.report(Notice::policy_not_enforced(&pod));
        }
    }
}

impl Worker {
    async fn run(mut self, mut tasks: mpsc::Receiver<ApiTask>) {
        let reporter = Reporter { controller: "nebula-cni-agent".into(), instance: Some(self.node.clone()) };
        let recorder = Recorder::new(self.client.clone(), reporter);
        while let Some(task) = tasks.recv().await {
            match task {
                ApiTask::Report(notice) => self.report(&recorder, &notice).await,
                ApiTask::Evict(pod) => {
                    let outcome = self.evict(&pod).await;
                    self.metrics.repaired("evict", outcome.is_ok());
                    self.report(&recorder, &Notice::evicted(&pod, &outcome)).await;
                }
                ApiTask::Label { pod, is_unprotected } => {
                    let outcome = self.label(&pod, is_unprotected).await;
                    self.metrics.repaired("label", outcome.is_ok());
                    if let Err(error) = outcome {
                        tracing::warn!(pod = %object(Some(&pod)), %error, "cannot label the pod");
                    }
                }
            }
        }
    }

    async fn report(&mut self, recorder: &Recorder, notice: &Notice) {
        if !self.throttle.admits(&object(notice.pod.as_ref()), notice.reason, notice.is_warning, SystemClock.now()) {
            return;
        }
        tracing::info!(reason = notice.reason, pod = %object(notice.pod.as_ref()), note = %notice.note, "event");
        let mut note = nebula_cert::visible(&notice.note).into_owned();
        // The API server refuses longer ones.
        while note.len() > MAX_NOTE {
            note.pop();
        }
        let event = Event {
            type_: if notice.is_warning { EventType::Warning } else { EventType::Normal },
            reason: notice.reason.to_owned(),
            note: Some(note),
            action: notice.action.to_owned(),
            secondary: None,
        };
        let about = self.reference(notice.pod.as_ref());
        match tokio::time::timeout(TELL_TIMEOUT, recorder.publish(&event, &about)).await {
            Ok(Ok(())) => self.metrics.told(true),
            Ok(Err(error)) => {
                self.metrics.told(false);
                tracing::warn!(%error, "cannot report an event to the API server");
            }
            Err(_) => self.metrics.told(false),
        }
    }

    fn reference(&self, pod: Option<&Pod>) -> ObjectReference {
        let part = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        match pod {
            Some(pod) => ObjectReference {
                api_version: part("v1"),
                kind: part("Pod"),
                namespace: part(&pod.namespace),
                name: part(&pod.name),
                // On the node a static pod has another UID.
                uid: self.known.pod(&pod.namespace, &pod.name).map(|info| info.uid).or_else(|| part(&pod.uid)),
                ..ObjectReference::default()
            },
            None => ObjectReference {
                api_version: part("v1"),
                kind: part("Node"),
                name: part(&self.node),
                // `kubectl describe node` looks for the name here.
                uid: part(&self.node),
                ..ObjectReference::default()
            },
        }
    }

    /// Evicts a pod if that is allowed, with its own grace period.
    async fn evict(&mut self, pod: &Pod) -> Result<(), String> {
        may_evict(pod, self.known.pod(&pod.namespace, &pod.name).as_ref()).map_err(|spared| spared.to_string())?;
        let path = path(pod).ok_or_else(|| Spared::Unknown.to_string())?;
        if !self.evictions.take(SystemClock.now()) {
            return Err(Spared::Later.to_string());
        }
        let path = format!("{path}/eviction");
        // Servers before 1.22 know the older version only.
        let mut outcome = Ok(());
        for version in ["policy/v1", "policy/v1beta1"] {
            let body = json!({"apiVersion": version, "kind": "Eviction",
                "metadata": {"namespace": pod.namespace, "name": pod.name},
                // A pod of the same name that was made meanwhile is another one.
                "deleteOptions": {"preconditions": {"uid": pod.uid}}});
            outcome = ask(&self.client, Method::POST, &path, Some((JSON, &body))).await.map(drop);
            if !matches!(&outcome, Err(error) if error.status() == Some(400)) {
                break;
            }
        }
        outcome.map_err(|error| match error.status() {
            Some(429) => "a disruption budget forbids it now; the agent tries again".to_owned(),
            _ => error.to_string(),
        })
    }

    async fn label(&self, pod: &Pod, is_unprotected: bool) -> Result<(), ApiError> {
        let path = path(pod).ok_or_else(|| ApiError::Malformed(object(Some(pod))))?;
        let value = if is_unprotected { json!("true") } else { json!(null) };
        let mut patch = json!({"metadata": {"labels": {LABEL: value}}});
        if let Some(info) = self.known.pod(&pod.namespace, &pod.name) {
            patch["metadata"]["uid"] = info.uid.into();
        }
        ask(&self.client, Method::PATCH, &path, Some((MERGE_PATCH, &patch))).await.map(drop)
    }
}

fn path(pod: &Pod) -> Option<String> {
    let is_good = is_name(&pod.namespace) && is_name(&pod.name);
    is_good.then(|| format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name))
}

fn object(pod: Option<&Pod>) -> String {
    pod.map_or_else(|| "node".to_owned(), |pod| format!("{}/{}", pod.namespace, pod.name))
}

/// The label of pods that are enrolled and run without a tunnel.
pub const LABEL: &str = "nebula-cni/unprotected";
const EVICTIONS_IN_A_MINUTE: usize = 6;
const MAX_NOTE: usize = 1000;
const TELL_TIMEOUT: Duration = Duration::from_secs(10);
const REMIND_AFTER: Duration = Duration::from_secs(60);

//! The pods of this node and all namespaces, as the API server knows them: metadata only, followed by watches.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::PartialObjectMeta;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use nebula_cni_contract::clock::Clock;
use nebula_cni_contract::labels::{Answer, LabelSource, Labels, Question};
use nebula_cni_contract::launch;
use tokio::sync::Notify;

/// What the agent needs to know of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodInfo {
    /// UID in the API.
    pub uid: String,
    /// UID on the node, which differs for static pods.
    pub node_uid: Option<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Whether a controller would recreate it.
    pub has_controller: bool,
    /// Whether it is the picture of a static pod.
    pub is_mirror: bool,
    /// Whether it is being deleted.
    pub is_ending: bool,
}

/// What the watches have heard.
#[derive(Debug, Default)]
pub struct Known {
    state: RwLock<State>,
    /// Notified when a pod of the node changes.
    pub changed: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// By namespace and name; `None` until the first list is complete.
    pods: Option<BTreeMap<(String, String), PodInfo>>,
    namespaces: Option<BTreeMap<String, BTreeMap<String, String>>>,
}

impl Known {
    /// A pod of this node.
    #[must_use]
    pub fn pod(&self, namespace: &str, name: &str) -> Option<PodInfo> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.pods.as_ref()?.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// The pods of this node whose UID is one of those that are wanted.
    #[must_use]
    pub fn with_uid(&self, is_wanted: impl Fn(&str) -> bool) -> Vec<launch::Pod> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let of_node = state.pods.iter().flatten();
        let wanted = of_node.filter(|(_, info)| is_wanted(info.node_uid.as_deref().unwrap_or(&info.uid)));
        wanted
            .map(|((namespace, name), info)| launch::Pod {
                namespace: namespace.clone(),
                name: name.clone(),
                uid: info.uid.clone(),
            })
            .collect()
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// Follows the pods of `node` until the task is cancelled.
    pub async fn follow_pods(&self, client: Client, node: &str) {
        let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
        let events = watcher(Api::<PartialObjectMeta<Pod>>::all(client), config);
        let mut listed = BTreeMap::new();
        follow("pods", events, |event| {
            let entry =
                |pod: &PartialObjectMeta<Pod>| ((pod.namespace().unwrap_or_default(), pod.name_any()), info(pod));
            match event {
                Event::Init => listed.clear(),
                Event::InitApply(pod) => {
                    let (key, info) = entry(&pod);
                    listed.insert(key, info);
                }
                Event::InitDone => self.change(|state| state.pods = Some(std::mem::take(&mut listed))),
                Event::Apply(pod) => {
                    let (key, info) = entry(&pod);
                    self.change(|state| drop(state.pods.get_or_insert_default().insert(key, info)));
                }
                Event::Delete(pod) => {
                    let key = entry(&pod).0;
                    self.change(|state| drop(state.pods.get_or_insert_default().remove(&key)));
                }
            }
            self.changed.notify_one();
        })
        .await;
    }

    /// Follows the labels of all namespaces until the task is cancelled.
    pub async fn follow_namespaces(&self, client: Client) {
        let events = watcher(Api::<PartialObjectMeta<Namespace>>::all(client), watcher::Config::default());
        let mut listed = BTreeMap::new();
        follow("namespaces", events, |event| match event {
            Event::Init => listed.clear(),
            Event::InitApply(found) => drop(listed.insert(found.name_any(), found.labels().clone())),
            Event::InitDone => self.change(|state| state.namespaces = Some(std::mem::take(&mut listed))),
            Event::Apply(found) => self.change(|state| {
                state.namespaces.get_or_insert_default().insert(found.name_any(), found.labels().clone());
            }),
            Event::Delete(gone) => self.change(|state| {
                state.namespaces.get_or_insert_default().remove(&gone.name_any());
            }),
        })
        .await;
    }
}

/// Hands each event of a watch to `take`; a watch that fails is begun again.
async fn follow<T>(
    what: &str,
    events: impl futures_util::Stream<Item = watcher::Result<Event<T>>>,
    mut take: impl FnMut(Event<T>),
) {
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take(event),
            Err(error) => {
                tracing::warn!(%error, what, "the watch failed; it is begun again");
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
    }
}

fn info(pod: &PartialObjectMeta<Pod>) -> PodInfo {
    let is_mirror = pod.annotations().contains_key(MIRROR[0]);
    PodInfo {
        uid: pod.uid().unwrap_or_default(),
        node_uid: MIRROR.iter().find_map(|key| pod.annotations().get(*key)).cloned(),
        labels: pod.labels().clone(),
        // The node itself "controls" the mirror pods of static pods.
        has_controller: pod
            .owner_references()
            .iter()
            .any(|owner| owner.controller == Some(true) && owner.kind != "Node"),
        is_mirror,
        is_ending: pod.metadata.deletion_timestamp.is_some(),
    }
}

impl LabelSource for Known {
    fn ask(&self, _: &Path, question: &Question, _: &dyn Clock) -> Answer {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let mut labels = Labels::default();
        if question.of_pod {
            let Some(pods) = &state.pods else { return not_heard("pods") };
            let Some(pod) = pods.get(&(question.namespace.clone(), question.name.clone())) else {
                return Answer::NoSuchPod;
            };
            let uid = &question.uid;
            if !uid.is_empty() && pod.uid != *uid && pod.node_uid.as_ref() != Some(uid) {
                return Answer::OtherPod { uid: pod.uid.clone() };
            }
            labels.pod = pod.labels.clone();
        }
        if question.of_namespace {
            let Some(namespaces) = &state.namespaces else { return not_heard("namespaces") };
            let Some(found) = namespaces.get(&question.namespace) else { return not_heard("this namespace") };
            labels.namespace = found.clone();
        }
        Answer::Labels(labels)
    }
}

fn not_heard(what: &str) -> Answer {
    Answer::Undecided(format!("the API server has not told the agent about {what} yet"))
}

const MIRROR: [&str; 2] = ["kubernetes.io/config.mirror", "kubernetes.io/config.hash"];
const RETRY_AFTER: Duration = Duration::from_secs(2);

//! Follows objects of the API server, each kind by a watch of its own that begins again when it fails.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use futures_util::{Stream, StreamExt};
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{ApiResource, PartialObjectMeta};
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;

use super::Shared;
use super::endpoints::Slice;
use super::facts::{Facts, Input};
use super::kept::Keep;
use super::member;
use super::nodes::NodeFacts;
use super::services::Service;
use super::shown::{Namespaces, Pod, Rules};
use crate::cluster::api;

/// Follows Services.
pub(super) async fn services(shared: Arc<Shared>, client: Client) {
    loop {
        let events = watcher(Api::<core::Service>::all(client.clone()), pages());
        let convert = |service: &core::Service| (name(service), Service::of(service));
        tokio::select! {
            () = follow(&shared, Input::Services, events, |facts| &mut facts.services, convert) => {}
            () = crowded(&shared, |facts| !facts.services.crowded().is_empty()) => {}
        }
    }
}

/// Waits until it is time to list everything again, because objects of some namespace were left out that may have
/// room by now.
async fn crowded(shared: &Shared, is_crowded: impl Fn(&Facts) -> bool) {
    loop {
        tokio::time::sleep(CROWDED_FOR).await;
        if is_crowded(&shared.facts()) {
            return;
        }
    }
}

/// Follows EndpointSlices, or Endpoints where the server has no EndpointSlices of version 1 (before 1.21).
pub(super) async fn endpoints(shared: Arc<Shared>, client: Client) {
    let is_old = loop {
        match api::ask(&client, Method::GET, "/apis/discovery.k8s.io/v1", None).await {
            Ok(_) => break false,
            Err(error) if error.status() == Some(404) => break true,
            Err(error) => shared.has_problem(Input::Endpoints, error.to_string()),
        }
        tokio::time::sleep(RETRY_AFTER).await;
    };
    let some = |slices: Vec<Slice>| Some(slices).filter(|slices| !slices.is_empty());
    loop {
        let followed = async {
            if is_old {
                let events = watcher(Api::<core::Endpoints>::all(client.clone()), pages());
                let convert = |object: &core::Endpoints| (name(object), some(Slice::of_endpoints(object)));
                follow(&shared, Input::Endpoints, events, |facts| &mut facts.slices, convert).await;
            } else {
                let events = watcher(Api::<EndpointSlice>::all(client.clone()), pages());
                let convert = |object: &EndpointSlice| (name(object), some(Slice::of_slice(object)));
                follow(&shared, Input::Endpoints, events, |facts| &mut facts.slices, convert).await;
            }
        };
        tokio::select! {
            () = followed => {}
            () = crowded(&shared, |facts| !facts.slices.crowded().is_empty()) => {}
        }
    }
}

/// Follows nodes.
pub(super) async fn nodes(shared: Arc<Shared>, client: Client) {
    let events = watcher(Api::<core::Node>::all(client), pages());
    let has_policies = shared.facts().settings.policies.is_some();
    let convert = |node: &core::Node| {
        let facts = NodeFacts::of(node);
        (node.name_any().into(), Some(if has_policies { facts.with_labels(node) } else { facts }))
    };
    follow(&shared, Input::Nodes, events, |facts| &mut facts.nodes, convert).await;
}

/// Follows the pods of the cluster; from the start whenever labels of a namespace change, if the rules ask for those.
pub(super) async fn pods(
    shared: Arc<Shared>,
    client: Client,
    mut rules: Rules,
    mut namespaces: watch::Receiver<Option<Arc<Namespaces>>>,
) {
    let resource = ApiResource::erase::<core::Pod>(&());
    loop {
        let Some(known) = namespaces.borrow_and_update().clone() else {
            if namespaces.changed().await.is_err() {
                return;
            }
            continue;
        };
        let events = watcher(Api::<Pod>::all_with(client.clone(), &resource), pages());
        let convert = |pod: &Pod| {
            let uid = pod.metadata.uid.as_deref().unwrap_or_default();
            (member::id(uid), rules.shown(pod, &known))
        };
        tokio::select! {
            () = follow(&shared, Input::Pods, events, |facts| &mut facts.pods, convert) => {}
            Ok(()) = namespaces.changed() => rules.forget(),
        }
    }
}

/// Follows the labels of namespaces.
pub(super) async fn namespaces(shared: Arc<Shared>, client: Client, known: watch::Sender<Option<Arc<Namespaces>>>) {
    let mut events = pin!(watcher(Api::<PartialObjectMeta<core::Namespace>>::all(client), pages()));
    let (mut all, mut is_complete) = (Namespaces::new(), false);
    while let Some(event) = events.next().await {
        match event {
            // While it is listed again, what is known stays.
            Ok(Event::Init) => (all, is_complete) = (Namespaces::new(), false),
            Ok(Event::InitApply(found) | Event::Apply(found)) => {
                all.insert(found.name_any(), found.labels().clone());
            }
            Ok(Event::InitDone) => is_complete = true,
            Ok(Event::Delete(gone)) => drop(all.remove(&gone.name_any())),
            Err(error) => {
                shared.has_problem(Input::Pods, format!("namespaces: {error}"));
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
        if is_complete && known.borrow().as_deref() != Some(&all) {
            known.send_replace(Some(Arc::new(all.clone())));
        }
    }
}

/// Keeps one part of the facts as a watch says.
pub(crate) async fn follow<T, P: Keep>(
    shared: &Shared,
    input: Input,
    events: impl Stream<Item = watcher::Result<Event<T>>>,
    part: fn(&mut Facts) -> &mut P,
    mut convert: impl FnMut(&T) -> (P::Key, Option<P::Value>),
) {
    let mut events = pin!(events);
    let mut listed = P::default();
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                shared.has_problem(input, error.to_string());
                tokio::time::sleep(RETRY_AFTER).await;
                continue;
            }
        };
        // A list that begins has not been answered yet.
        if !matches!(event, Event::Init) {
            shared.is_well(input);
        }
        match event {
            Event::Init => listed = P::default(),
            Event::InitApply(object) => {
                let (key, value) = convert(&object);
                listed.put(key, value);
            }
            // What is gone was gone while the watch was broken.
            Event::InitDone => shared.change(|facts| {
                let all = std::mem::take(&mut listed);
                let differs = *part(facts) != all;
                *part(facts) = all;
                facts.is_heard(input) | differs
            }),
            Event::Apply(object) => {
                let (key, value) = convert(&object);
                shared.change(|facts| part(facts).put(key, value));
            }
            Event::Delete(object) => {
                let key = convert(&object).0;
                shared.change(|facts| part(facts).put(key, None));
            }
        }
    }
}

/// Lists in small pages: a page is in memory as a whole.
pub(crate) fn pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

pub(crate) fn name(object: &impl ResourceExt) -> Box<str> {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any()).into()
}

const PAGE: u32 = 100;
/// Each time all of them are listed again, by every agent.
const CROWDED_FOR: Duration = Duration::from_secs(600);
pub(crate) const RETRY_AFTER: Duration = Duration::from_secs(2);

//! Follows objects of the API server, each kind by a watch of its own that begins again when it fails.

use std::collections::HashMap;
use std::hash::Hash;
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
use super::facts::{Facts, Input, put};
use super::outside::{Namespaces, Pod, Rules};
use super::services::Service;
use super::{directory, nodes};
use crate::cluster::api;

/// Follows Services.
pub(super) async fn services(shared: Arc<Shared>, client: Client) {
    let events = watcher(Api::<core::Service>::all(client), pages());
    follow(
        &shared,
        Input::Services,
        events,
        |facts| &mut facts.services,
        |service| (name(service), Service::of(service)),
    )
    .await;
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
    if is_old {
        let events = watcher(Api::<core::Endpoints>::all(client), pages());
        let convert = |object: &core::Endpoints| (name(object), some(Slice::of_endpoints(object)));
        follow(&shared, Input::Endpoints, events, |facts| &mut facts.slices, convert).await;
    } else {
        let events = watcher(Api::<EndpointSlice>::all(client), pages());
        let convert = |object: &EndpointSlice| (name(object), some(Slice::of_slice(object)));
        follow(&shared, Input::Endpoints, events, |facts| &mut facts.slices, convert).await;
    }
}

/// Follows nodes.
pub(super) async fn nodes(shared: Arc<Shared>, client: Client) {
    let events = watcher(Api::<core::Node>::all(client), pages());
    let convert = |node: &core::Node| (node.name_any().into(), Some(nodes::addresses(node)));
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
            (directory::id(uid), rules.outside(pod, &known))
        };
        tokio::select! {
            () = follow(&shared, Input::Pods, events, |facts| &mut facts.outside, convert) => {}
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
            Ok(Event::Init) => all.clear(),
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
async fn follow<T, K: Hash + Eq, V: PartialEq>(
    shared: &Shared,
    input: Input,
    events: impl Stream<Item = watcher::Result<Event<T>>>,
    part: fn(&mut Facts) -> &mut HashMap<K, V>,
    mut convert: impl FnMut(&T) -> (K, Option<V>),
) {
    let mut events = pin!(events);
    let mut listed = HashMap::new();
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                shared.has_problem(input, error.to_string());
                tokio::time::sleep(RETRY_AFTER).await;
                continue;
            }
        };
        shared.is_well(input);
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(object) => {
                let (key, value) = convert(&object);
                put(&mut listed, key, value);
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
                shared.change(|facts| put(part(facts), key, value));
            }
            Event::Delete(object) => {
                let key = convert(&object).0;
                shared.change(|facts| put(part(facts), key, None));
            }
        }
    }
}

/// Lists in small pages: a page is in memory as a whole.
fn pages() -> watcher::Config {
    watcher::Config::default().page_size(PAGE)
}

fn name(object: &impl ResourceExt) -> Box<str> {
    format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any()).into()
}

const PAGE: u32 = 100;
const RETRY_AFTER: Duration = Duration::from_secs(2);

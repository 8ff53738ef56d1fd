//! Follows what policies need besides pods and nodes. A list counts only if it is complete: while a watch is broken,
//! what was known stays.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Method;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{ApiResource, DynamicObject, PartialObjectMeta};
use kube::runtime::watcher::watcher;
use kube::{Api, Client, ResourceExt};
use nebula_cni_contract::clock::{Clock, SystemClock};
use nebula_cni_policy::kubernetes::ClusterNetworkPolicy;
use serde_json::Value;

use super::conditions::Conditions;
use super::described::Packed;
use super::said::{Budgeted, Weighed};
use crate::cluster::api;
use crate::table::Shared;
use crate::table::facts::Input;
use crate::table::watches::{RETRY_AFTER, follow, name, pages};

/// Follows the labels of namespaces.
pub(crate) async fn namespaces(shared: Arc<Shared>, client: Client) {
    let events = watcher(Api::<PartialObjectMeta<Namespace>>::all(client), pages());
    let convert = |namespace: &PartialObjectMeta<Namespace>| {
        (namespace.name_any().into(), Some(Packed::of(namespace.labels()).map(Arc::new)))
    };
    follow(&shared, Input::Namespaces, events, |facts| &mut facts.said.namespaces, convert).await;
}

/// Follows NetworkPolicies.
pub(crate) async fn policies(shared: Arc<Shared>, client: Client) {
    let resource = ApiResource::erase::<NetworkPolicy>(&());
    let events = watcher(Api::<DynamicObject>::all_with(client, &resource), pages());
    let convert = |object: &DynamicObject| (name(object), Some(Weighed::policy(object)));
    follow(&shared, Input::Policies, events, |facts| &mut facts.said.policies, convert).await;
}

/// Follows ClusterNetworkPolicies, where the cluster has them, and tells `conditions` of each.
pub(crate) async fn cluster_policies(shared: Arc<Shared>, client: Client, conditions: Option<Conditions>) {
    let resource = ApiResource::erase::<ClusterNetworkPolicy>(&());
    loop {
        match is_defined(&client).await {
            Ok(Defined::Here) => {
                let events = watcher(Api::<DynamicObject>::all_with(client.clone(), &resource), pages());
                let convert = |object: &DynamicObject| {
                    conditions.iter().for_each(|conditions| conditions.seen(object, SystemClock.now()));
                    (name(object), Some(Weighed::cluster_policy(object)))
                };
                tokio::select! {
                    () = follow(&shared, Input::ClusterPolicies, events, |facts| &mut facts.said.cluster_policies, convert) => {}
                    () = undefined(&shared, &client) => {}
                }
            }
            Ok(defined) => {
                match defined {
                    Defined::OtherVersion => shared.has_problem(Input::ClusterPolicies, OTHER_VERSION.to_owned()),
                    Defined::Here | Defined::Nowhere => shared.is_well(Input::ClusterPolicies),
                }
                shared.change(|facts| {
                    let had_some = std::mem::take(&mut facts.said.cluster_policies) != Budgeted::default();
                    facts.is_heard(Input::ClusterPolicies) | had_some
                });
                tokio::time::sleep(LOOK_EVERY).await;
            }
            Err(why) => {
                shared.has_problem(Input::ClusterPolicies, why);
                tokio::time::sleep(RETRY_AFTER).await;
            }
        }
    }
}

/// Waits until the definition is gone. Asked only while the watch is broken.
async fn undefined(shared: &Shared, client: &Client) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let is_broken = shared.problems().contains_key(Input::ClusterPolicies.name());
        if is_broken && is_defined(client).await == Ok(Defined::Nowhere) {
            return;
        }
    }
}

/// Whether and how the cluster defines ClusterNetworkPolicies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defined {
    Here,
    Nowhere,
    OtherVersion,
}

/// Whether the cluster has ClusterNetworkPolicies. The object that defines them says so; an API server that has just
/// started may not know them at their own path yet, which does not mean that there are none.
async fn is_defined(client: &Client) -> Result<Defined, String> {
    match api::ask(client, Method::GET, DEFINITION, None).await {
        Ok(definition) if serves(&definition) => Ok(Defined::Here),
        Ok(_) => Ok(Defined::OtherVersion),
        Err(error) if error.status() == Some(404) => Ok(Defined::Nowhere),
        Err(error) => Err(error.to_string()),
    }
}

fn serves(definition: &Value) -> bool {
    let versions = definition["spec"]["versions"].as_array();
    versions.into_iter().flatten().any(|version| version["name"] == "v1alpha2" && version["served"] == true)
}

pub(crate) const DEFINITION: &str =
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/clusternetworkpolicies.policy.networking.k8s.io";
const OTHER_VERSION: &str = "the cluster's ClusterNetworkPolicies are not of version v1alpha2: none is enforced";
/// How soon a definition that appears is seen.
const LOOK_EVERY: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 15 });

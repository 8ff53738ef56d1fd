//! The network of this node's pods, where our plugin makes it (`"primary": true` in the chain entry): the ranges that
//! pods get addresses from, and the way to the pods of other nodes.
//!
//! The ranges are those that Kubernetes gives to each node (`spec.podCIDRs`). Pods of other nodes are reached through
//! this node's gateway, a `nebula` daemon in the node's network, whose configuration is written here (`gateway.rs`).
//! Until the ranges are known there is no chain entry, and so no network for pods. Nodes without the labels that the
//! operator may ask for keep the network that they have, with our plugin behind it.

mod gateway;
mod gateway_health;
mod ranges;

use std::pin::pin;

use futures_util::StreamExt;
use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, ResourceExt};
use nebula_cni_plugin::primary::settings::KEYS;
use serde_json::{Map, Value, json};
use tokio::sync::watch;

pub(crate) use self::gateway_health::watch as watch_gateway;
use self::ranges::{NodeRanges, first_address};
use crate::cluster::api;
use crate::node::Node;
use crate::table::nodes::NodeFacts;
use crate::table::watches::{RETRY_AFTER, pages};

/// What the pods' network of this node is, or why that is not known.
pub(crate) type Found = Result<Network, String>;

/// Who makes the pods' network of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Network {
    /// Whoever the entry says: it needs nothing else.
    AsWritten,
    /// Our plugin, with these ranges.
    Own(Vec<IpNet>),
    /// Another plugin: the node has not the labels that ours is for.
    Others,
}

/// Follows the nodes of the cluster, if the chain entry makes the pods' network or there is a gateway. Otherwise it
/// returns at once. `name` is this node's.
pub(crate) async fn follow(node: &Node, name: Option<String>, found: watch::Sender<Option<Found>>) {
    let Node { config, .. } = node;
    let is_asked = needs_ranges(&config.entry) || !config.primary_nodes.is_empty();
    if !is_asked {
        found.send_replace(Some(Ok(Network::AsWritten)));
        if config.gateway.is_none() {
            return;
        }
    }
    let publish = |now: Found| {
        if is_asked {
            found.send_if_modified(|before| {
                let is_news = before.as_ref() != Some(&now);
                *before = Some(now);
                is_news
            });
        }
    };
    let Some(name) = name else {
        publish(Err("the name of this node is not known: NODE_NAME is missing".to_owned()));
        return;
    };
    let client = loop {
        match api::open(None).await {
            Ok(client) => break client,
            Err(error) => publish(Err(error.to_string())),
        }
        tokio::time::sleep(RETRY_AFTER).await;
    };
    let (mut nodes, mut listed, mut is_complete) = (NodeRanges::default(), NodeRanges::default(), false);
    // Of this node, as far as the operator asks for them.
    let mut is_wanted = true;
    let has_labels = |object: &core::Node| {
        let labels = object.metadata.labels.as_ref();
        config.primary_nodes.iter().all(|(key, value)| labels.is_some_and(|labels| labels.get(key) == Some(value)))
    };
    let mut events = pin!(watcher(Api::<core::Node>::all(client), pages()));
    while let Some(event) = events.next().await {
        let is_news = match event {
            Ok(Event::Init) => {
                listed = NodeRanges::default();
                false
            }
            Ok(Event::InitApply(object)) => {
                if object.name_any() == name {
                    is_wanted = has_labels(&object);
                }
                listed.put(object.name_any(), &NodeFacts::of(&object));
                false
            }
            Ok(Event::InitDone) => {
                (nodes, is_complete) = (std::mem::take(&mut listed), true);
                true
            }
            Ok(Event::Apply(object)) => {
                let was_wanted = is_wanted;
                if object.name_any() == name {
                    is_wanted = has_labels(&object);
                }
                nodes.put(object.name_any(), &NodeFacts::of(&object)) || was_wanted != is_wanted
            }
            Ok(Event::Delete(object)) => nodes.remove(&object.name_any()),
            Err(error) => {
                // What is known goes on: nodes that join are not reached meanwhile.
                if !is_complete {
                    publish(Err(error.to_string()));
                }
                tokio::time::sleep(RETRY_AFTER).await;
                false
            }
        };
        if is_complete && is_news {
            publish(match (is_wanted, needs_ranges(&config.entry)) {
                (false, _) => Ok(Network::Others),
                (true, true) => nodes.of(&name).map(Network::Own),
                (true, false) => Ok(Network::AsWritten),
            });
            gateway::write(config, &nodes, &name).await;
        }
    }
}

/// The chain entry for this network, with the ranges that were found. The addresses that the node itself has in them
/// are reserved.
#[must_use]
pub(crate) fn complete(mut entry: Map<String, Value>, network: &Network) -> Map<String, Value> {
    if *network == Network::Others {
        return chained(entry);
    }
    if let Network::Own(ranges) = network {
        let reserved = entry.get("reserved").and_then(Value::as_array).cloned().unwrap_or_default();
        let own = ranges.iter().map(|range| json!(first_address(*range)));
        entry.insert("reserved".to_owned(), reserved.into_iter().chain(own).collect());
        entry.insert("subnets".to_owned(), json!(ranges));
    }
    entry
}

/// Whether the entry makes the pods' network with ranges that it does not name.
pub(crate) fn needs_ranges(entry: &Map<String, Value>) -> bool {
    is_primary(entry) && !["subnets", "ipam"].iter().any(|key| entry.contains_key(*key))
}

/// Whether the entry makes the pods' network.
pub(crate) fn is_primary(entry: &Map<String, Value>) -> bool {
    entry.get("primary") == Some(&Value::Bool(true))
}

/// The same entry behind a plugin that makes the network: for a pod that has its interface already.
#[must_use]
pub(crate) fn chained(mut entry: Map<String, Value>) -> Map<String, Value> {
    if is_primary(&entry) {
        for key in KEYS.iter().chain(&["ipam", "ipMasq"]) {
            entry.shift_remove(*key);
        }
    }
    entry
}

/// What the operator can do where a node has no ranges.
pub(crate) const ADVICE: &str = "start the controller manager with --allocate-node-cidrs and --cluster-cidr (kubeadm init \
                                 --pod-network-cidr), or name ranges in \"entry.subnets\"";
#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn the_entry_gets_the_ranges_of_the_node_and_keeps_those_that_it_names() {
        let ranges: Vec<IpNet> = ["10.244.1.0/24", "fd00:244:0:1::/64"].map(|range| range.parse().unwrap()).to_vec();
        let own = Network::Own(ranges);
        let made = complete(entry(r#"{"primary": true, "reserved": ["10.244.1.200/30"]}"#), &own);
        assert_eq!(made["subnets"], json!(["10.244.1.0/24", "fd00:244:0:1::/64"]));
        assert_eq!(made["reserved"], json!(["10.244.1.200/30", "10.244.1.1", "fd00:244:0:1::1"]));
        for other in [r#"{"primary": true, "subnets": ["10.1.0.0/24"]}"#, r#"{"primary": true, "ipam": {}}"#, "{}"] {
            assert_eq!(complete(entry(other), &Network::AsWritten), entry(other));
        }
        assert_eq!(
            complete(entry(r#"{"primary": true, "mode": "lazy"}"#), &Network::Others),
            entry(r#"{"mode": "lazy"}"#)
        );
    }

    #[test]
    fn a_pod_that_has_its_interface_gets_only_what_a_chained_plugin_gives() {
        let all = r#"{"primary": true, "subnets": [], "reserved": [], "ipam": {}, "ipMasq": true, "noMasquerade": [],
            "mtu": 1400, "overlay": ["10.244.0.0/16"]}"#;
        assert_eq!(chained(entry(all)), entry(r#"{"overlay": ["10.244.0.0/16"]}"#));
        assert_eq!(chained(entry(r#"{"mtu": 1400}"#)), entry(r#"{"mtu": 1400}"#), "the plugin refuses it");
    }
}

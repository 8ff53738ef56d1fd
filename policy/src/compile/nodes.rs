//! Labels and addresses of nodes.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::model::{Labels, MAX_NODE_ADDRESSES, Selector};

/// Nodes by name.
#[derive(Debug, Default)]
pub(super) struct Nodes(BTreeMap<String, Node>);

/// A node.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) labels: Labels,
    addresses: Vec<IpAddr>,
}

impl Nodes {
    /// Sets or removes a node; returns what it was and whether that is something else now.
    pub(super) fn set(&mut self, name: &str, node: Option<(Labels, Vec<IpAddr>)>) -> (Option<Node>, bool) {
        let before = self.0.remove(name);
        let node = node.map(|(labels, mut addresses)| {
            addresses.truncate(MAX_NODE_ADDRESSES);
            Node { labels, addresses }
        });
        let is_changed = before != node;
        if let Some(node) = node {
            self.0.insert(name.to_owned(), node);
        }
        (before, is_changed)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Node> {
        self.0.get(name)
    }

    /// The addresses of all nodes that one of the selectors selects.
    pub(super) fn addresses(&self, selectors: &[Selector]) -> impl Iterator<Item = IpAddr> {
        let nodes = self.0.values();
        let selected = nodes.filter(|node| selectors.iter().any(|selector| selector.selects(&node.labels)));
        selected.flat_map(|node| node.addresses.iter().copied())
    }
}

//! The policies of the cluster in their order, and which of them mention what.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use super::rules::PreparedRule;
use super::selectors::{SelectorId, Selectors};
use crate::model::Direction;
use crate::program::{Identity, Tier};

/// The name of a policy and its kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PolicyKey {
    /// A NetworkPolicy.
    NetworkPolicy {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
    },
    /// A ClusterNetworkPolicy.
    ClusterNetworkPolicy {
        /// Its name.
        name: String,
    },
}

impl PolicyKey {
    pub(super) fn namespace(&self) -> &str {
        match self {
            Self::NetworkPolicy { namespace, .. } => namespace,
            Self::ClusterNetworkPolicy { .. } => "",
        }
    }

    /// As a program names it.
    pub(super) fn title(&self) -> String {
        match self {
            Self::NetworkPolicy { namespace, name } => format!("{namespace}/{name}"),
            Self::ClusterNetworkPolicy { name } => name.clone(),
        }
    }
}

/// A policy, ready to be compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Policy {
    pub(super) key: PolicyKey,
    pub(super) tier: Tier,
    pub(super) priority: u16,
    pub(super) is_audited: bool,
    /// Pods that it applies to; `None` for all.
    pub(super) subject: Option<SelectorId>,
    /// Directions that it is for, in the order of [`Direction::ALL`].
    pub(super) is_for: [bool; 2],
    pub(super) rules: [Vec<PreparedRule>; 2],
}

impl Policy {
    pub(super) fn is_for(&self, direction: Direction) -> bool {
        let [ingress, egress] = self.is_for;
        if direction == Direction::Ingress { ingress } else { egress }
    }

    pub(super) fn rules(&self, direction: Direction) -> &[PreparedRule] {
        let [ingress, egress] = &self.rules;
        if direction == Direction::Ingress { ingress } else { egress }
    }

    pub(super) fn selects(&self, identity: Identity, selectors: &Selectors) -> bool {
        self.subject.is_none_or(|id| selectors.selects(id, identity))
    }

    /// Every use of a selector.
    pub(super) fn selectors(&self) -> impl Iterator<Item = SelectorId> {
        self.subject.into_iter().chain(self.selectors_of_peers().map(|(id, _)| id))
    }

    pub(super) fn selectors_of_peers(&self) -> impl Iterator<Item = (SelectorId, Direction)> {
        Direction::ALL.into_iter().flat_map(move |direction| {
            let rules = self.rules(direction).iter();
            rules.flat_map(move |rule| rule.peers.selectors.iter().map(move |id| (*id, direction)))
        })
    }

    /// The names of ports that depend on the peer: those of egress.
    fn port_names(&self) -> impl Iterator<Item = &str> {
        let rules = self.rules(Direction::Egress).iter();
        rules.flat_map(|rule| rule.ports.names.iter().map(|port| port.name.as_str()))
    }

    pub(super) fn has_nodes(&self) -> bool {
        self.rules(Direction::Egress).iter().any(|rule| !rule.peers.nodes.is_empty())
    }

    fn order(&self) -> Order {
        (self.tier, self.key.namespace().to_owned(), self.priority, self.key.clone())
    }
}

/// Where a policy is evaluated.
type Order = (Tier, String, u16, PolicyKey);

/// The policies of the cluster.
#[derive(Debug, Default)]
pub(super) struct Policies {
    by_order: BTreeMap<Arc<Order>, Policy>,
    orders: HashMap<PolicyKey, Arc<Order>>,
    counts: HashMap<String, Counts>,
    by_selector: HashMap<SelectorId, BTreeSet<(Arc<Order>, Direction)>>,
    by_port_name: HashMap<String, BTreeSet<Arc<Order>>>,
    with_nodes: BTreeSet<Arc<Order>>,
}

/// What one namespace has.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Counts {
    pub(super) policies: usize,
    /// Selectors of peers.
    pub(super) selectors: usize,
}

impl Policies {
    pub(super) fn get(&self, key: &PolicyKey) -> Option<&Policy> {
        self.by_order.get(self.orders.get(key)?)
    }

    /// What a namespace has; ClusterNetworkPolicies are those of the namespace without a name.
    pub(super) fn counts(&self, namespace: &str) -> Counts {
        self.counts.get(namespace).copied().unwrap_or_default()
    }

    /// Adds a policy whose key is not there.
    pub(super) fn insert(&mut self, policy: Policy) {
        let order = Arc::new(policy.order());
        let counts = self.counts.entry(policy.key.namespace().to_owned()).or_default();
        counts.policies += 1;
        counts.selectors += policy.selectors_of_peers().count();
        for (id, direction) in policy.selectors_of_peers() {
            self.by_selector.entry(id).or_default().insert((order.clone(), direction));
        }
        for name in policy.port_names() {
            self.by_port_name.entry(name.to_owned()).or_default().insert(order.clone());
        }
        if policy.has_nodes() {
            self.with_nodes.insert(order.clone());
        }
        self.orders.insert(policy.key.clone(), order.clone());
        self.by_order.insert(order, policy);
    }

    pub(super) fn remove(&mut self, key: &PolicyKey) -> Option<Policy> {
        let order = self.orders.remove(key)?;
        let policy = self.by_order.remove(&order)?;
        if let Some(counts) = self.counts.get_mut(key.namespace()) {
            counts.policies -= 1;
            counts.selectors -= policy.selectors_of_peers().count();
            if counts.policies == 0 {
                self.counts.remove(key.namespace());
            }
        }
        for (id, direction) in policy.selectors_of_peers() {
            if let Some(users) = self.by_selector.get_mut(&id) {
                users.remove(&(order.clone(), direction));
                if users.is_empty() {
                    self.by_selector.remove(&id);
                }
            }
        }
        for name in policy.port_names() {
            if let Some(users) = self.by_port_name.get_mut(name) {
                users.remove(&order);
                if users.is_empty() {
                    self.by_port_name.remove(name);
                }
            }
        }
        self.with_nodes.remove(&order);
        Some(policy)
    }

    /// The policies that may select pods of a namespace, in the order of evaluation.
    pub(super) fn of_namespace<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = &'a Policy> {
        let of = move |tier, namespace: &'a str| {
            let first = PolicyKey::NetworkPolicy { namespace: String::new(), name: String::new() };
            let policies = self.by_order.range::<Order, _>((tier, namespace.to_owned(), 0, first)..);
            let of_namespace = policies.take_while(move |(order, _)| order.0 == tier && order.1 == namespace);
            of_namespace.map(|(_, policy)| policy)
        };
        of(Tier::Admin, "").chain(of(Tier::NetworkPolicy, namespace)).chain(of(Tier::Baseline, ""))
    }

    /// The policies with a selector among the peers of their rules in a direction.
    pub(super) fn with_selector(&self, id: SelectorId) -> impl Iterator<Item = (&Policy, Direction)> {
        let users = self.by_selector.get(&id).into_iter().flatten();
        users.filter_map(|(order, direction)| Some((self.by_order.get(order)?, *direction)))
    }

    /// The policies with the name of a port in a rule for egress.
    pub(super) fn with_port_name(&self, name: &str) -> impl Iterator<Item = &Policy> {
        self.by_port_name.get(name).into_iter().flatten().filter_map(|order| self.by_order.get(order))
    }

    /// The policies with nodes as peers.
    pub(super) fn with_nodes(&self) -> impl Iterator<Item = &Policy> {
        self.with_nodes.iter().filter_map(|order| self.by_order.get(order))
    }
}

//! What an agent knows of the cluster's pods, nodes and policies, and which programs depend on what.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::assemble::Context;
use super::identities::{Assigned, Full, Identities};
use super::nodes::Nodes;
use super::policies::{Policies, Policy, PolicyKey};
use super::rules::{self, Intern};
use super::selectors::{SelectorId, Selectors};
use super::{Compiled, Subject};
use crate::model::{
    ClusterNetworkPolicy, Direction, Labels, MAX_CLUSTER_POLICIES, MAX_POLICIES_OF_NAMESPACE,
    MAX_SELECTORS_OF_NAMESPACE, Namespaces, NetworkPolicy, PodSelector, Problem, Profile, Selector, Tier,
};
use crate::program::Identity;

/// There are too many ClusterNetworkPolicies. This one is not enforced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the cluster has more than {MAX_CLUSTER_POLICIES} ClusterNetworkPolicies: this one is not enforced")]
pub struct TooMany;

/// The pods, nodes and policies of a cluster, and the pods that get programs (those of one node).
///
/// Each change notes which programs it concerns; [`Cluster::take_changed`] returns them, and [`Cluster::compile`]
/// makes them. Programs depend on the identity of a pod only, apart from its addresses: pods with the same identity
/// have the same policies.
///
/// Readers must get the programs of a change before, or together with, the table that gives a pod a new identity: a
/// program says something about every number, but before the change about those that it had then.
#[derive(Debug, Default)]
pub struct Cluster {
    identities: Identities,
    selectors: Selectors,
    policies: Policies,
    nodes: Nodes,
    /// Identities of pods that get programs, and how many pods there are.
    subjects: BTreeMap<Identity, usize>,
    changed: BTreeSet<(Identity, Direction)>,
}

impl Cluster {
    /// An empty cluster.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Profiles and their numbers.
    #[must_use]
    pub const fn identities(&self) -> &Identities {
        &self.identities
    }

    /// See [`Identities::advance`].
    pub fn advance(&mut self) -> u64 {
        self.identities.advance()
    }

    /// See [`Identities::recycle`].
    pub fn recycle(&mut self, epoch: u64) {
        self.identities.recycle(epoch);
    }

    /// The identity of a pod with this profile, which has one more pod. A pod whose labels change gets its new
    /// identity first; then its old one is [released](Self::release).
    ///
    /// # Errors
    /// Returns an error if there are too many identities.
    pub fn identify(&mut self, profile: Profile) -> Result<Identity, Full> {
        let (identity, before) = match self.identities.assign(profile)? {
            Assigned::Known(identity) => return Ok(identity),
            Assigned::New(identity, before) => (identity, before),
        };
        let Some(now) = self.identities.profile(identity) else { return Ok(identity) };
        let mut changed = BTreeSet::new();
        for id in self.selectors.update(identity, before.as_deref(), now) {
            for (policy, direction) in self.policies.with_selector(id) {
                changed.extend(self.programs(policy, direction));
            }
        }
        for port in before.iter().flat_map(|before| before.ports()).chain(now.ports()) {
            for policy in self.policies.with_port_name(&port.name) {
                let mut rules = policy.rules(Direction::Egress).iter();
                if rules.any(|rule| {
                    let peers = &rule.peers;
                    let is_every = peers.everyone || peers.every_pod || peers.have_addresses();
                    let is_peer = is_every || peers.selectors.iter().any(|id| self.selectors.selects(*id, identity));
                    is_peer && rule.ports.names.iter().any(|name| name.name == port.name)
                }) {
                    changed.extend(self.programs(policy, Direction::Egress));
                }
            }
        }
        self.changed.append(&mut changed);
        Ok(identity)
    }

    /// A pod with this identity is gone, or has another one.
    pub fn release(&mut self, identity: Identity) {
        self.identities.release(identity);
    }

    /// A pod with this identity gets programs. The caller compiles the first ones; changes from now on are in
    /// [`Cluster::take_changed`].
    pub fn watch(&mut self, identity: Identity) {
        *self.subjects.entry(identity).or_default() += 1;
    }

    /// A pod with this identity gets no more programs.
    pub fn unwatch(&mut self, identity: Identity) {
        let Some(pods) = self.subjects.get_mut(&identity) else { return };
        *pods -= 1;
        if *pods == 0 {
            self.subjects.remove(&identity);
            self.changed.retain(|(changed, _)| *changed != identity);
        }
    }

    /// Adds or replaces a NetworkPolicy. Returns what of it is not enforced as it is written.
    pub fn set_policy(&mut self, policy: &NetworkPolicy) -> Vec<Problem> {
        let (namespace, name) = (policy.namespace.clone(), policy.name.clone());
        let key = PolicyKey::NetworkPolicy { namespace, name };
        let old = self.policies.get(&key).map(|old| old.selectors_of_peers().count());
        let counts = self.policies.counts(&policy.namespace);
        let others = counts.policies - usize::from(old.is_some());
        let mut problems = Vec::new();
        let stub;
        let policy = if others < MAX_POLICIES_OF_NAMESPACE {
            policy
        } else {
            problems.push(Problem::TooManyPolicies);
            stub = NetworkPolicy {
                is_audited: policy.is_audited,
                types: Direction::ALL.to_vec(),
                ..NetworkPolicy::new(policy.namespace.clone(), policy.name.clone())
            };
            &stub
        };
        if !policy.subject.is_valid() {
            problems.push(Problem::Subject);
        }
        let mut left = MAX_SELECTORS_OF_NAMESPACE.saturating_sub(counts.selectors - old.unwrap_or(0));
        let mut intern = |selector: &PodSelector| {
            left = left.checked_sub(1)?;
            Some(self.selectors.acquire(selector.clone(), &self.identities))
        };
        let rules = Direction::ALL.map(|direction| {
            rules::of_network_policy(policy, direction, &mut intern as &mut Intern<'_>, &mut problems)
        });
        let namespaces = Namespaces::Named(policy.namespace.clone());
        let subject = PodSelector { namespaces, pods: policy.subject.valid_part() };
        let subject = Some(self.selectors.acquire(subject, &self.identities));
        let is_for = Direction::ALL.map(|direction| policy.is_for(direction));
        let (tier, priority, is_audited) = (Tier::NetworkPolicy, 0, policy.is_audited);
        self.replace(Policy { key, tier, priority, is_audited, subject, is_for, rules });
        problems
    }

    /// Adds or replaces a ClusterNetworkPolicy. Returns what of it is not enforced as it is written.
    ///
    /// # Errors
    /// Returns an error if there are too many of them.
    pub fn set_cluster_policy(&mut self, policy: &ClusterNetworkPolicy) -> Result<Vec<Problem>, TooMany> {
        let key = PolicyKey::ClusterNetworkPolicy { name: policy.name.clone() };
        if self.policies.get(&key).is_none() && self.policies.counts("").policies >= MAX_CLUSTER_POLICIES {
            return Err(TooMany);
        }
        let mut problems = Vec::new();
        if !policy.subject.is_valid() {
            problems.push(Problem::Subject);
        }
        let mut intern = |selector: &PodSelector| Some(self.selectors.acquire(selector.clone(), &self.identities));
        let rules = Direction::ALL.map(|direction| {
            rules::of_cluster_policy(policy, direction, &mut intern as &mut Intern<'_>, &mut problems)
        });
        let subject = policy.subject.valid_part();
        let subject = (!subject.is_everything()).then(|| self.selectors.acquire(subject, &self.identities));
        let is_for = Direction::ALL.map(|direction| !policy.rules(direction).is_empty());
        let (tier, priority, is_audited) = (policy.tier.into(), policy.priority, policy.is_audited);
        self.replace(Policy { key, tier, priority, is_audited, subject, is_for, rules });
        Ok(problems)
    }

    /// Removes a policy.
    pub fn remove_policy(&mut self, key: &PolicyKey) {
        let Some(policy) = self.policies.remove(key) else { return };
        self.note(&policy);
        policy.selectors().for_each(|id| self.selectors.release(id));
    }

    /// Adds, replaces or removes a node: its labels and its addresses.
    pub fn set_node(&mut self, name: &str, node: Option<(Labels, Vec<IpAddr>)>) {
        let (before, is_changed) = self.nodes.set(name, node);
        if !is_changed {
            return;
        }
        let labels: Vec<&Labels> = before.iter().chain(self.nodes.get(name)).map(|node| &node.labels).collect();
        let concerns = |selector: &Selector| labels.iter().any(|labels| selector.selects(labels));
        let mut changed = BTreeSet::new();
        for policy in self.policies.with_nodes() {
            let mut rules = policy.rules(Direction::Egress).iter();
            if rules.any(|rule| rule.peers.nodes.iter().any(concerns)) {
                changed.extend(self.programs(policy, Direction::Egress));
            }
        }
        self.changed.append(&mut changed);
    }

    /// The programs that changes since the last call concern, by the identity of their pods.
    #[must_use]
    pub fn take_changed(&mut self) -> BTreeSet<(Identity, Direction)> {
        std::mem::take(&mut self.changed)
    }

    /// The program of a pod.
    #[must_use]
    pub fn compile(&self, subject: &Subject, direction: Direction) -> Compiled {
        let namespace = self.identities.profile(subject.identity).map(Profile::namespace).unwrap_or_default();
        let policies = self.policies.of_namespace(namespace);
        let selecting =
            policies.filter(|policy| policy.is_for(direction) && policy.selects(subject.identity, &self.selectors));
        let policies: Vec<&Policy> = selecting.collect();
        let context = Context { identities: &self.identities, selectors: &self.selectors, nodes: &self.nodes };
        context.assemble(subject, direction, &policies)
    }

    /// The programs of pods that a policy selects.
    #[must_use]
    pub fn programs_of_policy(&self, key: &PolicyKey) -> BTreeSet<(Identity, Direction)> {
        let policy = self.policies.get(key).into_iter();
        policy.flat_map(|policy| Direction::ALL.map(|direction| self.programs(policy, direction))).flatten().collect()
    }

    /// The programs with a rule whose selectors of peers select an identity. Rules for everyone, or for all pods of the
    /// cluster, mention nobody.
    #[must_use]
    pub fn programs_of_identity(&self, identity: Identity) -> BTreeSet<(Identity, Direction)> {
        let users = self.selectors.of_identity(identity).flat_map(|id: SelectorId| self.policies.with_selector(id));
        users.flat_map(|(policy, direction)| self.programs(policy, direction)).collect()
    }

    /// The programs of a policy in a direction.
    fn programs(&self, policy: &Policy, direction: Direction) -> impl Iterator<Item = (Identity, Direction)> {
        let subjects = self.subjects.keys().filter(move |_| policy.is_for(direction));
        subjects.filter(|identity| self.selects(policy, **identity)).map(move |identity| (*identity, direction))
    }

    fn selects(&self, policy: &Policy, identity: Identity) -> bool {
        policy.selects(identity, &self.selectors)
    }

    /// Puts a policy, whose selectors have their uses, in the place of the one with its key.
    fn replace(&mut self, policy: Policy) {
        match self.policies.remove(&policy.key) {
            // Lists of the API server say again what is known.
            Some(old) if old == policy => {
                old.selectors().for_each(|id| self.selectors.release(id));
                self.policies.insert(policy);
                return;
            }
            Some(old) => {
                self.note(&old);
                old.selectors().for_each(|id| self.selectors.release(id));
            }
            None => {}
        }
        self.note(&policy);
        self.policies.insert(policy);
    }

    fn note(&mut self, policy: &Policy) {
        let changed: Vec<_> =
            Direction::ALL.into_iter().flat_map(|direction| self.programs(policy, direction)).collect();
        self.changed.extend(changed);
    }
}

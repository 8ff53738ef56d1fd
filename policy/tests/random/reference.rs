//! A slow evaluator of policies, written from what the API says. It has nothing in common with the compiler but the
//! types of the model.

use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_policy::model::{
    Action, ClusterNetworkPolicy, ClusterPeer, ClusterRule, ClusterTier, Direction, Labels, Namespaces, NetworkPolicy,
    Peer, PodSelector, PortMatch, Profile, Protocol, Requirement, Rule, Selector, Tier,
};

/// A flow between a pod and a peer.
#[derive(Debug)]
pub(crate) struct Flow<'a> {
    pub(crate) pod: &'a Profile,
    pub(crate) own: &'a [IpAddr],
    pub(crate) node: &'a [IpAddr],
    pub(crate) direction: Direction,
    pub(crate) peer: Option<&'a Profile>,
    /// Whether the peer is the pod itself.
    pub(crate) is_itself: bool,
    pub(crate) address: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) port: u16,
    /// Of the certificate of the other end.
    pub(crate) groups: Vec<String>,
}

/// All policies, and the nodes.
#[derive(Debug, Default, Clone)]
pub(crate) struct Rules {
    pub(crate) policies: Vec<NetworkPolicy>,
    pub(crate) cluster: Vec<ClusterNetworkPolicy>,
    pub(crate) nodes: Vec<(Labels, Vec<IpAddr>)>,
}

/// Why a flow is allowed or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Why {
    Itself,
    OwnNode,
    NoPolicy,
    Rule(Tier, String, usize),
    Isolated(String),
}

impl Rules {
    /// The set without the policies for audit.
    pub(crate) fn enforced(&self) -> Self {
        let mut rules = self.clone();
        rules.policies.retain(|policy| !policy.is_audited);
        rules.cluster.retain(|policy| !policy.is_audited);
        rules
    }

    /// Whether a flow is allowed, with every policy in force.
    pub(crate) fn judge(&self, flow: &Flow<'_>) -> (bool, Why) {
        let address = flow.address.to_canonical();
        if flow.is_itself || (flow.peer.is_none() && flow.own.contains(&address)) {
            return (true, Why::Itself);
        }
        if flow.peer.is_none() && flow.node.contains(&address) {
            return (true, Why::OwnNode);
        }
        match self.tier(ClusterTier::Admin, flow) {
            Some((Action::Accept, why)) => return (true, why),
            Some((Action::Pass, _)) | None => {}
            Some((_, why)) => return (false, why),
        }
        let mut isolating: Vec<&NetworkPolicy> = self.policies.iter().filter(|policy| isolates(policy, flow)).collect();
        isolating.sort_by_key(|policy| (&policy.namespace, &policy.name));
        if let Some(first) = isolating.first() {
            let name = |policy: &NetworkPolicy| format!("{}/{}", policy.namespace, policy.name);
            for policy in &isolating {
                if let Some(rule) = allowing_rule(policy, flow) {
                    return (true, Why::Rule(Tier::NetworkPolicy, name(policy), rule));
                }
            }
            return (false, Why::Isolated(name(first)));
        }
        match self.tier(ClusterTier::Baseline, flow) {
            Some((Action::Accept, why)) => (true, why),
            Some((Action::Pass, _)) | None => (true, Why::NoPolicy),
            Some((_, why)) => (false, why),
        }
    }

    /// What the first matching rule of a tier does.
    fn tier(&self, tier: ClusterTier, flow: &Flow<'_>) -> Option<(Action, Why)> {
        let mut policies: Vec<_> = self.cluster.iter().filter(|policy| policy.tier == tier).collect();
        policies.sort_by_key(|policy| (policy.priority, &policy.name));
        for policy in policies {
            let certain = &policy.subject;
            if !may_select_pod(certain, flow.pod) {
                continue;
            }
            let is_certain = is_valid(certain);
            for (place, rule) in policy.rules(flow.direction).iter().enumerate() {
                if let Some(action) = self.applies(rule, is_certain, flow) {
                    return Some((action, Why::Rule(tier.into(), policy.name.clone(), place)));
                }
            }
        }
        None
    }

    /// What a rule does with a flow, if anything.
    fn applies(&self, rule: &ClusterRule, is_certain: bool, flow: &Flow<'_>) -> Option<Action> {
        let is_readable = !rule.peers.is_empty()
            && rule.peers.iter().all(|peer| is_readable_peer(peer, rule.action, flow.direction))
            && rule.protocols.iter().all(is_readable_port);
        if !is_readable {
            return (rule.action != Action::Accept).then_some(Action::Deny);
        }
        let is_peer = rule.peers.iter().any(|peer| match peer {
            ClusterPeer::Pods(selector) => flow.peer.is_some_and(|pod| selects_pod(selector, pod)),
            ClusterPeer::Nodes(selector) => self.nodes.iter().any(|(labels, addresses)| {
                selects(selector, labels) && addresses.contains(&flow.address.to_canonical())
            }),
            ClusterPeer::Networks(ranges) => ranges.iter().any(|range| contains(range, flow.address)),
            ClusterPeer::DomainNames(_) | ClusterPeer::Unreadable => false,
        });
        if !is_peer || !are_ports(&rule.protocols, flow) {
            return None;
        }
        match (rule.action, is_certain) {
            (Action::Accept, false) => None,
            (Action::Pass, false) | (Action::Unreadable, _) => Some(Action::Deny),
            (action, _) => Some(action),
        }
    }
}

fn isolates(policy: &NetworkPolicy, flow: &Flow<'_>) -> bool {
    let types = match (&policy.types[..], policy.egress.is_empty()) {
        ([], true) => vec![Direction::Ingress],
        ([], false) => vec![Direction::Ingress, Direction::Egress],
        (types, _) => types.to_vec(),
    };
    let is_subject = policy.namespace == flow.pod.namespace() && may_select(&policy.subject, &flow.pod.labels());
    is_subject && types.contains(&flow.direction)
}

fn allowing_rule(policy: &NetworkPolicy, flow: &Flow<'_>) -> Option<usize> {
    if !policy.subject.is_valid() {
        return None;
    }
    let rules = if flow.direction == Direction::Ingress { &policy.ingress } else { &policy.egress };
    rules.iter().position(|rule| is_peer(rule, flow) && are_ports(&rule.ports, flow))
}

fn is_peer(rule: &Rule, flow: &Flow<'_>) -> bool {
    rule.peers.is_empty()
        || rule.peers.iter().any(|peer| match peer {
            Peer::Pods(selector) => flow.peer.is_some_and(|pod| selects_pod(selector, pod)),
            Peer::Block(block) => {
                let is_excepted = block.except.iter().any(|range| contains(range, flow.address));
                contains(&block.range, flow.address) && !is_excepted
            }
            Peer::Groups(groups) => flow.peer.is_none() && groups.iter().any(|group| flow.groups.contains(group)),
            Peer::Unreadable => false,
        })
}

fn are_ports(ports: &[PortMatch], flow: &Flow<'_>) -> bool {
    // A name is one of the destination's.
    let destination = if flow.direction == Direction::Ingress { Some(flow.pod) } else { flow.peer };
    let is_of = |protocol: Protocol| protocol.number() == flow.protocol;
    ports.is_empty()
        || ports.iter().any(|port| match port {
            PortMatch::Protocol(protocol) => is_of(*protocol),
            PortMatch::Ports { protocol, first, last } => is_of(*protocol) && (*first..=*last).contains(&flow.port),
            PortMatch::Name { protocol, name } => destination.is_some_and(|pod| {
                pod.ports().iter().any(|port| {
                    let is_named = port.name == *name && protocol.is_none_or(|protocol| protocol == port.protocol);
                    is_named && is_of(port.protocol) && port.port == flow.port
                })
            }),
            PortMatch::Unreadable => false,
        })
}

fn is_readable_peer(peer: &ClusterPeer, action: Action, direction: Direction) -> bool {
    let is_egress = direction == Direction::Egress;
    match peer {
        ClusterPeer::Pods(selector) => is_valid(selector),
        ClusterPeer::Nodes(selector) => is_egress && selector.is_valid(),
        ClusterPeer::Networks(ranges) => is_egress && !ranges.is_empty(),
        ClusterPeer::DomainNames(names) => is_egress && action == Action::Accept && !names.is_empty(),
        ClusterPeer::Unreadable => false,
    }
}

fn is_readable_port(port: &PortMatch) -> bool {
    match port {
        PortMatch::Ports { first, last, .. } => first <= last,
        PortMatch::Unreadable => false,
        PortMatch::Protocol(_) | PortMatch::Name { .. } => true,
    }
}

fn is_valid(selector: &PodSelector) -> bool {
    let namespaces = match &selector.namespaces {
        Namespaces::Named(_) => true,
        Namespaces::Matching(selector) => selector.is_valid(),
    };
    namespaces && selector.pods.is_valid()
}

fn selects_pod(selector: &PodSelector, pod: &Profile) -> bool {
    is_valid(selector) && may_select_pod(selector, pod)
}

fn may_select_pod(selector: &PodSelector, pod: &Profile) -> bool {
    let is_namespace = match &selector.namespaces {
        Namespaces::Named(name) => name == pod.namespace(),
        Namespaces::Matching(selector) => may_select(selector, &pod.namespace_labels()),
    };
    is_namespace && may_select(&selector.pods, &pod.labels())
}

fn selects(selector: &Selector, labels: &Labels) -> bool {
    selector.is_valid() && may_select(selector, labels)
}

fn may_select(selector: &Selector, labels: &Labels) -> bool {
    for requirement in selector.requirements() {
        let (key, values, is_wanted) = match requirement {
            Requirement::In(key, values) => (key, Some(values), true),
            Requirement::NotIn(key, values) => (key, Some(values), false),
            Requirement::Exists(key) => (key, None, true),
            Requirement::DoesNotExist(key) => (key, None, false),
        };
        let is_so = match (labels.get(key), values) {
            (Some(value), Some(values)) => values.iter().any(|one| one == value),
            (found, _) => found.is_some(),
        };
        if is_so != is_wanted {
            return false;
        }
    }
    true
}

fn contains(range: &IpNet, address: IpAddr) -> bool {
    range.contains(&address.to_canonical())
}

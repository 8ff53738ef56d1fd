//! Policies of both kinds as rules of one form. What cannot be read becomes what is closed here.

use std::sync::Arc;

use ipnet::IpNet;

use super::ranges::{Addresses, Interval, merged};
use super::selectors::SelectorId;
use crate::model::{
    Action, Block, ClusterNetworkPolicy, ClusterPeer, ClusterRule, Direction, MAX_EXCEPTIONS, MAX_GROUPS, MAX_ITEMS,
    MAX_PEERS, MAX_PORTS, MAX_RULES, MAX_STRING, NetworkPolicy, Peer, PodSelector, PortMatch, Problem, Protocol, Rule,
    Selector,
};
use crate::program::{action, port_key};

/// A rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PreparedRule {
    /// Its place in the policy.
    pub(super) place: u16,
    pub(super) name: String,
    pub(super) action: u8,
    pub(super) peers: Peers,
    pub(super) ports: Ports,
}

/// The other ends that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Peers {
    /// Everybody.
    pub(super) everyone: bool,
    /// Every pod of the cluster.
    pub(super) every_pod: bool,
    pub(super) selectors: Vec<SelectorId>,
    pub(super) addresses: Addresses,
    /// Addresses of nodes with these labels.
    pub(super) nodes: Vec<Selector>,
    /// Whoever is no pod and carries one of these groups.
    pub(super) groups: Vec<Arc<[String]>>,
}

impl Peers {
    fn everyone() -> Self {
        Self { everyone: true, ..Self::default() }
    }

    pub(super) fn are_none(&self) -> bool {
        *self == Self::default()
    }

    /// Whether it depends on the address of a peer.
    pub(super) fn have_addresses(&self) -> bool {
        !self.addresses.is_empty() || !self.nodes.is_empty()
    }
}

/// The destination ports that a rule matches.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Ports {
    /// Of [`port_key`]s.
    pub(super) intervals: Vec<Interval>,
    pub(super) names: Vec<PortName>,
}

/// The name of a port of the destination pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PortName {
    pub(super) name: String,
    protocol: Option<Protocol>,
}

impl PortName {
    pub(super) fn is_of(&self, protocol: Protocol) -> bool {
        self.protocol.is_none_or(|of| of == protocol)
    }
}

impl Ports {
    fn all() -> Self {
        Self { intervals: vec![(0, (1 << 24) - 1)], names: Vec::new() }
    }

    /// Adds an item; returns whether it could be read.
    fn add(&mut self, item: &PortMatch) -> bool {
        let mut ports = |protocol: &Protocol, first, last| {
            let key = |port| u128::from(port_key(protocol.number(), port));
            self.intervals.push((key(first), key(last)));
        };
        match item {
            PortMatch::Protocol(protocol) => ports(protocol, 0, u16::MAX),
            PortMatch::Ports { protocol, first, last } if first <= last => ports(protocol, *first, *last),
            PortMatch::Name { protocol, name } if name.len() <= MAX_STRING => {
                self.names.push(PortName { name: name.clone(), protocol: *protocol });
            }
            PortMatch::Ports { .. } | PortMatch::Name { .. } | PortMatch::Unreadable => return false,
        }
        true
    }

    fn merged(mut self) -> Self {
        self.intervals = merged(self.intervals);
        self.intervals.shrink_to_fit();
        self.names.shrink_to_fit();
        self
    }

    fn are_none(&self) -> bool {
        self.intervals.is_empty() && self.names.is_empty()
    }
}

/// Gives out numbers of selectors; `None` if the policy may have no more of them.
pub(super) type Intern<'a> = dyn FnMut(&PodSelector) -> Option<SelectorId> + 'a;

/// The rules of a NetworkPolicy in one direction, without those that match nothing.
pub(super) fn of_network_policy(
    policy: &NetworkPolicy,
    direction: Direction,
    intern: &mut Intern<'_>,
    problems: &mut Vec<Problem>,
) -> Vec<PreparedRule> {
    // Pods that it only may select are isolated, and it allows them nothing.
    if !policy.is_for(direction) || !policy.subject.is_valid() {
        return Vec::new();
    }
    let rules = policy.rules(direction);
    if rules.len() > MAX_RULES {
        problems.push(Problem::TooManyRules { direction, limit: MAX_RULES });
    }
    let mut prepared = Vec::new();
    for (place, rule) in rules.iter().take(MAX_RULES).enumerate() {
        let mut is_whole = true;
        let peers = allowed_peers(rule, intern, &mut is_whole);
        let ports = allowed_ports(rule, &mut is_whole);
        if !is_whole {
            problems.push(Problem::Rule { direction, rule: place });
        }
        if !peers.are_none() && !ports.are_none() {
            let name = String::new();
            prepared.push(PreparedRule { place: place as u16, name, action: action::ACCEPT, peers, ports });
        }
    }
    // Most policies have one rule, and a list that grows has room for four.
    prepared.shrink_to_fit();
    prepared
}

fn allowed_peers(rule: &Rule, intern: &mut Intern<'_>, is_whole: &mut bool) -> Peers {
    if rule.peers.is_empty() {
        return Peers::everyone();
    }
    let mut peers = Peers::default();
    *is_whole &= rule.peers.len() <= MAX_PEERS;
    for peer in rule.peers.iter().take(MAX_PEERS) {
        *is_whole &= match peer {
            Peer::Pods(selector) => selector.is_valid() && add_pods(&mut peers, selector, intern),
            Peer::Block(Block { range, except }) => {
                let is_read = except.len() <= MAX_EXCEPTIONS;
                if is_read {
                    peers.addresses.add(*range, except);
                }
                is_read
            }
            Peer::Groups(groups) => {
                let is_read = groups.len() <= MAX_GROUPS && groups.iter().all(|group| group.len() <= MAX_STRING);
                peers.groups.extend(is_read.then(|| Arc::clone(groups)));
                is_read
            }
            Peer::Unreadable => false,
        };
    }
    peers.addresses = peers.addresses.merged();
    peers
}

fn add_pods(peers: &mut Peers, selector: &PodSelector, intern: &mut Intern<'_>) -> bool {
    if selector.is_everything() {
        peers.every_pod = true;
        return true;
    }
    let id = intern(selector);
    peers.selectors.extend(id);
    id.is_some()
}

fn allowed_ports(rule: &Rule, is_whole: &mut bool) -> Ports {
    if rule.ports.is_empty() {
        return Ports::all();
    }
    let mut ports = Ports::default();
    *is_whole &= rule.ports.len() <= MAX_PORTS;
    for item in rule.ports.iter().take(MAX_PORTS) {
        *is_whole &= ports.add(item);
    }
    ports.merged()
}

/// The rules of a ClusterNetworkPolicy in one direction, without those that match nothing.
pub(super) fn of_cluster_policy(
    policy: &ClusterNetworkPolicy,
    direction: Direction,
    intern: &mut Intern<'_>,
    problems: &mut Vec<Problem>,
) -> Vec<PreparedRule> {
    let rules = policy.rules(direction);
    let mut prepared = Vec::new();
    for (place, rule) in rules.iter().take(MAX_ITEMS).enumerate() {
        let read = cluster_rule(rule, direction, intern);
        let action = match rule.action {
            // Pods that it only may select are allowed nothing by it.
            Action::Accept if read.is_none() || !policy.subject.is_valid() => None,
            Action::Accept => Some(action::ACCEPT),
            Action::Pass if read.is_some() && policy.subject.is_valid() => Some(action::PASS),
            Action::Deny | Action::Pass | Action::Unreadable => Some(action::DENY),
        };
        match (&read, rule.action) {
            (None, Action::Accept) | (Some(_), Action::Unreadable) => {
                problems.push(Problem::Rule { direction, rule: place });
            }
            (None, _) => problems.push(Problem::DeniesAll { direction, rule: place }),
            (Some(_), _) => {}
        }
        if rule.peers.iter().any(|peer| matches!(peer, ClusterPeer::DomainNames(_))) {
            problems.push(Problem::DomainNames { direction, rule: place });
        }
        let (peers, ports) = read.unwrap_or_else(|| (Peers::everyone(), Ports::all()));
        if let Some(action) = action.filter(|_| !peers.are_none()) {
            let name = rule.name.chars().take(MAX_RULE_NAME).collect();
            prepared.push(PreparedRule { place: place as u16, name, action, peers, ports });
        }
    }
    if rules.len() > MAX_ITEMS {
        problems.push(Problem::TooManyRules { direction, limit: MAX_ITEMS });
        let (place, name) = (MAX_ITEMS as u16, String::new());
        let (peers, ports) = (Peers::everyone(), Ports::all());
        prepared.push(PreparedRule { place, name, action: action::DENY, peers, ports });
    }
    prepared.shrink_to_fit();
    prepared
}

/// What a rule matches; `None` if it cannot be read.
fn cluster_rule(rule: &ClusterRule, direction: Direction, intern: &mut Intern<'_>) -> Option<(Peers, Ports)> {
    let few = |len| len <= MAX_ITEMS;
    if rule.peers.is_empty() || !few(rule.peers.len()) || !few(rule.protocols.len()) {
        return None;
    }
    let is_known = |peer: &ClusterPeer| match peer {
        ClusterPeer::Pods(selector) => selector.is_valid(),
        ClusterPeer::Nodes(selector) => direction == Direction::Egress && selector.is_valid(),
        ClusterPeer::Networks(ranges) => direction == Direction::Egress && few(ranges.len()) && !ranges.is_empty(),
        ClusterPeer::DomainNames(names) => {
            direction == Direction::Egress && rule.action == Action::Accept && few(names.len()) && !names.is_empty()
        }
        ClusterPeer::Unreadable => false,
    };
    let mut ports = if rule.protocols.is_empty() { Ports::all() } else { Ports::default() };
    // Before any selector has a use.
    if !rule.peers.iter().all(is_known) || !rule.protocols.iter().all(|item| ports.add(item)) {
        return None;
    }
    let mut peers = Peers::default();
    for peer in &rule.peers {
        match peer {
            ClusterPeer::Pods(selector) => {
                if !add_pods(&mut peers, selector, intern) {
                    return None;
                }
            }
            ClusterPeer::Nodes(selector) => peers.nodes.push(selector.clone()),
            ClusterPeer::Networks(ranges) => add_ranges(&mut peers.addresses, ranges),
            ClusterPeer::DomainNames(_) | ClusterPeer::Unreadable => {}
        }
    }
    peers.addresses = peers.addresses.merged();
    Some((peers, ports.merged()))
}

fn add_ranges(addresses: &mut Addresses, ranges: &[IpNet]) {
    ranges.iter().for_each(|range| addresses.add(*range, &[]));
}

/// Characters of the name of a rule in the API.
const MAX_RULE_NAME: usize = 100;

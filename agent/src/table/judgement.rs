//! Who counts as enrolled and who as known not to be, after what the CA's directory and the API server say is held
//! against each other. Either may have been told lies: the directory by whoever has an agent's token, the API server
//! by a kubelet about its own node and its own pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use nebula_cni_contract::cluster_table::End;
use nebula_cni_contract::launch::port_at;

use super::facts::Facts;
use super::kept::Name;
use super::member::{Member, PodId, addresses};
use super::nodes::NodeFacts;
use super::seeded::{Map, Seeded, Set};
use super::shown::Shown;
use crate::policy::{Bystander, Holder, OwnPod, Records};
use crate::underlay::nodes::Ports;

/// What is believed.
#[derive(Debug, Default)]
pub struct Judgement {
    /// Addresses of enrolled pods, hosts and lighthouses, each with its incarnation.
    pub(super) enrolled: Vec<(IpAddr, u64)>,
    /// Where the tunnels of enrolled pods probably end.
    pub(super) ends: Vec<(IpAddr, End)>,
    /// Addresses that are known not to be enrolled: those of nodes, and of pods that the rules leave out.
    pub clear: BTreeSet<IpAddr>,
    /// Addresses of the enrolled pods of the node that is asked for.
    pub(super) of_this_node: Vec<IpAddr>,
    /// Number of members none of whose addresses is confirmed.
    pub(super) unconfirmed: usize,
    /// Addresses of nodes.
    pub(super) nodes: BTreeSet<IpAddr>,
    /// Addresses that members may have.
    pub(super) claimed: Set<IpAddr>,
    /// Who has the enrolled addresses, if policies are enforced.
    pub(super) holders: Vec<Holder>,
    /// Pods of the node that is asked for, likewise. Those with a certificate come first.
    pub(super) own: Vec<OwnPod>,
    /// Addresses of pods that are known not to be enrolled, likewise, with what policies can ask about the pods.
    pub(super) bystanders: Vec<Bystander>,
    /// What the table says for policies.
    pub(super) policy: Records,
    /// Number of addresses that are not `clear` only because an enrolled pod had them a moment ago.
    pub(super) withheld: usize,
}

impl Judgement {
    /// UDP ports of some instances on each of the other nodes, by the node's address.
    pub(super) fn ports_elsewhere(&self) -> Ports {
        let mut ports = Ports::new();
        let elsewhere = self.ends.iter().filter(|(address, _)| self.of_this_node.binary_search(address).is_err());
        for (_, end) in elsewhere {
            let of_node = ports.entry(end.node).or_default();
            if of_node.len() < PORTS_OF_NODE {
                of_node.insert(end.port);
            }
        }
        ports
    }
}

impl Facts {
    /// What is believed, for the node with this name.
    #[must_use]
    pub fn judge(&self, node: &str) -> Judgement {
        let ranges = NodeRanges::of(&self.nodes);
        let is_plausible = |node: &str, address: &IpAddr| self.is_plausible(&ranges, node, *address);
        // By the addresses that the API server shows, as far as their nodes give them out. Where two pods have one,
        // as while an address is used again, the one that may be enrolled counts: the other is not known to have it
        // alone.
        let mut shown: Map<IpAddr, &Shown> = Map::with_capacity_and_hasher(self.pods.len(), Seeded::default());
        for pod in self.pods.values() {
            for address in pod.addresses.iter().flatten().filter(|address| is_plausible(&pod.node, address)) {
                let other = shown.entry(*address).or_insert(pod);
                if other.is_left_out {
                    *other = pod;
                }
            }
        }
        let of_nodes: BTreeSet<IpAddr> = self
            .nodes
            .iter()
            .flat_map(|(name, facts)| {
                let reported = facts.reported.iter().copied().filter(|address| is_plausible(name, address));
                // flannel's device has the first of these, bridges of most plugins the second.
                let first = |range: &IpNet| [Some(range.network()), first_host(*range)];
                reported.chain(ranges.of_node(name).iter().flat_map(first).flatten())
            })
            .filter(|address| !(self.is_of_pods(address) && shown.contains_key(address)))
            .collect();

        let mirrors: Map<PodId, &Shown> =
            self.pods.values().filter_map(|pod| Some((*pod.mirrors.as_deref()?, pod))).collect();
        let mut judgement = Judgement::default();
        let mut claimed = Set::default();
        for (id, member) in &self.members {
            let pod = self.pods.get(id).or_else(|| mirrors.get(id).copied());
            let counts = |address: &IpAddr| match pod {
                Some(pod) if !pod.is_host_network => pod.counts && pod.has(address) && is_plausible(&pod.node, address),
                // A lighthouse, or a host outside of the cluster: nobody of the cluster has its address.
                Some(_) => self.is_free(address, &ranges, &shown, &of_nodes),
                None => member.is_host && self.is_free(address, &ranges, &shown, &of_nodes),
            };
            let enrolled: Vec<IpAddr> = member.all().filter(counts).collect();
            judgement.unconfirmed += usize::from(enrolled.is_empty());
            judgement.enrolled.extend(enrolled.iter().map(|address| (*address, member.incarnation)));
            if self.settings.policies.is_some() {
                let described = pod.and_then(|pod| pod.described.as_ref());
                judgement.holders.extend(enrolled.iter().map(|address| Holder {
                    address: *address,
                    incarnation: member.incarnation,
                    described: described.cloned(),
                }));
            }
            // A pod has its certificate before the API server shows its address. One that is shown with others has no
            // claim.
            let is_open = pod.is_none_or(|pod| pod.is_host_network || pod.addresses == [None; 2]);
            claimed.extend(member.all().filter(|address| is_open || pod.is_some_and(|pod| pod.has(address))));
            if let Some(pod) = pod.filter(|pod| !pod.is_host_network) {
                let end = self.end(pod, member).filter(|end| is_plausible(&pod.node, &end.node));
                judgement.ends.extend(end.iter().flat_map(|end| enrolled.iter().map(|address| (*address, *end))));
                if &*pod.node == node {
                    judgement.of_this_node.extend(enrolled);
                }
            }
        }
        let left_out = shown.iter().filter(|(_, pod)| pod.is_left_out).map(|(address, _)| *address);
        let is_free = |address: &IpAddr| !claimed.contains(address);
        judgement.nodes = of_nodes.into_iter().filter(is_free).collect();
        judgement.clear = left_out.filter(is_free).chain(judgement.nodes.iter().copied()).collect();
        for (address, _) in &judgement.enrolled {
            judgement.clear.remove(address);
            judgement.nodes.remove(address);
        }
        judgement.claimed = claimed;
        if self.settings.policies.is_some() {
            // In order: the next agent gives the same numbers.
            judgement.holders.sort_unstable_by_key(|holder| in_order(holder.address));
            judgement.own = self.own_pods(node, |address| is_plausible(node, address), &shown);
            let pods = judgement.clear.difference(&judgement.nodes);
            let described = |address: &IpAddr| shown.get(address).and_then(|pod| pod.described.clone());
            judgement.bystanders =
                pods.map(|address| Bystander { address: *address, described: described(address) }).collect();
        }
        judgement.enrolled.sort_unstable_by_key(|(address, incarnation)| (in_order(*address), *incarnation));
        judgement.ends.sort_unstable_by_key(|(address, end)| (in_order(*address), *end));
        judgement.of_this_node.sort_unstable();
        judgement
    }

    /// The pods of this node, for their programs. A pod has its certificate before the API server shows its address.
    fn own_pods(&self, node: &str, is_plausible: impl Fn(&IpAddr) -> bool, shown: &Map<IpAddr, &Shown>) -> Vec<OwnPod> {
        let own = self.pods.iter().filter(|(_, pod)| &*pod.node == node && !pod.is_host_network);
        let mut own: Vec<OwnPod> = own
            .filter_map(|(id, pod)| {
                let member = self.members.get(id).or_else(|| self.members.get(pod.mirrors.as_deref()?));
                let is_free = |address: &IpAddr| is_plausible(address) && !shown.contains_key(address);
                let certified = member.into_iter().flat_map(Member::all).filter(is_free);
                let shown = pod.addresses.iter().flatten().copied().filter(&is_plausible);
                let addresses = addresses(shown.chain(certified));
                let incarnation = member.map_or(0, |member| member.incarnation);
                let is_wanted = addresses != [None; 2] && (member.is_some() || !pod.is_left_out);
                let described = pod.described.as_ref().filter(|_| is_wanted)?;
                Some(OwnPod { addresses, incarnation, described: Arc::clone(described) })
            })
            .collect();
        own.sort_unstable_by_key(|pod| (pod.addresses, std::cmp::Reverse(pod.incarnation)));
        own
    }

    /// Where the tunnel of a pod ends, if its instance found the port free at which it began to look, or the next one.
    fn end(&self, pod: &Shown, member: &Member) -> Option<End> {
        let (ports, node) = (self.settings.ports?, self.nodes.get(&*pod.node)?.internal?);
        let port = |step| port_at(member.port_number, step, ports);
        Some(End { node, port: port(0)?, other: port(1) })
    }

    /// Whether a node may have, or give to its pods, this address. In the ranges of pods only its own part counts.
    fn is_plausible(&self, ranges: &NodeRanges<'_>, node: &str, address: IpAddr) -> bool {
        if !self.settings.node_ranges || !self.is_of_pods(&address) {
            return true;
        }
        let mut own =
            ranges.of_node(node).iter().filter(|range| range.addr().is_ipv4() == address.is_ipv4()).peekable();
        match own.peek() {
            Some(_) => own.any(|range| range.contains(&address)),
            None => self.nodes.contains_key(node) && ranges.owner(address).is_none(),
        }
    }

    fn is_of_pods(&self, address: &IpAddr) -> bool {
        self.settings.pod_ranges.iter().any(|range| range.contains(address))
    }

    fn is_free(
        &self,
        address: &IpAddr,
        ranges: &NodeRanges<'_>,
        shown: &Map<IpAddr, &Shown>,
        of_nodes: &BTreeSet<IpAddr>,
    ) -> bool {
        let is_given_out = self.settings.node_ranges && ranges.owner(*address).is_some();
        !is_given_out && !shown.contains_key(address) && !of_nodes.contains(address)
    }
}

impl Member {
    pub(super) fn all(&self) -> impl Iterator<Item = IpAddr> {
        self.addresses.iter().flatten().copied()
    }
}

/// The ranges from which nodes give addresses to their pods. Of two that overlap, that of the older node counts.
struct NodeRanges<'a> {
    /// By first address: the last one, and the node.
    all: BTreeMap<IpAddr, (IpAddr, &'a str)>,
    by_node: Map<&'a str, Vec<IpNet>>,
}

impl<'a> NodeRanges<'a> {
    fn of(nodes: &'a Map<Name, NodeFacts>) -> Self {
        let mut oldest_first: Vec<(&Name, &NodeFacts)> = nodes.iter().collect();
        oldest_first.sort_unstable_by_key(|(name, facts)| (facts.created, *name));
        let mut ranges = Self { all: BTreeMap::new(), by_node: Map::default() };
        for (name, facts) in oldest_first {
            for range in &facts.ranges {
                let (first, last) = (range.network(), range.broadcast());
                let before = ranges.all.range(..=last).next_back();
                if before.is_none_or(|(_, (end, _))| *end < first) {
                    ranges.all.insert(first, (last, name));
                    ranges.by_node.entry(name).or_default().push(*range);
                }
            }
        }
        ranges
    }

    fn of_node(&self, node: &str) -> &[IpNet] {
        self.by_node.get(node).map(Vec::as_slice).unwrap_or_default()
    }

    /// The node that gives this address to its pods.
    fn owner(&self, address: IpAddr) -> Option<&'a str> {
        let (_, (last, node)) = self.all.range(..=address).next_back()?;
        (last.is_ipv4() == address.is_ipv4() && address <= *last).then_some(*node)
    }
}

/// What orders addresses as they are, and is compared at once.
fn in_order(address: IpAddr) -> (bool, u128) {
    match address {
        IpAddr::V4(address) => (false, address.to_bits().into()),
        IpAddr::V6(address) => (true, address.to_bits()),
    }
}

/// So many instances of a node are asked for an answer before the node is called silent.
const PORTS_OF_NODE: usize = 3;

/// The first address of a prefix after its network address: what bridges and tunnel devices of a node usually have.
pub(crate) fn first_host(prefix: IpNet) -> Option<IpAddr> {
    prefix.hosts().find(|address| *address != prefix.network())
}

#[cfg(test)]
mod tests;

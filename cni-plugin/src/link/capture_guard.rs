//! What holds "never in clear" for captured pods, where no program of the pod can reach: rules for the frames of their
//! links on the node, and for what the node forwards after the destination of a packet was translated (kube-proxy).
//!
//! From and to a captured pod nothing passes whose other end is an address of a pod, except addresses that are known
//! not to be enrolled (the sets `clear4` and `clear6`, which the node agent keeps), the node's own, and the
//! operator's exceptions. Without an agent nothing is added to these sets, so the guard fails closed. What is left is
//! in clear; rules of the pod's own decide about it (`clear`). A captured pod sends from and receives at its own
//! addresses only, those that the capture knows: anything else could be translated into an address of a pod under a
//! name that the rules do not know. Other protocols than IP and ARP (VLAN tags too) do not pass at all, because they
//! can hide addresses.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::netlink::nftables::{AddressSet, Chain, Header, Hook, Is, Match, Rule, Set, Verdict};
use nebula_cni_contract::netlink::octets;
use serde::{Deserialize, Serialize};

use crate::link::clear::{Clear, ClearRules, Opens, clear_set};
use crate::link::clear_policy::{PolicyRules, PolicyTerms};
use crate::link::ip::{BOTH, Ip, V4, V6, bytes, not_within};
use crate::link::pod_link::{PodLink, link_local};

/// The rules of one captured pod, as they were installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaptureGuard {
    /// The attachment, which its chains are named after.
    attachment: String,
    /// The node's end of the pod's link.
    pub link: String,
    /// Index of that link, because a name can be reused for another link.
    pub index: u32,
    /// Whether the link is a port of a bridge or switch.
    is_shared: bool,
    /// The pod's addresses, as far as they are captured or excluded.
    own: Vec<IpAddr>,
    /// Addresses of everybody on the pod's link.
    #[serde(default)]
    broadcast: Vec<IpAddr>,
    /// Addresses of pods.
    ranges: Vec<IpNet>,
    /// The node's addresses towards the pod.
    node: Vec<IpAddr>,
    /// No addresses of enrolled pods, although they may be in the ranges: Services, and what the operator excludes.
    open: Vec<IpNet>,
    /// The latter.
    #[serde(default)]
    exclude: Vec<IpNet>,
    #[serde(default)]
    clear: Clear,
    /// Network policies for what is in clear, if they are enforced. Earlier releases read records without the key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    clear_policy: Option<PolicyTerms>,
}

/// What the operator says about captured pods, for all of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Terms {
    /// Addresses of pods.
    pub ranges: Vec<IpNet>,
    /// Cluster IPs of Services.
    pub services: Vec<IpNet>,
    /// Addresses of load balancers, among others.
    pub load_balancers: Vec<IpNet>,
    /// First and last of the ports that Services have on all nodes.
    pub node_ports: Option<(u16, u16)>,
    /// What stays on the primary network.
    pub exclude: Vec<IpNet>,
    /// What passes in clear.
    pub clear: Clear,
    /// Whether network policies hold for it, which the node agent must write.
    pub clear_policy: bool,
}

impl Terms {
    fn policy(&self) -> Option<PolicyTerms> {
        self.clear_policy.then_some(PolicyTerms { node_ports: self.node_ports })
    }
}

impl CaptureGuard {
    /// Builds the rules of one attachment. `node` are the node's addresses on its way to the pod.
    #[must_use]
    pub fn new(attachment: String, link: PodLink, terms: Terms, node: Vec<IpAddr>) -> Self {
        let clear_policy = terms.policy();
        let Terms { ranges, services, exclude, clear, .. } = terms;
        let mut guard = Self {
            attachment,
            link: link.name,
            index: link.index,
            is_shared: link.is_shared,
            own: Vec::new(),
            broadcast: Vec::new(),
            ranges,
            node,
            open: [services, exclude.clone()].concat(),
            exclude,
            clear,
            clear_policy,
        };
        let uncovered = guard.uncovered(&link.addresses);
        guard.own = link.addresses.iter().map(IpNet::addr).filter(|address| !uncovered.contains(address)).collect();
        guard.own.push(IpAddr::V6(link_local(link.mac)));
        guard.own.sort();
        guard.own.dedup();
        let has_broadcast = |network: &&IpNet| network.addr().is_ipv4() && network.prefix_len() < 31;
        guard.broadcast = link.addresses.iter().filter(has_broadcast).map(IpNet::broadcast).collect();
        guard
    }

    /// Whether rules that were made now would be for the same networks and ports.
    #[must_use]
    pub fn is_made_of(&self, terms: &Terms) -> bool {
        let Terms { ranges, services, exclude, clear, .. } = terms;
        let open = [&services[..], exclude].concat();
        (&self.ranges, &self.open, &self.exclude, &self.clear, self.clear_policy)
            == (ranges, &open, exclude, clear, terms.policy())
    }

    /// Whether network policies are enforced on what passes in clear.
    #[must_use]
    pub const fn judges_by_policy(&self) -> bool {
        self.clear_policy.is_some()
    }

    /// Those of a pod's addresses that are in no range and not excluded either. Nothing passes from or to them.
    #[must_use]
    pub fn uncovered(&self, addresses: &[IpNet]) -> Vec<IpAddr> {
        let is_known = |address: &IpAddr| {
            let mut known = self.ranges.iter().chain(&self.open);
            known.any(|range| range.contains(address)) || is_of_link(address)
        };
        addresses.iter().map(IpNet::addr).filter(|address| !is_known(address)).collect()
    }

    /// The chains about frames of the pod's link, each behind those that it leads to.
    pub(super) fn on_link(&self) -> Vec<Chain> {
        let [from, to, _, _, out, into] = chain_names(&self.attachment);
        let mut chains = Vec::new();
        if self.has_clear_rules() {
            let rules = self.clear_rules();
            chains = vec![Chain::without_hook(out, rules.outgoing()), Chain::without_hook(into, rules.incoming())];
        }
        chains.extend(self.policy_rules().iter().flat_map(PolicyRules::chains));
        chains.push(Chain::new(Hook::FromLink(self.link.clone()), self.outgoing()).named(from));
        chains.push(Chain::new(Hook::ToLink(self.link.clone()), self.incoming()).named(to));
        chains
    }

    /// The sets that these chains use and keep.
    pub(super) fn sets(&self) -> Vec<Set> {
        let asked = self.has_clear_rules().then(|| self.clear_rules().sets());
        let flows = self.policy_rules().map(|rules| rules.flow_sets());
        asked.into_iter().flatten().chain(flows.into_iter().flatten()).collect()
    }

    /// The rules of network policies, if they are enforced in clear.
    pub(super) fn policy_rules(&self) -> Option<PolicyRules<'_>> {
        let Self { own, node, attachment, .. } = self;
        let leads_on = self.has_clear_rules();
        self.clear_policy.map(|terms| PolicyRules { terms, own, node, attachment, leads_on })
    }

    /// Whether there are rules of `capture.clear`.
    pub(super) fn has_clear_rules(&self) -> bool {
        self.clear.opens != Opens::Allow
    }

    fn clear_rules(&self) -> ClearRules<'_> {
        let Self { clear, own, node, exclude, ranges, attachment, .. } = self;
        ClearRules { clear, own, node, exclude, ranges, attachment }
    }

    /// A packet in clear: it passes, or a chain decides: that of network policies, or that of `capture.clear`.
    fn in_clear(&self, conditions: Vec<Match>, [policy, clear]: [&str; 2]) -> Rule {
        match self.clear_policy {
            Some(_) => Rule::goto(conditions, policy),
            None if self.has_clear_rules() => Rule::goto(conditions, clear),
            None => Rule::accept(conditions),
        }
    }

    /// The chain for forwarded packets, which all pods with the same ranges share.
    pub(super) fn forwarded(&self) -> Chain {
        let policy = self.policy();
        let mut rules = Vec::new();
        for ip in BOTH {
            let captured = captured_set(ip, &policy).name;
            for open in self.open.iter().filter(|open| ip.has(open) && self.is_inside(open)) {
                for offset in [ip.source, ip.destination] {
                    rules.push(Rule::accept(vec![Match::IsV4(ip.is_v4), ip.within(offset, *open)]));
                }
            }
            for range in self.ranges.iter().filter(|range| ip.has(range)) {
                let between = |pod: u32, other: u32| {
                    vec![
                        Match::IsV4(ip.is_v4),
                        Match::In(captured.clone(), vec![ip.address(Header::Network, pod)]),
                        ip.within(other, *range),
                        Match::NotIn(clear_set(ip).name, vec![ip.address(Header::Network, other)]),
                    ]
                };
                rules.push(Rule::drop(between(ip.source, ip.destination)).counted(TO_ENROLLED));
                rules.push(Rule::drop(between(ip.destination, ip.source)).counted(FROM_ENROLLED));
            }
        }
        Chain::new(Hook::Forward, rules).named(format!("{FORWARD}{policy}")).otherwise(Verdict::Accept)
    }

    /// The sets of captured pods in the table of [`CaptureGuard::forwarded`].
    pub(super) fn captured_sets(&self) -> [AddressSet; 2] {
        captured_sets(&self.policy())
    }

    /// The addresses of the pod in these sets.
    pub(super) fn captured(&self) -> Vec<IpNet> {
        routed(&self.own)
    }

    pub(super) fn attachment(&self) -> &str {
        &self.attachment
    }

    /// The pod's addresses.
    #[must_use]
    pub fn addresses(&self) -> &[IpAddr] {
        &self.own
    }

    fn outgoing(&self) -> Vec<Rule> {
        let [_, _, policy, _, clear, _] = chain_names(&self.attachment);
        let chains = [&*policy, &*clear];
        let mut rules = vec![other_protocols(), padded_arp(ARP_BEFORE_PADDING)];
        for ip in BOTH {
            rules.extend(self.foreign_sources(ip));
            let to = |network: IpNet| vec![ip.is(), ip.within(ip.destination, network)];
            rules.extend(self.open(ip).map(|open| self.in_clear(to(open), chains)));
            for range in self.ranges.iter().filter(|range| ip.has(range)) {
                let unknown = Match::NotIn(clear_set(ip).name, vec![ip.address(Header::Network, ip.destination)]);
                rules.push(Rule::drop([to(*range), vec![unknown]].concat()).counted(TO_ENROLLED));
            }
        }
        rules.extend(self.rest(chains));
        rules
    }

    fn incoming(&self) -> Vec<Rule> {
        let [_, _, _, policy, _, clear] = chain_names(&self.attachment);
        let chains = [&*policy, &*clear];
        // With the Ethernet header, and as long as the shortest frame on a wire.
        let mut rules = vec![other_protocols(), padded_arp(SHORTEST_FRAME)];
        for ip in BOTH {
            rules.push(self.foreign_destination(ip));
            let from = |network: IpNet| vec![ip.is(), ip.within(ip.source, network)];
            rules.extend(self.open(ip).map(|open| self.in_clear(from(open), chains)));
            for range in self.ranges.iter().filter(|range| ip.has(range)) {
                let unknown = Match::NotIn(clear_set(ip).name, vec![ip.address(Header::Network, ip.source)]);
                rules.push(Rule::drop([from(*range), vec![unknown]].concat()).counted(FROM_ENROLLED));
            }
            if self.is_shared {
                // Others on the bridge can use these instead of their own; questions for neighbours need them, and no
                // more. IPv4 has such addresses beyond the link as well, as the metadata service of clouds.
                let local = (!ip.is_v4).then(|| ip.link_local());
                for network in local.into_iter().chain([ip.unspecified().into()]) {
                    if !ip.is_v4 {
                        let discovery = ip.icmp_types(SOLICITATION, ADVERTISEMENT);
                        let is_short = vec![Match::Length(Is::AtMost, DISCOVERY)];
                        rules.push(Rule::accept([from(network), discovery, is_short].concat()));
                    }
                    rules.push(Rule::drop(from(network)).counted(FROM_LINK_LOCAL));
                }
            }
        }
        rules.extend(self.rest(chains));
        rules
    }

    /// Refuses source addresses that are not the pod's.
    fn foreign_sources(&self, ip: Ip) -> [Rule; 2] {
        let is_not = |address: &IpAddr| bytes(Header::Network, ip.source, Is::Not, &octets(*address));
        let unspecified = ip.unspecified();
        let mut foreign = vec![ip.is(), is_not(&unspecified)];
        foreign.extend(self.own.iter().filter(|own| own.is_ipv4() == ip.is_v4).map(is_not));
        // Router and neighbour discovery come before the pod has an address, requests for one (DHCP) likewise.
        let on_link = not_within(ip.destination, ip.whole_link());
        let before = vec![ip.is(), bytes(Header::Network, ip.source, Is::Equal, &octets(unspecified)), on_link];
        [foreign, before].map(|conditions| Rule::drop(conditions).counted(FOREIGN_SOURCE))
    }

    /// Refuses destinations that are not the pod's: others on the link, or routes of the node, could lead to
    /// addresses that the capture does not know.
    fn foreign_destination(&self, ip: Ip) -> Rule {
        let mut foreign = vec![ip.is(), not_within(ip.destination, ip.multicast())];
        let everybody = ip.is_v4.then_some(IpAddr::V4(Ipv4Addr::BROADCAST));
        let known = ip.addresses(&self.own).chain(ip.addresses(&self.broadcast)).chain(everybody);
        foreign.extend(known.map(|address| bytes(Header::Network, ip.destination, Is::Not, &octets(address))));
        Rule::drop(foreign).counted(FOREIGN_DESTINATION)
    }

    /// Passes what no rule has dropped. A packet that is too short for its addresses has met no rule, and goes.
    fn rest(&self, chains: [&str; 2]) -> Vec<Rule> {
        let both = |ip: Ip| {
            let whole = |offset| bytes(Header::Network, offset, Is::AtLeast, &[0; 16][..ip.address_len as usize]);
            self.in_clear(vec![ip.is(), whole(ip.source), whole(ip.destination)], chains)
        };
        let arp = Rule::accept(vec![bytes(Header::Link, 12, Is::Equal, &ARP)]);
        vec![both(V4), both(V6), arp, Rule::drop(Vec::new()).counted(OTHER_PROTOCOL)]
    }

    /// The exceptions of one family that need a rule.
    fn open(&self, ip: Ip) -> impl Iterator<Item = IpNet> {
        let node = self.node.iter().map(|address| IpNet::from(*address));
        let all = node.chain(self.open.iter().copied()).filter(move |network| ip.has(network));
        all.filter(move |network| self.is_inside(network) || (self.is_shared && ip.link_local().contains(network)))
    }

    /// Whether rules about the ranges see some of these addresses.
    fn is_inside(&self, network: &IpNet) -> bool {
        self.ranges.iter().any(|range| range.contains(network) || network.contains(range))
    }

    /// Tells sets of ranges and exceptions apart.
    fn policy(&self) -> String {
        let text = format!("{:?} {:?}", self.ranges, self.open);
        format!("{:016x}", fnv1a(&[&text]))
    }
}

/// Name of the table for frames and of that for forwarded packets.
pub(super) const TABLE: &str = "nebula-cni-capture";

/// The sets of captured pods that a chain for forwarded packets uses; `None` for another chain.
pub(super) fn sets_of_chain(name: &str) -> Option<[AddressSet; 2]> {
    name.strip_prefix(FORWARD).map(captured_sets)
}

/// Names of the chains of an attachment: for what comes from the pod, for what goes to it, and the two to which these
/// leave what is in clear, of network policies and of `capture.clear`. Each is before those that it leads to.
pub(super) fn chain_names(attachment: &str) -> [String; 6] {
    CHAINS.map(|way| format!("{way}-{attachment}"))
}

/// The attachment of a chain about the frames of a link.
pub(super) fn attachment_of(chain: &str) -> Option<&str> {
    chain.split_once('-').filter(|(way, _)| CHAINS.contains(way)).map(|(_, attachment)| attachment)
}

/// Whether packets with this address stay on a link.
pub(crate) fn is_of_link(address: &IpAddr) -> bool {
    BOTH.iter().any(|ip| ip.link_local().contains(address))
}

/// Those addresses that packets beyond a link can have.
pub(super) fn routed(addresses: &[IpAddr]) -> Vec<IpNet> {
    let is_routed = |address: &&IpAddr| !is_of_link(address);
    addresses.iter().filter(is_routed).map(|address| IpNet::from(*address)).collect()
}

fn captured_sets(policy: &str) -> [AddressSet; 2] {
    BOTH.map(|ip| captured_set(ip, policy))
}

fn captured_set(ip: Ip, policy: &str) -> AddressSet {
    let family = if ip.is_v4 { 4 } else { 6 };
    AddressSet { name: format!("captured{family}-{policy}").into(), is_v4: ip.is_v4, of_prefixes: false }
}

/// Drops what is neither IP nor ARP: VLAN tags and other protocols hide addresses.
fn other_protocols() -> Rule {
    let is_no_arp = bytes(Header::Link, 12, Is::Not, &ARP);
    Rule::drop(vec![V4.is_not(), V6.is_not(), is_no_arp]).counted(OTHER_PROTOCOL)
}

/// Drops ARP messages with data behind them.
fn padded_arp(longest: u32) -> Rule {
    Rule::drop(vec![bytes(Header::Link, 12, Is::Equal, &ARP), Match::Length(Is::AtLeast, longest + 1)])
        .counted(OTHER_PROTOCOL)
}

const ARP: [u8; 2] = [8, 6];
const FORWARD: &str = "forward-";
const CHAINS: [&str; 6] = ["from", "to", "egress", "ingress", "out", "in"];
// The data of the shortest Ethernet frame, and that frame without its check sequence.
const ARP_BEFORE_PADDING: u32 = 46;
const SHORTEST_FRAME: u32 = 60;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
// Such a frame with one Ethernet address and a nonce: the headers, 24 bytes, two options of 8 bytes.
const DISCOVERY: u32 = 14 + 40 + 24 + 16;

// Reasons, as `nft list` shows them.
const TO_ENROLLED: &str = "to a pod that is not known to be unenrolled";
const FROM_ENROLLED: &str = "from a pod that is not known to be unenrolled";
const FOREIGN_SOURCE: &str = "not from the pod's own address";
const FOREIGN_DESTINATION: &str = "not to the pod's own address";
const FROM_LINK_LOCAL: &str = "from a link-local address";
const OTHER_PROTOCOL: &str = "neither IP nor ARP";

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn guard(is_shared: bool) -> CaptureGuard {
        let link = PodLink {
            name: "veth7".into(),
            index: 7,
            mac: [2, 0, 0, 0, 0, 7],
            addresses: nets(&["10.244.1.7/24", "fd00:244:1::7/64"]),
            is_shared,
            node_mac: None,
            node_addresses: vec![],
        };
        let node = ["10.244.1.1", "192.0.2.1", "fe80::1"].map(|text| text.parse().unwrap()).to_vec();
        let (ranges, open) = (nets(&["10.244.0.0/16", "fd00:244::/32"]), nets(&["10.96.0.0/12", "10.244.250.0/24"]));
        let terms = Terms { ranges, services: open, ..Terms::default() };
        CaptureGuard::new("0000000000000007".into(), link, terms, node)
    }

    #[test]
    fn only_exceptions_inside_the_ranges_need_a_rule() {
        let open = |guard: &CaptureGuard, ip: Ip| guard.open(ip).map(|net| net.to_string()).collect::<Vec<_>>();
        assert_eq!(open(&guard(false), V4), ["10.244.1.1/32", "10.244.250.0/24"]);
        assert!(open(&guard(false), V6).is_empty());
        // On a bridge the rules about link-local addresses need one as well.
        assert_eq!(open(&guard(true), V6), ["fe80::1/128"]);
    }

    #[test]
    fn a_guard_in_a_record_is_read_back_and_its_chains_are_named_after_the_attachment() {
        let text = serde_json::to_string(&guard(true)).unwrap();
        assert_eq!(serde_json::from_str::<CaptureGuard>(&text).unwrap(), guard(true));
        let names: Vec<String> = guard(true).on_link().iter().map(|chain| chain.name().to_owned()).collect();
        assert_eq!(names, ["from-0000000000000007", "to-0000000000000007"]);
    }

    #[test]
    fn unless_everybody_may_open_connections_in_clear_chains_of_the_pod_s_own_decide() {
        let closed = CaptureGuard { clear: Clear { opens: Opens::Outgoing, ..Clear::default() }, ..guard(true) };
        let names: Vec<String> = closed.on_link().iter().map(|chain| chain.name().to_owned()).collect();
        assert_eq!(names, ["out", "in", "from", "to"].map(|way| format!("{way}-0000000000000007")));
        assert!(names.iter().all(|name| attachment_of(name) == Some("0000000000000007")));
        assert_eq!((closed.sets().len(), guard(true).sets().len()), (2, 0));
        assert_eq!(attachment_of(&format!("{FORWARD}{}", closed.policy())), None);
    }

    #[test]
    fn with_network_policies_chains_of_theirs_come_before_those_of_capture_clear() {
        let judged = CaptureGuard { clear_policy: Some(PolicyTerms::default()), ..guard(true) };
        let names =
            |guard: &CaptureGuard| guard.on_link().iter().map(|chain| chain.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(names(&judged), ["egress", "ingress", "from", "to"].map(|way| format!("{way}-0000000000000007")));
        let both = CaptureGuard { clear: Clear { opens: Opens::Deny, ..Clear::default() }, ..judged.clone() };
        assert_eq!(names(&both)[..3], ["out", "in", "egress"].map(|way| format!("{way}-0000000000000007")));
        assert_eq!((judged.sets().len(), both.sets().len()), (4, 6));
        let chains = both.on_link();
        let uses = |way: &str| {
            let chain = chains.iter().find(|chain| chain.name() == format!("{way}-0000000000000007")).unwrap();
            chains.iter().map(|other| other.leads_to(chain)).sum::<u32>()
        };
        assert!(uses("egress") > 0 && uses("ingress") > 0 && uses("out") > 0 && uses("in") > 0);
        let frames = |way: &str, to: &str| {
            let find =
                |way: &str| chains.iter().find(|chain| chain.name() == format!("{way}-0000000000000007")).unwrap();
            find(way).leads_to(find(to))
        };
        assert_eq!((frames("from", "out"), frames("to", "in")), (0, 0), "nothing passes the policies by");
        let text = serde_json::to_string(&both).unwrap();
        assert_eq!(serde_json::from_str::<CaptureGuard>(&text).unwrap(), both);
        assert!(!serde_json::to_string(&guard(true)).unwrap().contains("policy"), "earlier releases read it");
    }

    #[test]
    fn an_address_of_the_pod_that_no_range_has_is_not_its_own_to_the_rules() {
        let mut link = PodLink {
            name: "veth7".into(),
            index: 7,
            mac: [2, 0, 0, 0, 0, 7],
            addresses: nets(&["10.244.1.7/24", "fd00:244:1::7/64", "fe80::7/64"]),
            is_shared: true,
            node_mac: None,
            node_addresses: vec![],
        };
        let terms =
            |exclude: &[&str]| Terms { ranges: nets(&["10.244.0.0/16"]), exclude: nets(exclude), ..Terms::default() };
        let with =
            |exclude: &[&str], link: &PodLink| CaptureGuard::new("7".into(), link.clone(), terms(exclude), vec![]);
        let named = ["10.244.1.7", "fe80::7", "fe80::ff:fe00:7"];
        let own = |guard: &CaptureGuard| guard.own.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(own(&with(&[], &link)), named);
        assert_eq!(with(&[], &link).uncovered(&link.addresses), ["fd00:244:1::7".parse::<IpAddr>().unwrap()]);
        assert_eq!(own(&with(&["fd00:244::/32"], &link)).len(), 4, "the operator named it");
        assert_eq!(with(&[], &link).broadcast, ["10.244.1.255".parse::<IpAddr>().unwrap()]);
        link.addresses = nets(&["10.244.1.7/32"]);
        assert!(with(&[], &link).broadcast.is_empty());
    }

    #[test]
    fn pods_with_the_same_ranges_and_exceptions_share_the_chain_for_forwarded_packets() {
        let [one, two] = [guard(true), guard(false)];
        assert_eq!(one.policy(), two.policy());
        let other = CaptureGuard { open: nets(&["10.96.0.0/12"]), ..guard(false) };
        assert_ne!(other.policy(), two.policy());
        let sets = sets_of_chain(&format!("{FORWARD}{}", one.policy())).unwrap();
        assert_eq!(sets, one.captured_sets());
        assert_eq!(sets_of_chain("forward"), None);
    }

    #[test]
    fn addresses_of_the_link_alone_are_not_forwarded() {
        let own: Vec<String> = guard(true).captured().iter().map(ToString::to_string).collect();
        assert_eq!(own, ["10.244.1.7/32", "fd00:244:1::7/128"]);
    }
}

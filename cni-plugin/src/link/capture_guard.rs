//! What holds "never in clear" for captured pods, where no program of the pod can reach: rules for the frames of their
//! links on the node, and for what the node forwards after the destination of a packet was translated (kube-proxy).
//!
//! From and to a captured pod nothing passes whose other end is an address of a pod, except addresses that are known not
//! to be enrolled (the sets `clear4` and `clear6`, which the node agent keeps), the node's own, and the operator's
//! exceptions. Without an agent nothing is added to these sets, so the guard fails closed. A captured pod sends from its
//! own addresses only: anything else could be translated into an address of a pod under a name that the rules do not
//! know. Other protocols than IP and ARP (VLAN tags too) do not pass at all, because they can hide addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv6Net};
use nix::libc;
use serde::{Deserialize, Serialize};

use crate::hash::fnv1a;
use crate::link::guard::{bytes, within};
use crate::link::pod_link::{PodLink, link_local};
use crate::netlink::nftables::{AddressSet, Chain, Field, Header, Hook, Is, Match, Rule, Verdict};
use crate::netlink::octets;

/// The rules of one captured pod, as they were installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaptureGuard {
    /// The attachment, which its chains are named after.
    attachment: String,
    /// The node's end of the pod's link.
    pub link: String,
    /// Index of that link, because a name can be reused for another link.
    pub index: u32,
    /// Whether the link is a port of a bridge or switch.
    is_shared: bool,
    /// The pod's addresses.
    own: Vec<IpAddr>,
    /// Addresses of pods.
    ranges: Vec<IpNet>,
    /// Open in both directions: the node's addresses towards the pod.
    node: Vec<IpAddr>,
    /// Open in both directions: Services, and what the operator excludes.
    open: Vec<IpNet>,
}

impl CaptureGuard {
    /// Builds the rules of one attachment. `node` are the node's addresses on its way to the pod.
    #[must_use]
    pub fn new(attachment: String, link: PodLink, ranges: Vec<IpNet>, node: Vec<IpAddr>, open: Vec<IpNet>) -> Self {
        let mut own: Vec<IpAddr> = link.addresses.iter().map(IpNet::addr).collect();
        own.push(IpAddr::V6(link_local(link.mac)));
        own.sort();
        own.dedup();
        Self { attachment, link: link.name, index: link.index, is_shared: link.is_shared, own, ranges, node, open }
    }

    /// The chains on the pod's link: for what comes from the pod, and for what goes to it.
    pub(super) fn on_link(&self) -> [Chain; 2] {
        [
            Chain::new(Hook::FromLink(self.link.clone()), self.outgoing()).named(self.chain_names()[0].as_str()),
            Chain::new(Hook::ToLink(self.link.clone()), self.incoming()).named(self.chain_names()[1].as_str()),
        ]
    }

    /// The chain for forwarded packets, which all pods with the same ranges share.
    pub(super) fn forwarded(&self) -> Chain {
        let policy = self.policy();
        let mut rules = Vec::new();
        for ip in BOTH {
            let captured = ip.captured(&policy).name;
            for open in self.open.iter().filter(|open| ip.has(open) && self.is_inside(open)) {
                for offset in [ip.source, ip.destination] {
                    rules.push(Rule::accept(vec![Match::IsV4(ip.is_v4), within(Header::Network, offset, *open)]));
                }
            }
            for range in self.ranges.iter().filter(|range| ip.has(range)) {
                let between = |pod: u32, other: u32| {
                    vec![
                        Match::IsV4(ip.is_v4),
                        Match::In(captured.clone(), vec![ip.address(pod)]),
                        within(Header::Network, other, *range),
                        Match::NotIn(ip.clear().name, vec![ip.address(other)]),
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

    /// Names of the chains on the pod's link.
    pub(super) fn chain_names(&self) -> [String; 2] {
        chain_names(&self.attachment)
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
        let mut rules = vec![other_protocols(), padded_arp(ARP_BEFORE_PADDING)];
        for ip in BOTH {
            rules.extend(self.foreign_sources(ip));
            let to = |network: IpNet| vec![ip.is(), within(Header::Network, ip.destination, network)];
            rules.extend(self.open(ip).map(|open| Rule::accept(to(open))));
            for range in self.ranges.iter().filter(|range| ip.has(range)) {
                let unknown = Match::NotIn(ip.clear().name, vec![ip.address(ip.destination)]);
                rules.push(Rule::drop([to(*range), vec![unknown]].concat()).counted(TO_ENROLLED));
            }
        }
        rules.extend(rest());
        rules
    }

    fn incoming(&self) -> Vec<Rule> {
        // With the Ethernet header, and as long as the shortest frame on a wire.
        let mut rules = vec![other_protocols(), padded_arp(SHORTEST_FRAME)];
        for ip in BOTH {
            let from = |network: IpNet| vec![ip.is(), within(Header::Network, ip.source, network)];
            rules.extend(self.open(ip).map(|open| Rule::accept(from(open))));
            for range in self.ranges.iter().filter(|range| ip.has(range)) {
                let unknown = Match::NotIn(ip.clear().name, vec![ip.address(ip.source)]);
                rules.push(Rule::drop([from(*range), vec![unknown]].concat()).counted(FROM_ENROLLED));
            }
            if self.is_shared {
                // Others on the bridge can use these instead of their own; questions for neighbours need them, and no more.
                // IPv4 has such addresses beyond the link as well, as the metadata service of clouds.
                let local = (!ip.is_v4).then(|| ip.link_local());
                for network in local.into_iter().chain([ip.unspecified().into()]) {
                    if !ip.is_v4 {
                        let bound = |is, kind| bytes(Header::Transport, 0, is, &[kind]);
                        let icmp = [Match::Protocol(libc::IPPROTO_ICMPV6 as u8), Match::Length(Is::AtMost, DISCOVERY)];
                        let kind = [bound(Is::AtLeast, SOLICITATION), bound(Is::AtMost, ADVERTISEMENT)];
                        rules.push(Rule::accept([from(network), icmp.to_vec(), kind.to_vec()].concat()));
                    }
                    rules.push(Rule::drop(from(network)).counted(FROM_LINK_LOCAL));
                }
            }
        }
        rules.extend(rest());
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

/// The sets of addresses that are known not to be enrolled.
pub(super) fn clear_sets() -> [AddressSet; 2] {
    BOTH.map(Ip::clear)
}

/// The sets of captured pods that a chain for forwarded packets uses; `None` for another chain.
pub(super) fn sets_of_chain(name: &str) -> Option<[AddressSet; 2]> {
    name.strip_prefix(FORWARD).map(captured_sets)
}

/// Names of the chains of an attachment.
pub(super) fn chain_names(attachment: &str) -> [String; 2] {
    ["from", "to"].map(|way| format!("{way}-{attachment}"))
}

/// Those addresses that packets beyond a link can have.
pub(super) fn routed(addresses: &[IpAddr]) -> Vec<IpNet> {
    let is_routed = |address: &&IpAddr| BOTH.iter().all(|ip| !ip.link_local().contains(*address));
    addresses.iter().filter(is_routed).map(|address| IpNet::from(*address)).collect()
}

fn captured_sets(policy: &str) -> [AddressSet; 2] {
    BOTH.map(|ip| ip.captured(policy))
}

/// Drops what is neither IP nor ARP: VLAN tags and other protocols hide addresses.
fn other_protocols() -> Rule {
    let is_not = |ether_type: &[u8; 2]| bytes(Header::Link, 12, Is::Not, ether_type);
    Rule::drop(vec![is_not(&V4.ether_type), is_not(&V6.ether_type), is_not(&ARP)]).counted(OTHER_PROTOCOL)
}

/// Drops ARP messages with data behind them.
fn padded_arp(longest: u32) -> Rule {
    Rule::drop(vec![bytes(Header::Link, 12, Is::Equal, &ARP), Match::Length(Is::AtLeast, longest + 1)])
        .counted(OTHER_PROTOCOL)
}

/// Accepts what no rule has dropped. A packet that is too short for its addresses has met no rule, and goes.
fn rest() -> Vec<Rule> {
    let whole = |ip: Ip| bytes(Header::Network, ip.source, Is::AtLeast, &[0; 16][..ip.address_len as usize]);
    let both = |ip: Ip| {
        let destination = bytes(Header::Network, ip.destination, Is::AtLeast, &[0; 16][..ip.address_len as usize]);
        Rule::accept(vec![ip.is(), whole(ip), destination])
    };
    let arp = Rule::accept(vec![bytes(Header::Link, 12, Is::Equal, &ARP)]);
    vec![both(V4), both(V6), arp, Rule::drop(Vec::new()).counted(OTHER_PROTOCOL)]
}

fn not_within(offset: u32, network: IpNet) -> Match {
    let (address, mask) = (octets(network.network()), octets(network.netmask()));
    Match::Bytes(Header::Network, offset, Is::Not, address, Some(mask))
}

/// The offsets and numbers that differ between IPv4 and IPv6.
#[derive(Debug, Clone, Copy)]
struct Ip {
    is_v4: bool,
    ether_type: [u8; 2],
    source: u32,
    destination: u32,
    address_len: u32,
}

impl Ip {
    fn is(self) -> Match {
        bytes(Header::Link, 12, Is::Equal, &self.ether_type)
    }

    fn has(self, network: &IpNet) -> bool {
        network.addr().is_ipv4() == self.is_v4
    }

    fn address(self, offset: u32) -> Field {
        Field::Bytes { header: Header::Network, offset, len: self.address_len }
    }

    fn clear(self) -> AddressSet {
        let name = if self.is_v4 { "clear4" } else { "clear6" };
        AddressSet { name: name.into(), is_v4: self.is_v4, of_prefixes: true }
    }

    fn captured(self, policy: &str) -> AddressSet {
        let family = if self.is_v4 { 4 } else { 6 };
        AddressSet { name: format!("captured{family}-{policy}").into(), is_v4: self.is_v4, of_prefixes: false }
    }

    fn unspecified(self) -> IpAddr {
        if self.is_v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() }
    }

    fn link_local(self) -> IpNet {
        if self.is_v4 {
            IpNet::V4(ipnet::Ipv4Net::new_assert(Ipv4Addr::new(169, 254, 0, 0), 16))
        } else {
            IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10))
        }
    }

    /// Where packets without a source address go: to everybody on the link.
    fn whole_link(self) -> IpNet {
        if self.is_v4 {
            IpAddr::V4(Ipv4Addr::BROADCAST).into()
        } else {
            IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0), 16))
        }
    }
}

const V4: Ip = Ip { is_v4: true, ether_type: [8, 0], source: 12, destination: 16, address_len: 4 };
const V6: Ip = Ip { is_v4: false, ether_type: [0x86, 0xdd], source: 8, destination: 24, address_len: 16 };
const BOTH: [Ip; 2] = [V4, V6];
const ARP: [u8; 2] = [8, 6];
const FORWARD: &str = "forward-";
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
        let (ranges, open) = (nets(&["10.244.0.0/16", "fd00:244::/48"]), nets(&["10.96.0.0/12", "10.244.250.0/24"]));
        CaptureGuard::new("0000000000000007".into(), link, ranges, node, open)
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
        assert_eq!(guard(true).chain_names(), ["from-0000000000000007", "to-0000000000000007"]);
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

//! What a captured pod exchanges in clear with whoever has no certificate: who may open a connection, and the rules
//! on the node's side of the pod's link that hold it.
//!
//! The rules for frames of the link (`capture_guard`) come first: they refuse what must be in a tunnel, and leave the
//! rest to the chains made here. Those have no connection tracking, which links do not have. A TCP connection begins
//! with a SYN, so every other segment passes as a part of one. Of other protocols a set remembers what the pod asked
//! for a minute, in each pod's own sets, so that none can use up the room of another. The node is known by its
//! sockets and not by its addresses: others can send from those, and kube-proxy does it for its clients.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use nebula_cni_contract::netlink::nftables::{AddressSet, Field, Header, Is, Match, Rule, Set};
use serde::{Deserialize, Serialize};

use crate::link::ip::{BOTH, DESTINATION_PORT, Ip, SOURCE_PORT, Side, TCP, V6, ports, within};

/// What the operator allows in clear.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Clear {
    /// Who may open connections.
    pub opens: Opens,
    /// Clients without a certificate that may open connections to the pod all the same.
    pub accept: Vec<Accept>,
}

/// Who may open connections in clear between a captured pod and whoever has no certificate. In each case the pod's
/// own node may.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Opens {
    /// Both of them. Records of earlier releases mean this one.
    #[default]
    Allow,
    /// The pod.
    Outgoing,
    /// Neither of them; the pod to its node and to what the operator excludes from the capture.
    Deny,
}

/// Ports of captured pods that are open in clear.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Accept {
    /// IP protocol: 6 for TCP, 17 for UDP, 132 for SCTP.
    pub protocol: u8,
    /// First and last port.
    pub ports: (u16, u16),
    /// Addresses of the clients; empty for everybody.
    pub from: Vec<IpNet>,
}

/// The rules about clear packets of one pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClearRules<'a> {
    pub(super) clear: &'a Clear,
    /// The pod's addresses.
    pub(super) own: &'a [IpAddr],
    /// The node's addresses on its way to the pod.
    pub(super) node: &'a [IpAddr],
    /// What the operator excludes from the capture.
    pub(super) exclude: &'a [IpNet],
    /// Addresses of pods.
    pub(super) ranges: &'a [IpNet],
    /// Part of the names of the sets.
    pub(super) attachment: &'a str,
}

impl ClearRules<'_> {
    /// The sets that remember what the pod asked.
    pub(super) fn sets(&self) -> [Set; 2] {
        BOTH.map(|ip| Set { name: self.asked(ip).into(), key_len: ip.key_len(), size: 0 })
    }

    /// Judges what the pod sends in clear.
    pub(super) fn outgoing(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for ip in BOTH {
            // Answers to accepted clients need not be remembered.
            rules.extend(self.accepted(ip, ip.destination, SOURCE_PORT).map(Rule::accept));
            if ip == V6 {
                rules.push(Rule::accept(on_link(ip, SOLICITATION, ADVERTISEMENT)));
                rules.push(Rule::accept(
                    [on_link(ip, 0, u8::MAX), vec![ip.within(ip.destination, ip.whole_link())]].concat(),
                ));
            }
            for way in self.ways(ip, ip.destination) {
                rules.extend(self.notes(ip, &way));
                rules.push(Rule::accept(way));
            }
        }
        rules.push(Rule::drop(Vec::new()).counted(OPENED_BY_POD));
        rules
    }

    /// Judges what is sent to the pod in clear.
    pub(super) fn incoming(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for ip in BOTH {
            // Without its first fragment it is part of nothing.
            let later = |way| Rule::accept([way, ip.is_later_fragment()].concat());
            rules.extend(self.ways(ip, ip.source).into_iter().map(later));
            rules.push(Rule::drop([vec![ip.is()], ip.is_later_fragment()].concat()).counted(OPENED_BY_OTHERS));
            let goes_on = Match::Bytes(Header::Transport, TCP_FLAGS, Is::Not, vec![SYN], Some(vec![SYN | ACK]));
            for way in self.ways(ip, ip.source) {
                rules.push(Rule::accept([way, vec![Match::Protocol(TCP), goes_on.clone()]].concat()));
            }
            rules.push(Rule::accept(vec![ip.is(), Match::OfLocalSocket]));
            let set = || self.asked(ip).into();
            for (kind, key) in ip.answers(Side::Destination) {
                let is_asked = vec![Match::In(set(), key.clone()), Match::Remember(set(), key, ANSWERED_WITHIN)];
                rules.push(Rule::accept([vec![ip.is()], kind, is_asked].concat()));
            }
            rules.extend(self.accepted(ip, ip.source, DESTINATION_PORT).map(Rule::accept));
            rules.extend(self.errors(ip));
            if ip == V6 {
                rules.push(Rule::accept(on_link(ip, SOLICITATION, ADVERTISEMENT)));
                // Questions about groups, and router advertisements.
                let from_node =
                    |node: IpAddr| [on_link(ip, GROUP_QUERY, ADVERTISEMENT), vec![ip.within(ip.source, node.into())]];
                rules.extend(ip.addresses(self.node).map(|node| Rule::accept(from_node(node).concat())));
            }
        }
        rules.push(Rule::drop(Vec::new()).counted(OPENED_BY_OTHERS));
        rules
    }

    /// With whom the pod may open connections, as alternative conditions.
    fn ways(&self, ip: Ip, offset: u32) -> Vec<Vec<Match>> {
        if self.clear.opens != Opens::Deny {
            return vec![vec![ip.is()]];
        }
        let node = self.node.iter().map(|address| IpNet::from(*address));
        let named = node.chain(self.exclude.iter().copied()).filter(|network| ip.has(network));
        named.map(|network| vec![ip.is(), ip.within(offset, network)]).collect()
    }

    /// Rules that remember what the pod asks.
    fn notes(&self, ip: Ip, way: &[Match]) -> Vec<Rule> {
        let note = |(kind, key): (Vec<Match>, Vec<Field>)| {
            let remember = Match::Remember(self.asked(ip).into(), key, ANSWERED_WITHIN);
            Rule::note([way, &kind, &[remember]].concat())
        };
        ip.asks(Side::Source).into_iter().map(note).collect()
    }

    /// Conditions for packets from or to an accepted client, whose address and the pod's port are at these offsets.
    fn accepted(&self, ip: Ip, address: u32, port: u32) -> impl Iterator<Item = Vec<Match>> {
        self.clear.accept.iter().flat_map(move |accept| {
            let open = [vec![ip.is()], ports(accept.protocol, port, accept.ports)].concat();
            let from = accept.from.iter().filter(move |network| ip.has(network));
            let from = from.map(move |network| Some(ip.within(address, *network)));
            let everybody = accept.from.is_empty().then_some(None);
            from.chain(everybody).map(move |from| open.iter().cloned().chain(from).collect())
        })
    }

    /// Lets ICMP errors pass about what the pod may send in clear, whoever reports them.
    fn errors(&self, ip: Ip) -> Vec<Rule> {
        let quoted = QUOTED + ip.destination;
        let mut rules = Vec::new();
        for range in self.ranges.iter().filter(|range| ip.has(range)) {
            let unknown = Match::NotIn(clear_set(ip).name, vec![ip.address(Header::Transport, quoted)]);
            rules.extend(
                about(ip, ip.destination, *range)
                    .into_iter()
                    .map(|error| Rule::drop([error, vec![unknown.clone()]].concat()).counted(OPENED_BY_OTHERS)),
            );
        }
        for own in ip.addresses(self.own) {
            rules.extend(about(ip, ip.source, own.into()).into_iter().map(Rule::accept));
        }
        rules
    }

    fn asked(&self, ip: Ip) -> String {
        asked_set(ip, self.attachment)
    }
}

/// Names of the sets of [`ClearRules::sets`].
pub(super) fn asked_sets(attachment: &str) -> [String; 2] {
    BOTH.map(|ip| asked_set(ip, attachment))
}

fn asked_set(ip: Ip, attachment: &str) -> String {
    format!("asked{}-{attachment}", ip.number())
}

/// Matches ICMP errors about a packet with an address of this network at this offset.
pub(super) fn about(ip: Ip, offset: u32, network: IpNet) -> Vec<Vec<Match>> {
    let kinds: &[(u8, u8)] = if ip.is_v4 { &[(3, 3), (11, 12)] } else { &[(1, 4)] };
    let quoted = within(Header::Transport, QUOTED + offset, network);
    let errors =
        |(lowest, highest): &(u8, u8)| [vec![ip.is()], ip.icmp_types(*lowest, *highest), vec![quoted.clone()]].concat();
    kinds.iter().map(errors).collect()
}

/// Matches ICMP messages of these types, inclusive.
pub(super) fn on_link(ip: Ip, lowest: u8, highest: u8) -> Vec<Match> {
    [vec![ip.is()], ip.icmp_types(lowest, highest)].concat()
}

// As long as connection tracking of most kernels, between its limits for one answer and for many.
pub(super) const ANSWERED_WITHIN: Duration = Duration::from_secs(60);
// Where a TCP header has its flags.
pub(super) const TCP_FLAGS: u32 = 13;
pub(super) const SYN: u8 = 0x02;
pub(super) const ACK: u8 = 0x10;
// An ICMP error quotes the IP header that it is about behind its own.
const QUOTED: u32 = 8;
pub(super) const GROUP_QUERY: u8 = 130;
pub(super) const SOLICITATION: u8 = 135;
pub(super) const ADVERTISEMENT: u8 = 136;

// Reasons, as `nft list` shows them.
const OPENED_BY_POD: &str = "to somebody without a certificate (capture.clear)";
const OPENED_BY_OTHERS: &str = "from somebody without a certificate (capture.clear, capture.accept)";

/// The sets of addresses that are known not to be enrolled.
pub(super) fn clear_sets() -> [AddressSet; 2] {
    BOTH.map(clear_set)
}

pub(super) fn clear_set(ip: Ip) -> AddressSet {
    AddressSet { name: if ip.is_v4 { "clear4" } else { "clear6" }.into(), is_v4: ip.is_v4, of_prefixes: true }
}

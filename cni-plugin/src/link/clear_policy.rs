//! Network policies of a captured pod for what it exchanges in clear: rules on the node's side of its link, and sets
//! that the node agent fills.
//!
//! The rules for frames (`capture_guard`) leave what is in clear to the chains made here, which leave what they allow
//! to those of `capture.clear` (`clear`): both must allow. As there, links have no connection tracking. A TCP
//! connection begins with a SYN, and every other segment passes as a part of one. In other protocols a packet passes
//! as an answer for a minute after an allowed packet of the flow's other end; all others are judged. An answer does not
//! count as an allowed packet: otherwise two ends could keep a flow alive after the policies have changed.
//!
//! A packet is allowed if the set of its direction has the peer's address with its protocol and destination port.
//! Before the agent's first write the sets have the pod's node only.

use std::io;
use std::net::IpAddr;

use nebula_cni_contract::netlink::nftables::{
    self, Chain, Family, Field, Header, Interval, IntervalSet, Is, Match, Rule, Set, Transaction,
};
use serde::{Deserialize, Serialize};

use crate::link::capture_guard::{TABLE, chain_names, routed};
use crate::link::clear::{
    ACK, ADVERTISEMENT, ANSWERED_WITHIN, GROUP_QUERY, SOLICITATION, SYN, TCP_FLAGS, about, on_link,
};
use crate::link::ip::{BOTH, DESTINATION_PORT, Ip, SCTP, Side, TCP, UDP, V4, V6, field};

/// What a pod may exchange in clear.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Allowed {
    /// From whom, by destination port, without an overlap.
    pub ingress: Vec<Interval>,
    /// To whom, likewise.
    pub egress: Vec<Interval>,
}

/// The sets of one captured pod in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// Part of their names.
    pub attachment: String,
    /// The pod's addresses.
    pub addresses: Vec<IpAddr>,
    /// Numbers that no other sets get: those of another pod, or those of the same pod that were made again.
    pub id: (u64, u64),
}

/// What the rules follow from, beside the pod's own addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyTerms {
    /// First and last of the ports that Services have on all nodes.
    pub node_ports: Option<(u16, u16)>,
}

/// The rules about clear packets of one pod.
#[derive(Debug, Clone, Copy)]
pub(super) struct PolicyRules<'a> {
    pub(super) terms: PolicyTerms,
    /// The pod's addresses.
    pub(super) own: &'a [IpAddr],
    /// The node's addresses on its way to the pod.
    pub(super) node: &'a [IpAddr],
    /// Part of the names of chains and sets.
    pub(super) attachment: &'a str,
    /// Whether the chains of `capture.clear` judge what is allowed here.
    pub(super) leads_on: bool,
}

impl PolicyRules<'_> {
    /// For what the pod sends, and what is sent to it.
    pub(super) fn chains(&self) -> [Chain; 2] {
        let [_, _, egress, ingress, _, _] = chain_names(self.attachment);
        [Chain::without_hook(egress, self.outgoing()), Chain::without_hook(ingress, self.incoming())]
    }

    /// The sets that remember flows.
    pub(super) fn flow_sets(&self) -> [Set; 4] {
        EACH.map(|(ip, asked)| Set {
            name: flow_set(ip, asked, self.attachment).into(),
            key_len: ip.key_len(),
            size: 0,
        })
    }

    /// The sets of [`replace`].
    pub(super) fn policy_sets(&self) -> [IntervalSet; 4] {
        let own: Vec<String> = routed(self.own).iter().take(MAX_NAMED).map(|own| own.addr().to_string()).collect();
        policy_sets(self.attachment, &own.join(" "))
    }

    /// What is allowed before the agent's first write.
    pub(super) fn at_first(&self) -> Allowed {
        let mut node: Vec<IpAddr> = self.node.to_vec();
        node.sort_unstable();
        node.dedup();
        let all = |protocols| (protocols, (0, u16::MAX));
        let mut parts = vec![all((0, u8::MAX))];
        if let Some((first, last)) = self.terms.node_ports {
            parts =
                vec![all((0, TCP - 1)), all((TCP + 1, UDP - 1)), all((UDP + 1, SCTP - 1)), all((SCTP + 1, u8::MAX))];
            for protocol in [TCP, UDP, SCTP] {
                let below = first.checked_sub(1).map(|end| (0, end));
                let above = last.checked_add(1).map(|start| (start, u16::MAX));
                parts.extend(below.into_iter().chain(above).map(|ports| ((protocol, protocol), ports)));
            }
        }
        let reach = |address: IpAddr| {
            parts.iter().map(move |(protocols, ports)| Interval {
                addresses: (address, address),
                protocols: *protocols,
                ports: *ports,
            })
        };
        Allowed { ingress: Vec::new(), egress: node.into_iter().flat_map(reach).collect() }
    }

    fn outgoing(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for ip in BOTH {
            rules.extend(self.of_connections(ip, Side::Source));
            if ip == V6 {
                rules.push(self.pass(on_link(ip, SOLICITATION, ADVERTISEMENT), Side::Source));
                let to_link = vec![ip.within(ip.destination, ip.whole_link())];
                rules.push(self.pass([on_link(ip, 0, u8::MAX), to_link].concat(), Side::Source));
            }
            rules.extend(self.judged(ip, Side::Source));
        }
        rules.push(Rule::drop(Vec::new()).counted(REFUSED_TO));
        rules
    }

    fn incoming(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for ip in BOTH {
            rules.extend(self.of_connections(ip, Side::Destination));
            if ip == V6 {
                rules.push(self.pass(on_link(ip, SOLICITATION, ADVERTISEMENT), Side::Destination));
                for node in ip.addresses(self.node) {
                    let from = vec![ip.within(ip.source, node.into())];
                    rules.push(self.pass([on_link(ip, GROUP_QUERY, ADVERTISEMENT), from].concat(), Side::Destination));
                }
            }
            rules.extend(self.judged(ip, Side::Destination));
        }
        rules.push(Rule::drop(Vec::new()).counted(REFUSED_FROM));
        rules
    }

    /// What belongs to a connection that was judged, or to none: later fragments, TCP segments behind the first one,
    /// and ICMP errors about what the other end sent.
    fn of_connections(&self, ip: Ip, pod: Side) -> Vec<Rule> {
        let goes_on = Match::Bytes(Header::Transport, TCP_FLAGS, Is::Not, vec![SYN], Some(vec![SYN | ACK]));
        let mut rules = vec![
            self.pass([vec![ip.is()], ip.is_later_fragment()].concat(), pod),
            self.pass(vec![ip.is(), Match::Protocol(TCP), goes_on], pod),
        ];
        // The quoted packet went the other way.
        let quoted = if pod == Side::Source { ip.destination } else { ip.source };
        for own in ip.addresses(self.own) {
            rules.extend(about(ip, quoted, own.into()).into_iter().map(|error| self.pass(error, pod)));
        }
        rules
    }

    /// Answers, and what is allowed.
    fn judged(&self, ip: Ip, pod: Side) -> Vec<Rule> {
        let peer = if pod == Side::Source { ip.destination } else { ip.source };
        // Of protocols without ports all "ports" are allowed or none, so whatever is there in the packet will do.
        let key = [ip.address(Header::Network, peer), Field::Protocol, field(Header::Transport, DESTINATION_PORT, 2)];
        let is_in_set = Match::In(set_name(ip, pod, self.attachment).into(), key.to_vec());
        let other_end = if pod == Side::Source { Side::Destination } else { Side::Source };
        let asked = |by| flow_set(ip, by, self.attachment).into();
        let mut rules = Vec::new();
        for (kind, key) in ip.answers(pod) {
            rules.push(self.pass([vec![ip.is()], kind, vec![Match::In(asked(other_end), key)]].concat(), pod));
        }
        // The node, by its sockets: others can send from its addresses.
        let of_node = (pod == Side::Destination).then_some(Match::OfLocalSocket);
        for is_allowed in of_node.into_iter().chain([is_in_set]) {
            for (kind, key) in ip.asks(pod) {
                let remember = vec![is_allowed.clone(), Match::Remember(asked(pod), key, ANSWERED_WITHIN)];
                rules.push(Rule::note([vec![ip.is()], kind, remember].concat()));
            }
            rules.push(self.pass(vec![ip.is(), is_allowed], pod));
        }
        rules
    }

    fn pass(&self, conditions: Vec<Match>, pod: Side) -> Rule {
        let [.., out, into] = chain_names(self.attachment);
        match pod {
            _ if !self.leads_on => Rule::accept(conditions),
            Side::Source => Rule::goto(conditions, out),
            Side::Destination => Rule::goto(conditions, into),
        }
    }
}

impl Allowed {
    /// Adds the replacement of a pod's sets to a transaction.
    pub(super) fn write(&self, attachment: &str, change: &mut Transaction) {
        let [out4, in4, out6, in6] = policy_sets(attachment, "");
        for (set, intervals) in [(out4, &self.egress), (in4, &self.ingress), (out6, &self.egress), (in6, &self.ingress)]
        {
            change.replace_intervals(Family::Link, TABLE, &set, intervals);
        }
    }
}

/// The captured pods whose clear packets are judged.
///
/// # Errors
/// Returns the kernel's error.
pub fn judged() -> io::Result<Vec<Judged>> {
    let table = match nftables::table_handle(Family::Link, TABLE) {
        Err(error) if nftables::has_no_tables(&error) => None,
        handle => handle?,
    };
    let Some(table) = table else { return Ok(Vec::new()) };
    let sets = nftables::sets(Family::Link, TABLE)?;
    let judged = sets.into_iter().filter_map(|set| {
        let attachment = set.name.strip_prefix(FIRST_SET)?.to_owned();
        let comment = set.comment.unwrap_or_default();
        let addresses = comment.split(' ').filter_map(|address| address.parse().ok()).collect();
        Some(Judged { attachment, addresses, id: (table, set.handle) })
    });
    Ok(judged.collect())
}

/// Replaces what a pod may exchange in clear, in one transaction: a packet is judged by what was there or by this.
/// Returns whether the pod has such sets; if not, nothing is done.
///
/// # Errors
/// Returns the kernel's error; nothing has changed then.
pub fn replace(attachment: &str, allowed: &Allowed) -> io::Result<bool> {
    let mut change = Transaction::new();
    allowed.write(attachment, &mut change);
    match change.run() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        done => done.map(|()| true),
    }
}

/// Names of all sets of an attachment.
pub(super) fn set_names(attachment: &str) -> Vec<String> {
    let names = |(ip, side)| [set_name(ip, side, attachment), flow_set(ip, side, attachment)];
    EACH.into_iter().flat_map(names).collect()
}

fn policy_sets(attachment: &str, comment: &str) -> [IntervalSet; 4] {
    EACH.map(|(ip, pod)| IntervalSet {
        name: set_name(ip, pod, attachment),
        is_v4: ip.is_v4,
        comment: comment.to_owned(),
    })
}

fn set_name(ip: Ip, pod: Side, attachment: &str) -> String {
    let direction = if pod == Side::Source { "egress" } else { "ingress" };
    format!("{direction}{}-{attachment}", ip.number())
}

/// Flows of which this end sent an allowed packet; the pod, if it is the source.
fn flow_set(ip: Ip, asked: Side, attachment: &str) -> String {
    let by = if asked == Side::Source { "pod" } else { "peer" };
    format!("{by}-asked{}-{attachment}", ip.number())
}

/// A pod has sets for each family and for what it sends and receives.
const EACH: [(Ip, Side); 4] =
    [(V4, Side::Source), (V4, Side::Destination), (V6, Side::Source), (V6, Side::Destination)];
// Each pod has one of this name.
const FIRST_SET: &str = "egress4-";
// Addresses of a pod that are noted with its sets: room for as many in the longest comment.
const MAX_NAMED: usize = 4;

// Reasons, as `nft list` shows them.
const REFUSED_TO: &str = "to somebody without a certificate (network policy)";
const REFUSED_FROM: &str = "from somebody without a certificate (network policy)";

#[cfg(test)]
mod tests {
    use super::*;

    fn rules<'a>(own: &'a [IpAddr], node: &'a [IpAddr], node_ports: Option<(u16, u16)>) -> PolicyRules<'a> {
        PolicyRules { terms: PolicyTerms { node_ports }, own, node, attachment: "7", leads_on: true }
    }

    #[test]
    fn at_first_a_pod_reaches_its_node_but_for_the_ports_of_nodes() {
        let node = ["10.244.1.1".parse().unwrap(), "10.244.1.1".parse().unwrap()];
        let first = rules(&[], &node, Some((30_000, 32_767))).at_first();
        assert!(first.ingress.is_empty());
        assert!(first.egress.iter().all(|interval| interval.addresses == (node[0], node[0])));
        let allows = |protocol: u8, port: u16| {
            let within = |interval: &&Interval| {
                (interval.protocols.0..=interval.protocols.1).contains(&protocol)
                    && (interval.ports.0..=interval.ports.1).contains(&port)
            };
            let times = first.egress.iter().filter(within).count();
            assert!(times < 2, "they overlap");
            times == 1
        };
        assert!([29_999, 32_768].iter().all(|port| allows(6, *port) && allows(17, *port) && allows(132, *port)));
        assert!(![30_000, 32_767].iter().any(|port| allows(6, *port) || allows(17, *port) || allows(132, *port)));
        assert!([0, 1, 5, 7, 16, 18, 131, 133, 255].iter().all(|other| allows(*other, 30_000)), "they have no ports");
        assert_eq!(rules(&[], &node, None).at_first().egress.len(), 1);
        assert_eq!(rules(&[], &node, Some((1, u16::MAX))).at_first().egress.len(), 7, "port 0 is none of them");
    }

    #[test]
    fn the_sets_of_a_pod_have_its_addresses_as_comment() {
        let own = ["10.244.1.7", "fd00::7", "fe80::7"].map(|address| address.parse().unwrap());
        let sets = rules(&own, &[], None).policy_sets();
        assert!(sets.iter().all(|set| set.comment == "10.244.1.7 fd00::7"), "{sets:?}");
        let names = set_names("7");
        assert!(names.len() == 8 && sets.iter().all(|set| names.contains(&set.name)));
    }
}

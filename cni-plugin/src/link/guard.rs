//! Isolation rules on the node's end of the pod's own interface, which see every frame in either direction. A raw
//! socket in the pod can bypass the rules in its own network namespace, but not these.
//!
//! There is no connection tracking at a link, so sets remember requests: from the pod to a DNS server, from the node's
//! own sockets to the pod, from a neighbour for an address. Everything that is neither a reply to one of these nor in a
//! listed range is dropped: other protocols, VLAN tags, IP options, extension headers, source addresses that are not
//! the pod's, trailing bytes after ARP and neighbour discovery messages. If the link is a port of a bridge, frames for
//! the node or beyond must carry the node's own Ethernet address, because others on the bridge could read them
//! otherwise.

use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use nebula_cni_contract::launch::Isolate;
use nebula_cni_contract::netlink::nftables::{self, Family, Header, Hook, Is, Match, Rule, Set, Table};
use nebula_cni_contract::netlink::octets;
use serde::{Deserialize, Serialize};

use crate::link::ip::{self, DESTINATION_PORT, Ip, SCTP, SOURCE_PORT, Side, TCP, UDP, V4, V6, bytes, field, within};
use crate::link::pod_link::{Mac, PodLink, link_local};

/// The rules of one pod's link, as they were installed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Guard {
    /// Name of the table.
    table: String,
    /// The node's end of the pod's link.
    pub link: String,
    /// Index of that link, because a name can be reused for another link.
    pub index: u32,
    /// Ethernet address of the pod.
    mac: Mac,
    /// The node's own Ethernet address, if the link is a port of a bridge through which the pod reaches the node.
    node_mac: Option<Mac>,
    /// Whether the link is a port of a bridge or switch.
    is_shared: bool,
    /// The pod's addresses with their networks.
    own: Vec<IpNet>,
    /// Neighbours that the pod may resolve by ARP and neighbour discovery, and that may resolve the pod.
    neighbours: Vec<IpAddr>,
    allowed: Isolate,
    /// Lets the tunnel's own packets through, if its socket is in the pod.
    tunnel: Option<Tunnel>,
}

/// The instance's own traffic through the pod's network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tunnel {
    /// Range of UDP ports that its socket may use, inclusive.
    pub ports: (u16, u16),
    /// Address and port of the CA service, if its URL contains an IP address.
    pub ca: Option<(IpAddr, u16)>,
}

impl Guard {
    /// Builds the rules of one attachment. `table` is named after the attachment (see [`table_name`]); `gateways` are
    /// those of the pod's routes.
    #[must_use]
    pub fn new(table: String, link: PodLink, gateways: Vec<IpAddr>, allowed: Isolate, tunnel: Option<Tunnel>) -> Self {
        let mut own = link.addresses;
        let has_v6 = own.iter().any(|network| network.addr().is_ipv6());
        if has_v6 && !own.iter().any(|network| is_link_local(&network.addr())) {
            own.push(IpNet::from(IpAddr::V6(link_local(link.mac))));
        }
        let mut neighbours = [gateways, link.node_addresses, allowed.probes.clone()].concat();
        neighbours.sort();
        neighbours.dedup();
        let (name, index, mac) = (link.name, link.index, link.mac);
        let (node_mac, is_shared) = (link.node_mac, link.is_shared);
        Self { table, link: name, index, mac, node_mac, is_shared, own, neighbours, allowed, tunnel }
    }

    fn table(&self) -> Table {
        let set = |name: &'static str, key_len, size| Set { name: name.into(), key_len, size };
        Table::new(Family::Link, self.table.as_str())
            .set(set(flows(V4), 20, MAX_FLOWS))
            .set(set(flows(V6), 44, MAX_FLOWS))
            .set(set(askers(V4), 12, MAX_ASKERS))
            .set(set(askers(V6), 24, MAX_ASKERS))
            .chain(Hook::FromLink(self.link.clone()), self.outgoing())
            .chain(Hook::ToLink(self.link.clone()), self.incoming())
    }

    fn outgoing(&self) -> Vec<Rule> {
        let mut rules = vec![Rule::drop(vec![bytes(Header::Link, 6, Is::Not, &self.mac)])];
        rules.extend(odd_headers());
        for ip in [V4, V6] {
            for range in self.ranges(ip) {
                let own = self.own(ip).into_iter().map(|own| ip.within(ip.source, own.into()));
                let ways = self.ways_to(range);
                let way = own.flat_map(|own| ways.iter().map(move |way| [way.clone(), vec![own.clone()]].concat()));
                rules.extend(way.map(|way| Rule::accept([way, vec![ip.is_fragment()]].concat())));
            }
            rules.push(Rule::drop(vec![ip.is(), ip.is_fragment()]));
            // Replies to the node's own sockets, and the later packets of a connection.
            let flow = Match::In(flows(ip).into(), ip.flow(Side::Source));
            rules.push(Rule::accept([vec![ip.is()], self.to_node(), vec![flow]].concat()));
            let echo = Match::In(flows(ip).into(), ip.echo(Side::Source));
            rules.push(Rule::accept([vec![ip.is()], self.to_node(), ip.icmp(ip.echo_reply), vec![echo]].concat()));
            let own = self.own(ip);
            let foreign = own.iter().map(|address| bytes(Header::Network, ip.source, Is::Not, &octets(*address)));
            rules.push(Rule::drop(std::iter::once(ip.is()).chain(foreign).collect()));
        }
        let ask = |server: IpAddr, protocol: u8, port: u16| {
            let ip = Ip::of(&server);
            let remember = Match::Remember(flows(ip).into(), ip.flow(Side::Source), ANSWERED_WITHIN);
            let asks = vec![Match::Protocol(protocol), Match::DestinationPort(port), remember];
            self.ways_to(server.into()).into_iter().map(move |way| Rule::accept([way, asks.clone()].concat()))
        };
        for server in &self.allowed.dns {
            rules.extend(ask(*server, UDP, DNS).chain(ask(*server, TCP, DNS)));
        }
        rules.extend(self.allowed.ranges.iter().flat_map(|range| self.ways_to(*range)).map(Rule::accept));
        if let Some(Tunnel { ports, ca }) = self.tunnel {
            rules.extend(
                [V4, V6]
                    .map(|ip| Rule::accept([vec![ip.is(), unicast()], ip::ports(UDP, SOURCE_PORT, ports)].concat())),
            );
            rules.extend(ca.into_iter().flat_map(|(address, port)| ask(address, TCP, port)));
        }
        rules.extend(self.outgoing_arp());
        rules.extend(self.outgoing_discovery());
        rules
    }

    fn incoming(&self) -> Vec<Rule> {
        let mut rules = odd_headers();
        for ip in [V4, V6] {
            let part = |range| Rule::accept(vec![ip.is(), ip.is_fragment(), ip.within(ip.source, range)]);
            rules.extend(self.ranges(ip).map(part));
            rules.push(Rule::drop(vec![ip.is(), ip.is_fragment()]));
            rules.push(Rule::accept(vec![ip.is(), Match::In(flows(ip).into(), ip.flow(Side::Destination))]));
        }
        for probe in &self.allowed.probes {
            let ip = Ip::of(probe);
            // Others on the bridge can forge the node's address, but their frames do not come from a socket of the
            // node.
            let from_node = vec![ip.is(), ip.within(ip.source, (*probe).into()), Match::OfLocalSocket];
            let echo = Match::Remember(flows(ip).into(), ip.echo(Side::Destination), ANSWERED_WITHIN);
            rules.push(Rule::accept([from_node.clone(), ip.icmp(ip.echo_request), vec![echo]].concat()));
            for protocol in [TCP, UDP, SCTP] {
                let flow = Match::Remember(flows(ip).into(), ip.flow(Side::Destination), CONNECTION_IDLE);
                rules.push(Rule::accept([from_node.clone(), vec![Match::Protocol(protocol), flow]].concat()));
            }
        }
        for range in &self.allowed.ranges {
            let ip = Ip::of(&range.addr());
            rules.push(Rule::accept(vec![ip.is(), ip.within(ip.source, *range)]));
            // Routers on the path may report that a packet for the range was too big.
            for own in self.own(ip) {
                let quoted = [(ip.source, own.into()), (ip.destination, *range)];
                let about = quoted.map(|(offset, network)| within(Header::Transport, 8 + offset, network));
                rules.push(Rule::accept([vec![ip.is()], ip.icmp(ip.too_big), about.to_vec()].concat()));
            }
        }
        if let Some(Tunnel { ports, .. }) = self.tunnel {
            rules.extend(
                [V4, V6].map(|ip| Rule::accept([vec![ip.is()], ip::ports(UDP, DESTINATION_PORT, ports)].concat())),
            );
        }
        rules.extend(self.incoming_arp());
        rules.extend(self.incoming_discovery());
        rules
    }

    fn outgoing_arp(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for own in self.own(V4) {
            let from = |operation| [arp_of(operation, &self.mac, &own), vec![Match::Length(Is::Equal, ARP)]].concat();
            let question = [from(REQUEST), vec![bytes(Header::Network, 18, Is::Equal, &[0; 6])]].concat();
            let about = |network| within(Header::Network, 24, network);
            rules.extend(self.peers(V4).map(|peer| Rule::accept([question.clone(), vec![about(peer)]].concat())));
            // A reply must go to the neighbour that asked, both in the Ethernet header and in the ARP message.
            let asked = [(Header::Link, 0), (Header::Network, 18)].map(|(header, offset)| {
                Match::In(askers(V4).into(), vec![field(header, offset, 6), field(Header::Network, 24, 4)])
            });
            rules.push(Rule::accept([from(REPLY), asked.to_vec()].concat()));
        }
        rules
    }

    fn incoming_arp(&self) -> Vec<Rule> {
        let mut rules = Vec::new();
        for own in self.own(V4) {
            let short = Match::Length(Is::AtMost, SHORTEST_FRAME);
            let for_us = bytes(Header::Network, 24, Is::Equal, &octets(own));
            for peer in self.peers(V4) {
                let from = |operation| {
                    let sender = within(Header::Network, 14, peer);
                    [arp(operation), vec![short.clone(), sender, for_us.clone()]].concat()
                };
                let asker = vec![field(Header::Network, 8, 6), field(Header::Network, 14, 4)];
                let remember = Match::Remember(askers(V4).into(), asker, ANSWERED_WITHIN);
                // In requests as kernels send them, the target hardware address is zero.
                let empty = bytes(Header::Network, 18, Is::Equal, &[0; 6]);
                rules.push(Rule::accept([from(REQUEST), vec![empty, remember]].concat()));
                let told = bytes(Header::Network, 18, Is::Equal, &self.mac);
                rules.push(Rule::accept([from(REPLY), vec![told]].concat()));
            }
        }
        rules
    }

    fn outgoing_discovery(&self) -> Vec<Rule> {
        let option = |kind: u8| bytes(Header::Transport, 24, Is::Equal, &[&[kind, 1], &self.mac[..]].concat());
        let mut rules = Vec::new();
        for peer in self.peers(V6) {
            let target = within(Header::Transport, 8, peer);
            let solicited = within(Header::Network, V6.destination, solicited_nodes());
            for destination in [solicited, within(Header::Network, V6.destination, peer)] {
                let rest = vec![empty_flags([0xff; 4]), target.clone(), option(1), Match::Length(Is::Equal, DISCOVERY)];
                rules.push(Rule::accept([discovery(SOLICITATION), vec![destination], rest].concat()));
            }
        }
        let asker = vec![field(Header::Link, 0, 6), field(Header::Network, V6.destination, 16)];
        for own in self.own(V6) {
            let target = within(Header::Transport, 8, own.into());
            let answer =
                vec![Match::In(askers(V6).into(), asker.clone()), empty_flags([0x1f, 0xff, 0xff, 0xff]), target];
            let with_address = vec![Match::Length(Is::Equal, DISCOVERY), option(2)];
            let without = vec![Match::Length(Is::Equal, DISCOVERY - 8)];
            for length in [with_address, without] {
                rules.push(Rule::accept([discovery(ADVERTISEMENT), answer.clone(), length].concat()));
            }
        }
        rules
    }

    fn incoming_discovery(&self) -> Vec<Rule> {
        let short = Match::Length(Is::AtMost, ETHERNET + DISCOVERY);
        let asker = vec![field(Header::Link, 6, 6), field(Header::Network, V6.source, 16)];
        let remember = Match::Remember(askers(V6).into(), asker, ANSWERED_WITHIN);
        let mut rules = Vec::new();
        // Neighbour unreachability detection uses link-local source addresses.
        for peer in self.peers(V6).chain([link_locals()]) {
            for own in self.own(V6) {
                let target = within(Header::Transport, 8, own.into());
                let from = vec![short.clone(), within(Header::Network, V6.source, peer), target, remember.clone()];
                rules.push(Rule::accept([discovery(SOLICITATION), from].concat()));
            }
        }
        for peer in self.peers(V6) {
            let target = within(Header::Transport, 8, peer);
            rules.push(Rule::accept([discovery(ADVERTISEMENT), vec![short.clone(), target]].concat()));
        }
        rules
    }

    /// Those of the given address family.
    fn ranges(&self, ip: Ip) -> impl Iterator<Item = IpNet> {
        self.allowed.ranges.iter().copied().filter(move |range| range.addr().is_ipv4() == ip.is_v4)
    }

    /// Those of the given address family.
    fn own(&self, ip: Ip) -> Vec<IpAddr> {
        self.own.iter().map(IpNet::addr).filter(|address| address.is_ipv4() == ip.is_v4).collect()
    }

    /// The addresses that the pod may resolve on its link. On a link that is not shared, that is every address, because
    /// only the node can answer.
    fn peers(&self, ip: Ip) -> impl Iterator<Item = IpNet> {
        let everybody: IpNet = if ip.is_v4 { Ipv4Net::default().into() } else { Ipv6Net::default().into() };
        let everybody = (!self.is_shared).then_some(everybody);
        let listed = [&self.neighbours[..], &self.allowed.dns].concat().into_iter().map(IpNet::from);
        let listed = listed.chain(self.allowed.ranges.iter().copied()).filter(|_| self.is_shared);
        let tunnel = self.tunnel.filter(|_| self.is_shared).map(|_| self.own.clone()).unwrap_or_default();
        // A tunnel whose socket is in the pod also goes to pods on the same link.
        let tunnel =
            tunnel.into_iter().filter(|network| !is_link_local(&network.addr())).map(|network| network.trunc());
        let mut peers: Vec<IpNet> = listed.chain(tunnel).chain(everybody).collect();
        peers.retain(|network| network.addr().is_ipv4() == ip.is_v4);
        peers.sort();
        peers.dedup();
        peers.into_iter()
    }

    fn to_node(&self) -> Vec<Match> {
        match self.node_mac {
            Some(mac) => vec![bytes(Header::Link, 0, Is::Equal, &mac)],
            None => vec![unicast()],
        }
    }

    /// The conditions for a packet for `network`: its frame is addressed to the node or, as far as the network overlaps
    /// the pod's link, to any single station.
    fn ways_to(&self, network: IpNet) -> Vec<Vec<Match>> {
        let ip = Ip::of(&network.addr());
        let inside = vec![ip.is(), ip.within(ip.destination, network)];
        let on_link = self.own.iter().filter(|own| own.contains(&network) || network.contains(&own.trunc()));
        let on_link =
            on_link.filter(|_| self.node_mac.is_some()).map(|own| vec![unicast(), ip.within(ip.destination, *own)]);
        std::iter::once(self.to_node()).chain(on_link).map(|to| [inside.clone(), to].concat()).collect()
    }
}

/// Name of the set of flows.
fn flows(ip: Ip) -> &'static str {
    if ip.is_v4 { "flows4" } else { "flows6" }
}

/// Name of the set of neighbours that asked for an address.
fn askers(ip: Ip) -> &'static str {
    if ip.is_v4 { "askers4" } else { "askers6" }
}

/// Drops packets with headers that nobody needs here and that can divert them: IPv4 options (source routes) and IPv6
/// extension headers.
fn odd_headers() -> Vec<Rule> {
    let options = Rule::drop(vec![V4.is(), bytes(Header::Network, 0, Is::Not, &[0x45])]);
    let extension = |number: u8| Rule::drop(vec![V6.is(), bytes(Header::Network, 6, Is::Equal, &[number])]);
    std::iter::once(options).chain(EXTENSIONS.map(extension)).collect()
}

/// Matches ARP for IPv4 over Ethernet.
fn arp(operation: u8) -> Vec<Match> {
    let fixed = [0, 1, 8, 0, 6, 4, 0, operation];
    vec![bytes(Header::Link, 12, Is::Equal, &[8, 6]), bytes(Header::Network, 0, Is::Equal, &fixed)]
}

fn arp_of(operation: u8, mac: &Mac, address: &IpAddr) -> Vec<Match> {
    let sender = [&mac[..], &octets(*address)].concat();
    [arp(operation), vec![bytes(Header::Network, 8, Is::Equal, &sender)]].concat()
}

/// Matches a neighbour discovery message that comes from the link itself and directly follows the IPv6 header.
fn discovery(kind: u8) -> Vec<Match> {
    let header = bytes(Header::Network, 6, Is::Equal, &[V6.icmp, HOPS_ON_LINK]);
    vec![V6.is(), header, Match::Protocol(V6.icmp), bytes(Header::Transport, 0, Is::Equal, &[kind, 0])]
}

fn empty_flags(mask: [u8; 4]) -> Match {
    Match::Bytes(Header::Transport, 4, Is::Equal, vec![0; 4], Some(mask.to_vec()))
}

/// Matches unicast frames: the lowest bit of the first byte is set in group addresses.
fn unicast() -> Match {
    Match::Bytes(Header::Link, 0, Is::Equal, vec![0], Some(vec![1]))
}

/// The solicited-node multicast addresses.
fn solicited_nodes() -> IpNet {
    Ipv6Net::new_assert(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00, 0), 104).into()
}

fn link_locals() -> IpNet {
    Ipv6Net::new_assert(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 64).into()
}

fn is_link_local(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// Installs and removes the rules of links.
pub trait Guards {
    /// Installs the rules, replacing any others for the same attachment or link.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn install(&self, guard: &Guard) -> io::Result<()>;

    /// Whether these rules are installed.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn is_in_force(&self, guard: &Guard) -> io::Result<bool>;

    /// Removes the tables with this prefix, which belong to one attachment; does nothing if there are none.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn remove(&self, prefix: &str) -> io::Result<()>;

    /// Removes stale rules of links that no longer exist.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn sweep(&self) -> io::Result<()>;
}

/// The rules in the kernel, in the plugin's own network namespace.
#[derive(Debug)]
pub struct SystemGuards;

impl Guards for SystemGuards {
    fn install(&self, guard: &Guard) -> io::Result<()> {
        // The link may have the name of an earlier one whose rules were never removed.
        let of_link = |name: &String| *name != guard.table && link_of(name) == Some(guard.link.as_str());
        for other in nftables::tables(Family::Link)?.iter().filter(|name| of_link(name)) {
            nftables::remove(Family::Link, other)?;
        }
        guard.table().install()
    }

    fn is_in_force(&self, guard: &Guard) -> io::Result<bool> {
        let rules = guard.outgoing().len() + guard.incoming().len();
        Ok(nftables::chains_on_link(&guard.table, &guard.link)? == (2, rules as u32))
    }

    fn remove(&self, prefix: &str) -> io::Result<()> {
        let tables = nftables::tables_if_any(Family::Link)?;
        tables.iter().filter(|name| name.starts_with(prefix)).try_for_each(|name| nftables::remove(Family::Link, name))
    }

    fn sweep(&self) -> io::Result<()> {
        for table in nftables::tables_if_any(Family::Link)? {
            if link_of(&table).is_some_and(|link| nix::net::if_::if_nametoindex(link).is_err()) {
                nftables::remove(Family::Link, &table)?;
            }
        }
        Ok(())
    }
}

/// Name of the table for an attachment's link: a prefix for the attachment, then the name of the link.
#[must_use]
pub fn table_name(prefix: &str, link: &str) -> String {
    format!("{prefix}{link}")
}

/// Prefix of the names of an attachment's tables.
#[must_use]
pub fn table_prefix(attachment: u64) -> String {
    format!("{PREFIX}{attachment:016x}-")
}

fn link_of(table: &str) -> Option<&str> {
    let (attachment, link) = table.strip_prefix(PREFIX)?.split_at_checked(16)?;
    u64::from_str_radix(attachment, 16).ok()?;
    link.strip_prefix('-')
}

const PREFIX: &str = "nebula-cni-";
// After this time a DNS query has been answered or is retransmitted.
const ANSWERED_WITHIN: Duration = Duration::from_secs(30);
const CONNECTION_IDLE: Duration = Duration::from_secs(600);
const MAX_FLOWS: u32 = 16_384;
const MAX_ASKERS: u32 = 256;
const DNS: u16 = 53;
// Hop-by-hop, routing, authentication, destination options, mobility, HIP, shim6.
const EXTENSIONS: [u8; 7] = [0, 43, 51, 60, 135, 139, 140];
const REQUEST: u8 = 1;
const REPLY: u8 = 2;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const HOPS_ON_LINK: u8 = 255;
const ETHERNET: u32 = 14;
// Length of an ARP message for IPv4, and of a neighbour discovery message with one Ethernet address.
const ARP: u32 = 28;
const DISCOVERY: u32 = 40 + 32;
// Without the frame check sequence; the hardware pads shorter frames.
const SHORTEST_FRAME: u32 = 60;

#[cfg(test)]
mod tests {
    use super::*;

    fn link(is_shared: bool) -> PodLink {
        PodLink {
            name: "veth7".into(),
            index: 7,
            mac: [2, 0, 0, 0, 0, 7],
            addresses: vec!["10.4.0.7/24".parse().unwrap(), "fd00:4::7/64".parse().unwrap()],
            is_shared,
            node_mac: is_shared.then_some([2, 0, 0, 0, 0, 1]),
            node_addresses: vec!["10.4.0.1".parse().unwrap()],
        }
    }

    fn guard(is_shared: bool) -> Guard {
        let allowed = Isolate {
            ranges: vec!["192.0.2.0/24".parse().unwrap()],
            dns: vec!["10.96.0.10".parse().unwrap(), "10.4.0.9".parse().unwrap()],
            probes: vec!["10.4.0.1".parse().unwrap()],
        };
        Guard::new(table_name(&table_prefix(7), "veth7"), link(is_shared), Vec::new(), allowed, None)
    }

    #[test]
    fn a_table_tells_its_attachment_and_its_link() {
        let name = table_name(&table_prefix(0xabc), "cali-1-2");
        assert_eq!(name, "nebula-cni-0000000000000abc-cali-1-2");
        assert_eq!(link_of(&name), Some("cali-1-2"));
        for other in ["nebula-cni", "filter", "nebula-cni-x-y", "nebula-cni-000000000000000g-veth1"] {
            assert_eq!(link_of(other), None, "{other}");
        }
    }

    #[test]
    fn on_a_bridge_what_is_beyond_the_link_goes_to_the_node_and_neighbours_are_the_listed_ones() {
        let shared = guard(true);
        let to_node = bytes(Header::Link, 0, Is::Equal, &[2, 0, 0, 0, 0, 1]);
        let ways = |guard: &Guard, to: &str| guard.ways_to(to.parse().unwrap());
        assert!(matches!(&ways(&shared, "10.96.0.10/32")[..], [only] if only.contains(&to_node)));
        let [beyond, on_link] = &ways(&shared, "10.0.0.0/8")[..] else { panic!("two ways") };
        assert!(beyond.contains(&to_node) && on_link.contains(&unicast()));
        assert!(on_link.contains(&V4.within(V4.destination, "10.4.0.0/24".parse().unwrap())));
        assert_eq!(ways(&shared, "10.4.0.9/32").len(), 2);
        let peers: Vec<String> = shared.peers(V4).map(|peer| peer.to_string()).collect();
        assert_eq!(peers, ["10.4.0.1/32", "10.4.0.9/32", "10.96.0.10/32", "192.0.2.0/24"]);
        // On a link that is not shared, only the node is at the other end.
        let alone = guard(false);
        assert!(matches!(&ways(&alone, "10.96.0.10/32")[..], [only] if only.contains(&unicast())));
        assert_eq!(alone.peers(V6).collect::<Vec<_>>(), ["::/0".parse::<IpNet>().unwrap()]);
    }

    #[test]
    fn without_a_link_local_address_yet_the_usual_one_counts_as_the_pod_s() {
        let own: Vec<String> = guard(true).own(V6).iter().map(ToString::to_string).collect();
        assert_eq!(own, ["fd00:4::7", "fe80::ff:fe00:7"]);
    }

    #[test]
    fn a_guard_in_a_record_is_read_back() {
        let text = serde_json::to_string(&guard(true)).unwrap();
        assert_eq!(serde_json::from_str::<Guard>(&text).unwrap(), guard(true));
    }
}

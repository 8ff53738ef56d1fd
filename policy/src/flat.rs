//! What a program says of peers that are known by their addresses alone, as intervals: for who judges packets in clear
//! and can look up intervals, but runs no program (nf_tables).
//!
//! Addresses that are allowed the same protocols and ports share a class. A packet is allowed if the class of the
//! peer's address has its protocol and port.
//!
//! # The pod's own node
//!
//! The verdicts are those of [`Program::judge`], with one exception. Others can send from the node's addresses
//! (kube-proxy puts them in place of its clients'), so for ingress they are addresses as any other, and whoever knows
//! the node by other means lets it pass. For egress the node is allowed, but for the ports of nodes, which lead on to
//! pods.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use crate::program::protocol::{SCTP, TCP, UDP};
use crate::program::{Direction, Peer, Program, Who, port_key};

/// Who has which address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Peers {
    /// By canonical address.
    pub known: BTreeMap<IpAddr, Who>,
    /// Addresses of pods and Services. One of them that is not known is refused wherever a policy could refuse some
    /// pod; all other addresses are of no pod.
    pub ranges: Vec<IpNet>,
    /// Parts of them that have neither.
    pub exclude: Vec<IpNet>,
    /// Ports of Services, for egress.
    pub services: Vec<ServicePort>,
    /// First and last of the ports that Services have on all nodes.
    pub node_ports: Option<(u16, u16)>,
}

/// A port of a Service. It is allowed if each of its endpoints is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServicePort {
    /// Address of the Service.
    pub address: IpAddr,
    /// IP protocol: TCP, UDP or SCTP.
    pub protocol: u8,
    /// Port of the Service.
    pub port: u16,
    /// Addresses and ports of the endpoints.
    pub endpoints: Vec<(IpAddr, u16)>,
}

/// What a program allows, as intervals. What is in none of them is refused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flat {
    /// In order, without an overlap; first those of IPv4.
    pub addresses: Vec<Addresses>,
    /// What the classes allow, in order and without an overlap.
    pub classes: Vec<Vec<Ports>>,
}

/// Addresses of one class, of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    /// The first one.
    pub first: IpAddr,
    /// The last one.
    pub last: IpAddr,
    /// Place of the class.
    pub class: usize,
}

/// Protocols and ports: from all ports of some protocols, or some of one protocol. Both ends are
/// `protocol << 16 | port`. For a protocol without ports it is always all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ports {
    /// The first one.
    pub first: u32,
    /// The last one.
    pub last: u32,
}

/// The flat form would be larger than [`MAX_ADDRESSES`] or [`MAX_PORTS`], so the pod has to be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("what the policies of the pod say of addresses is more than {MAX_ADDRESSES} intervals of them")]
pub struct TooMuch;

impl Flat {
    /// Flattens a program.
    ///
    /// # Errors
    /// Returns an error if the flat form is too large, or the program is damaged.
    pub fn of(program: &Program<'_>, peers: &Peers) -> Result<Self, TooMuch> {
        let judge = Judge { program, peers, ports: port_starts(program)? };
        let mut flat = Self::default();
        let mut seen = HashMap::new();
        let services = judge.of_services();
        for is_v4 in [true, false] {
            let mut starts: BTreeSet<u128> = program.address_starts(is_v4).chain([0]).chain(MAPPED).collect();
            let of_family = |address: &&IpAddr| address.is_ipv4() == is_v4;
            let known = peers.known.keys().chain(services.keys()).filter(of_family);
            let ranges = peers.ranges.iter().chain(&peers.exclude).filter(|range| range.addr().is_ipv4() == is_v4);
            let intervals = known.map(|address| (number(*address), number(*address)));
            let intervals = intervals.chain(ranges.map(|range| (number(range.network()), number(range.broadcast()))));
            for (first, last) in intervals {
                starts.extend([Some(first), last.checked_add(1)].into_iter().flatten());
            }
            let end = if is_v4 { u128::from(u32::MAX) } else { u128::MAX };
            starts.retain(|start| *start <= end);
            if starts.len() > MAX_STARTS {
                return Err(TooMuch);
            }
            let mut starts = starts.into_iter().peekable();
            while let Some(start) = starts.next() {
                let (first, last) = (address(start, is_v4), address(starts.peek().map_or(end, |next| next - 1), is_v4));
                // No packet has them as addresses of IPv6.
                if !is_v4 && (MAPPED[0]..MAPPED[1]).contains(&start) {
                    continue;
                }
                let class = match services.get(&first) {
                    Some(ports) => flat.class(ports.clone()),
                    None => {
                        let peer = judge.peer(first);
                        let likeness = program.likeness(&peer).ok_or(TooMuch)?;
                        match seen.get(&likeness) {
                            Some(class) => *class,
                            None => *seen.entry(likeness).or_insert_with(|| flat.class(judge.allowed(&peer))),
                        }
                    }
                };
                class.into_iter().for_each(|class| flat.push(Addresses { first, last, class }));
            }
        }
        let ports: usize = flat.classes.iter().map(Vec::len).sum();
        let fits = flat.addresses.len() <= MAX_ADDRESSES && ports <= MAX_PORTS;
        if fits { Ok(flat) } else { Err(TooMuch) }
    }

    /// Whether it allows a packet.
    #[must_use]
    pub fn allows(&self, peer: IpAddr, protocol: u8, port: u16) -> bool {
        let peer = peer.to_canonical();
        let at = self.addresses.iter().find(|addresses| {
            addresses.first.is_ipv4() == peer.is_ipv4() && addresses.first <= peer && peer <= addresses.last
        });
        let key = port_key(protocol, port);
        let ports = at.and_then(|addresses| self.classes.get(addresses.class));
        ports.is_some_and(|ports| ports.iter().any(|ports| ports.first <= key && key <= ports.last))
    }

    /// The place of the class that allows these; `None` if they are none.
    fn class(&mut self, ports: Vec<Ports>) -> Option<usize> {
        if ports.is_empty() {
            return None;
        }
        let known = self.classes.iter().position(|class| *class == ports);
        Some(known.unwrap_or_else(|| {
            self.classes.push(ports);
            self.classes.len() - 1
        }))
    }

    fn push(&mut self, next: Addresses) {
        if let Some(before) = self.addresses.last_mut()
            && before.class == next.class
            && before.first.is_ipv4() == next.first.is_ipv4()
            && number(before.last).checked_add(1) == Some(number(next.first))
        {
            before.last = next.last;
            return;
        }
        self.addresses.push(next);
    }
}

/// Asks a program.
struct Judge<'a> {
    program: &'a Program<'a>,
    peers: &'a Peers,
    /// Protocols and ports where verdicts can change.
    ports: BTreeSet<u32>,
}

impl Judge<'_> {
    fn peer(&self, address: IpAddr) -> Peer {
        let is_in = |ranges: &[IpNet]| ranges.iter().any(|range| range.contains(&address));
        let is_of_pod = || is_in(&self.peers.ranges) && !is_in(&self.peers.exclude);
        let who = match self.peers.known.get(&address) {
            Some(who) => *who,
            None if is_of_pod() => Who::Unnumbered,
            None => Who::Outside,
        };
        Peer { who, address: Some(address) }
    }

    fn allows(&self, peer: &Peer, key: u32) -> bool {
        let (protocol, port) = ((key >> 16) as u8, key as u16);
        let is_node_port =
            has_ports(protocol) && self.peers.node_ports.is_some_and(|(first, last)| (first..=last).contains(&port));
        let knows_node = self.program.direction() == Direction::Egress && !is_node_port;
        self.program.judge_at(peer, protocol, port, knows_node).is_allowed()
    }

    /// All that a peer is allowed.
    fn allowed(&self, peer: &Peer) -> Vec<Ports> {
        let mut allowed = Vec::<Ports>::new();
        let mut starts = self.ports.iter().copied().chain(self.node_port_starts()).collect::<BTreeSet<u32>>();
        starts.insert(0);
        let mut starts = starts.into_iter().peekable();
        while let Some(first) = starts.next() {
            let last = starts.peek().map_or(END, |next| *next) - 1;
            if self.allows(peer, first) {
                push_ports(&mut allowed, Ports { first, last });
            }
        }
        allowed
    }

    fn node_port_starts(&self) -> impl Iterator<Item = u32> {
        let bounds =
            self.peers.node_ports.into_iter().flat_map(|(first, last)| [u32::from(first), u32::from(last) + 1]);
        bounds.flat_map(|port| WITH_PORTS.map(|protocol| (u32::from(protocol) << 16) + port))
    }

    /// What is allowed to the addresses of Services; nothing but their ports.
    fn of_services(&self) -> BTreeMap<IpAddr, Vec<Ports>> {
        let mut all = BTreeMap::<IpAddr, Vec<Ports>>::new();
        let (is_closed, is_selected) = (self.program.is_closed(), self.program.policies().next().is_some());
        if self.program.direction() != Direction::Egress || !(is_closed || is_selected) {
            return all;
        }
        for service in &self.peers.services {
            let address = service.address.to_canonical();
            // The program of a closed pod names the Service of the DNS itself.
            let by_address = |key| self.allows(&Peer::outside(address), key);
            let endpoint = |(endpoint, port): &(IpAddr, u16)| {
                self.allows(&self.peer(endpoint.to_canonical()), port_key(service.protocol, *port))
            };
            let key = port_key(service.protocol, service.port);
            let of_address = all.entry(address).or_default();
            let is_allowed = !service.endpoints.is_empty() && service.endpoints.iter().all(endpoint);
            if is_allowed || (is_closed && by_address(key)) {
                of_address.push(Ports { first: key, last: key });
            }
        }
        for ports in all.values_mut() {
            ports.sort_unstable();
            let sorted = std::mem::take(ports);
            sorted.into_iter().for_each(|one| push_ports(ports, one));
        }
        all
    }
}

fn push_ports(all: &mut Vec<Ports>, next: Ports) {
    match all.last_mut() {
        Some(before) if next.first <= before.last + 1 => before.last = before.last.max(next.last),
        _ => all.push(next),
    }
}

/// Protocols without ports are judged as with port 0, so verdicts about them change between two of them only.
fn port_starts(program: &Program<'_>) -> Result<BTreeSet<u32>, TooMuch> {
    let whole = |key: u32| match u8::try_from(key >> 16) {
        Ok(protocol) if has_ports(protocol) => key,
        _ => key.div_ceil(1 << 16) << 16,
    };
    let of_protocols = WITH_PORTS.into_iter().map(u32::from).flat_map(|protocol| [protocol, protocol + 1]);
    let of_protocols = of_protocols.map(|protocol| protocol << 16);
    let starts: BTreeSet<u32> = program
        .port_starts()
        .filter(|key| *key < END)
        .map(whole)
        .chain(of_protocols)
        .filter(|key| *key < END)
        .collect();
    if starts.len() <= MAX_PORTS { Ok(starts) } else { Err(TooMuch) }
}

fn has_ports(protocol: u8) -> bool {
    WITH_PORTS.contains(&protocol)
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => address.to_bits().into(),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(number: u128, is_v4: bool) -> IpAddr {
    match u32::try_from(number) {
        Ok(number) if is_v4 => Ipv4Addr::from_bits(number).into(),
        _ => Ipv6Addr::from_bits(number).into(),
    }
}

/// Intervals of addresses in a flat form.
pub const MAX_ADDRESSES: usize = 16_384;
/// Intervals of protocols and ports in it, of all classes.
pub const MAX_PORTS: usize = 16_384;
/// Intervals that are looked at: known addresses next to each other may say the same.
const MAX_STARTS: usize = 1 << 18;
/// The first IPv4 address that is mapped into IPv6, and the address after the last one.
const MAPPED: [u128; 2] = [0xffff << 32, 1 << 48];
const WITH_PORTS: [u8; 3] = [TCP, UDP, SCTP];
/// After the last protocol.
const END: u32 = 1 << 24;

//! Random policies, pods and flows of a small cluster, in which much matches.

use std::net::IpAddr;

use nebula_cni_policy::model::{
    Action, Block, ClusterNetworkPolicy, ClusterPeer, ClusterRule, ClusterTier, Direction, Labels, NamedPort,
    Namespaces, NetworkPolicy, Peer, PodSelector, PortMatch, Profile, Protocol, Requirement, Rule, Selector,
};

pub(crate) const NAMESPACES: [&str; 3] = ["shop", "pay", "web"];
const KEYS: [&str; 3] = ["app", "tier", "example.com/team"];
const VALUES: [&str; 3] = ["a", "b", ""];
const PORTS: [u16; 6] = [1, 80, 81, 82, 443, 65535];
const PORT_NAMES: [&str; 3] = ["http", "metrics", "dns"];
const RANGES: [&str; 10] = [
    "0.0.0.0/0",
    "10.0.0.0/24",
    "10.0.0.0/30",
    "10.0.0.2/31",
    "10.0.0.4/32",
    "::/0",
    "fd00::/64",
    "fd00::/126",
    "fd00::4/128",
    "192.0.2.0/24",
];

/// SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    pub(crate) fn number(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % below as u64) as usize
    }

    /// True in one of this many cases.
    pub(crate) fn one_in(&mut self, times: usize) -> bool {
        self.number(times) == 0
    }

    pub(crate) fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.number(all.len())].clone()
    }

    fn some<T>(&mut self, most: usize, mut draw: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.number(most + 1)).map(|_| draw(self)).collect()
    }

    pub(crate) fn address(&mut self) -> IpAddr {
        let low = self.number(9);
        match self.number(8) {
            0..3 => IpAddr::from([10, 0, 0, low as u8]),
            3 => format!("::ffff:10.0.0.{low}").parse().unwrap(),
            4..7 => format!("fd00::{low}").parse().unwrap(),
            _ => self.of(&["192.0.2.1", "198.51.100.1", "2001:db8::1"]).parse().unwrap(),
        }
    }

    pub(crate) fn labels(&mut self) -> Labels {
        let pairs = self.some(3, |draw| (draw.of(&KEYS).to_owned(), draw.of(&VALUES).to_owned()));
        pairs.into_iter().collect()
    }

    fn protocol(&mut self) -> Protocol {
        self.of(&[Protocol::Tcp, Protocol::Tcp, Protocol::Udp, Protocol::Sctp])
    }

    pub(crate) fn profile(&mut self, namespace: &str, namespace_labels: &Labels) -> Profile {
        let ports = self.some(3, |draw| {
            let (name, protocol) = (draw.of(&PORT_NAMES).to_owned(), draw.protocol());
            NamedPort { name, protocol, port: draw.of(&PORTS) }
        });
        Profile::new(namespace, namespace_labels.clone(), self.labels(), ports).unwrap()
    }

    fn selector(&mut self) -> Selector {
        if self.one_in(3) {
            return Selector::everything();
        }
        let requirements = self.some(2, |draw| {
            if draw.one_in(25) {
                return None;
            }
            let key = draw.of(&KEYS).to_owned();
            let values = vec![draw.of(&VALUES).to_owned(), draw.of(&VALUES).to_owned()];
            Some(match draw.number(6) {
                0..3 => Requirement::In(key, values),
                3 => Requirement::NotIn(key, values),
                4 => Requirement::Exists(key),
                _ => Requirement::DoesNotExist(key),
            })
        });
        Selector::new(requirements)
    }

    fn pods(&mut self) -> PodSelector {
        PodSelector { namespaces: Namespaces::Matching(self.selector()), pods: self.selector() }
    }

    fn port(&mut self) -> PortMatch {
        let (protocol, first, last) = (self.protocol(), self.of(&PORTS), self.of(&PORTS));
        match self.number(20) {
            0..4 => PortMatch::Protocol(protocol),
            4..9 => PortMatch::port(protocol, first),
            9..12 => PortMatch::Ports { protocol, first: first.min(last), last: first.max(last) },
            12 => PortMatch::Ports { protocol, first, last },
            13..17 => PortMatch::Name { protocol: Some(protocol), name: self.of(&PORT_NAMES).into() },
            17..19 => PortMatch::Name { protocol: None, name: self.of(&PORT_NAMES).into() },
            _ => PortMatch::Unreadable,
        }
    }

    fn peer(&mut self, namespace: &str) -> Peer {
        match self.number(20) {
            0..6 => Peer::Pods(PodSelector { pods: self.selector(), ..PodSelector::namespace(namespace) }),
            6..12 => Peer::Pods(self.pods()),
            12..18 => {
                let range = self.of(&RANGES).parse().unwrap();
                Peer::Block(Block { range, except: self.some(2, |draw| draw.of(&RANGES).parse().unwrap()) })
            }
            18 => Peer::Groups(self.groups().into()),
            _ => Peer::Unreadable,
        }
    }

    pub(crate) fn groups(&mut self) -> Vec<String> {
        self.some(2, |draw| draw.of(&["backup", "vms", "vms2"]).to_owned())
    }

    pub(crate) fn policy(&mut self) -> NetworkPolicy {
        let namespace = self.of(&NAMESPACES);
        let mut rules = |_| {
            self.some(3, |draw| Rule {
                peers: draw.some(2, |draw| draw.peer(namespace)),
                ports: draw.some(2, Self::port),
            })
        };
        let [ingress, egress] = Direction::ALL.map(&mut rules);
        NetworkPolicy {
            subject: self.selector(),
            is_audited: self.one_in(4),
            types: self.some(2, |draw| draw.of(&Direction::ALL)),
            ingress,
            egress,
            ..NetworkPolicy::new(namespace, format!("policy-{}", self.number(4)))
        }
    }

    fn cluster_peer(&mut self, direction: Direction) -> ClusterPeer {
        let most = if direction == Direction::Ingress && !self.one_in(20) { 10 } else { 20 };
        match self.number(most) {
            0..10 => ClusterPeer::Pods(self.pods()),
            10..12 => ClusterPeer::Nodes(self.selector()),
            12..17 => {
                let mut ranges = self.some(2, |draw| draw.of(&RANGES).parse().unwrap());
                if !self.one_in(20) {
                    ranges.push(self.of(&RANGES).parse().unwrap());
                }
                ClusterPeer::Networks(ranges)
            }
            17..19 => ClusterPeer::DomainNames(vec!["*.example.com".into()]),
            _ => ClusterPeer::Unreadable,
        }
    }

    pub(crate) fn cluster_policy(&mut self) -> ClusterNetworkPolicy {
        let mut rules = |direction| {
            self.some(4, |draw| {
                let mut peers = draw.some(2, |draw| draw.cluster_peer(direction));
                if !draw.one_in(20) {
                    peers.push(draw.cluster_peer(direction));
                }
                let actions = [Action::Accept, Action::Deny, Action::Pass];
                let action = if draw.one_in(30) { Action::Unreadable } else { draw.of(&actions) };
                ClusterRule { name: String::new(), action, peers, protocols: draw.some(2, Self::port) }
            })
        };
        let [ingress, egress] = Direction::ALL.map(&mut rules);
        ClusterNetworkPolicy {
            name: format!("cluster-{}", self.number(5)),
            is_audited: self.one_in(4),
            tier: self.of(&[ClusterTier::Admin, ClusterTier::Baseline]),
            priority: self.number(3) as u16,
            subject: self.pods(),
            ingress,
            egress,
        }
    }

    /// A protocol and a port.
    pub(crate) fn service(&mut self) -> (u8, u16) {
        let protocol = self.of(&[6, 6, 6, 17, 17, 132, 1, 58, 47]);
        (protocol, self.of(&[0, 1, 79, 80, 81, 82, 443, 444, 65535]))
    }
}

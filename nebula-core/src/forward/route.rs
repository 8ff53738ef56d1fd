//! Chooses the peer that gets a packet: own networks first, then subnet routes. Subnet routes to parts of own
//! networks come before both.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use prefix_trie::joint::JointPrefixMap;

use super::gateways::{Health, Pins};
use crate::config::SubnetRoute;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// Own networks, and the networks behind other nodes.
#[derive(Debug)]
pub(super) struct Routes {
    /// Own addresses with the prefix of their networks; one or two of them.
    networks: Vec<IpNet>,
    subnets: JointPrefixMap<IpNet, Gateways>,
    /// The parts of own networks that are behind other nodes. A gateway itself is never in such a part.
    inside: JointPrefixMap<IpNet, Vec<IpAddr>>,
    /// The gateways of subnet routes with several gateways; empty if there is no such route.
    shared: BTreeMap<IpAddr, Arc<Health>>,
    pins: Arc<Pins>,
}

/// The next hop of a packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct NextHop<'a> {
    /// The peer that the packet is sent to.
    pub(super) peer: IpAddr,
    gateways: &'a [Gateway],
}

/// The gateways of one subnet route, those of the best priority first, otherwise as configured.
#[derive(Debug)]
struct Gateways(Vec<Gateway>);

#[derive(Debug)]
struct Gateway {
    address: IpAddr,
    weight: u32,
    priority: u32,
    /// Highest flow hash that selects this gateway among those of its priority.
    bound: u32,
    health: Arc<Health>,
}

impl Routes {
    /// What is known about gateways is taken from the routes that these replace.
    pub(super) fn new(networks: &[IpNet], subnets: &[SubnetRoute], old: Option<&Self>) -> Self {
        let several = subnets.iter().filter(|route| route.gateways.len() > 1).flat_map(|route| &route.gateways);
        let known = |address| old.and_then(|old| old.shared.get(&address)).map(Arc::clone).unwrap_or_default();
        let mut shared = BTreeMap::new();
        several.for_each(|gateway| {
            shared.entry(gateway.address).or_insert_with_key(|address| known(*address));
        });
        let single = Arc::<Health>::default();
        let health = |address| Arc::clone(shared.get(&address).unwrap_or(&single));
        let inside = subnets.iter().filter(|route| route.inside);
        let addresses = |route: &SubnetRoute| route.gateways.iter().map(|gateway| gateway.address).collect();
        let inside = inside.map(|route| (route.network.trunc(), addresses(route))).collect();
        let subnets = subnets.iter().map(|route| (route.network.trunc(), Gateways::new(route, health))).collect();
        let pins = old.map(|old| Arc::clone(&old.pins)).unwrap_or_default();
        Self { networks: networks.to_vec(), subnets, inside, shared, pins }
    }

    /// The next hop of `flow`; `None` if there is no route. With `keeps`, a flow that does not take the gateway that
    /// its hash selects stays on the one that it gets now.
    pub(super) fn next_hop(&self, flow: &FlowKey, keeps: bool) -> Option<NextHop<'_>> {
        if self.is_overlay(flow.remote) {
            return Some(NextHop { peer: flow.remote, gateways: &[] });
        }
        let (_, Gateways(gateways)) = self.subnets.get_lpm(&flow.remote.into())?;
        let chosen = match gateways.as_slice() {
            [only] => only,
            several => self.choose(several, flow, keeps)?,
        };
        Some(NextHop { peer: chosen.address, gateways })
    }

    /// The gateway of a flow: of those of the best priority with a gateway that answers, the one that its hash selects.
    /// If that one is dead, the flow moves to another one and stays there.
    fn choose<'a>(&self, several: &'a [Gateway], flow: &FlowKey, keeps: bool) -> Option<&'a Gateway> {
        // If all are dead, nothing is lost by trying the best ones.
        let first = several.iter().find(|gateway| gateway.health.is_alive()).or_else(|| several.first())?;
        let members = || several.iter().filter(|gateway| gateway.priority == first.priority);
        let alive = || members().filter(|gateway| gateway.health.is_alive());
        let pin = self.pins.of(flow);
        if let Some(address) = pin
            && let Some(pinned) = alive().find(|gateway| gateway.address == address)
        {
            return Some(pinned);
        }
        let hash = flow_hash(flow);
        let home = members().find(|gateway| hash <= gateway.bound)?;
        if home.health.is_alive() || !first.health.is_alive() {
            if keeps && pin.is_some() {
                self.pins.remove(flow);
            }
            return Some(home);
        }
        let total: u64 = alive().map(|gateway| u64::from(gateway.weight)).sum();
        // Another hash: those of the flows of the dead gateway are all of one range.
        let mut at = u64::from(mix(hash.wrapping_mul(0x9e37_79b1))) % total.max(1);
        let heir = alive().find(|gateway| {
            let is_it = at < u64::from(gateway.weight);
            at = at.saturating_sub(gateway.weight.into());
            is_it
        })?;
        if keeps {
            self.pins.set(flow, heir.address);
        }
        Some(heir)
    }

    /// The subnet route and the gateway of a flow, if the route has several gateways.
    pub(super) fn shared_gateway_of(&self, flow: &FlowKey) -> Option<(IpNet, IpAddr)> {
        if self.shared.is_empty() || self.is_overlay(flow.remote) {
            return None;
        }
        let (network, Gateways(gateways)) = self.subnets.get_lpm(&flow.remote.into())?;
        let several = (gateways.len() > 1).then_some(gateways)?;
        Some((network, self.choose(several, flow, false)?.address))
    }

    /// The gateways of routes with several gateways.
    pub(super) fn shared_gateways(&self) -> &BTreeMap<IpAddr, Arc<Health>> {
        &self.shared
    }

    /// Flows that stay on a gateway which their hash does not select.
    pub(super) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// The network of the subnet route that matches an address outside the own networks.
    pub(super) fn subnet(&self, address: IpAddr) -> Option<IpNet> {
        Some(self.subnets.get_lpm(&address.into())?.0)
    }

    /// The subnet route to the remote end of `flow`, if it has several gateways and the peer of `tunnel` is one of
    /// them. Return packets of such a flow may come through another gateway.
    pub(super) fn shared(&self, flow: &FlowKey, tunnel: &Tunnel) -> Option<IpNet> {
        self.shared_with(flow, &tunnel.peer_addresses)
    }

    /// Like [`Routes::shared`], for the peer with these addresses.
    #[inline]
    pub(super) fn shared_with(&self, flow: &FlowKey, peer: &[IpAddr]) -> Option<IpNet> {
        if self.shared.is_empty() || self.is_overlay(flow.remote) {
            return None;
        }
        let (network, Gateways(gateways)) = self.subnets.get_lpm(&flow.remote.into())?;
        let is_one = || gateways.iter().any(|gateway| peer.contains(&gateway.address));
        (gateways.len() > 1 && is_one()).then_some(network)
    }

    /// The subnet routes with several gateways of which the peer with these addresses is one.
    pub(super) fn all_shared_with(&self, peer: &[IpAddr]) -> Vec<IpNet> {
        let is_one = |gateway: &Gateway| peer.contains(&gateway.address);
        let routes = self.subnets.iter().filter(|_| !self.shared.is_empty());
        let shared = routes.filter(|(_, Gateways(gateways))| gateways.len() > 1 && gateways.iter().any(is_one));
        shared.map(|(network, _)| network).collect()
    }

    /// Whether an address lies inside the own overlay networks.
    pub(super) fn is_in_own_network(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&address))
    }

    /// Whether the host with this address is a peer itself: the address lies inside the own overlay networks, and not
    /// in a part of them that is behind another node.
    pub(super) fn is_overlay(&self, address: IpAddr) -> bool {
        self.is_in_own_network(address) && !self.is_behind(address)
    }

    fn is_behind(&self, address: IpAddr) -> bool {
        let part = if self.inside.is_empty() { None } else { self.inside.get_lpm(&address.into()) };
        part.is_some_and(|(_, gateways)| !gateways.contains(&address))
    }

    /// Whether an address is an own overlay address.
    pub(super) fn is_own(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.addr() == address)
    }

    /// Whether an address is the IPv4 broadcast address of an own network.
    pub(super) fn is_broadcast(&self, address: IpAddr) -> bool {
        address.is_ipv4() && self.networks.iter().any(|network| network.broadcast() == address)
    }
}

/// A gateway to use while the chosen one has no tunnel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Other {
    pub(super) address: IpAddr,
    /// It may take the packet. Otherwise it is only worth a handshake.
    pub(super) may_carry: bool,
    /// The flow should stay there.
    pub(super) keeps: bool,
}

impl NextHop<'_> {
    /// Whether the peer is the destination itself.
    pub(super) fn is_final(&self) -> bool {
        self.gateways.is_empty()
    }

    /// Fallback peers for when the chosen one is unreachable, those of the best priority first.
    pub(super) fn others(&self) -> impl Iterator<Item = IpAddr> {
        self.gateways.iter().map(|gateway| gateway.address).filter(|address| *address != self.peer)
    }

    /// What may be done with the other gateways while the chosen one has no tunnel. A packet does not go to a gateway
    /// that is dead or of another priority before a handshake with the chosen one was tried.
    pub(super) fn fallbacks(&self) -> impl Iterator<Item = Other> {
        let chosen = self.gateways.iter().find(|gateway| gateway.address == self.peer);
        let chosen = chosen.filter(|gateway| gateway.health.is_alive()).map(|gateway| gateway.priority);
        let others = self.gateways.iter().filter(|gateway| gateway.address != self.peer);
        others.filter(move |other| chosen.is_none() || other.health.is_alive()).map(move |other| Other {
            address: other.address,
            may_carry: chosen.is_none_or(|priority| priority == other.priority),
            keeps: chosen == Some(other.priority),
        })
    }
}

impl Gateways {
    /// Divides the hash space among the gateways of each priority in proportion to their weights.
    fn new(route: &SubnetRoute, health: impl Fn(IpAddr) -> Arc<Health>) -> Self {
        let mut sorted = route.gateways.clone();
        sorted.sort_by_key(|gateway| gateway.priority);
        let divided = sorted.chunk_by(|a, b| a.priority == b.priority).flat_map(|equals| {
            let total: u128 = equals.iter().map(|gateway| u128::from(gateway.weight.get())).sum();
            let mut sum = 0;
            let health = &health;
            equals.iter().map(move |gateway| {
                sum += u128::from(gateway.weight.get());
                let share = (sum * HASH_SPACE + total / 2) / total;
                Gateway {
                    address: gateway.address,
                    weight: gateway.weight.get(),
                    priority: gateway.priority,
                    bound: share.saturating_sub(1) as u32,
                    health: health(gateway.address),
                }
            })
        });
        Self(divided.collect())
    }
}

/// The hash that selects the gateway of a flow: a mix of its ports, the same as in Go, so that a flow keeps its gateway
/// when one implementation replaces the other.
fn flow_hash(flow: &FlowKey) -> u32 {
    mix(u32::from(flow.local_port) << 16 | u32::from(flow.remote_port))
}

fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x21f0_aaad);
    x = (x ^ x >> 15).wrapping_mul(0xd35a_2d97);
    (x ^ x >> 15) & (HASH_SPACE - 1) as u32
}

const HASH_SPACE: u128 = 1 << 31;

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;
    use crate::config;

    fn subnet(network: &str, gateways: &[(&str, u32)]) -> SubnetRoute {
        let gateway = |(address, weight): &(&str, u32)| config::Gateway {
            address: address.parse().unwrap(),
            weight: NonZeroU32::new(*weight).unwrap(),
            priority: 0,
        };
        SubnetRoute::new(network.parse().unwrap(), gateways.iter().map(gateway).collect())
    }

    fn routes(subnets: &[SubnetRoute]) -> Routes {
        Routes::new(&["10.1.0.1/16".parse().unwrap(), "fd00::1/64".parse().unwrap()], subnets, None)
    }

    fn flow(remote: &str, local_port: u16, remote_port: u16) -> FlowKey {
        let remote: IpAddr = remote.parse().unwrap();
        FlowKey { local: remote, remote, local_port, remote_port, protocol: 6, fragment: false }
    }

    fn peer(routes: &Routes, remote: &str) -> Option<String> {
        routes.next_hop(&flow(remote, 1, 2), false).map(|hop| hop.peer.to_string())
    }

    #[test]
    fn own_networks_come_before_subnets_and_the_longest_prefix_wins() {
        let routes = routes(&[
            subnet("0.0.0.0/0", &[("10.1.0.2", 1)]),
            subnet("192.168.0.0/16", &[("10.1.0.3", 1)]),
            subnet("192.168.7.0/24", &[("10.1.0.4", 1)]),
            subnet("10.0.0.0/8", &[("10.1.0.5", 1)]),
            subnet("fd99::/16", &[("fd00::9", 1)]),
            subnet("fd98::/16", &[("10.1.0.6", 1)]),
        ]);
        for (remote, expected) in [
            ("10.1.2.3", Some("10.1.2.3")),
            ("10.2.2.3", Some("10.1.0.5")),
            ("192.168.7.255", Some("10.1.0.4")),
            ("192.168.8.0", Some("10.1.0.3")),
            ("1.1.1.1", Some("10.1.0.2")),
            ("fd00::77", Some("fd00::77")),
            ("fd99::1", Some("fd00::9")),
            ("fd98::1", Some("10.1.0.6")),
            ("2001:db8::1", None),
        ] {
            assert_eq!(peer(&routes, remote).as_deref(), expected, "{remote}");
        }
    }

    #[test]
    fn a_part_of_an_own_network_is_behind_its_gateway_which_is_reached_itself() {
        let routes = routes(&[
            subnet("10.1.2.0/24", &[("10.1.2.1", 1)]).inside(),
            subnet("10.1.3.0/24", &[("10.1.0.9", 1)]),
            subnet("fd00::2:0/112", &[("fd00::2:1", 1)]).inside(),
        ]);
        for (remote, expected) in [
            ("10.1.2.7", "10.1.2.1"),
            ("10.1.2.1", "10.1.2.1"),
            ("10.1.3.7", "10.1.3.7"),
            ("10.1.4.7", "10.1.4.7"),
            ("fd00::2:7", "fd00::2:1"),
            ("fd00::2:1", "fd00::2:1"),
            ("fd00::3:7", "fd00::3:7"),
        ] {
            assert_eq!(peer(&routes, remote).as_deref(), Some(expected), "{remote}");
        }
        assert!(!routes.is_overlay("10.1.2.7".parse().unwrap()) && routes.is_overlay("10.1.2.1".parse().unwrap()));
    }

    #[test]
    fn a_prefix_written_with_host_bits_is_the_network_it_lies_in() {
        let routes = routes(&[subnet("192.168.7.9/24", &[("10.1.0.4", 1)])]);
        assert_eq!(peer(&routes, "192.168.7.1").as_deref(), Some("10.1.0.4"));
    }

    #[test]
    fn the_space_of_hashes_is_cut_by_weight_without_a_gap() {
        let bounds = |weights: &[u32]| -> Vec<u32> {
            let gateways: Vec<_> = weights.iter().map(|weight| ("10.1.0.2", *weight)).collect();
            Gateways::new(&subnet("1.0.0.0/8", &gateways), |_| Arc::default())
                .0
                .iter()
                .map(|gateway| gateway.bound)
                .collect()
        };
        assert_eq!(bounds(&[1, 1]), [0x3fff_ffff, 0x7fff_ffff]);
        assert_eq!(bounds(&[1, 3]), [0x1fff_ffff, 0x7fff_ffff]);
        assert_eq!(bounds(&[1, 1, 1]), [0x2aaa_aaaa, 0x5555_5554, 0x7fff_ffff]);
        assert_eq!(bounds(&[0x7fff_ffff; 2]), [0x3fff_ffff, 0x7fff_ffff]);
    }

    #[test]
    fn the_other_gateways_are_offered_in_order_and_none_for_an_overlay_address() {
        let gateways = [("10.1.0.2", 1), ("10.1.0.3", 1), ("10.1.0.4", 1)];
        let routes = routes(&[subnet("192.168.0.0/16", &gateways)]);
        for port in 0..100 {
            let hop = routes.next_hop(&flow("192.168.0.1", port, 80), false).unwrap();
            let others: Vec<_> = hop.others().collect();
            let expected: Vec<IpAddr> = gateways.iter().map(|(address, _)| address.parse().unwrap()).collect();
            assert_eq!(others, expected.into_iter().filter(|address| *address != hop.peer).collect::<Vec<_>>());
        }
        assert_eq!(routes.next_hop(&flow("10.1.0.9", 1, 2), false).unwrap().others().count(), 0);
    }

    #[test]
    fn flows_spread_by_weight() {
        let routes = routes(&[subnet("192.168.0.0/16", &[("10.1.0.2", 1), ("10.1.0.3", 3)])]);
        let second: IpAddr = "10.1.0.3".parse().unwrap();
        let count = (0..40_000_u16)
            .filter(|port| routes.next_hop(&flow("192.168.0.1", *port, 443), false).unwrap().peer == second)
            .count();
        assert!((29_000..31_000).contains(&count), "{count} of 40000 on the gateway with three quarters");
    }

    proptest! {
        #[test]
        fn the_longest_prefix_is_what_a_scan_of_all_finds(
            prefixes in prop::collection::vec((0_u32..8, 0_u8..=32), 1..20),
            address in 0_u32..8,
        ) {
            let network = |(high, length): &(u32, u8)| {
                IpNet::new(IpAddr::from((0xc0a8_0000 | high << 13).to_be_bytes()), *length).unwrap().trunc()
            };
            let mut networks: Vec<_> = prefixes.iter().map(network).collect();
            networks.sort();
            networks.dedup();
            let gateway = |n: usize| format!("10.1.1.{n}");
            let subnets: Vec<_> = networks.iter().enumerate()
                .map(|(n, network)| subnet(&network.to_string(), &[(&gateway(n), 1)])).collect();
            let remote = IpAddr::from((0xc0a8_0000 | address << 13 | 5).to_be_bytes());
            let best = (0..networks.len()).filter(|n| networks[*n].contains(&remote)).max_by_key(|n| networks[*n].prefix_len());
            prop_assert_eq!(peer(&routes(&subnets), &remote.to_string()), best.map(gateway));
        }
    }
}

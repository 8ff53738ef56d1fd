//! Chooses the peer that gets a packet: own networks first, then subnet routes.

use std::net::IpAddr;

use ipnet::IpNet;
use prefix_trie::joint::JointPrefixMap;

use crate::config::SubnetRoute;
use crate::tunnel::Tunnel;
use crate::wire::ip::FlowKey;

/// Own networks, and the networks behind other nodes.
#[derive(Debug)]
pub(super) struct Routes {
    /// Own addresses with the prefix of their networks; one or two of them.
    networks: Vec<IpNet>,
    subnets: JointPrefixMap<IpNet, Gateways>,
    /// Whether any subnet route has several gateways.
    has_shared: bool,
}

/// The next hop of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NextHop<'a> {
    /// The peer that the packet is sent to.
    pub(super) peer: IpAddr,
    gateways: &'a [Gateway],
}

/// The gateways of one subnet route, as configured.
#[derive(Debug)]
struct Gateways(Vec<Gateway>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Gateway {
    address: IpAddr,
    /// Highest flow hash that selects this gateway.
    bound: u32,
}

impl Routes {
    pub(super) fn new(networks: &[IpNet], subnets: &[SubnetRoute]) -> Self {
        let has_shared = subnets.iter().any(|route| route.gateways.len() > 1);
        let subnets = subnets.iter().map(|route| (route.network.trunc(), Gateways::new(route))).collect();
        Self { networks: networks.to_vec(), subnets, has_shared }
    }

    /// The next hop of `flow`; `None` if there is no route.
    pub(super) fn next_hop(&self, flow: &FlowKey) -> Option<NextHop<'_>> {
        if self.is_overlay(flow.remote) {
            return Some(NextHop { peer: flow.remote, gateways: &[] });
        }
        let (_, Gateways(gateways)) = self.subnets.get_lpm(&flow.remote.into())?;
        let chosen = match gateways.as_slice() {
            [only] => only,
            several => {
                let hash = flow_hash(flow);
                several.iter().find(|gateway| hash <= gateway.bound)?
            }
        };
        Some(NextHop { peer: chosen.address, gateways })
    }

    /// The network of the subnet route that matches an address outside the own networks.
    pub(super) fn subnet(&self, address: IpAddr) -> Option<IpNet> {
        Some(self.subnets.get_lpm(&address.into())?.0)
    }

    /// The subnet route to the remote end of `flow`, if it has several gateways and the peer of `tunnel` is one of
    /// them. Return packets of such a flow may come through another gateway.
    pub(super) fn shared(&self, flow: &FlowKey, tunnel: &Tunnel) -> Option<IpNet> {
        if !self.has_shared || self.is_overlay(flow.remote) {
            return None;
        }
        let (network, Gateways(gateways)) = self.subnets.get_lpm(&flow.remote.into())?;
        let is_one = || gateways.iter().any(|gateway| tunnel.peer_addresses.contains(&gateway.address));
        (gateways.len() > 1 && is_one()).then_some(network)
    }

    /// Whether an address lies inside the own overlay networks.
    pub(super) fn is_overlay(&self, address: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&address))
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

impl NextHop<'_> {
    /// Whether the peer is the destination itself.
    pub(super) fn is_final(&self) -> bool {
        self.gateways.is_empty()
    }

    /// Fallback peers for when the chosen one is unreachable, in the order of the configuration.
    pub(super) fn others(&self) -> impl Iterator<Item = IpAddr> {
        self.gateways.iter().map(|gateway| gateway.address).filter(|address| *address != self.peer)
    }
}

impl Gateways {
    /// Divides the hash space among the gateways in proportion to their weights.
    fn new(route: &SubnetRoute) -> Self {
        let total: u128 = route.gateways.iter().map(|gateway| u128::from(gateway.weight.get())).sum();
        let mut sum = 0;
        let gateways = route.gateways.iter().map(|gateway| {
            sum += u128::from(gateway.weight.get());
            let share = (sum * HASH_SPACE + total / 2) / total;
            Gateway { address: gateway.address, bound: share.saturating_sub(1) as u32 }
        });
        Self(gateways.collect())
    }
}

/// The hash that selects the gateway of a flow: a mix of its ports, the same as in Go, so that a flow keeps its gateway
/// when one implementation replaces the other.
fn flow_hash(flow: &FlowKey) -> u32 {
    let mut x = u32::from(flow.local_port) << 16 | u32::from(flow.remote_port);
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
        };
        SubnetRoute { network: network.parse().unwrap(), gateways: gateways.iter().map(gateway).collect() }
    }

    fn routes(subnets: &[SubnetRoute]) -> Routes {
        Routes::new(&["10.1.0.1/16".parse().unwrap(), "fd00::1/64".parse().unwrap()], subnets)
    }

    fn flow(remote: &str, local_port: u16, remote_port: u16) -> FlowKey {
        let remote: IpAddr = remote.parse().unwrap();
        FlowKey { local: remote, remote, local_port, remote_port, protocol: 6, fragment: false }
    }

    fn peer(routes: &Routes, remote: &str) -> Option<String> {
        routes.next_hop(&flow(remote, 1, 2)).map(|hop| hop.peer.to_string())
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
    fn a_prefix_written_with_host_bits_is_the_network_it_lies_in() {
        let routes = routes(&[subnet("192.168.7.9/24", &[("10.1.0.4", 1)])]);
        assert_eq!(peer(&routes, "192.168.7.1").as_deref(), Some("10.1.0.4"));
    }

    #[test]
    fn the_space_of_hashes_is_cut_by_weight_without_a_gap() {
        let bounds = |weights: &[u32]| -> Vec<u32> {
            let gateways: Vec<_> = weights.iter().map(|weight| ("10.1.0.2", *weight)).collect();
            Gateways::new(&subnet("1.0.0.0/8", &gateways)).0.iter().map(|gateway| gateway.bound).collect()
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
            let hop = routes.next_hop(&flow("192.168.0.1", port, 80)).unwrap();
            let others: Vec<_> = hop.others().collect();
            let expected: Vec<IpAddr> = gateways.iter().map(|(address, _)| address.parse().unwrap()).collect();
            assert_eq!(others, expected.into_iter().filter(|address| *address != hop.peer).collect::<Vec<_>>());
        }
        assert_eq!(routes.next_hop(&flow("10.1.0.9", 1, 2)).unwrap().others().count(), 0);
    }

    #[test]
    fn flows_spread_by_weight() {
        let routes = routes(&[subnet("192.168.0.0/16", &[("10.1.0.2", 1), ("10.1.0.3", 3)])]);
        let second: IpAddr = "10.1.0.3".parse().unwrap();
        let count = (0..40_000_u16)
            .filter(|port| routes.next_hop(&flow("192.168.0.1", *port, 443)).unwrap().peer == second)
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

//! Which of its addresses a host tells lighthouses, and in what order. Readers cut the list: Go Nebula to ten
//! endpoints of each family, this program to [`MAX_ENDPOINTS`](crate::wire::messages::MAX_ENDPOINTS) in all.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;

use super::LocalAddress;
use crate::wire::messages::fair_cut;

/// An address of an interface, and how useful it is to peers; less is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ranked {
    is_other_range: bool,
    /// It is on a bridge to containers or virtual machines of this host.
    is_inner: bool,
    /// Number of better addresses in the same network.
    nth: usize,
    address: IpAddr,
}

/// Orders local addresses: preferred ranges first, then one address of each network, then a second of each, and
/// bridges to containers last. The order depends on nothing else, so it stays as long as the addresses do.
pub(super) fn in_order<'a>(local: impl Iterator<Item = &'a LocalAddress>, preferred: &[IpNet]) -> Vec<Ranked> {
    let mut in_network: BTreeMap<(&str, IpAddr), usize> = BTreeMap::new();
    let ranked = local.map(|LocalAddress { address, interface }| {
        let count = in_network.entry((interface, network(*address))).or_default();
        let nth = *count;
        *count += 1;
        let is_other_range = !preferred.iter().any(|range| range.contains(address));
        Ranked { is_other_range, is_inner: is_inner(interface), nth, address: *address }
    });
    let mut ranked: Vec<_> = ranked.collect();
    ranked.sort_unstable();
    ranked
}

/// The list to send: what was configured, then local addresses, each once, with the families sharing the room.
/// Bridges to containers are named only among the first ten of their family: few peers can reach them, but all would
/// try.
pub(super) fn cut(configured: impl Iterator<Item = SocketAddr>, local: Vec<Ranked>, port: u16) -> Vec<SocketAddr> {
    let mut list: Vec<SocketAddr> = Vec::new();
    let (mut ipv4, mut ipv6) = (0, 0);
    let local = local.into_iter().map(|it| (SocketAddr::new(it.address, port), it.is_inner && it.is_other_range));
    for (endpoint, is_inner) in configured.map(|endpoint| (endpoint, false)).chain(local) {
        let count = if endpoint.is_ipv4() { &mut ipv4 } else { &mut ipv6 };
        let is_useless = is_inner && *count >= READ_BY_GO;
        if !is_useless && !list.contains(&endpoint) {
            list.push(endpoint);
            *count += 1;
        }
    }
    let (mut ipv4, mut ipv6) = fair_cut(ipv4, ipv6);
    list.retain(|endpoint| {
        let left = if endpoint.is_ipv4() { &mut ipv4 } else { &mut ipv6 };
        let keep = *left > 0;
        *left = left.saturating_sub(1);
        keep
    });
    list
}

/// What is usually one network: the prefix length is not known here.
fn network(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => Ipv4Addr::from_bits(v4.to_bits() & !0xff).into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
    }
}

/// Whether the name of an interface is one that container runtimes and hypervisors give to what is inside the host.
fn is_inner(interface: &str) -> bool {
    let is_hash = |rest: &str| rest.len() == 12 && rest.bytes().all(|byte| byte.is_ascii_hexdigit());
    INNER.iter().any(|prefix| interface.starts_with(prefix)) || interface.strip_prefix("br-").is_some_and(is_hash)
}

/// Docker names bridges of its own networks `br-` and twelve digits; `br0` or `br-lan` may be the way to a real
/// network.
const INNER: [&str; 15] = [
    "docker", "veth", "virbr", "vnet", "cni", "cbr", "flannel", "cali", "cilium", "lxc", "lxdbr", "podman", "kube-",
    "vmnet", "vboxnet",
];
/// Endpoints of each family that Go Nebula reads.
const READ_BY_GO: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::messages::MAX_ENDPOINTS;

    fn local(interface: &str, address: &str) -> LocalAddress {
        LocalAddress { address: address.parse().unwrap(), interface: interface.to_owned() }
    }

    fn advertise(configured: &[&str], local: &[LocalAddress], preferred: &[&str]) -> Vec<String> {
        let preferred: Vec<_> = preferred.iter().map(|range| range.parse().unwrap()).collect();
        let configured = configured.iter().map(|at| at.parse().unwrap());
        let list = cut(configured, in_order(local.iter(), &preferred), 4242);
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_first_ten_are_of_all_networks_and_not_of_the_one_with_most_addresses() {
        let mut addresses: Vec<_> = (1..=12).map(|n| local("eth0", &format!("10.1.1.{n}"))).collect();
        addresses.extend([local("eth1", "192.168.1.2"), local("wg0", "172.16.0.2"), local("eth0", "10.1.2.1")]);
        let list = advertise(&["203.0.113.1:99"], &addresses, &["192.168.1.0/24"]);
        let expected = [
            "203.0.113.1:99",
            "192.168.1.2:4242",
            "10.1.1.1:4242",
            "10.1.2.1:4242",
            "172.16.0.2:4242",
            "10.1.1.2:4242",
        ];
        assert_eq!(list[..6], expected);
        assert_eq!(list.len(), 16, "nothing is left out while there is room");
    }

    #[test]
    fn bridges_to_containers_come_last_and_only_up_to_ten() {
        let mut addresses: Vec<_> = (0..20).map(|n| local("br-0123456789ab", &format!("10.2.{n}.1"))).collect();
        addresses.extend([
            local("docker0", "172.17.0.1"),
            local("br-lan", "192.168.1.1"),
            local("eth0", "198.51.100.7"),
        ]);
        let list = advertise(&[], &addresses, &[]);
        assert_eq!(list[..2], ["192.168.1.1:4242", "198.51.100.7:4242"]);
        assert_eq!(list.len(), READ_BY_GO);
        let list = advertise(&[], &addresses, &["172.17.0.0/16"]);
        assert_eq!(list[0], "172.17.0.1:4242", "unless the range is preferred");
    }

    #[test]
    fn neither_family_takes_the_room_of_the_other() {
        let v4: Vec<_> = (0..40).map(|n| local("a", &format!("10.3.{n}.1"))).collect();
        let v6: Vec<_> = (0..40).map(|n| local("a", &format!("2001:db8:{n}::1"))).collect();
        let both = advertise(&[], &[&v4[..], &v6[..]].concat(), &[]);
        assert_eq!(both.iter().filter(|at| at.starts_with('[')).count(), MAX_ENDPOINTS / 2);
        assert_eq!(both.len(), MAX_ENDPOINTS);
        let mostly = advertise(&[], &[&v4[..], &v6[..3]].concat(), &[]);
        assert_eq!(mostly.iter().filter(|at| at.starts_with('[')).count(), 3);
        assert_eq!(mostly.len(), MAX_ENDPOINTS);
        assert_eq!(advertise(&[], &v6, &[]).len(), MAX_ENDPOINTS);
    }

    #[test]
    fn an_address_that_comes_or_goes_leaves_the_order_of_the_others() {
        let mut addresses: Vec<_> = (0..9).map(|n| local("a", &format!("10.4.{}.{n}", n % 3))).collect();
        let before = advertise(&[], &addresses, &[]);
        addresses.push(local("b", "192.168.9.9"));
        let mut after = advertise(&[], &addresses, &[]);
        after.retain(|at| !at.starts_with("192"));
        assert_eq!(after, before);
    }
}

//! What a link has: its addresses, and the routes to it that a program of ours could have made.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use nebula_cni_contract::netlink;
use nix::libc;

use crate::next_hop::NextHop;
use crate::rtnetlink::{LinkRoute, MAIN_TABLE, RTAX_MTU, RTMSG};

/// The addresses and routes of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkContents {
    /// Addresses with the prefix lengths of their networks, without link-local ones.
    pub addresses: Vec<IpNet>,
    /// Routes of the main table without a gateway that the kernel made or a program without a name of its own
    /// (`proto kernel`, `proto static`): those of routing daemons, and those that a person added, are not among them.
    pub routes: Vec<LinkRoute>,
}

impl LinkContents {
    /// Reads the contents of a link in the network namespace of the calling thread.
    ///
    /// # Errors
    /// Returns an error if the kernel does not tell.
    pub fn read(index: u32) -> io::Result<Self> {
        let addresses = netlink::ask_route(libc::RTM_GETADDR, libc::NLM_F_DUMP, &[0; IFADDRMSG])?;
        let routes = netlink::ask_route(libc::RTM_GETROUTE, libc::NLM_F_DUMP, &[0; RTMSG])?;
        let addresses = addresses.iter().filter_map(|body| Address::parse(body));
        let addresses = addresses.filter(|address| address.device == index && !address.is_link_local);
        let addresses = addresses.map(|address| address.network).collect();
        Ok(Self { addresses, routes: routes.iter().filter_map(|body| route(body, index)).collect() })
    }
}

/// An address of any link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// Interface index.
    pub(crate) device: u32,
    pub(crate) network: IpNet,
    pub(crate) is_link_local: bool,
}

impl Address {
    /// Reads struct ifaddrmsg and its attributes.
    pub(crate) fn parse(body: &[u8]) -> Option<Self> {
        let (header, attributes) = body.split_first_chunk::<IFADDRMSG>()?;
        let [_, prefix, _, scope, a, b, c, d] = *header;
        let local = netlink::attribute(attributes, libc::IFA_LOCAL);
        let address = netlink::address(local.or_else(|| netlink::attribute(attributes, libc::IFA_ADDRESS))?)?;
        let network = IpNet::new(address, prefix).ok()?;
        Some(Self { device: u32::from_ne_bytes([a, b, c, d]), network, is_link_local: scope == libc::RT_SCOPE_LINK })
    }
}

/// Reads struct rtmsg and its attributes; `None` if it is no route of [`LinkContents::routes`] to this link.
fn route(body: &[u8], index: u32) -> Option<LinkRoute> {
    let (header, attributes) = body.split_first_chunk::<RTMSG>()?;
    let [family, prefix, _, _, table, protocol, _, kind, ..] = *header;
    let is_ours = [libc::RTPROT_KERNEL, libc::RTPROT_STATIC].contains(&protocol) && kind == libc::RTN_UNICAST;
    let hops = NextHop::of_route(attributes);
    let [NextHop { gateway: None, device, .. }] = hops[..] else { return None };
    if !is_ours || u32::from(table) != MAIN_TABLE || device != index {
        return None;
    }
    let everywhere = || match i32::from(family) {
        libc::AF_INET => Some(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
        libc::AF_INET6 => Some(IpAddr::V6(Ipv6Addr::UNSPECIFIED)),
        _ => None,
    };
    let destination = netlink::attribute(attributes, libc::RTA_DST).map_or_else(everywhere, netlink::address)?;
    let number = |value: &[u8]| value.try_into().map(u32::from_ne_bytes).ok();
    let network = IpNet::new(destination, prefix).ok()?;
    let is_link_local = matches!(destination, IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_multicast());
    (!is_link_local).then(|| LinkRoute {
        network,
        mtu: netlink::attribute(attributes, libc::RTA_METRICS)
            .and_then(|metrics| netlink::attribute(metrics, RTAX_MTU))
            .and_then(number),
        metric: netlink::attribute(attributes, libc::RTA_PRIORITY).and_then(number).unwrap_or(0),
        source: netlink::attribute(attributes, libc::RTA_PREFSRC).and_then(netlink::address),
        table: MAIN_TABLE,
    })
}

/// Length of struct ifaddrmsg.
pub(crate) const IFADDRMSG: usize = 8;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::netlink::push_attribute;

    use super::*;

    #[test]
    fn loopback_has_its_address() {
        let contents = LinkContents::read(nix::net::if_::if_nametoindex("lo").unwrap()).unwrap();
        assert!(contents.addresses.contains(&"127.0.0.1/8".parse().unwrap()), "{contents:?}");
        let nobody = LinkContents::read(u32::MAX >> 1).unwrap();
        assert_eq!(nobody, LinkContents { addresses: Vec::new(), routes: Vec::new() });
    }

    /// struct rtmsg of IPv4 with a destination, device and other attributes.
    fn body(protocol: u8, prefix: u8, device: u32, more: &[(u16, &[u8])]) -> Vec<u8> {
        let mut body = vec![2, prefix, 0, 0, libc::RT_TABLE_MAIN, protocol, 0, libc::RTN_UNICAST, 0, 0, 0, 0];
        let own = [(libc::RTA_DST, &[10, 7, 0, 0][..]), (libc::RTA_OIF, &device.to_ne_bytes())];
        own.iter().chain(more).for_each(|(kind, value)| push_attribute(&mut body, *kind, value));
        body
    }

    #[test]
    fn routes_that_we_could_have_made_are_read_and_others_are_not() {
        let mut metrics = Vec::new();
        push_attribute(&mut metrics, RTAX_MTU, &1200_u32.to_ne_bytes());
        let more: [(u16, &[u8]); 3] = [
            (libc::RTA_PRIORITY, &7_u32.to_ne_bytes()),
            (libc::RTA_PREFSRC, &[10, 7, 0, 9]),
            (libc::RTA_METRICS, &metrics),
        ];
        let full = body(libc::RTPROT_KERNEL, 16, 3, &more);
        let expected = LinkRoute {
            network: "10.7.0.0/16".parse().unwrap(),
            mtu: Some(1200),
            metric: 7,
            source: Some([10, 7, 0, 9].into()),
            table: MAIN_TABLE,
        };
        assert_eq!(route(&full, 3), Some(expected));
        assert!(route(&body(libc::RTPROT_STATIC, 16, 3, &[]), 3).is_some());
        assert_eq!(route(&full, 4), None, "of another link");
        assert_eq!(route(&body(libc::RTPROT_BOOT, 16, 3, &[]), 3), None, "a person's");
        let gateway: (u16, &[u8]) = (libc::RTA_GATEWAY, &[10, 7, 0, 1]);
        assert_eq!(route(&body(libc::RTPROT_STATIC, 16, 3, &[gateway]), 3), None);
        assert_eq!(route(&body(libc::RTPROT_STATIC, 33, 3, &[]), 3), None, "no such prefix");
        let mut other_table = full.clone();
        other_table[4] = 52;
        assert_eq!(route(&other_table, 3), None);
        for cut in 0..full.len() {
            let _ = route(&full[..cut], 3);
            let _ = Address::parse(&full[..cut]);
        }
        let everywhere = [&[10, 0, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0][..], &[8, 0, 4, 0], &3_u32.to_ne_bytes()].concat();
        assert_eq!(route(&everywhere, 3).unwrap().network, "::/0".parse::<IpNet>().unwrap());
    }
}

//! A pod's interface where this plugin makes it: a veth pair with a route to each of the pod's addresses on the node's
//! end, and no bridge (rtnetlink).
//!
//! Each end knows the other one's Ethernet address as a permanent neighbour. So there are no questions by ARP or
//! neighbour discovery, and nobody can answer for another one. The pod's default routes lead to link-local addresses,
//! which need not be those of anything on the node.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use nebula_cni_contract::hash::fnv1a;
use nebula_cni_contract::netlink::{self, octets, push_attribute, route};
use nebula_cni_contract::netns::in_namespace;
use nix::libc;
use nix::net::if_::if_nametoindex;

use crate::link::pod_link::{IFINFOMSG, INFO_KIND, Mac};
use crate::request::Key;

/// The two ends of a pod's link, by names that follow from the attachment: what a call that was killed has left is
/// found by any later one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Veth {
    /// Name of the node's end.
    pub node_end: String,
    /// Ethernet address of the node's end.
    pub node_mac: Mac,
    /// Name of the pod's end.
    pub pod_end: String,
    /// Ethernet address of the pod's end.
    pub pod_mac: Mac,
}

impl Veth {
    /// That of an attachment.
    #[must_use]
    pub fn new(key: &Key) -> Self {
        let number = fnv1a(&[&key.network, "\0", &key.container_id, "\0", &key.ifname]);
        let [_, a, b, c, d, e, f, g] = number.to_be_bytes();
        // The second lowest bit of the first byte: given by nobody but the administrator.
        let mac = |end: u8| [0x02 | end << 4, b, c, d, e, f ^ a ^ g];
        Self {
            node_end: format!("{NODE_END}{:012x}", number & 0xffff_ffff_ffff),
            node_mac: mac(1),
            pod_end: key.ifname.clone(),
            pod_mac: mac(2),
        }
    }

    /// Makes the pair, with the pod's end in the namespace `netns`. `alias` says whose it is in `ip link`.
    ///
    /// # Errors
    /// Returns the kernel's error; `EEXIST` if one of the names is taken. Nothing has been made then.
    pub fn create(&self, netns: &File, mtu: u32, alias: &str) -> io::Result<()> {
        let mut peer = vec![0; IFINFOMSG];
        push_end(&mut peer, &self.pod_end, self.pod_mac, mtu);
        push_attribute(&mut peer, libc::IFLA_NET_NS_FD, &netns.as_raw_fd().to_ne_bytes());
        let nested = |kind, value: &[u8]| {
            let mut out = Vec::new();
            push_attribute(&mut out, kind, value);
            out
        };
        let mut info = nested(INFO_KIND, b"veth\0");
        push_attribute(&mut info, INFO_DATA, &nested(VETH_INFO_PEER, &peer));
        let mut body = vec![0; IFINFOMSG];
        push_end(&mut body, &self.node_end, self.node_mac, mtu);
        let alias = alias.get(..MAX_ALIAS).unwrap_or(alias);
        push_attribute(&mut body, libc::IFLA_IFALIAS, alias.as_bytes());
        push_attribute(&mut body, libc::IFLA_LINKINFO, &info);
        netlink::ask_route(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL, &body).map(drop)
    }

    /// Removes the pair, and all routes and neighbours of both ends with it; does nothing if it is gone already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn remove(&self) -> io::Result<()> {
        let mut body = vec![0; IFINFOMSG];
        push_attribute(&mut body, libc::IFLA_IFNAME, &[self.node_end.as_bytes(), &[0]].concat());
        match netlink::ask_route(libc::RTM_DELLINK, 0, &body) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            removed => removed.map(drop),
        }
    }

    /// Gives the pod's end its addresses, and the pod its default routes.
    ///
    /// # Errors
    /// Returns the error of the kernel or the file system.
    pub fn set_up_pod(&self, netns: &File, addresses: &[IpAddr]) -> io::Result<()> {
        in_namespace(netns, || {
            let index = if_nametoindex(self.pod_end.as_str())?;
            if addresses.iter().any(IpAddr::is_ipv6) {
                // Container runtimes switch it off in new namespaces.
                fs::write(format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.pod_end), "0")?;
            }
            addresses.iter().try_for_each(|address| add_address(index, *address))?;
            bring_up(index)?;
            for gateway in GATEWAYS.into_iter().filter(|gateway| has_family(addresses, *gateway)) {
                add_neighbour(index, gateway, self.node_mac)?;
                if gateway.is_ipv4() {
                    add_route(IpNet::from(gateway), None, index)?;
                }
                add_route(everything(gateway), Some(gateway), index)?;
            }
            Ok(())
        })
    }

    /// Brings the node's end up, with a route to each of the pod's addresses.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn set_up_node(&self, addresses: &[IpAddr]) -> io::Result<()> {
        let index = if_nametoindex(self.node_end.as_str())?;
        bring_up(index)?;
        for address in addresses {
            add_neighbour(index, *address, self.pod_mac)?;
            add_route(IpNet::from(*address), None, index)?;
        }
        Ok(())
    }
}

/// Next hops of the pod's default routes.
pub const GATEWAYS: [IpAddr; 2] =
    [IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1)), IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1))];

/// Whether one of the addresses is of the family of `other`.
#[must_use]
pub fn has_family(addresses: &[IpAddr], other: IpAddr) -> bool {
    addresses.iter().any(|address| address.is_ipv4() == other.is_ipv4())
}

/// The prefix of all addresses of this family.
#[must_use]
pub fn everything(of: IpAddr) -> IpNet {
    match of {
        IpAddr::V4(_) => IpNet::V4(ipnet::Ipv4Net::default()),
        IpAddr::V6(_) => IpNet::V6(ipnet::Ipv6Net::default()),
    }
}

/// Whether the node has a route of ours to this very address.
#[must_use]
pub fn is_routed(address: IpAddr) -> bool {
    route::route_to(address, libc::RTM_F_FIB_MATCH).is_ok_and(|found| found.is_ours)
}

/// The interface by which the node reaches an address.
#[must_use]
pub fn interface_to(address: IpAddr) -> Option<u32> {
    route::route_to(address, 0).ok().map(|route| route.interface)
}

/// The MTU of the interface by which the node reaches everybody else, if there is one.
#[must_use]
pub fn mtu_of_node() -> Option<u32> {
    let anywhere =
        [IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1))];
    let ways = anywhere.iter().filter_map(|address| interface_to(*address)).filter(|index| *index != LOOPBACK);
    ways.filter_map(|index| mtu(index).ok().flatten()).min()
}

fn mtu(index: u32) -> io::Result<Option<u32>> {
    let mut body = vec![0; IFINFOMSG];
    body[INDEX].copy_from_slice(&index.to_ne_bytes());
    let bodies = netlink::ask_route(libc::RTM_GETLINK, 0, &body)?;
    let mtu = bodies.first().and_then(|body| netlink::attribute(body.get(IFINFOMSG..)?, libc::IFLA_MTU));
    Ok(mtu.and_then(|mtu| mtu.try_into().ok()).map(u32::from_ne_bytes))
}

fn push_end(out: &mut Vec<u8>, name: &str, mac: Mac, mtu: u32) {
    push_attribute(out, libc::IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
    push_attribute(out, libc::IFLA_ADDRESS, &mac);
    push_attribute(out, libc::IFLA_MTU, &mtu.to_ne_bytes());
}

fn bring_up(index: u32) -> io::Result<()> {
    let mut body = vec![0; IFINFOMSG];
    body[INDEX].copy_from_slice(&index.to_ne_bytes());
    let up = (libc::IFF_UP as u32).to_ne_bytes();
    // ifi_flags, ifi_change.
    body[8..12].copy_from_slice(&up);
    body[12..16].copy_from_slice(&up);
    netlink::ask_route(libc::RTM_NEWLINK, 0, &body).map(drop)
}

fn add_address(index: u32, address: IpAddr) -> io::Result<()> {
    // struct ifaddrmsg: family, prefix length, flags, scope, index.
    let mut body = vec![family(address), bits(address), 0, libc::RT_SCOPE_UNIVERSE];
    body.extend(index.to_ne_bytes());
    push_attribute(&mut body, libc::IFA_LOCAL, &octets(address));
    push_attribute(&mut body, libc::IFA_ADDRESS, &octets(address));
    if address.is_ipv6() {
        // The plugin knows that nobody else has it, and the pod may use it at once.
        push_attribute(&mut body, libc::IFA_FLAGS, &libc::IFA_F_NODAD.to_ne_bytes());
    }
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    netlink::ask_route(libc::RTM_NEWADDR, flags, &body).map(drop)
}

fn add_neighbour(index: u32, address: IpAddr, mac: Mac) -> io::Result<()> {
    // struct ndmsg: family, padding, index, state, flags, type.
    let mut body = vec![family(address), 0, 0, 0];
    body.extend(index.to_ne_bytes());
    body.extend(libc::NUD_PERMANENT.to_ne_bytes());
    body.extend([0, 0]);
    push_attribute(&mut body, libc::NDA_DST, &octets(address));
    push_attribute(&mut body, libc::NDA_LLADDR, &mac);
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    netlink::ask_route(libc::RTM_NEWNEIGH, flags, &body).map(drop)
}

fn add_route(destination: IpNet, gateway: Option<IpAddr>, index: u32) -> io::Result<()> {
    let address = destination.addr();
    let mut body = route::header(address, if gateway.is_some() { route::ONLINK } else { 0 });
    body[LENGTH] = destination.prefix_len();
    if gateway.is_none() && address.is_ipv4() {
        body[SCOPE] = libc::RT_SCOPE_LINK;
    }
    if destination.prefix_len() > 0 {
        push_attribute(&mut body, libc::RTA_DST, &octets(address));
    }
    if let Some(gateway) = gateway {
        push_attribute(&mut body, libc::RTA_GATEWAY, &octets(gateway));
    }
    push_attribute(&mut body, libc::RTA_OIF, &index.to_ne_bytes());
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    netlink::ask_route(libc::RTM_NEWROUTE, flags, &body).map(drop)
}

fn family(address: IpAddr) -> u8 {
    (if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
}

fn bits(address: IpAddr) -> u8 {
    IpNet::from(address).prefix_len()
}

/// With twelve digits behind it as long as a name may be.
const NODE_END: &str = "neb";
/// Its index in every namespace.
const LOOPBACK: u32 = 1;
// ifi_index.
const INDEX: std::ops::Range<usize> = 4..8;
// rtm_dst_len, rtm_scope.
const LENGTH: usize = 1;
const SCOPE: usize = 6;
// linux/if_link.h, linux/veth.h.
const INFO_DATA: u16 = 2;
const VETH_INFO_PEER: u16 = 1;
// IFALIASZ, with the terminating zero byte.
const MAX_ALIAS: usize = 255;

#[cfg(test)]
mod tests {
    use super::*;

    fn veth(container: &str) -> Veth {
        Veth::new(&Key { network: "net".into(), container_id: container.into(), ifname: "eth0".into() })
    }

    #[test]
    fn names_and_addresses_follow_from_the_attachment_and_fit() {
        let (one, two) = (veth("one"), veth("two"));
        assert_eq!(one, veth("one"));
        assert_ne!(one.node_end, two.node_end);
        assert_ne!(one.pod_mac, two.pod_mac);
        for veth in [one, two] {
            assert_eq!((veth.node_end.len(), veth.pod_end.as_str()), (15, "eth0"));
            assert_ne!(veth.node_mac, veth.pod_mac);
            for mac in [veth.node_mac, veth.pod_mac] {
                assert_eq!(mac[0] & 3, 2, "a single station, administered locally: {mac:?}");
            }
        }
    }

    #[test]
    fn the_loopback_interface_has_an_mtu() {
        assert_eq!(mtu(LOOPBACK).unwrap(), Some(65_536));
    }
}

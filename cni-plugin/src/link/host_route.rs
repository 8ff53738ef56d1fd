//! The node's host route to a pod whose address in Kubernetes is its overlay address: it leads through the pod's
//! interface, so that the kubelet's probes reach the pod without a tunnel (rtnetlink).

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;
use serde::{Deserialize, Serialize};

use crate::netlink::policy::{DeadEnd, Fate, LAST_METRIC};
use crate::netlink::{self, octets, push_attribute};

/// A route to one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoute {
    /// The pod's overlay address.
    pub destination: IpAddr,
    /// Next hop: the pod's primary address, or the gateway on the way there.
    pub next_hop: IpAddr,
    /// Index of the interface on the node.
    pub interface: u32,
}

/// The node's routes.
pub trait Routes {
    /// Returns a route to `destination` along the path that packets for `pod` take now.
    ///
    /// # Errors
    /// Returns an error if the pod is unreachable.
    fn like(&self, pod: IpAddr, destination: IpAddr) -> io::Result<HostRoute>;

    /// Adds the route, replacing any other to the same address.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn add(&self, route: &HostRoute) -> io::Result<()>;

    /// The route to `destination` that this plugin added, if there is one.
    fn ours_to(&self, destination: IpAddr) -> Option<HostRoute>;

    /// Removes the route; does nothing if it is gone already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn remove(&self, route: &HostRoute) -> io::Result<()>;

    /// Whether packets to the destination take this route.
    fn is_used(&self, route: &HostRoute) -> bool;

    /// Refuses what the node would send to an overlay network in clear, where no better route leads there; does
    /// nothing if that is so already.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn refuse(&self, network: IpNet) -> io::Result<()>;

    /// Ends [`Routes::refuse`].
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn end_refusal(&self, network: IpNet) -> io::Result<()>;
}

/// The kernel's routes, in the plugin's own network namespace.
#[derive(Debug)]
pub struct SystemRoutes;

impl Routes for SystemRoutes {
    fn like(&self, pod: IpAddr, destination: IpAddr) -> io::Result<HostRoute> {
        let way = way_to(pod, 0)?;
        Ok(HostRoute { destination, next_hop: way.gateway.unwrap_or(pod), interface: way.interface })
    }

    fn add(&self, route: &HostRoute) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        netlink::ask_route(libc::RTM_NEWROUTE, flags, &body_of(route)).map(drop)
    }

    fn ours_to(&self, destination: IpAddr) -> Option<HostRoute> {
        let way = way_to(destination, libc::RTM_F_FIB_MATCH).ok().filter(|way| way.is_ours)?;
        Some(HostRoute { destination, next_hop: way.gateway?, interface: way.interface })
    }

    fn remove(&self, route: &HostRoute) -> io::Result<()> {
        match netlink::ask_route(libc::RTM_DELROUTE, 0, &body_of(route)) {
            // The route or its interface is gone already.
            Err(e) if [libc::ESRCH, libc::ENODEV].contains(&e.raw_os_error().unwrap_or_default()) => Ok(()),
            other => other.map(drop),
        }
    }

    fn is_used(&self, route: &HostRoute) -> bool {
        way_to(route.destination, 0)
            .is_ok_and(|way| (way.interface, way.gateway) == (route.interface, Some(route.next_hop)))
    }

    fn refuse(&self, network: IpNet) -> io::Result<()> {
        refusal(network).add()
    }

    fn end_refusal(&self, network: IpNet) -> io::Result<()> {
        refusal(network).remove()
    }
}

fn refusal(network: IpNet) -> DeadEnd {
    DeadEnd { network, table: libc::RT_TABLE_MAIN.into(), fate: Fate::Unreachable, metric: LAST_METRIC }
}

/// Lets packets to the node's address `node` leave from `source`, along the path that they take now, in the network
/// namespace of the calling thread: a pod that was asked at its overlay address must answer from there, also where a
/// program lets the kernel choose (UDP).
///
/// # Errors
/// Returns the kernel's error.
pub fn answer_from(node: IpAddr, source: IpAddr) -> io::Result<()> {
    let way = way_to(node, 0)?;
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    netlink::ask_route(libc::RTM_NEWROUTE, flags, &answer_body(node, source, &way)).map(drop)
}

fn answer_body(node: IpAddr, source: IpAddr, way: &Way) -> Vec<u8> {
    let mut body = header(node, if way.gateway.is_some() { ONLINK } else { 0 });
    if way.gateway.is_none() && node.is_ipv4() {
        body[SCOPE] = libc::RT_SCOPE_LINK;
    }
    push_attribute(&mut body, libc::RTA_DST, &octets(node));
    if let Some(gateway) = way.gateway {
        push_attribute(&mut body, libc::RTA_GATEWAY, &octets(gateway));
    }
    push_attribute(&mut body, libc::RTA_OIF, &way.interface.to_ne_bytes());
    push_attribute(&mut body, libc::RTA_PREFSRC, &octets(source));
    body
}

/// The kernel's route to an address.
struct Way {
    interface: u32,
    gateway: Option<IpAddr>,
    /// Whether this plugin added the route, to that single address; only known for an entry of the routing table.
    is_ours: bool,
}

/// Looks up the route to an address. With `RTM_F_FIB_MATCH` it is the matching entry of the routing table, otherwise
/// the resolved route.
fn way_to(address: IpAddr, flags: u32) -> io::Result<Way> {
    let mut body = header(address, flags);
    push_attribute(&mut body, libc::RTA_DST, &octets(address));
    let routes = netlink::ask_route(libc::RTM_GETROUTE, 0, &body)?;
    routes
        .first()
        .and_then(|route| read_way(route, address))
        .ok_or_else(|| io::Error::other("no interface leads to the pod's address"))
}

fn read_way(route: &[u8], address: IpAddr) -> Option<Way> {
    let (head, attributes) = route.split_first_chunk::<RTMSG>()?;
    let interface = netlink::attribute(attributes, libc::RTA_OIF).and_then(|index| index.try_into().ok());
    // rtm_dst_len, rtm_protocol.
    let is_ours = (head[1], head[5]) == (bits(address), PROTOCOL);
    let gateway = netlink::attribute(attributes, libc::RTA_GATEWAY).and_then(netlink::address);
    Some(Way { interface: u32::from_ne_bytes(interface?), gateway, is_ours })
}

/// Decodes a route, for the fuzzer.
pub(crate) fn fuzz(route: &[u8]) {
    for address in [IpAddr::from([10, 0, 0, 1]), IpAddr::from([0; 16])] {
        let _ = read_way(route, address);
    }
}

fn body_of(route: &HostRoute) -> Vec<u8> {
    let mut body = header(route.destination, ONLINK);
    push_attribute(&mut body, libc::RTA_DST, &octets(route.destination));
    push_attribute(&mut body, libc::RTA_GATEWAY, &octets(route.next_hop));
    push_attribute(&mut body, libc::RTA_OIF, &route.interface.to_ne_bytes());
    body
}

// struct rtmsg.
fn header(address: IpAddr, flags: u32) -> Vec<u8> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (table, scope, unicast) = (libc::RT_TABLE_MAIN, libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST);
    let mut bytes = vec![family as u8, bits(address), 0, 0, table, PROTOCOL, scope, unicast];
    bytes.extend(flags.to_ne_bytes());
    bytes
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

const RTMSG: usize = 12;
// rtm_scope.
const SCOPE: usize = 6;
// RTNH_F_ONLINK of linux/rtnetlink.h: treats the next hop as reachable on the interface regardless of other routes.
const ONLINK: u32 = 4;
// Marks our routes in `ip route`; no routing daemon uses this protocol number.
const PROTOCOL: u8 = 78;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_the_machine_itself_is_its_loopback_interface() {
        let way = way_to("127.0.0.1".parse().unwrap(), 0).unwrap();
        assert_eq!((way.interface, way.gateway, way.is_ours), (1, None, false));
    }

    #[test]
    fn a_route_is_encoded_as_the_kernel_reads_it() {
        let route = HostRoute {
            destination: "10.42.0.7".parse().unwrap(),
            next_hop: "10.4.0.7".parse().unwrap(),
            interface: 3,
        };
        let bytes = body_of(&route);
        assert_eq!(bytes.len(), 12 + 3 * 8);
        assert_eq!(&bytes[..12], &[2, 32, 0, 0, 254, 78, 0, 1, 4, 0, 0, 0]);
        assert_eq!(&bytes[12..20], &[8, 0, 1, 0, 10, 42, 0, 7]);
        assert_eq!(netlink::attribute(&bytes[12..], libc::RTA_GATEWAY), Some(&[10, 4, 0, 7][..]));
        let way = read_way(&bytes, route.destination).unwrap();
        assert_eq!((way.interface, way.gateway, way.is_ours), (3, Some(route.next_hop), true));
    }

    #[test]
    fn the_route_of_answers_names_their_source_and_the_gateway_if_there_is_one() {
        let [node, source, gateway] = ["10.4.0.1", "10.42.0.7", "169.254.1.1"].map(|text| text.parse().unwrap());
        let near = answer_body(node, source, &Way { interface: 3, gateway: None, is_ours: false });
        assert_eq!((near[SCOPE], near[8]), (libc::RT_SCOPE_LINK, 0));
        assert_eq!(netlink::attribute(&near[12..], libc::RTA_PREFSRC), Some(&[10, 42, 0, 7][..]));
        let far = answer_body(node, source, &Way { interface: 3, gateway: Some(gateway), is_ours: false });
        assert_eq!((far[SCOPE], far[8]), (libc::RT_SCOPE_UNIVERSE, 4));
        assert_eq!(netlink::attribute(&far[12..], libc::RTA_GATEWAY), Some(&[169, 254, 1, 1][..]));
    }

    #[test]
    fn torn_attributes_end_the_reading() {
        for bytes in [&[][..], &[8], &[8, 0, 1], &[8, 0, 1, 0, 1], &[3, 0, 1, 0], &[0, 0, 0, 0]] {
            assert!(netlink::attributes(bytes).all(|(_, value)| value.is_empty()), "{bytes:?}");
            let route = [&[0; RTMSG], bytes].concat();
            assert!(read_way(&route, [10, 0, 0, 1].into()).is_none(), "{bytes:?}");
        }
    }
}

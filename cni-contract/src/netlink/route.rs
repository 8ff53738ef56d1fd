//! The kernel's route to one address, and a route that gives answers their source address (rtnetlink(7)).

use std::io;
use std::net::IpAddr;

use nix::libc;

use crate::netlink::{self, octets, push_attribute};

/// The kernel's route to an address.
pub struct Route {
    /// Index of the interface.
    pub interface: u32,
    /// Next hop.
    pub gateway: Option<IpAddr>,
    /// Whether the plugin added the route, to that single address; only known for an entry of the routing table.
    pub is_ours: bool,
}

/// Looks up the route to an address. With `RTM_F_FIB_MATCH` it is the matching entry of the routing table, otherwise
/// the resolved route.
///
/// # Errors
/// Returns the kernel's error, or an error if no interface leads there.
pub fn route_to(address: IpAddr, flags: u32) -> io::Result<Route> {
    let mut body = header(address, flags);
    push_attribute(&mut body, libc::RTA_DST, &octets(address));
    let routes = netlink::ask_route(libc::RTM_GETROUTE, 0, &body)?;
    routes
        .first()
        .and_then(|answer| read(answer, address))
        .ok_or_else(|| io::Error::other("no interface leads to the pod's address"))
}

/// Decodes a message about a route.
#[must_use]
pub fn read(answer: &[u8], address: IpAddr) -> Option<Route> {
    let (head, attributes) = answer.split_first_chunk::<RTMSG>()?;
    let interface = netlink::attribute(attributes, libc::RTA_OIF).and_then(|index| index.try_into().ok());
    // rtm_dst_len, rtm_protocol.
    let is_ours = (head[1], head[5]) == (bits(address), PROTOCOL);
    let gateway = netlink::attribute(attributes, libc::RTA_GATEWAY).and_then(netlink::address);
    Some(Route { interface: u32::from_ne_bytes(interface?), gateway, is_ours })
}

/// Lets packets to the node's address `node` leave from `source`, along the path that they take now, in the network
/// namespace of the calling thread: a pod that was asked at its overlay address must answer from there, also where a
/// program lets the kernel choose (UDP).
///
/// # Errors
/// Returns the kernel's error.
pub fn answer_from(node: IpAddr, source: IpAddr) -> io::Result<()> {
    let route = route_to(node, 0)?;
    let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
    netlink::ask_route(libc::RTM_NEWROUTE, flags, &answer_body(node, source, &route)).map(drop)
}

fn answer_body(node: IpAddr, source: IpAddr, route: &Route) -> Vec<u8> {
    let mut body = header(node, if route.gateway.is_some() { ONLINK } else { 0 });
    if route.gateway.is_none() && node.is_ipv4() {
        body[SCOPE] = libc::RT_SCOPE_LINK;
    }
    push_attribute(&mut body, libc::RTA_DST, &octets(node));
    if let Some(gateway) = route.gateway {
        push_attribute(&mut body, libc::RTA_GATEWAY, &octets(gateway));
    }
    push_attribute(&mut body, libc::RTA_OIF, &route.interface.to_ne_bytes());
    push_attribute(&mut body, libc::RTA_PREFSRC, &octets(source));
    body
}

/// Decodes a route, for the fuzzer.
pub(crate) fn fuzz(route: &[u8]) {
    for address in [IpAddr::from([10, 0, 0, 1]), IpAddr::from([0; 16])] {
        let _ = read(route, address);
    }
}

/// struct rtmsg of a route to one address, marked as ours.
#[must_use]
pub fn header(address: IpAddr, flags: u32) -> Vec<u8> {
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
/// RTNH_F_ONLINK of linux/rtnetlink.h: treats the next hop as reachable on the interface regardless of other routes.
pub const ONLINK: u32 = 4;
// Marks our routes in `ip route`; no routing daemon uses this protocol number.
const PROTOCOL: u8 = 78;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_the_machine_itself_is_its_loopback_interface() {
        let route = route_to("127.0.0.1".parse().unwrap(), 0).unwrap();
        assert_eq!((route.interface, route.gateway, route.is_ours), (1, None, false));
    }

    #[test]
    fn the_route_of_answers_names_their_source_and_the_gateway_if_there_is_one() {
        let [node, source, gateway] = ["10.4.0.1", "10.42.0.7", "169.254.1.1"].map(|text| text.parse().unwrap());
        let near = answer_body(node, source, &Route { interface: 3, gateway: None, is_ours: false });
        assert_eq!((near[SCOPE], near[8]), (libc::RT_SCOPE_LINK, 0));
        assert_eq!(netlink::attribute(&near[12..], libc::RTA_PREFSRC), Some(&[10, 42, 0, 7][..]));
        let far = answer_body(node, source, &Route { interface: 3, gateway: Some(gateway), is_ours: false });
        assert_eq!((far[SCOPE], far[8]), (libc::RT_SCOPE_UNIVERSE, 4));
        assert_eq!(netlink::attribute(&far[12..], libc::RTA_GATEWAY), Some(&[169, 254, 1, 1][..]));
    }

    #[test]
    fn torn_attributes_end_the_reading() {
        for bytes in [&[][..], &[8], &[8, 0, 1], &[8, 0, 1, 0, 1], &[3, 0, 1, 0], &[0, 0, 0, 0]] {
            assert!(netlink::attributes(bytes).all(|(_, value)| value.is_empty()), "{bytes:?}");
            let route = [&[0; RTMSG], bytes].concat();
            assert!(read(&route, [10, 0, 0, 1].into()).is_none(), "{bytes:?}");
        }
    }
}

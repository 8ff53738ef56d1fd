//! The node's own way to a pod whose address in Kubernetes is its overlay address: a host route through the pod's
//! interface, so that the kubelet's probes reach it without a tunnel (rtnetlink).

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;

use nix::libc;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
use serde::{Deserialize, Serialize};

/// A route to one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostRoute {
    /// The pod's overlay address.
    pub destination: IpAddr,
    /// Who takes packets for it: the pod's primary address, or the gateway on the way there.
    pub next_hop: IpAddr,
    /// Index of the interface on the node.
    pub interface: u32,
}

/// The node's routes.
pub trait Routes {
    /// A route to `destination` the way packets for `pod` go now.
    ///
    /// # Errors
    /// There is no way to the pod.
    fn like(&self, pod: IpAddr, destination: IpAddr) -> io::Result<HostRoute>;

    /// Makes the route, in place of another one to the same address.
    ///
    /// # Errors
    /// What the kernel says.
    fn add(&self, route: &HostRoute) -> io::Result<()>;

    /// The route to `destination` that a plugin made, if there is one.
    fn ours_to(&self, destination: IpAddr) -> Option<HostRoute>;

    /// Removes the route; that it is gone is no error.
    ///
    /// # Errors
    /// What the kernel says.
    fn remove(&self, route: &HostRoute) -> io::Result<()>;

    /// Whether packets to the destination take this route.
    fn is_used(&self, route: &HostRoute) -> bool;
}

/// The kernel's, in the plugin's own network namespace.
#[derive(Debug)]
pub struct SystemRoutes;

impl Routes for SystemRoutes {
    fn like(&self, pod: IpAddr, destination: IpAddr) -> io::Result<HostRoute> {
        let way = way_to(pod, 0)?;
        Ok(HostRoute { destination, next_hop: way.gateway.unwrap_or(pod), interface: way.interface })
    }

    fn add(&self, route: &HostRoute) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE | libc::NLM_F_ACK;
        ask(&message(libc::RTM_NEWROUTE, flags, route)).map(|_| ())
    }

    fn ours_to(&self, destination: IpAddr) -> Option<HostRoute> {
        let way = way_to(destination, libc::RTM_F_FIB_MATCH).ok().filter(|way| way.is_ours)?;
        Some(HostRoute { destination, next_hop: way.gateway?, interface: way.interface })
    }

    fn remove(&self, route: &HostRoute) -> io::Result<()> {
        match ask(&message(libc::RTM_DELROUTE, libc::NLM_F_ACK, route)) {
            // The route, or its interface, went before us.
            Err(e) if [libc::ESRCH, libc::ENODEV].contains(&e.raw_os_error().unwrap_or_default()) => Ok(()),
            other => other.map(|_| ()),
        }
    }

    fn is_used(&self, route: &HostRoute) -> bool {
        way_to(route.destination, 0)
            .is_ok_and(|way| (way.interface, way.gateway) == (route.interface, Some(route.next_hop)))
    }
}

/// How packets to an address go.
struct Way {
    interface: u32,
    gateway: Option<IpAddr>,
    /// A plugin made this route, to the one address; known only of an entry of the table.
    is_ours: bool,
}

/// With `RTM_F_FIB_MATCH` the entry of the routing table, otherwise what the kernel makes of it.
fn way_to(address: IpAddr, flags: u32) -> io::Result<Way> {
    let mut request = header(libc::RTM_GETROUTE, 0, address, flags);
    attribute(&mut request, libc::RTA_DST, &octets(address));
    let reply = ask(&finished(request))?;
    read_way(&reply, address).ok_or_else(|| io::Error::other("no interface leads to the pod's address"))
}

fn read_way(reply: &[u8], address: IpAddr) -> Option<Way> {
    let (mut interface, mut gateway) = (None, None);
    let (headers, mut rest) = reply.split_at_checked(HEADERS).unwrap_or_default();
    while let Some((kind, value, next)) = next_attribute(rest) {
        match kind {
            libc::RTA_OIF => interface = value.try_into().ok().map(u32::from_ne_bytes),
            libc::RTA_GATEWAY => gateway = address_of(value),
            _ => {}
        }
        rest = next;
    }
    // rtm_dst_len, rtm_protocol.
    let is_ours = (headers.get(17), headers.get(21)) == (Some(&bits(address)), Some(&PROTOCOL));
    Some(Way { interface: interface?, gateway, is_ours })
}

/// Reads an answer to the question for a route, for the fuzzer.
pub(crate) fn fuzz(data: &[u8]) {
    for address in [IpAddr::from([10, 0, 0, 1]), IpAddr::from([0; 16])] {
        let _ = read_way(data, address);
    }
}

fn message(kind: u16, flags: i32, route: &HostRoute) -> Vec<u8> {
    let mut request = header(kind, flags, route.destination, ONLINK);
    attribute(&mut request, libc::RTA_DST, &octets(route.destination));
    attribute(&mut request, libc::RTA_GATEWAY, &octets(route.next_hop));
    attribute(&mut request, libc::RTA_OIF, &route.interface.to_ne_bytes());
    finished(request)
}

// struct nlmsghdr, struct rtmsg.
fn header(kind: u16, flags: i32, address: IpAddr, route_flags: u32) -> Vec<u8> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (table, scope, unicast) = (libc::RT_TABLE_MAIN, libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST);
    let mut bytes = vec![0; 4];
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    bytes.extend([0; 8]);
    bytes.extend([family as u8, bits(address), 0, 0, table, PROTOCOL, scope, unicast]);
    bytes.extend(route_flags.to_ne_bytes());
    bytes
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

fn attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    bytes.extend((4 + value.len() as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

fn finished(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = (bytes.len() as u32).to_ne_bytes();
    bytes[..4].copy_from_slice(&length);
    bytes
}

fn next_attribute(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
    let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?);
    let value = bytes.get(4..length)?;
    Some((kind, value, bytes.get(length.next_multiple_of(4)..).unwrap_or_default()))
}

/// Sends one request and returns the one answer to it.
fn ask(request: &[u8]) -> io::Result<Vec<u8>> {
    let kernel =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, Some(SockProtocol::NetlinkRoute))?;
    send(kernel.as_raw_fd(), request, MsgFlags::empty())?;
    let mut reply = vec![0; 8192];
    let length = recv(kernel.as_raw_fd(), &mut reply, MsgFlags::empty())?;
    reply.truncate(length);
    let kind = reply.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    let code = reply.get(16..20).and_then(|code| code.try_into().ok()).map(i32::from_ne_bytes);
    const ERROR: u16 = libc::NLMSG_ERROR as u16;
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(reply),
        (Some(ERROR), Some(code)) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        (Some(libc::RTM_NEWROUTE), _) => Ok(reply),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is no route")),
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    v4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}

const HEADERS: usize = 16 + 12;
// RTNH_F_ONLINK of linux/rtnetlink.h: the next hop is on the interface, whatever other routes say.
const ONLINK: u32 = 4;
// Tells our routes from others' in `ip route`; no routing daemon uses it.
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
        let bytes = message(libc::RTM_NEWROUTE, libc::NLM_F_ACK, &route);
        assert_eq!(bytes.len(), 28 + 3 * 8);
        assert_eq!(&bytes[16..28], &[2, 32, 0, 0, 254, 78, 0, 1, 4, 0, 0, 0]);
        assert_eq!(&bytes[28..36], &[8, 0, 1, 0, 10, 42, 0, 7]);
        let (kind, value, rest) = next_attribute(&bytes[36..]).unwrap();
        assert_eq!((kind, value, rest.len()), (libc::RTA_GATEWAY, &[10, 4, 0, 7][..], 8));
    }

    #[test]
    fn torn_attributes_end_the_reading() {
        for bytes in [&[][..], &[8], &[8, 0, 1], &[8, 0, 1, 0, 1], &[3, 0, 1, 0], &[0, 0, 0, 0]] {
            assert!(next_attribute(bytes).is_none_or(|(_, value, _)| value.is_empty()), "{bytes:?}");
        }
    }
}

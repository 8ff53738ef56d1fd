//! The few rtnetlink(7) messages that a tun link needs: one change at a time, each acknowledged by the kernel.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ipnet::IpNet;
use nebula_cni_contract::netlink::{self, octets, push_attribute};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, SockProtocol, recv, send};

/// A route via the link, without a gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkRoute {
    /// Destination network.
    pub network: IpNet,
    /// MTU of the route; `None` uses the device's.
    pub mtu: Option<u32>,
    /// Metric; 0 uses the kernel's default.
    pub metric: u32,
    /// Source address. In the main table only for the route to an overlay network that the kernel usually adds by
    /// itself.
    pub source: Option<IpAddr>,
    /// Routing table.
    pub table: u32,
}

/// The main routing table.
pub const MAIN_TABLE: u32 = libc::RT_TABLE_MAIN as u32;

/// Sends one change at a time to the kernel and waits for the acknowledgement. The messages are encoded here, because a
/// complete netlink library would make up a tenth of the program.
pub struct Kernel {
    socket: OwnedFd,
    sequence: u32,
}

impl Kernel {
    pub fn connect() -> io::Result<Self> {
        Ok(Self { socket: netlink::connect(SockProtocol::NetlinkRoute)?, sequence: 0 })
    }

    pub fn change(&mut self, index: u32, attribute: u16, value: u32) -> io::Result<()> {
        let mut body = link_header(index, 0);
        push_attribute(&mut body, attribute, &value.to_ne_bytes());
        self.ask(libc::RTM_NEWLINK, 0, &body)
    }

    pub fn bring_up(&mut self, index: u32) -> io::Result<()> {
        self.ask(libc::RTM_NEWLINK, 0, &link_header(index, libc::IFF_UP as u32))
    }

    pub fn add_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        self.ask(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &address_body(index, address))
    }

    pub fn remove_address(&mut self, index: u32, address: IpNet) -> io::Result<()> {
        self.ask(libc::RTM_DELADDR, 0, &address_body(index, address))
    }

    /// Adds an address unless the link has it. Returns whether it was missing.
    pub fn ensure_address(&mut self, index: u32, address: IpNet) -> io::Result<bool> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        was_missing(self.ask(libc::RTM_NEWADDR, flags, &address_body(index, address)))
    }

    /// Like [`Kernel::add_route`], but only if there is no route to the same network with the same metric, whatever its
    /// device. Returns whether it was missing.
    pub fn ensure_route(&mut self, index: u32, route: &LinkRoute, device_mtu: u32) -> io::Result<bool> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        was_missing(self.ask(libc::RTM_NEWROUTE, flags, &route_body(index, route, device_mtu)))
    }

    /// Adds a route, or replaces the one to the same network with the same metric. `device_mtu` is the MTU of the
    /// device.
    pub fn add_route(&mut self, index: u32, route: &LinkRoute, device_mtu: u32) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        self.ask(libc::RTM_NEWROUTE, flags, &route_body(index, route, device_mtu))
    }

    pub fn remove_route(&mut self, index: u32, route: &LinkRoute) -> io::Result<()> {
        self.ask(libc::RTM_DELROUTE, 0, &route_body(index, &LinkRoute { mtu: None, ..route.clone() }, 0))
    }

    /// Whether the link exists. The kernel answers only after a change in progress is complete.
    pub fn has_link(&mut self, index: u32) -> io::Result<bool> {
        match self.ask(libc::RTM_GETLINK, 0, &link_header(index, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(false),
            found => found.map(|()| true),
        }
    }

    /// Adds an unreachable route (RTN_UNREACHABLE) with the worst metric, so packets to `network` without another route
    /// are rejected.
    pub fn refuse(&mut self, network: IpNet) -> io::Result<()> {
        self.ask(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_REPLACE, &unreachable_body(network))
    }

    fn ask(&mut self, kind: u16, flags: i32, body: &[u8]) -> io::Result<()> {
        self.sequence += 1;
        let mut message = Vec::new();
        netlink::push_message(&mut message, kind, libc::NLM_F_ACK | flags, self.sequence, body);
        send(self.socket.as_raw_fd(), &message, MsgFlags::empty())?;
        let mut answer = [0; 4096];
        loop {
            let len = recv(self.socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
            // Messages about other things may come first.
            if let Some((_, outcome)) = netlink::answers(&answer[..len]).find(|(asked, _)| *asked == self.sequence) {
                return outcome;
            }
        }
    }
}

fn was_missing(outcome: io::Result<()>) -> io::Result<bool> {
    match outcome {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        added => added.map(|()| true),
    }
}

/// State of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkState {
    pub is_up: bool,
    pub mtu: u32,
}

impl LinkState {
    /// Reads the state of a link in the namespace of the calling thread; `None` if there is no such link.
    pub fn read(index: u32) -> io::Result<Option<Self>> {
        match netlink::ask_route(libc::RTM_GETLINK, 0, &link_header(index, 0)) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            answers => Ok(answers?.iter().find_map(|body| Self::parse(body))),
        }
    }

    fn parse(body: &[u8]) -> Option<Self> {
        let (header, attributes) = body.split_first_chunk::<IFINFOMSG>()?;
        let [.., a, b, c, d, _, _, _, _] = *header;
        let is_up = u32::from_ne_bytes([a, b, c, d]) & libc::IFF_UP as u32 != 0;
        let mtu = netlink::attribute(attributes, libc::IFLA_MTU)?.try_into().map(u32::from_ne_bytes).ok()?;
        Some(Self { is_up, mtu })
    }
}

/// struct ifinfomsg; sets the flags in `set`.
fn link_header(index: u32, set: u32) -> Vec<u8> {
    let mut body = vec![libc::AF_UNSPEC as u8, 0, 0, 0];
    for word in [index, set, set] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}

/// struct ifaddrmsg and its attributes.
fn address_body(index: u32, address: IpNet) -> Vec<u8> {
    let (family, flags) = match address {
        IpNet::V4(_) => (libc::AF_INET, 0),
        // No other host can have the same address behind a tun, and duplicate address detection would delay its use by
        // a second.
        IpNet::V6(_) => (libc::AF_INET6, libc::IFA_F_NODAD),
    };
    let mut body = vec![family as u8, address.prefix_len(), flags as u8, libc::RT_SCOPE_UNIVERSE];
    body.extend_from_slice(&index.to_ne_bytes());
    match address {
        IpNet::V4(network) => {
            push_attribute(&mut body, libc::IFA_ADDRESS, &network.addr().octets());
            push_attribute(&mut body, libc::IFA_LOCAL, &network.addr().octets());
            if network.prefix_len() < 31 {
                push_attribute(&mut body, libc::IFA_BROADCAST, &network.broadcast().octets());
            }
        }
        IpNet::V6(network) => {
            push_attribute(&mut body, libc::IFA_ADDRESS, &network.addr().octets());
            push_attribute(&mut body, libc::IFA_LOCAL, &network.addr().octets());
        }
    }
    body
}

/// struct rtmsg and its attributes.
fn route_body(index: u32, route: &LinkRoute, device_mtu: u32) -> Vec<u8> {
    let (family, scope, headers) = match route.network {
        IpNet::V4(_) => (libc::AF_INET, libc::RT_SCOPE_LINK, 40),
        IpNet::V6(_) => (libc::AF_INET6, libc::RT_SCOPE_UNIVERSE, 60),
    };
    let by_kernel = route.source.is_some() && route.table == MAIN_TABLE;
    let protocol = if by_kernel { libc::RTPROT_KERNEL } else { libc::RTPROT_STATIC };
    // The header has one byte for the table; a larger number is an attribute.
    let (table, kind) = (u8::try_from(route.table).unwrap_or(libc::RT_TABLE_UNSPEC), libc::RTN_UNICAST);
    let mut body = vec![family as u8, route.network.prefix_len(), 0, 0, table, protocol, scope, kind, 0, 0, 0, 0];
    push_attribute(&mut body, libc::RTA_DST, &octets(route.network.network()));
    push_attribute(&mut body, libc::RTA_OIF, &index.to_ne_bytes());
    if table == libc::RT_TABLE_UNSPEC {
        push_attribute(&mut body, libc::RTA_TABLE, &route.table.to_ne_bytes());
    }
    if route.metric > 0 {
        push_attribute(&mut body, libc::RTA_PRIORITY, &route.metric.to_ne_bytes());
    }
    if let Some(source) = route.source {
        push_attribute(&mut body, libc::RTA_PREFSRC, &octets(source));
    }
    if let Some(mtu) = route.mtu {
        let mut metrics = Vec::new();
        push_attribute(&mut metrics, RTAX_MTU, &mtu.to_ne_bytes());
        if mtu != device_mtu {
            // Otherwise the kernel would advertise an MSS to peers that fits the device but not the route.
            push_attribute(&mut metrics, RTAX_ADVMSS, &mtu.saturating_sub(headers).to_ne_bytes());
        }
        push_attribute(&mut body, libc::RTA_METRICS, &metrics);
    }
    body
}

/// Like [`route_body`], for an unreachable route.
fn unreachable_body(network: IpNet) -> Vec<u8> {
    let family = if network.addr().is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let (table, protocol) = (libc::RT_TABLE_MAIN, libc::RTPROT_STATIC);
    let (scope, kind) = (libc::RT_SCOPE_UNIVERSE, libc::RTN_UNREACHABLE);
    let mut body = vec![family as u8, network.prefix_len(), 0, 0, table, protocol, scope, kind, 0, 0, 0, 0];
    push_attribute(&mut body, libc::RTA_DST, &octets(network.network()));
    push_attribute(&mut body, libc::RTA_PRIORITY, &u32::MAX.to_ne_bytes());
    body
}

/// Length of struct ifinfomsg.
pub(crate) const IFINFOMSG: usize = 16;
/// Length of struct rtmsg.
pub const RTMSG: usize = 12;
// linux/rtnetlink.h: route metrics.
pub(crate) const RTAX_MTU: u16 = 2;
const RTAX_ADVMSS: u16 = 8;

/// Receives an event when a link is added, removed or changed in the namespace that it was created in.
#[derive(Debug)]
pub struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// Subscribes in the namespace of the calling thread; the result can be used from any thread.
    pub fn new() -> io::Result<Self> {
        netlink::subscribe(libc::RTMGRP_LINK, 0).map(Self)
    }

    /// Whether any event arrived since the last call. Its kind does not matter: the caller checks for itself.
    pub fn changed(&self) -> io::Result<bool> {
        // Longer messages are truncated, which does no harm here.
        let mut message = [0; 64];
        for taken in 0..MAX_EVENTS_PER_READ {
            match recv(self.0.as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
                // ENOBUFS: some of too many events were dropped; that counts as an event as well.
                Ok(_) | Err(Errno::ENOBUFS | Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(taken > 0),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

// Processes in the namespace may cause events faster than they are read.
const MAX_EVENTS_PER_READ: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_the_kernel_reads_them() {
        let v4 = address_body(3, "10.1.2.3/24".parse().unwrap());
        assert_eq!(v4[..4], [2, 24, 0, 0]);
        assert_eq!(v4[8..], [8, 0, 1, 0, 10, 1, 2, 3, 8, 0, 2, 0, 10, 1, 2, 3, 8, 0, 4, 0, 10, 1, 2, 255]);
        assert_eq!(address_body(3, "10.1.2.3/32".parse().unwrap()).len(), 24, "one host has no broadcast address");
        let v6 = address_body(3, "fd00::1/64".parse().unwrap());
        assert_eq!((v6[..4].to_vec(), v6.len()), (vec![10, 64, 2, 0], 48));
    }

    #[test]
    fn routes_are_written_as_the_kernel_reads_them() {
        let route = |network: &str| LinkRoute {
            network: network.parse().unwrap(),
            mtu: None,
            metric: 0,
            source: None,
            table: MAIN_TABLE,
        };
        let v4 = route_body(3, &route("10.1.2.3/16"), 1300);
        assert_eq!(v4[..8], [2, 16, 0, 0, 254, 4, 253, 1]);
        assert_eq!(v4[12..20], [8, 0, 1, 0, 10, 1, 0, 0]);
        assert_eq!(v4[20..24], [8, 0, 4, 0]);
        assert_eq!(route_body(3, &route("fd00::/8"), 1300).len(), 40);
        let full = LinkRoute { mtu: Some(1000), metric: 7, source: Some([10, 1, 0, 9].into()), ..route("10.1.0.0/16") };
        let full = route_body(3, &full, 1300);
        assert_eq!(full[5], 2, "by the kernel");
        assert_eq!(full[28..36], [8, 0, 6, 0, 7, 0, 0, 0]);
        assert_eq!(full[36..44], [8, 0, 7, 0, 10, 1, 0, 9]);
        assert_eq!(full[44..], [20, 0, 8, 0, 8, 0, 2, 0, 232, 3, 0, 0, 8, 0, 8, 0, 192, 3, 0, 0]);
        let source = Some([10, 244, 1, 7].into());
        let own_table = route_body(3, &LinkRoute { table: 20_034, source, ..route("10.96.0.0/12") }, 1300);
        assert_eq!(own_table[4..6], [0, 4], "its table is an attribute, and no kernel would have made it");
        assert_eq!(own_table[28..36], [8, 0, 15, 0, 66, 78, 0, 0]);
    }

    #[test]
    fn a_route_that_leads_nowhere_names_no_device() {
        let route = unreachable_body("10.1.2.3/16".parse().unwrap());
        assert_eq!(route[..8], [2, 16, 0, 0, 254, 4, 0, 7]);
        assert_eq!(route[12..], [8, 0, 1, 0, 10, 1, 0, 0, 8, 0, 6, 0, 255, 255, 255, 255]);
    }

    #[test]
    fn a_link_is_there_or_not() {
        let mut kernel = Kernel::connect().unwrap();
        assert!(kernel.has_link(nix::net::if_::if_nametoindex("lo").unwrap()).unwrap());
        assert!(!kernel.has_link(u32::MAX >> 1).unwrap());
    }

    #[test]
    fn the_state_of_a_link_is_read() {
        let state = LinkState::read(nix::net::if_::if_nametoindex("lo").unwrap()).unwrap();
        assert!(state.is_some_and(|state| state.mtu >= 1500), "{state:?}");
        assert_eq!(LinkState::read(u32::MAX >> 1).unwrap(), None);
        let mut body = link_header(3, libc::IFF_UP as u32);
        push_attribute(&mut body, libc::IFLA_MTU, &1300_u32.to_ne_bytes());
        assert_eq!(LinkState::parse(&body), Some(LinkState { is_up: true, mtu: 1300 }));
        assert_eq!(LinkState::parse(&body[..20]), None);
    }

    #[test]
    fn a_refusal_of_the_kernel_comes_back_as_its_error() {
        let mut kernel = Kernel::connect().unwrap();
        let error = kernel.change(u32::MAX >> 1, libc::IFLA_MTU, 1300).unwrap_err();
        assert!(matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EPERM)), "{error}");
    }
}

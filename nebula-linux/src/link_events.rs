//! Link events from rtnetlink(7): changes to links, their addresses and their routes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use ipnet::IpNet;
use nebula_cni_contract::netlink::{self, Message};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};

use crate::rtnetlink::{IFINFOMSG, RTMSG};

/// Receives events from the network namespace that it was created in.
#[derive(Debug)]
pub struct LinkEvents(OwnedFd);

/// An event, and the port id of the netlink socket that caused it (0 if unknown).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkEvent {
    pub news: News,
    pub port: u32,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// A link was added or changed.
    Link(u32),
    /// A link was removed from the namespace.
    LinkGone(u32),
    /// This link lost an address.
    AddressGone(u32),
    /// The main table lost a route to this network, which used this link.
    RouteGone(IpNet, u32),
    /// A route in the main table was replaced by one to the same network that uses this link.
    RouteReplaced(IpNet, u32),
    /// The kernel dropped events, so anything may have changed.
    Lost,
}

impl LinkEvents {
    /// Subscribes in the namespace of the calling thread; the result can be used from any thread.
    pub fn subscribe() -> io::Result<Self> {
        let addresses = libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let routes = libc::RTMGRP_IPV4_ROUTE | libc::RTMGRP_IPV6_ROUTE;
        netlink::subscribe(libc::RTMGRP_LINK | addresses | routes, 0).map(Self)
    }

    /// Passes on pending events, at most a batch: call it again while the descriptor is readable.
    pub fn read(&self, mut each: impl FnMut(LinkEvent)) -> io::Result<()> {
        let mut buffer = vec![0; 32 << 10];
        for _ in 0..MAX_READS {
            match recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(len) => netlink::messages(&buffer[..len]).filter_map(parse).for_each(&mut each),
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => each(LinkEvent { news: News::Lost, port: 0 }),
                Err(Errno::EAGAIN) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl AsFd for LinkEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn parse(message: Message<'_>) -> Option<LinkEvent> {
    let index = || {
        // struct ifinfomsg and struct ifaddrmsg have the index at the same offset. Bridges report their ports with the
        // same message type.
        let [family, _, _, _, a, b, c, d] = *message.body.first_chunk()?;
        (i32::from(family) != libc::AF_BRIDGE).then_some(u32::from_ne_bytes([a, b, c, d]))
    };
    let news = match message.kind {
        libc::RTM_NEWLINK if message.body.len() >= IFINFOMSG => News::Link(index()?),
        libc::RTM_DELLINK => News::LinkGone(index()?),
        libc::RTM_DELADDR => News::AddressGone(index()?),
        libc::RTM_DELROUTE => route(message.body).map(|(network, device)| News::RouteGone(network, device))?,
        libc::RTM_NEWROUTE if i32::from(message.flags) & libc::NLM_F_REPLACE != 0 => {
            route(message.body).map(|(network, device)| News::RouteReplaced(network, device))?
        }
        _ => return None,
    };
    Some(LinkEvent { news, port: message.port })
}

/// Destination and device (0 if none or several) of a unicast route in the main table.
fn route(body: &[u8]) -> Option<(IpNet, u32)> {
    let (head, attributes) = body.split_first_chunk::<RTMSG>()?;
    let [family, prefix_len, _, _, table, ..] = *head;
    if table != libc::RT_TABLE_MAIN {
        return None;
    }
    let (mut destination, mut device) = (None, 0);
    for (kind, value) in netlink::attributes(attributes) {
        match kind {
            libc::RTA_DST => destination = netlink::address(value),
            libc::RTA_OIF => device = value.try_into().map_or(0, u32::from_ne_bytes),
            _ => {}
        }
    }
    let unspecified = if i32::from(family) == libc::AF_INET6 { [0; 16].into() } else { [0; 4].into() };
    let network = IpNet::new(destination.unwrap_or(unspecified), prefix_len).ok()?;
    Some((network.trunc(), device))
}

// Others may cause events faster than they are read; the limit lets the caller check for signals in between.
const MAX_READS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: u16 = libc::RTM_DELROUTE;

    fn told(kind: u16, flags: i32, body: &[u8]) -> Option<News> {
        let mut bytes = Vec::new();
        netlink::push_message(&mut bytes, kind, flags, 0, body);
        netlink::messages(&bytes).find_map(parse).map(|event| event.news)
    }

    fn route_to(table: u8, destination: &[u8], device: u32) -> Vec<u8> {
        let mut body = vec![2, 16, 0, 0, table, 4, 0, 1, 0, 0, 0, 0];
        netlink::push_attribute(&mut body, libc::RTA_DST, destination);
        netlink::push_attribute(&mut body, libc::RTA_OIF, &device.to_ne_bytes());
        body
    }

    #[test]
    fn what_links_lose_is_told_by_their_number() {
        let network = "10.1.0.0/16".parse().unwrap();
        assert_eq!(told(EVENT, 0, &route_to(254, &[10, 1, 0, 0], 7)), Some(News::RouteGone(network, 7)));
        assert_eq!(told(EVENT, 0, &route_to(255, &[10, 1, 0, 0], 7)), None, "another table");
        assert_eq!(told(EVENT, 0, &route_to(254, &[10, 1], 7)[..11]), None, "cut short");
        let replaced = told(libc::RTM_NEWROUTE, libc::NLM_F_REPLACE, &route_to(254, &[10, 1, 0, 0], 8));
        assert_eq!(replaced, Some(News::RouteReplaced(network, 8)));
        assert_eq!(told(libc::RTM_NEWROUTE, 0, &route_to(254, &[10, 1, 0, 0], 8)), None);
        let link = |family: u8| [vec![family, 0, 0, 0, 7, 0, 0, 0], vec![0; 8]].concat();
        assert_eq!(told(libc::RTM_DELADDR, 0, &link(2)[..8]), Some(News::AddressGone(7)));
        assert_eq!(told(libc::RTM_DELLINK, 0, &link(0)), Some(News::LinkGone(7)));
        assert_eq!(told(libc::RTM_DELLINK, 0, &link(7)), None, "a port left its bridge");
        assert_eq!(told(libc::RTM_NEWLINK, 0, &link(0)), Some(News::Link(7)));
        assert_eq!(told(libc::RTM_NEWADDR, 0, &link(2)[..8]), None);
    }

    #[test]
    fn damaged_messages_are_passed_over() {
        let mut good = Vec::new();
        netlink::push_message(&mut good, EVENT, 0, 0, &route_to(254, &[10, 1, 0, 0], 7));
        for len in 0..good.len() {
            assert_eq!(netlink::messages(&good[..len]).find_map(parse), None);
        }
        for at in 0..good.len() {
            for value in [0, 1, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                assert!(netlink::messages(&bad).filter_map(parse).count() <= 1);
            }
        }
    }
}

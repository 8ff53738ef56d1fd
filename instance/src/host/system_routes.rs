//! Follows the kernel's routing table: routes via a gateway inside the overlay become subnet routes.

use std::io;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use ipnet::IpNet;
use nebula_cni_plugin::netlink::{self, Message};
use nebula_core::config::Gateway;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv, send};

use crate::host::subnets::Subnets;
use crate::linux::next_hop::NextHop;
use crate::linux::rtnetlink::RTMSG;

/// What a route must lead to in order to be followed.
#[derive(Debug, Clone)]
pub(crate) struct Overlay {
    /// This node's overlay networks.
    pub(crate) networks: Vec<IpNet>,
    /// Interface index of the device.
    pub(crate) device: u32,
}

/// Starts to follow existing routes and all later changes, in the network namespace of the calling thread. `buffer` is
/// the size in bytes of the receive buffer for pending events; 0 keeps the system's default.
///
/// # Errors
/// Returns an error if no netlink socket can be opened or no thread started.
pub(crate) fn follow(overlay: Overlay, buffer: usize, subnets: Arc<Subnets>) -> io::Result<()> {
    let socket = subscribe(buffer)?;
    std::thread::Builder::new().name("system-routes".to_owned()).spawn(move || listen(&socket, &overlay, &subnets))?;
    Ok(())
}

/// Opens a socket that receives all existing routes, as if just added, and then every change.
fn subscribe(buffer: usize) -> io::Result<OwnedFd> {
    let socket = netlink::subscribe(libc::RTMGRP_IPV4_ROUTE | libc::RTMGRP_IPV6_ROUTE, buffer)?;
    // Requested after the subscription, so that a route added meanwhile arrives twice rather than not at all.
    let mut request = Vec::new();
    // All address families and tables.
    netlink::push_message(&mut request, libc::RTM_GETROUTE, libc::NLM_F_DUMP, 0, &[0; RTMSG]);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    Ok(socket)
}

fn listen(socket: &OwnedFd, overlay: &Overlay, subnets: &Subnets) {
    let mut buffer = vec![0; 64 << 10];
    let mut news = Vec::new();
    loop {
        // A routing daemon changes many routes at once, so pending events are handled as one batch.
        let flags = if news.is_empty() { MsgFlags::empty() } else { MsgFlags::MSG_DONTWAIT };
        let more_may_wait = match recv(socket.as_raw_fd(), &mut buffer, flags) {
            Ok(len) => {
                news.extend(changes(&buffer[..len], overlay));
                news.len() < MAX_TOGETHER
            }
            Err(Errno::EAGAIN) => false,
            Err(Errno::EINTR) => true,
            Err(Errno::ENOBUFS) => {
                tracing::error!("News of system routes were lost: raise tun.use_system_route_table_buffer_size");
                true
            }
            Err(error) => {
                tracing::error!(%error, "System routes are no longer followed");
                return;
            }
        };
        if !more_may_wait && !news.is_empty() {
            tracing::info!(changes = news.len(), "System routes changed");
            subnets.learn(news.drain(..).map(|Change { network, gateways }| (network, gateways)));
        }
    }
}

/// A changed route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    network: IpNet,
    /// Empty: the route is gone.
    gateways: Vec<Gateway>,
}

/// Parses the route changes in one datagram from the kernel.
pub(crate) fn changes(datagram: &[u8], overlay: &Overlay) -> Vec<Change> {
    netlink::messages(datagram).filter_map(|message| change(message, overlay)).collect()
}

fn change(message: Message<'_>, overlay: &Overlay) -> Option<Change> {
    let replaces = i32::from(message.flags) & libc::NLM_F_REPLACE != 0;
    let (route, attributes) = message.body.split_first_chunk::<RTMSG>()?;
    let is_v6 = match i32::from(route[0]) {
        libc::AF_INET => false,
        libc::AF_INET6 => true,
        _ => return None,
    };
    // Only unicast routes have gateways.
    if route[7] != libc::RTN_UNICAST {
        return None;
    }
    let unspecified = if is_v6 { IpAddr::from([0; 16]) } else { IpAddr::from([0; 4]) };
    let destination = match netlink::attribute(attributes, libc::RTA_DST) {
        Some(value) => netlink::address(value)?,
        None => unspecified,
    };
    let network = IpNet::new(destination, route[1]).ok()?.trunc();
    let hops = NextHop::of_route(attributes);
    let gateways: Vec<_> = hops.iter().filter_map(|hop| gateway_in(hop, overlay)).collect();
    match message.kind {
        libc::RTM_NEWROUTE if !gateways.is_empty() || replaces => Some(Change { network, gateways }),
        libc::RTM_DELROUTE if !gateways.is_empty() => Some(Change { network, gateways: Vec::new() }),
        _ => None,
    }
}

/// The gateway of a next hop that leads into the overlay.
fn gateway_in(hop: &NextHop, overlay: &Overlay) -> Option<Gateway> {
    let address = hop.gateway.filter(|_| hop.device == overlay.device)?;
    let is_inside = overlay.networks.iter().any(|network| network.contains(&address));
    is_inside.then_some(Gateway::new(address).weighing(NonZeroU32::MIN.saturating_add(hop.weight)))
}

const MAX_TOGETHER: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        netlink::push_attribute(&mut bytes, kind, value);
        bytes
    }

    fn message(kind: u16, flags: i32, prefix_len: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut body = vec![2, prefix_len, 0, 0, 254, 4, 0, 1, 0, 0, 0, 0];
        body.extend(attributes.concat());
        let mut bytes = Vec::new();
        netlink::push_message(&mut bytes, kind, flags, 0, &body);
        bytes
    }

    fn overlay() -> Overlay {
        Overlay { networks: vec!["10.1.0.1/16".parse().unwrap(), "fd00::1/64".parse().unwrap()], device: 7 }
    }

    fn gateway(address: &str, weight: u32) -> Gateway {
        Gateway::new(address.parse().unwrap()).weighing(NonZeroU32::new(weight).unwrap())
    }

    const NEW: u16 = libc::RTM_NEWROUTE;
    const GONE: u16 = libc::RTM_DELROUTE;

    #[test]
    fn a_route_by_a_gateway_in_the_overlay_is_learnt_and_forgotten() {
        let parts = |gateway: [u8; 4], device: u32| {
            [attribute(1, &[192, 168, 7, 0]), attribute(5, &gateway), attribute(4, &device.to_ne_bytes())]
        };
        let network = "192.168.7.0/24".parse().unwrap();
        let mut datagram = message(NEW, 0, 24, &parts([10, 1, 0, 9], 7));
        datagram.extend(message(GONE, 0, 24, &parts([10, 1, 0, 9], 7)));
        assert_eq!(
            changes(&datagram, &overlay()),
            [Change { network, gateways: vec![gateway("10.1.0.9", 1)] }, Change { network, gateways: Vec::new() }]
        );
        assert_eq!(changes(&message(NEW, 0, 24, &parts([10, 2, 0, 9], 7)), &overlay()), [], "gateway elsewhere");
        assert_eq!(changes(&message(NEW, 0, 24, &parts([10, 1, 0, 9], 8)), &overlay()), [], "another device");
        let replaced = message(NEW, libc::NLM_F_REPLACE, 24, &parts([10, 2, 0, 9], 8));
        assert_eq!(changes(&replaced, &overlay()), [Change { network, gateways: Vec::new() }]);
    }

    #[test]
    fn several_next_hops_keep_their_weights_and_those_elsewhere_are_left_out() {
        let hop = |weight: u8, device: u8, gateway: [u8; 4]| {
            let attribute = attribute(5, &gateway);
            let mut bytes = ((8 + attribute.len()) as u16).to_ne_bytes().to_vec();
            bytes.extend([0, weight - 1]);
            bytes.extend(u32::from(device).to_ne_bytes());
            bytes.extend(attribute);
            bytes
        };
        let hops = [hop(10, 7, [10, 1, 0, 9]), hop(1, 7, [10, 1, 0, 8]), hop(5, 3, [10, 1, 0, 7])].concat();
        let datagram = message(NEW, 0, 0, &[attribute(9, &hops)]);
        let gateways = vec![gateway("10.1.0.9", 10), gateway("10.1.0.8", 1)];
        assert_eq!(changes(&datagram, &overlay()), [Change { network: "0.0.0.0/0".parse().unwrap(), gateways }]);
    }

    #[test]
    fn a_gateway_of_the_other_family_counts() {
        let via = [&[10, 0][..], &"fd00::9".parse::<std::net::Ipv6Addr>().unwrap().octets()].concat();
        let parts = [attribute(1, &[192, 168, 7, 0]), attribute(18, &via), attribute(4, &7_u32.to_ne_bytes())];
        let found = changes(&message(NEW, 0, 24, &parts), &overlay());
        assert_eq!(found[0].gateways, [gateway("fd00::9", 1)]);
    }

    #[test]
    #[ignore = "needs root: makes a network namespace"]
    fn routes_that_are_there_already_are_learnt_like_new_ones() {
        let ip = |arguments: &str| {
            let status = std::process::Command::new("ip").args(arguments.split(' ')).status();
            assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
        };
        // On a separate thread, so that the rest of the process stays in its namespace.
        let found = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a network namespace");
            ip("link add neb7 type veth peer name neb8");
            ip("link set neb8 up");
            ip("addr add 10.1.0.1/16 dev neb7");
            ip("addr add fd00::1/64 dev neb7 nodad");
            ip("link set neb7 up");
            ip("route add 192.168.7.0/24 via 10.1.0.9 dev neb7");
            ip("route add 192.168.9.0/24 dev neb7");
            ip("route add 2001:db8:7::/48 via fd00::9 dev neb7");
            ip("route add 192.168.8.0/24 nexthop via 10.1.0.9 dev neb7 weight 3 nexthop via 10.1.0.8 dev neb7");
            let device = nix::net::if_::if_nametoindex("neb7").unwrap();
            let socket = subscribe(0).unwrap();
            let (overlay, mut found, mut buffer) = (Overlay { device, ..overlay() }, Vec::new(), vec![0; 64 << 10]);
            let is_done = |message: Message<'_>| i32::from(message.kind) == libc::NLMSG_DONE;
            loop {
                let len = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()).unwrap();
                found.extend(changes(&buffer[..len], &overlay));
                if netlink::messages(&buffer[..len]).any(is_done) {
                    return found;
                }
            }
        });
        let mut found = found.join().unwrap();
        found.sort_by_key(|change| change.network);
        let change = |network: &str, gateways| Change { network: network.parse().unwrap(), gateways };
        assert_eq!(
            found,
            [
                change("192.168.7.0/24", vec![gateway("10.1.0.9", 1)]),
                change("192.168.8.0/24", vec![gateway("10.1.0.9", 3), gateway("10.1.0.8", 1)]),
                change("2001:db8:7::/48", vec![gateway("fd00::9", 1)]),
            ]
        );
    }

    #[test]
    fn cut_and_contradictory_messages_are_passed_over() {
        let parts = [attribute(1, &[192, 168, 7, 0]), attribute(5, &[10, 1, 0, 9]), attribute(4, &7_u32.to_ne_bytes())];
        let good = message(NEW, 0, 24, &parts);
        for len in 0..good.len() {
            assert_eq!(changes(&good[..len], &overlay()), []);
        }
        for at in 0..good.len() {
            for value in [0, 1, 0xff] {
                let mut bad = good.clone();
                bad[at] = value;
                assert!(changes(&bad, &overlay()).len() <= 1);
            }
        }
    }
}

//! Follows the kernel's routing table: routes via a gateway inside the overlay become subnet routes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use ipnet::IpNet;
use nebula_cni_contract::netlink::{self, Message};
use nebula_core::config::Gateway;
use nebula_linux::next_hop::NextHop;
use nebula_linux::rtnetlink::RTMSG;
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, SockProtocol, recv, send};

use crate::host::subnets::Subnets;

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
    ask_for_all(&socket)?;
    Ok(socket)
}

/// Asks for the routes of all address families and tables.
fn ask_for_all(socket: &OwnedFd) -> io::Result<()> {
    let mut request = Vec::new();
    netlink::push_message(&mut request, libc::RTM_GETROUTE, libc::NLM_F_DUMP, 0, &[0; RTMSG]);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    Ok(())
}

fn listen(socket: &OwnedFd, overlay: &Overlay, subnets: &Subnets) {
    let mut buffer = vec![0; 64 << 10];
    let mut news = Vec::new();
    let mut are_lost = false;
    loop {
        // A routing daemon changes many routes at once, so pending events are handled as one batch.
        let flags = if news.is_empty() && !are_lost { MsgFlags::empty() } else { MsgFlags::MSG_DONTWAIT };
        let more_may_wait = match recv(socket.as_raw_fd(), &mut buffer, flags) {
            Ok(len) => {
                news.extend(changes(&buffer[..len], overlay));
                news.len() < MAX_TOGETHER
            }
            Err(Errno::EAGAIN) => false,
            Err(Errno::EINTR) => true,
            Err(Errno::ENOBUFS) => {
                tracing::error!("News of system routes were lost: raise tun.use_system_route_table_buffer_size");
                are_lost = true;
                true
            }
            Err(error) => {
                tracing::error!(%error, "System routes are no longer followed");
                return;
            }
        };
        if !more_may_wait && (are_lost || !news.is_empty()) {
            tracing::info!(changes = news.len(), "System routes changed");
            let needs_all = are_lost || !is_whole_truth(&news, subnets);
            let news = news.drain(..).map(|Change { network, gateways, .. }| (network, gateways));
            are_lost = false;
            match needs_all.then(|| existing(overlay)) {
                None => subnets.learn(news),
                Some(Ok(Some(routes))) => subnets.replace_learnt(best(routes)),
                // They change too fast: the next look comes with the next news, or at once.
                Some(Ok(None)) => are_lost = true,
                Some(Err(error)) => {
                    tracing::error!(%error, "The kernel does not tell its routes; what is known of them may be wrong");
                    subnets.learn(news);
                }
            }
        }
    }
}

/// Whether these changes say all about their networks. A network may have several routes: one that is gone, or one
/// more, does not say which of them the kernel uses.
fn is_whole_truth(news: &[Change], subnets: &Subnets) -> bool {
    let mut seen = BTreeSet::new();
    news.iter()
        .all(|change| !change.gateways.is_empty() && !subnets.has_learnt(change.network) && seen.insert(change.network))
}

/// Asks for all routes that lead to the overlay; `None` if changes interrupted each answer.
fn existing(overlay: &Overlay) -> io::Result<Option<Vec<Change>>> {
    (0..MAX_DUMPS).find_map(|_| dump(overlay).transpose()).transpose()
}

/// One dump; `None` if a change interrupted it.
fn dump(overlay: &Overlay) -> io::Result<Option<Vec<Change>>> {
    let socket = netlink::connect(SockProtocol::NetlinkRoute)?;
    ask_for_all(&socket)?;
    let (mut found, mut buffer, mut is_interrupted) = (Vec::new(), vec![0; 64 << 10], false);
    loop {
        let len = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        for message in netlink::messages(&buffer[..len]) {
            is_interrupted |= i32::from(message.flags) & DUMP_INTERRUPTED != 0;
            match i32::from(message.kind) {
                libc::NLMSG_DONE => return Ok((!is_interrupted).then_some(found)),
                libc::NLMSG_ERROR => {
                    let code = message.body.first_chunk().map_or(0, |code| i32::from_ne_bytes(*code));
                    return Err(io::Error::from_raw_os_error(code.saturating_neg()));
                }
                _ => found.extend(change(message, overlay)),
            }
        }
    }
}

/// The gateways of the route with the lowest metric to each network, which is the one that the kernel uses.
fn best(mut routes: Vec<Change>) -> BTreeMap<IpNet, Vec<Gateway>> {
    routes.sort_by_key(|route| route.metric);
    let mut best = BTreeMap::new();
    for Change { network, gateways, .. } in routes {
        best.entry(network).or_insert(gateways);
    }
    best
}

/// A changed route.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Change {
    network: IpNet,
    /// Empty: the route is gone.
    gateways: Vec<Gateway>,
    metric: u32,
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
    let metric = netlink::attribute(attributes, libc::RTA_PRIORITY).and_then(|value| value.try_into().ok());
    let metric = metric.map_or(0, u32::from_ne_bytes);
    let hops = NextHop::of_route(attributes);
    let gateways: Vec<_> = hops.iter().filter_map(|hop| gateway_in(hop, overlay)).collect();
    match message.kind {
        libc::RTM_NEWROUTE if !gateways.is_empty() || replaces => Some(Change { network, gateways, metric }),
        libc::RTM_DELROUTE if !gateways.is_empty() => Some(Change { network, gateways: Vec::new(), metric }),
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
// linux/netlink.h: NLM_F_DUMP_INTR.
const DUMP_INTERRUPTED: i32 = 0x10;
// A routing daemon at work may interrupt each of them.
const MAX_DUMPS: usize = 3;

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

    fn to(network: IpNet, gateways: Vec<Gateway>) -> Change {
        Change { network, gateways, metric: 0 }
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
            [to(network, vec![gateway("10.1.0.9", 1)]), to(network, Vec::new())]
        );
        assert_eq!(changes(&message(NEW, 0, 24, &parts([10, 2, 0, 9], 7)), &overlay()), [], "gateway elsewhere");
        assert_eq!(changes(&message(NEW, 0, 24, &parts([10, 1, 0, 9], 8)), &overlay()), [], "another device");
        let replaced = message(NEW, libc::NLM_F_REPLACE, 24, &parts([10, 2, 0, 9], 8));
        assert_eq!(changes(&replaced, &overlay()), [to(network, Vec::new())]);
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
        assert_eq!(changes(&datagram, &overlay()), [to("0.0.0.0/0".parse().unwrap(), gateways)]);
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
        let change = |network: &str, gateways| to(network.parse().unwrap(), gateways);
        assert_eq!(
            found,
            [
                change("192.168.7.0/24", vec![gateway("10.1.0.9", 1)]),
                change("192.168.8.0/24", vec![gateway("10.1.0.9", 3), gateway("10.1.0.8", 1)]),
                Change { metric: 1024, ..change("2001:db8:7::/48", vec![gateway("fd00::9", 1)]) },
            ]
        );
    }

    #[test]
    #[ignore = "needs root: makes a network namespace"]
    fn of_two_routes_to_a_network_the_one_with_the_lower_metric_counts_and_the_other_stays_when_it_is_gone() {
        let ip = |arguments: &str| {
            let status = std::process::Command::new("ip").args(arguments.split(' ')).status();
            assert!(status.is_ok_and(|status| status.success()), "ip {arguments}");
        };
        let (sender, receiver) = std::sync::mpsc::channel();
        let script = move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).expect("a network namespace");
            for line in [
                "link add neb7 type veth peer name neb8",
                "link set neb8 up",
                "addr add 10.1.0.1/16 dev neb7",
                "link set neb7 up",
                "route add 192.168.7.0/24 via 10.1.0.9 dev neb7 metric 10",
                "route add 192.168.7.0/24 via 10.1.0.8 dev neb7 metric 20",
            ] {
                ip(line);
            }
            let device = nix::net::if_::if_nametoindex("neb7").unwrap();
            let subnets = Arc::new(Subnets::telling(move |all| drop(sender.send(all))));
            follow(Overlay { device, ..overlay() }, 0, subnets).unwrap();
            let mut seen = Vec::new();
            for (line, expected) in [
                ("route show", Some("10.1.0.9")),
                ("route del 192.168.7.0/24 via 10.1.0.9 metric 10", Some("10.1.0.8")),
                ("route add 192.168.7.0/24 via 10.1.0.7 dev neb7 metric 30", Some("10.1.0.8")),
                ("route add 192.168.7.0/24 via 10.1.0.6 dev neb7 metric 5", Some("10.1.0.6")),
                ("route del 192.168.7.0/24 via 10.1.0.8 metric 20", Some("10.1.0.6")),
                ("route del 192.168.7.0/24 via 10.1.0.6 metric 5", Some("10.1.0.7")),
                ("route del 192.168.7.0/24 via 10.1.0.7 metric 30", None),
            ] {
                ip(line);
                // What changes nothing is not told.
                let mut last = seen.last().cloned().flatten();
                while let Ok(all) = receiver.recv_timeout(std::time::Duration::from_millis(300)) {
                    let all: Vec<nebula_core::config::SubnetRoute> = all;
                    last = all.first().map(|route| route.gateways[0].address.to_string());
                }
                assert_eq!(last.as_deref(), expected, "after ip {line}");
                seen.push(last);
            }
        };
        std::thread::spawn(script).join().unwrap();
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

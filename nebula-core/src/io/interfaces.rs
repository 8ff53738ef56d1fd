//! Addresses of this host's interfaces at which a peer might reach it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::{AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket};

use crate::lighthouse::LocalAddress;

/// Lists the addresses of the interfaces at intervals and soon after a change, and reports when they changed.
#[derive(Debug)]
pub(super) struct InterfaceWatch {
    except: Option<String>,
    interval: Duration,
    next: Option<Instant>,
    /// Time of the last look.
    looked: Option<Instant>,
    /// A change was noticed since the last look, and `next` is soon.
    noticed: bool,
    last: Vec<LocalAddress>,
    /// The links that had such an address at the last look, whether or not they were up.
    links: BTreeSet<u32>,
    // None: not listening for changes, so every look lists the addresses.
    changes: Option<Changes>,
}

impl InterfaceWatch {
    /// Looks once per `interval` and after changes, and skips the interface `except`.
    pub(super) fn new(except: Option<String>, interval: Duration) -> Self {
        Self {
            except,
            interval,
            next: None,
            looked: None,
            noticed: false,
            last: Vec::new(),
            links: BTreeSet::new(),
            changes: None,
        }
    }

    /// Becomes readable when something changed; then call [`InterfaceWatch::notice`]. `None`: there is no need to wait
    /// for changes.
    pub(super) fn changes(&self) -> Option<BorrowedFd<'_>> {
        self.changes.as_ref().filter(|_| !self.noticed).map(|changes| changes.socket.as_fd())
    }

    /// Records a change: call [`InterfaceWatch::look`] when [`InterfaceWatch::due`] says so.
    pub(super) fn notice(&mut self, now: Instant) {
        let soon = now + SETTLE;
        self.next = Some(self.looked.map_or(soon, |looked| soon.max(looked + MIN_INTERVAL)));
        self.noticed = true;
    }

    /// When to look because of a noticed change.
    pub(super) fn due(&self) -> Option<Instant> {
        self.next.filter(|_| self.noticed)
    }

    /// Lists the addresses if it is time to and something may have changed. The inner value is `Some` if they differ
    /// from the previous ones.
    #[allow(clippy::option_option, reason = "the outer one says whether they were listed")]
    pub(super) fn look(&mut self, now: Instant) -> Option<Option<Vec<LocalAddress>>> {
        if self.next.is_some_and(|next| now < next) {
            return None;
        }
        self.next = Some(now + self.interval);
        self.looked = Some(now);
        self.noticed = false;
        match &self.changes {
            Some(changes) if !changes.any(&self.links) => return None,
            Some(_) => {}
            // Listen before the look, so that no change is missed in between.
            None => self.changes = Changes::listen().ok(),
        }
        match Listing::read(self.except.as_deref()) {
            Ok(listing) => {
                self.links = listing.links;
                let is_news = listing.addresses != self.last;
                Some(is_news.then(|| self.last.clone_from(&listing.addresses)).map(|()| listing.addresses))
            }
            Err(errno) => {
                tracing::warn!(%errno, "cannot list the interface addresses");
                self.changes = None;
                Some(None)
            }
        }
    }
}

/// What the interfaces in the network namespace of the calling thread have.
#[derive(Debug, Default)]
struct Listing {
    /// Addresses of interfaces that are up, sorted.
    addresses: Vec<LocalAddress>,
    /// Links that have such an address, also those that are down.
    links: BTreeSet<u32>,
}

impl Listing {
    /// Lists all but the interface `except`.
    fn read(except: Option<&str>) -> Result<Self, Errno> {
        let mut listing = Self::default();
        let (mut indices, mut names) = (BTreeMap::new(), BTreeSet::new());
        // The kernel's order varies, and a different order is not a change.
        let mut addresses = BTreeSet::new();
        for entry in getifaddrs()? {
            let Some(address) = entry.address else { continue };
            if let Some(index) = address.as_link_addr().and_then(|link| u32::try_from(link.ifindex()).ok()) {
                indices.insert(entry.interface_name, index);
                continue;
            }
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            let Some(address) = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()))) else {
                continue;
            };
            if !is_reachable(&address) || Some(entry.interface_name.as_str()) == except {
                continue;
            }
            names.insert(entry.interface_name.clone());
            if entry.flags.contains(InterfaceFlags::IFF_UP) {
                addresses.insert(LocalAddress { address, interface: entry.interface_name });
            }
        }
        listing.links.extend(names.iter().filter_map(|name| indices.get(name)));
        listing.addresses.extend(addresses);
        Ok(listing)
    }
}

/// Addresses of this host's interfaces that are up, where a peer might reach it: what a program without a [`Driver`]
/// passes to [`Node::set_local_addresses`].
///
/// # Errors
/// Returns an error if the system call fails.
///
/// [`Driver`]: crate::io::Driver
/// [`Node::set_local_addresses`]: crate::Node::set_local_addresses
pub fn interface_addresses() -> std::io::Result<Vec<LocalAddress>> {
    Ok(Listing::read(None)?.addresses)
}

/// Listens for changes of interfaces and their addresses (rtnetlink): without one there is nothing to list.
#[derive(Debug)]
pub(super) struct Changes {
    socket: OwnedFd,
}

impl Changes {
    /// Listens in the network namespace of the calling thread, from now on.
    pub(super) fn listen() -> Result<Self, Errno> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)?;
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, groups as u32))?;
        Ok(Self { socket })
    }

    /// Whether anything changed since the last call that may matter if these are the links with an address. On the node
    /// of a cluster, links of pods come and go all the time, and to list them all each time would take each instance as
    /// long as there are links.
    pub(super) fn any(&self, links: &BTreeSet<u32>) -> bool {
        let mut matters = false;
        for _ in 0..MAX_CHANGES_PER_CALL {
            let mut head = [0; CHANGE_HEAD];
            // The rest of the message may be lost.
            match recv(self.socket.as_raw_fd(), &mut head, MsgFlags::empty()) {
                Ok(len) => matters |= concerns(&head[..len], links),
                Err(Errno::EAGAIN) => return matters,
                Err(Errno::EINTR) => {}
                // The socket's buffer overflowed, or the state is unknown: assume a change.
                Err(_) => return true,
            }
        }
        true
    }
}

/// Whether a message of rtnetlink(7) may be about an address at which a peer reaches this host: that of an address, or
/// of a link that has one. What is not understood may be.
fn concerns(head: &[u8], links: &BTreeSet<u32>) -> bool {
    let [_, _, _, _, k1, k2, _, _, _, _, _, _, _, _, _, _, family, _, _, scope, i1, i2, i3, i4] = *head else {
        return true;
    };
    match u16::from_ne_bytes([k1, k2]) {
        libc::RTM_NEWLINK | libc::RTM_DELLINK => links.contains(&u32::from_ne_bytes([i1, i2, i3, i4])),
        // Every link has one that is for the link only (fe80::/10); the kernel takes the scope from the address.
        libc::RTM_NEWADDR | libc::RTM_DELADDR => i32::from(family) != libc::AF_INET6 || scope != libc::RT_SCOPE_LINK,
        _ => true,
    }
}

// Debounce: a new address comes as the old one goes, and both together with changes of the link.
const SETTLE: Duration = Duration::from_millis(50);
// Rate limit: a node of a cluster may get many interfaces a second.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
// Maximum number of messages read per call; the rest is left for the next call.
const MAX_CHANGES_PER_CALL: usize = 1024;
// struct nlmsghdr, and what struct ifinfomsg and struct ifaddrmsg begin with: the index is at the same offset in both.
const CHANGE_HEAD: usize = 16 + 8;

fn is_reachable(address: &IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local() || *v6 == Ipv6Addr::UNSPECIFIED,
    };
    !address.is_loopback() && !address.is_multicast() && !is_link_local
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_mean_something_else_to_a_peer_are_left_out() {
        for (address, expected) in [
            ("10.1.2.3", true),
            ("2001:db8::1", true),
            ("fd00::1", true),
            ("127.0.0.1", false),
            ("169.254.9.9", false),
            ("::1", false),
            ("fe80::1", false),
        ] {
            assert_eq!(is_reachable(&address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    #[ignore = "needs root and network namespaces"]
    fn a_change_is_heard_once_and_only_if_it_may_be_about_an_address() {
        let run = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let ip = |arguments: &str| {
                let status = std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap();
                assert!(status.success(), "ip {arguments}");
            };
            let changes = Changes::listen().unwrap();
            let links = || Listing::read(None).unwrap().links;
            assert!(!changes.any(&links()));
            for change in ["link set lo up", "addr add 192.0.2.1/32 dev lo", "addr del 192.0.2.1/32 dev lo"] {
                ip(change);
                assert!(changes.any(&links()), "{change}");
                assert!(!changes.any(&links()));
            }
            for change in ["link add v1 type veth peer name v2", "link set v1 up", "link set v2 up"] {
                ip(change);
                assert!(!changes.any(&links()), "{change}");
            }
            ip("addr add fe80::9/64 dev v1 nodad");
            assert!(!changes.any(&links()), "an address for the link only");
            for change in [
                "addr add 192.0.2.1/32 dev v1",
                "link set v1 down",
                "addr del 192.0.2.1/32 dev v1",
                "addr add 198.51.100.1/32 dev v1",
                "link set v1 up",
                "addr add 10.0.0.1/32 scope link dev v2",
                "link del v1",
            ] {
                let before = links();
                changes.any(&before);
                ip(change);
                assert!(changes.any(&before), "{change}");
            }
        };
        std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
    }

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn a_change_is_looked_at_soon_but_not_all_the_time() {
        let mut watch = InterfaceWatch::new(None, Duration::from_secs(10));
        let start = Instant::now();
        assert!(watch.changes().is_none() && watch.due().is_none());
        assert!(watch.look(start).is_some());
        assert!(watch.changes().is_some(), "it listens from the first look on");
        let later = start + Duration::from_secs(5);
        watch.notice(later);
        assert!(watch.changes().is_none(), "one change is enough to look");
        assert_eq!(watch.due(), Some(later + SETTLE));
        assert!(watch.look(later).is_none());
        let _listed = watch.look(later + SETTLE);
        assert!(watch.changes().is_some() && watch.due().is_none());
        watch.notice(later + SETTLE);
        assert_eq!(watch.due(), Some(later + SETTLE + MIN_INTERVAL));
    }

    #[test]
    fn the_system_can_be_asked() {
        let Listing { addresses, .. } = Listing::read(None).unwrap();
        assert!(addresses.iter().all(|local| is_reachable(&local.address)), "{addresses:?}");
    }
}

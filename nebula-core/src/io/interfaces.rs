//! Addresses of this host's interfaces at which a peer might reach it.

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
    // None: not listening for changes, so every look lists the addresses.
    changes: Option<Changes>,
}

impl InterfaceWatch {
    /// Looks once per `interval` and after changes, and skips the interface `except`.
    pub(super) fn new(except: Option<String>, interval: Duration) -> Self {
        Self { except, interval, next: None, looked: None, noticed: false, last: Vec::new(), changes: None }
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
            Some(changes) if !changes.any() => return None,
            Some(_) => {}
            // Listen before the look, so that no change is missed in between.
            None => self.changes = Changes::listen().ok(),
        }
        let listed = reachable_addresses(self.except.as_deref());
        if let Err(errno) = &listed {
            tracing::warn!(%errno, "cannot list the interface addresses");
            self.changes = None;
        }
        let changed = listed.ok().filter(|addresses| *addresses != self.last);
        if let Some(addresses) = &changed {
            self.last.clone_from(addresses);
        }
        Some(changed)
    }
}

/// Addresses of the interfaces that are up in the network namespace of the calling thread, except those of interface
/// `except`.
pub(super) fn reachable_addresses(except: Option<&str>) -> Result<Vec<LocalAddress>, Errno> {
    let mut addresses: Vec<_> = getifaddrs()?
        .filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP) && Some(entry.interface_name.as_str()) != except)
        .filter_map(|entry| {
            let address = entry.address?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
            let address = v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))?;
            Some(LocalAddress { address, interface: entry.interface_name })
        })
        .filter(|local| is_reachable(&local.address))
        .collect();
    // The kernel's order varies, and a different order is not a change.
    addresses.sort_unstable();
    addresses.dedup();
    Ok(addresses)
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

    /// Whether anything changed since the last call.
    pub(super) fn any(&self) -> bool {
        let mut changed = false;
        for _ in 0..MAX_CHANGES_PER_CALL {
            // Only the fact matters, so the rest of the message may be lost.
            match recv(self.socket.as_raw_fd(), &mut [0; 16], MsgFlags::empty()) {
                Ok(_) => changed = true,
                Err(Errno::EAGAIN) => return changed,
                Err(Errno::EINTR) => {}
                // The socket's buffer overflowed, or the state is unknown: assume a change.
                Err(_) => return true,
            }
        }
        true
    }
}

// Debounce: a new address comes as the old one goes, and both together with changes of the link.
const SETTLE: Duration = Duration::from_millis(50);
// Rate limit: a node of a cluster may get many interfaces a second.
const MIN_INTERVAL: Duration = Duration::from_millis(250);
// Maximum number of messages read per call; the rest is left for the next call.
const MAX_CHANGES_PER_CALL: usize = 1024;

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
    fn a_change_of_an_interface_or_address_is_heard_once() {
        let run = || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            let ip = |arguments: &str| {
                let status = std::process::Command::new("ip").args(arguments.split(' ')).status().unwrap();
                assert!(status.success(), "ip {arguments}");
            };
            let changes = Changes::listen().unwrap();
            assert!(!changes.any());
            for change in ["link set lo up", "addr add 192.0.2.1/32 dev lo", "addr del 192.0.2.1/32 dev lo"] {
                ip(change);
                assert!(changes.any(), "{change}");
                assert!(!changes.any());
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
        let addresses = reachable_addresses(None).unwrap();
        assert!(addresses.iter().all(|local| is_reachable(&local.address)), "{addresses:?}");
    }
}

//! Opening, comparing and entering network namespaces.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::thread;

use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};

use crate::netlink;

/// Identity of a namespace: (st_dev, st_ino). Inode numbers are reused, so compare only while one of the two is held
/// open.
pub type NetnsId = (u64, u64);

/// An open network namespace.
#[derive(Debug)]
pub struct Netns {
    /// Held open so that the identity stays valid.
    pub file: File,
    /// Identity of the namespace.
    pub id: NetnsId,
}

/// An interface as seen in a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Whether it is administratively up.
    pub up: bool,
    /// Its addresses with prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Whether the namespace has no IPv6 on it, so that it cannot have such addresses.
    pub is_without_v6: bool,
}

/// Network namespaces.
pub trait Namespaces {
    /// Opens the namespace at `path`.
    ///
    /// # Errors
    /// Returns the system's error, or an error if the file is not a namespace.
    fn open(&self, path: &Path) -> io::Result<Netns>;

    /// Identity of the caller's own namespace.
    ///
    /// # Errors
    /// Returns the system's error.
    fn own(&self) -> io::Result<NetnsId>;

    /// The interface `name` in a namespace, if it exists.
    ///
    /// # Errors
    /// Returns the system's error.
    fn link(&self, netns: &Netns, name: &str) -> io::Result<Option<Link>>;

    /// Sets the MTU of the interface `name` in a namespace.
    ///
    /// # Errors
    /// Returns the system's error.
    fn set_mtu(&self, netns: &Netns, name: &str, mtu: u32) -> io::Result<()>;
}

/// The kernel's network namespaces.
#[derive(Debug)]
pub struct SystemNamespaces;

impl Namespaces for SystemNamespaces {
    fn open(&self, path: &Path) -> io::Result<Netns> {
        // Without O_NONBLOCK a path to a fifo would block forever.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        if fstatfs(&file)?.filesystem_type() != NSFS_MAGIC {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a namespace"));
        }
        let meta = file.metadata()?;
        Ok(Netns { id: (meta.dev(), meta.ino()), file })
    }

    fn own(&self) -> io::Result<NetnsId> {
        let meta = std::fs::metadata("/proc/thread-self/ns/net")?;
        Ok((meta.dev(), meta.ino()))
    }

    fn link(&self, netns: &Netns, name: &str) -> io::Result<Option<Link>> {
        in_namespace(&netns.file, || link_here(name))
    }

    fn set_mtu(&self, netns: &Netns, name: &str, mtu: u32) -> io::Result<()> {
        in_namespace(&netns.file, || {
            let index = nix::net::if_::if_nametoindex(name)?;
            // struct ifinfomsg
            let mut body = vec![0; 16];
            body[4..8].copy_from_slice(&index.to_ne_bytes());
            netlink::push_attribute(&mut body, libc::IFLA_MTU, &mtu.to_ne_bytes());
            netlink::ask_route(libc::RTM_NEWLINK, 0, &body).map(drop)
        })
    }
}

/// Runs `work` in a network namespace, on a thread of its own.
///
/// # Errors
/// Returns an error if the namespace cannot be entered, or the error of `work`.
pub fn in_namespace<T: Send>(netns: &File, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    // setns affects one thread only. This one ends after `work`, so no other code ever runs in the pod's namespace.
    thread::scope(|scope| {
        let visit = thread::Builder::new().spawn_scoped(scope, || {
            setns(netns, CloneFlags::CLONE_NEWNET)?;
            work()
        })?;
        visit.join().unwrap_or_else(|_| Err(io::Error::other("the visit to the namespace failed")))
    })
}

fn link_here(name: &str) -> io::Result<Option<Link>> {
    let mut found: Option<Link> = None;
    for entry in nix::ifaddrs::getifaddrs()?.filter(|entry| entry.interface_name == name) {
        let link = found.get_or_insert_with(|| Link { is_without_v6: is_without_v6(name), ..Link::default() });
        link.up |= entry.flags.contains(nix::net::if_::InterfaceFlags::IFF_UP);
        let ip = |address: &Option<nix::sys::socket::SockaddrStorage>| -> Option<IpAddr> {
            let address = address.as_ref()?;
            let v4 = address.as_sockaddr_in().map(|v4| IpAddr::from(v4.ip()));
            v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::from(v6.ip())))
        };
        if let (Some(address), Some(mask)) = (ip(&entry.address), ip(&entry.netmask)) {
            let ones = match mask {
                IpAddr::V4(mask) => mask.to_bits().count_ones(),
                IpAddr::V6(mask) => mask.to_bits().count_ones(),
            };
            link.addresses.push((address, ones as u8));
        }
    }
    Ok(found)
}

fn is_without_v6(name: &str) -> bool {
    let switches = Path::new("/proc/sys/net/ipv6");
    match std::fs::read_to_string(switches.join("conf").join(name).join("disable_ipv6")) {
        Ok(is_off) => is_off.trim() != "0",
        Err(_) => !switches.exists(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_namespace_is_refused() {
        assert!(SystemNamespaces.open(Path::new("/etc/passwd")).is_err());
        assert!(SystemNamespaces.open(Path::new("/nonexistent")).is_err());
    }

    #[test]
    fn the_own_namespace_is_recognised() {
        let own = SystemNamespaces.open(Path::new("/proc/self/ns/net")).unwrap();
        assert_eq!(own.id, SystemNamespaces.own().unwrap());
    }

    #[test]
    fn the_loopback_interface_is_found_with_its_address() {
        let lo = link_here("lo").unwrap().unwrap();
        assert!(!lo.up || lo.addresses.contains(&("127.0.0.1".parse().unwrap(), 8)), "{lo:?}");
        assert_eq!(link_here("no-such-link").unwrap(), None);
    }
}

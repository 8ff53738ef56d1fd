//! The node as the verbs see it: clock, network namespaces, supervisor. Each stands behind a small trait, so that a
//! verb is a function that can be tested.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::{NSFS_MAGIC, fstatfs};

use crate::enrolment::labels::LabelSource;
use crate::link::guard::Guards;
use crate::link::host_route::Routes;
use crate::link::pod_link::Links;
use crate::supervisor::{Kind, Supervisor};

/// Everything a verb may touch besides files.
pub struct Host<'a> {
    /// Time.
    pub clock: &'a dyn Clock,
    /// Network namespaces.
    pub namespaces: &'a dyn Namespaces,
    /// Instances as processes of the plugin's own making.
    pub direct: &'a dyn Supervisor,
    /// Instances as units of systemd.
    pub systemd: &'a dyn Supervisor,
    /// The node's routes.
    pub routes: &'a dyn Routes,
    /// Ends of pods' links on the node.
    pub links: &'a dyn Links,
    /// Rules of these.
    pub guards: &'a dyn Guards,
    /// Labels of pods and namespaces.
    pub labels: &'a dyn LabelSource,
    /// The directory of the plugin's own binary.
    pub plugin_dir: Option<PathBuf>,
}

impl<'a> Host<'a> {
    /// The supervisor of that kind.
    #[must_use]
    pub fn supervisor(&self, kind: Kind) -> &'a dyn Supervisor {
        match kind {
            Kind::Direct => self.direct,
            Kind::Systemd => self.systemd,
        }
    }
}

/// Time, as an argument.
pub trait Clock {
    /// For deadlines.
    fn now(&self) -> Instant;
    /// For certificates.
    fn unix_seconds(&self) -> i64;
    /// Waits.
    fn sleep(&self, time: Duration);
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock;

#[expect(clippy::disallowed_methods, reason = "the rim: the only place of the plugin that reads clocks")]
impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn unix_seconds(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    }

    fn sleep(&self, time: Duration) {
        thread::sleep(time);
    }
}

/// One absolute point in time that all parts of a verb share.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// `time` from now.
    #[must_use]
    pub fn after(clock: &dyn Clock, time: Duration) -> Self {
        Self(clock.now() + time)
    }

    /// What is left.
    #[must_use]
    pub fn left(self, clock: &dyn Clock) -> Duration {
        self.0.saturating_duration_since(clock.now())
    }

    /// Nothing is left.
    #[must_use]
    pub fn is_over(self, clock: &dyn Clock) -> bool {
        self.left(clock).is_zero()
    }
}

/// What tells two namespaces apart: (st_dev, st_ino). Inodes are reused, so compare only while one is held open.
pub type NetnsId = (u64, u64);

/// An open network namespace.
#[derive(Debug)]
pub struct Netns {
    /// Held so that the identity stays true.
    pub file: File,
    /// Which one it is.
    pub id: NetnsId,
}

/// An interface as seen in a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Whether it is administratively up.
    pub up: bool,
    /// Its addresses with prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
}

/// Network namespaces.
pub trait Namespaces {
    /// Opens the one at `path`.
    ///
    /// # Errors
    /// What the system says, or that it is no namespace.
    fn open(&self, path: &Path) -> io::Result<Netns>;

    /// The caller's own.
    ///
    /// # Errors
    /// What the system says.
    fn own(&self) -> io::Result<NetnsId>;

    /// The interface `name` in a namespace, if it is there.
    ///
    /// # Errors
    /// What the system says.
    fn link(&self, netns: &Netns, name: &str) -> io::Result<Option<Link>>;
}

/// The kernel's.
#[derive(Debug)]
pub struct SystemNamespaces;

impl Namespaces for SystemNamespaces {
    fn open(&self, path: &Path) -> io::Result<Netns> {
        // Without O_NONBLOCK a path to a fifo would block for ever.
        let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path)?;
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
        // setns is per thread: this one enters, looks and ends, so no other code ever runs in the pod's namespace.
        thread::scope(|scope| {
            let visit = thread::Builder::new().spawn_scoped(scope, || {
                setns(&netns.file, CloneFlags::CLONE_NEWNET)?;
                link_here(name)
            })?;
            visit.join().unwrap_or_else(|_| Err(io::Error::other("the visit to the namespace failed")))
        })
    }
}

fn link_here(name: &str) -> io::Result<Option<Link>> {
    let mut found: Option<Link> = None;
    for entry in nix::ifaddrs::getifaddrs()?.filter(|entry| entry.interface_name == name) {
        let link = found.get_or_insert_with(Link::default);
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

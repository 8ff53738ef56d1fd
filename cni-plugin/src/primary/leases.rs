//! Which container has which address: one file for each address, in a folder for each network.
//!
//! A file appears under its name with its content already in it, by linking a temporary one. That fails if the name is
//! taken: so no two calls get one address, and no crash leaves half a lease. A lease counts until the node starts
//! again, since no container outlives that; so nothing has to be synced to the disk.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nebula_cni_contract::netns::NetnsId;
use serde::{Deserialize, Serialize};

use crate::request::Key;

/// The address of one container's interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The address, which is also the name of the file.
    pub address: IpAddr,
    /// Which container.
    pub container_id: String,
    /// Name of its interface.
    pub ifname: String,
    /// `NAMESPACE/NAME` of the pod, for people; empty without one.
    pub pod: String,
    /// Its network namespace.
    pub netns: PathBuf,
    /// Identity of the namespace.
    pub netns_id: NetnsId,
    /// Which start of the node it belongs to.
    boot: String,
}

/// The leases of a network.
#[derive(Debug)]
pub struct Leases {
    dir: PathBuf,
    boot: String,
}

/// Whose lease is made.
#[derive(Debug, Clone, Copy)]
pub struct Owner<'a> {
    /// Which attachment.
    pub key: &'a Key,
    /// `NAMESPACE/NAME` of the pod, or nothing.
    pub pod: &'a str,
    /// Its network namespace.
    pub netns: (&'a Path, NetnsId),
}

impl Lease {
    /// Whether it is that of the attachment.
    #[must_use]
    pub fn is_of(&self, key: &Key) -> bool {
        (&self.container_id, &self.ifname) == (&key.container_id, &key.ifname)
    }

    /// The attachment, in this network.
    #[must_use]
    pub fn key(&self, network: &str) -> Key {
        Key { network: network.to_owned(), container_id: self.container_id.clone(), ifname: self.ifname.clone() }
    }
}

impl Leases {
    /// Those of a network, in the plugin's state directory.
    #[must_use]
    pub fn new(state_dir: &Path, network: &str) -> Self {
        let boot = fs::read_to_string(BOOT_ID).unwrap_or_default().trim().to_owned();
        Self { dir: state_dir.join(FOLDER).join(network), boot }
    }

    /// Waits until no other call changes leases. The kernel gives the lock back with the returned file, also if the
    /// call is killed.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn lock(&self) -> io::Result<File> {
        self.create()?;
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(self.dir.join(LOCK))?;
        file.lock()?;
        Ok(file)
    }

    /// All leases. Those of before the node started, and files that are no leases, are removed.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn list(&self) -> io::Result<Vec<Lease>> {
        let entries = match fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut leases = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let Some(address) = name.to_str().and_then(|name| name.parse::<IpAddr>().ok()) else { continue };
            let path = self.path(address);
            let text = match fs::read(&path) {
                // Another call has just given it back.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                text => text?,
            };
            match serde_json::from_slice::<Lease>(&text) {
                Ok(lease) if lease.address == address && lease.boot == self.boot => leases.push(lease),
                _ => remove(&path)?,
            }
        }
        Ok(leases)
    }

    /// Takes an address; returns whether it was free.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn take(&self, address: IpAddr, owner: Owner<'_>) -> io::Result<bool> {
        let lease = Lease {
            address,
            container_id: owner.key.container_id.clone(),
            ifname: owner.key.ifname.clone(),
            pod: owner.pod.to_owned(),
            netns: owner.netns.0.to_owned(),
            netns_id: owner.netns.1,
            boot: self.boot.clone(),
        };
        let text = serde_json::to_vec(&lease)?;
        self.create()?;
        let temporary = self.temporary(owner.key);
        let taken = write(&temporary, &text).and_then(|()| fs::hard_link(&temporary, self.path(address)));
        remove(&temporary)?;
        match taken {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            taken => taken.map(|()| true),
        }
    }

    /// The address of this family that was given last, if that is known: others come first, so that an address rests
    /// before another container has it.
    #[must_use]
    pub fn last_given(&self, is_v4: bool) -> Option<IpAddr> {
        fs::read_to_string(self.last(is_v4)).ok()?.trim().parse().ok()
    }

    /// Notes which address was given last. It is a hint: one that is lost or torn does no harm.
    pub fn note_given(&self, address: IpAddr) {
        let _ = write(&self.last(address.is_ipv4()), address.to_string().as_bytes());
    }

    /// Gives back the addresses of an attachment; returns whether there are others in the network.
    ///
    /// # Errors
    /// Returns the file system's error.
    pub fn give_back(&self, key: &Key) -> io::Result<bool> {
        let (own, others): (Vec<Lease>, Vec<Lease>) = self.list()?.into_iter().partition(|lease| lease.is_of(key));
        // A call that was killed may have left this one.
        let left = own.iter().map(|lease| self.path(lease.address)).chain([self.temporary(key)]);
        left.into_iter().try_for_each(|path| remove(&path))?;
        Ok(!others.is_empty())
    }

    fn create(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)
    }

    fn path(&self, address: IpAddr) -> PathBuf {
        self.dir.join(address.to_string())
    }

    /// Of one attachment, for which a runtime makes one call at a time.
    fn temporary(&self, key: &Key) -> PathBuf {
        self.dir.join(format!(".{}-{}", key.container_id, key.ifname))
    }

    fn last(&self, is_v4: bool) -> PathBuf {
        self.dir.join(if is_v4 { "last-ipv4" } else { "last-ipv6" })
    }
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?.write_all(bytes)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Networks have no names that begin with a dot.
const FOLDER: &str = ".addresses";
const LOCK: &str = ".lock";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;
    use std::thread;

    use super::*;
    use crate::primary::range::Range;

    fn key(container: &str) -> Key {
        Key { network: "net".into(), container_id: container.into(), ifname: "eth0".into() }
    }

    fn owner(key: &Key) -> Owner<'_> {
        Owner { key, pod: "shop/web", netns: (Path::new("/run/netns/x"), (4, 9)) }
    }

    fn addresses(leases: &Leases) -> Vec<String> {
        let mut all: Vec<String> = leases.list().unwrap().iter().map(|lease| lease.address.to_string()).collect();
        all.sort();
        all
    }

    #[test]
    fn an_address_is_taken_once_and_free_again_when_it_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let leases = Leases::new(dir.path(), "net");
        assert_eq!(leases.list().unwrap(), []);
        let (one, two) = (key("one"), key("two"));
        for address in ["10.0.0.1", "fd00::1"] {
            assert!(leases.take(address.parse().unwrap(), owner(&one)).unwrap());
            assert!(!leases.take(address.parse().unwrap(), owner(&two)).unwrap());
        }
        assert!(leases.take("10.0.0.2".parse().unwrap(), owner(&two)).unwrap());
        assert_eq!(addresses(&leases), ["10.0.0.1", "10.0.0.2", "fd00::1"]);
        assert!(leases.give_back(&one).unwrap(), "another one is left");
        assert!(leases.give_back(&one).unwrap());
        assert_eq!(addresses(&leases), ["10.0.0.2"]);
        assert!(!leases.give_back(&two).unwrap());
        let other = Leases::new(dir.path(), "other");
        assert!(other.take("10.0.0.2".parse().unwrap(), owner(&two)).unwrap(), "networks do not share addresses");
    }

    #[test]
    fn leases_of_before_the_node_started_and_torn_ones_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (leases, one) = (Leases::new(dir.path(), "net"), key("one"));
        assert!(leases.take("10.0.0.1".parse().unwrap(), owner(&one)).unwrap());
        fs::write(leases.path("10.0.0.2".parse().unwrap()), "").unwrap();
        fs::copy(leases.path("10.0.0.1".parse().unwrap()), leases.path("10.0.0.3".parse().unwrap())).unwrap();
        let after = Leases { boot: "another".into(), dir: leases.dir.clone() };
        assert!(after.take("10.0.0.4".parse().unwrap(), owner(&one)).unwrap());
        assert_eq!(addresses(&after), ["10.0.0.4"]);
        assert_eq!(fs::read_dir(&leases.dir).unwrap().count(), 1);
        fs::write(leases.temporary(&one), "left by a call that was killed").unwrap();
        assert!(!after.give_back(&one).unwrap());
        assert_eq!(fs::read_dir(&leases.dir).unwrap().count(), 0);
    }

    #[test]
    fn callers_that_race_get_different_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let got = Mutex::new(BTreeSet::new());
        thread::scope(|scope| {
            for caller in 0..4 {
                let (got, dir) = (&got, dir.path());
                scope.spawn(move || {
                    let leases = Leases::new(dir, "net");
                    for turn in 0..50 {
                        let key = key(&format!("{caller}-{turn}"));
                        let range = Range::new("10.0.0.0/24".parse().unwrap());
                        let address = loop {
                            let taken: Vec<IpAddr> = leases.list().unwrap().iter().map(|lease| lease.address).collect();
                            let last = leases.last_given(true);
                            let free = range.free(last, &[], taken.len(), |one| taken.contains(&one)).unwrap();
                            if leases.take(free, owner(&key)).unwrap() {
                                break free;
                            }
                        };
                        leases.note_given(address);
                        assert!(got.lock().unwrap().insert(address), "{address} twice");
                    }
                });
            }
        });
        assert_eq!(got.into_inner().unwrap().len(), 200);
    }
}

//! A control group of its own for each instance, where the machine lets us: otherwise the instance would be counted, and
//! perhaps ended, with the container runtime that called the plugin.

use std::fs;
use std::path::{Path, PathBuf};

use crate::request::Key;

/// Creates the group of an attachment; `None` where there is no writable cgroup2 tree.
#[must_use]
pub fn create(key: &Key) -> Option<PathBuf> {
    let group = path(key)?;
    // A concurrent removal of the network's last group may take the parent away once.
    fs::create_dir_all(&group).or_else(|_| fs::create_dir_all(&group)).ok()?;
    Some(group)
}

/// Removes the group; fails silently while a process is in it.
#[must_use]
pub fn remove(key: &Key) -> bool {
    let Some(group) = path(key) else { return true };
    let _ = fs::remove_dir(&group);
    if let Some(network) = group.parent() {
        let _ = fs::remove_dir(network);
        let _ = network.parent().map(fs::remove_dir);
    }
    !group.exists()
}

fn path(key: &Key) -> Option<PathBuf> {
    // The second is the place of the cgroup2 tree on machines that have both hierarchies.
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let root = roots.into_iter().find(|root| root.join("cgroup.controllers").exists())?;
    Some(root.join("nebula-cni").join(&key.network).join(format!("{}-{}", key.container_id, key.ifname)))
}

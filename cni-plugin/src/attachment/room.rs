//! The room of an instance: a directory owned by a user id that no other instance has, so that no instance can reach
//! the files or the memory of another. The user id stays taken for as long as the room exists.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::path::Path;

use nebula_cni_contract::hash::fnv1a;

use crate::attachment::files::Files;
use crate::attachment::shared;

/// Range of user ids for instances, inclusive. Each is used as a group id as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Users {
    /// First user id.
    pub low: u32,
    /// Last user id.
    pub high: u32,
}

impl Users {
    /// Lies outside the ranges that systemd assigns to services, containers and users, OpenShift to namespaces, and
    /// directory services to accounts.
    pub const DEFAULT: Self = Self { low: 2_130_706_432, high: 2_130_771_967 };
}

/// Creates the room of an attachment and picks an owner for it that no other instance of this state directory has.
/// Returns `None` if the plugin is not root; the instance then runs as the plugin's user.
///
/// # Errors
/// Returns the file system's error, or an error if all user ids are taken.
pub fn make(files: &Files, users: Users) -> io::Result<Option<u32>> {
    let state_dir = files.state_dir();
    // Two plugins that search at the same time would pick the same id.
    let _lock = shared::lock_shared(&state_dir)?;
    let room = files.room();
    let user = if nix::unistd::geteuid().is_root() {
        let taken = owners(&state_dir)?;
        let free = candidates(users, &state_dir, &room).find(|user| !taken.contains(user));
        Some(free.ok_or_else(|| io::Error::other("every number in \"users\" is taken; widen the range"))?)
    } else {
        None
    };
    DirBuilder::new().mode(0o700).create(&room)?;
    if user.is_some() {
        let made = chown(&room, user, user);
        made.map_err(|e| io::Error::new(e.kind(), format!("{} cannot belong to user {user:?}: {e}", room.display())))?;
    }
    Ok(user)
}

/// Yields each user id once. The starting point depends on the state directory and the room, so that two state
/// directories on a node rarely collide.
fn candidates(users: Users, state_dir: &Path, room: &Path) -> impl Iterator<Item = u32> {
    let count = u64::from(users.high - users.low) + 1;
    let start = fnv1a(&[&state_dir.to_string_lossy(), &room.to_string_lossy()]) % count;
    (0..count).filter_map(move |step| u32::try_from((start + step) % count).ok()?.checked_add(users.low))
}

fn owners(state_dir: &Path) -> io::Result<BTreeSet<u32>> {
    let hidden = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let entries = fs::read_dir(state_dir)?.flatten().filter(hidden);
    // A room that vanishes meanwhile takes no id.
    Ok(entries.filter_map(|entry| entry.metadata().ok()).map(|room| room.uid()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Key;

    fn files(dir: &Path, container_id: &str) -> Files {
        Files::new(dir, &Key { network: "net".into(), container_id: container_id.into(), ifname: "eth0".into() })
    }

    #[test]
    fn each_number_is_tried_once() {
        let users = Users { low: 7, high: 11 };
        let found: BTreeSet<u32> = candidates(users, Path::new("/a"), Path::new("/b")).collect();
        assert_eq!(found, (7..=11).collect());
        assert_eq!(candidates(users, Path::new("/a"), Path::new("/b")).count(), 5);
        let all = Users { low: 1, high: u32::MAX - 1 };
        assert!(candidates(all, Path::new("/a"), Path::new("/b")).take(9).all(|user| user > 0 && user < u32::MAX));
    }

    #[test]
    #[ignore = "needs root"]
    fn every_room_has_an_owner_of_its_own_until_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let users = Users { low: 2_130_706_432, high: 2_130_706_434 };
        let owned: BTreeSet<Option<u32>> =
            ["a", "b", "c"].iter().map(|id| make(&files(dir.path(), id), users).unwrap()).collect();
        assert_eq!(owned, (users.low..=users.high).map(Some).collect());
        let b = files(dir.path(), "b").room().metadata().unwrap();
        assert_eq!((b.uid(), b.gid(), b.mode() & 0o777), (b.uid(), b.uid(), 0o700));
        assert!(make(&files(dir.path(), "d"), users).unwrap_err().to_string().contains("widen"));
        fs::remove_dir(files(dir.path(), "b").room()).unwrap();
        assert_eq!(make(&files(dir.path(), "d"), users).unwrap(), Some(b.uid()));
    }
}

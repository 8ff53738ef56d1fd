//! Who the daemon becomes once the system is set up (`daemon.user`).
//!
//! The kernel keeps ids and capabilities for each thread, so this is done while there is one thread only: all others have
//! what it has.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Uid};
use rustix::thread::CapabilitySet;

use crate::capabilities;

/// A user of the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    uid: Uid,
    gid: Gid,
    /// Others that the user belongs to.
    groups: Vec<Gid>,
}

impl Account {
    /// A name in `/etc/passwd`, or `UID:GID`.
    ///
    /// # Errors
    /// There is no such user. A static program knows no other directory of users.
    pub(crate) fn find(user: &str) -> io::Result<Self> {
        if let Some(account) = Self::numbered(user) {
            return Ok(account);
        }
        let (users, groups) = (read("/etc/passwd")?, read("/etc/group").unwrap_or_default());
        let unknown = || io::Error::other(format!("/etc/passwd has no user {user:?}, and it is not UID:GID"));
        Self::named(user, &users, &groups).ok_or_else(unknown)
    }

    fn numbered(user: &str) -> Option<Self> {
        let (uid, gid) = user.split_once(':')?;
        let [uid, gid] = [uid, gid].map(|number| number.parse().ok().filter(|number| *number != u32::MAX));
        Some(Self { uid: Uid::from_raw(uid?), gid: Gid::from_raw(gid?), groups: Vec::new() })
    }

    fn named(user: &str, users: &str, groups: &str) -> Option<Self> {
        let entry = users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == user)?;
        let number = |field: usize| entry.get(field)?.parse().ok();
        let (uid, gid) = (Uid::from_raw(number(2)?), Gid::from_raw(number(3)?));
        let member_of = |line: &str| {
            let fields: Vec<_> = line.split(':').collect();
            let is_member = fields.get(3)?.split(',').any(|member| member == user);
            fields[2].parse().ok().filter(|_| is_member).map(Gid::from_raw)
        };
        let groups = groups.lines().filter_map(member_of).filter(|group| *group != gid).take(MAX_GROUPS).collect();
        Some(Self { uid, gid, groups })
    }

    /// Becomes this user, with no more than these capabilities, for good.
    ///
    /// # Errors
    /// The kernel refuses: this process may not change its ids.
    pub(crate) fn assume(&self, kept: CapabilitySet) -> io::Result<()> {
        if (Uid::current(), Gid::current()) != (self.uid, self.gid) {
            rustix::thread::set_keep_capabilities(true)?;
            nix::unistd::setgroups(&self.groups)?;
            nix::unistd::setresgid(self.gid, self.gid, self.gid)?;
            nix::unistd::setresuid(self.uid, self.uid, self.uid)?;
        }
        capabilities::keep(kept)
    }

    /// Gives a file to this user.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn own(&self, path: &Path) -> io::Result<()> {
        Ok(nix::unistd::chown(path, Some(self.uid), Some(self.gid))?)
    }
}

/// Those of these files that exist and that this process may not read.
pub(crate) fn unreadable(files: Vec<PathBuf>) -> Vec<PathBuf> {
    let is_refused =
        |file: &PathBuf| std::fs::File::open(file).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied);
    files.into_iter().filter(is_refused).collect()
}

fn read(path: &str) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MOST_TEXT).read_to_string(&mut text)?;
    Ok(text)
}

const MOST_TEXT: u64 = 1 << 20;
const MAX_GROUPS: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\nnebula:x:990:980::/:/bin/false\nhalf:x:7\n";
    const GROUPS: &str = "root:x:0:\nkeys:x:55:other,nebula\nnebula:x:980:nebula\nbroken:x\nother:x:56:nebulas\n";

    #[test]
    fn a_user_is_found_by_name_with_all_groups() {
        let (uid, gid, groups) = (Uid::from_raw(990), Gid::from_raw(980), vec![Gid::from_raw(55)]);
        assert_eq!(Account::named("nebula", USERS, GROUPS), Some(Account { uid, gid, groups }));
        for unknown in ["neb", "broken", "half", "", "keys"] {
            assert_eq!(Account::named(unknown, USERS, GROUPS), None, "{unknown}");
        }
    }

    #[test]
    fn numbers_need_no_entry_and_must_be_two() {
        let (uid, gid) = (Uid::from_raw(65534), Gid::from_raw(7));
        assert_eq!(Account::find("65534:7").unwrap(), Account { uid, gid, groups: Vec::new() });
        for wrong in ["65534", "65534:", ":7", "4294967295:7", "-1:7", "1:2:3"] {
            assert!(Account::find(wrong).is_err(), "{wrong}");
        }
    }
}

//! The user that the daemon switches to once it has set up the system (`daemon.user`).
//!
//! User ids and capabilities belong to each thread in the kernel. The daemon therefore switches while it has a single
//! thread; all later threads inherit the result.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use nebula_linux::{capabilities, errno};
use nix::unistd::{Gid, Uid};
use rustix::thread::CapabilitySet;

/// A user account of the system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    uid: Uid,
    gid: Gid,
    /// Supplementary groups.
    groups: Vec<Gid>,
}

impl Account {
    /// Looks up a user name in `/etc/passwd`, or takes `UID:GID`.
    ///
    /// # Errors
    /// Returns an error if there is no such user. A static program cannot ask any other user database (NSS).
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
        Some(Self { uid: Uid::from_raw(id(uid)?), gid: Gid::from_raw(id(gid)?), groups: Vec::new() })
    }

    fn named(user: &str, users: &str, groups: &str) -> Option<Self> {
        let entry = users.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == user)?;
        let (uid, gid) = (Uid::from_raw(id(entry.get(2)?)?), Gid::from_raw(id(entry.get(3)?)?));
        let member_of = |line: &str| {
            let fields: Vec<_> = line.split(':').collect();
            let is_member = fields.get(3)?.split(',').any(|member| member == user);
            id(fields[2]).filter(|_| is_member).map(Gid::from_raw)
        };
        let groups = groups.lines().filter_map(member_of).filter(|group| *group != gid).take(MAX_GROUPS).collect();
        Some(Self { uid, gid, groups })
    }

    /// Switches to this user for good, and keeps at most the given capabilities.
    ///
    /// # Errors
    /// Returns an error if this process may not change its ids.
    pub(crate) fn assume(&self, kept: CapabilitySet) -> io::Result<()> {
        if (Uid::current(), Gid::current()) != (self.uid, self.gid) {
            rustix::thread::set_keep_capabilities(true)
                .map_err(|error| errno::of_call("prctl(PR_SET_KEEPCAPS)", error))?;
            nix::unistd::setgroups(&self.groups)?;
            nix::unistd::setresgid(self.gid, self.gid, self.gid)?;
            nix::unistd::setresuid(self.uid, self.uid, self.uid)?;
        }
        capabilities::keep(kept)
    }

    /// Makes this user the owner of a file.
    ///
    /// # Errors
    /// Returns an error if the kernel refuses.
    pub(crate) fn own(&self, path: &Path) -> io::Result<()> {
        Ok(nix::unistd::chown(path, Some(self.uid), Some(self.gid))?)
    }
}

/// The id of a group in `/etc/group`, or a number.
///
/// # Errors
/// Returns an error if there is no such group. A static program cannot ask any other group database (NSS).
pub(crate) fn group(name: &str) -> io::Result<Gid> {
    if let Some(number) = id(name) {
        return Ok(Gid::from_raw(number));
    }
    let groups = read("/etc/group")?;
    let found = groups.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| fields[0] == name);
    let number = found.and_then(|fields| id(fields.get(2)?));
    number.map(Gid::from_raw).ok_or_else(|| io::Error::other(format!("/etc/group has no group {name:?}")))
}

/// Returns those of `files` that exist but that this process may not read.
pub(crate) fn unreadable(files: Vec<PathBuf>) -> Vec<PathBuf> {
    let is_refused =
        |file: &PathBuf| std::fs::File::open(file).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied);
    files.into_iter().filter(is_refused).collect()
}

/// Parses an id. `u32::MAX` is rejected: to the kernel it means "unchanged", which would leave the daemon root.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

fn read(path: &str) -> io::Result<String> {
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_FILE_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

const MAX_FILE_BYTES: u64 = 1 << 20;
const MAX_GROUPS: usize = 64;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const USERS: &str = "root:x:0:0:root:/root:/bin/sh\nbroken\nnebula:x:990:980::/:/bin/false\nhalf:x:7\n\
        keep:x:4294967295:7\nless:x:-1:7\n";
    const GROUPS: &str = "root:x:0:\nkeys:x:55:other,nebula\nnebula:x:980:nebula\nbroken:x\nother:x:56:nebulas\n";

    #[test]
    fn a_user_is_found_by_name_with_all_groups() {
        let (uid, gid, groups) = (Uid::from_raw(990), Gid::from_raw(980), vec![Gid::from_raw(55)]);
        assert_eq!(Account::named("nebula", USERS, GROUPS), Some(Account { uid, gid, groups }));
        for unknown in ["neb", "broken", "half", "", "keys", "keep", "less"] {
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

    proptest! {
        #[test]
        fn any_two_files_are_read_and_a_user_has_the_ids_of_its_own_line(
            users in "((a|b|ab|\\PC{0,3})(:(x|0|7|4294967295|\\PC{0,2})){0,5}\n?){0,6}",
            groups in "(\\PC{0,3}(:(x|5|a|b,a|\\PC{0,2})){0,5}\n?){0,6}",
            user in "a|b|ab|",
        ) {
            if let Some(account) = Account::named(&user, &users, &groups) {
                let (uid, gid) = (account.uid.as_raw(), account.gid.as_raw());
                prop_assert!(uid != u32::MAX && gid != u32::MAX && account.groups.len() <= MAX_GROUPS);
                let mut lines = users.lines().map(|line| line.split(':'));
                let own = lines.find_map(|mut fields| (fields.next()? == user).then_some(fields)).expect("its line");
                let ids: Vec<u32> = own.skip(1).take(2).filter_map(|field| field.parse().ok()).collect();
                prop_assert_eq!(ids, [uid, gid]);
            }
        }
    }
}

//! Tables that are replaced as a whole.

use std::io;

use nix::libc;

use crate::netlink::nftables::chain::{Chain, Hook};
use crate::netlink::nftables::listing::tables;
use crate::netlink::nftables::rule::Rule;
use crate::netlink::nftables::set::Set;
use crate::netlink::nftables::transaction::Transaction;

/// A table of base chains.
#[derive(Debug)]
pub struct Table {
    family: Family,
    name: String,
    sets: Vec<Set>,
    chains: Vec<Chain>,
}

/// Which packets a table sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// The IPv4 and IPv6 packets of a network namespace.
    Inet = libc::NFPROTO_INET as isize,
    /// Every frame of a single link.
    Link = libc::NFPROTO_NETDEV as isize,
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        Self { family, name: name.into(), sets: Vec::new(), chains: Vec::new() }
    }

    /// Adds a set.
    #[must_use]
    pub fn set(mut self, set: Set) -> Self {
        self.sets.push(set);
        self
    }

    /// Adds a chain that drops the packets about which no rule decides.
    #[must_use]
    pub fn chain(self, hook: Hook, rules: Vec<Rule>) -> Self {
        self.with(Chain::new(hook, rules))
    }

    /// Adds a chain.
    #[must_use]
    pub fn with(mut self, chain: Chain) -> Self {
        self.chains.push(chain);
        self
    }

    /// Installs the table in the network namespace of the calling thread, replacing any table of the same name.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing has changed then.
    pub fn install(&self) -> io::Result<()> {
        // The kernel waits for its readers whenever a table goes, so a removal that is not needed would cost
        // milliseconds.
        let is_there = tables(self.family)?.contains(&self.name);
        self.transaction(is_there).run()
    }

    /// Encodes the table as a transaction that removes the present one first.
    fn transaction(&self, is_there: bool) -> Transaction {
        let mut change = Transaction::new();
        if is_there {
            // Creating it first ensures that there is one to delete.
            change.table(self.family, &self.name);
            change.remove_table(self.family, &self.name);
        }
        change.table(self.family, &self.name);
        for (number, set) in self.sets.iter().enumerate() {
            change.set(self.family, &self.name, set, number as u32);
        }
        for chain in &self.chains {
            change.chain(self.family, &self.name, chain);
        }
        change
    }
}

/// Removes a table; does nothing if it is gone already, or if the kernel has no such tables.
///
/// # Errors
/// Returns the kernel's error.
pub fn remove(family: Family, name: &str) -> io::Result<()> {
    let mut change = Transaction::new();
    change.remove_table(family, name);
    match change.run() {
        Err(error) if error.raw_os_error().is_some_and(|code| NO_TABLE.contains(&code)) => Ok(()),
        done => done,
    }
}

// No table; no netlink for netfilter; no nf_tables; none of this family.
const NO_TABLE: [i32; 4] = [libc::ENOENT, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP, libc::EAFNOSUPPORT];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::nftables::Match;

    #[test]
    fn a_transaction_is_made_of_whole_messages_between_begin_and_end() {
        let rules = [Match::From("lo".to_owned()), Match::Known].map(|condition| Rule::accept(vec![condition]));
        let set = Set { name: "s".into(), key_len: 4, size: 1 };
        let table = Table::new(Family::Inet, "t").set(set).chain(Hook::Input, rules.to_vec());
        let (bytes, asked) = table.transaction(true).encoded(None);
        let mut kinds = Vec::new();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = u32::from_ne_bytes(rest[..4].try_into().unwrap()) as usize;
            assert!(len >= 20 && len.is_multiple_of(4));
            kinds.push(u16::from_ne_bytes(rest[4..6].try_into().unwrap()));
            rest = &rest[len..];
        }
        assert_eq!(kinds, [0x10, 0xa00, 0xa02, 0xa00, 0xa09, 0xa03, 0xa06, 0xa06, 0x11]);
        assert_eq!(asked, 7);
    }
}

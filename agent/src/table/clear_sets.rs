//! The addresses that the node's guard lets captured pods reach in clear: those that are known not to be enrolled.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nebula_cni_plugin::link::capture_rules;

/// Keeps the kernel's sets as the facts say.
#[derive(Debug, Default)]
pub struct ClearSets<G = NodeGuard> {
    guard: G,
    /// What was written last, and into which tables; `None` if that failed or there were none.
    written: Option<(BTreeSet<IpAddr>, Tables)>,
}

/// Handles of the nftables tables that contain the sets. The kernel gives a recreated table a new handle, and its
/// sets are empty.
pub type Tables = [u64; 2];

/// The rules that contain the sets.
pub trait Guard: Send {
    /// The tables; `None` without captured pods.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn tables(&self) -> io::Result<Option<Tables>>;

    /// Replaces the addresses; returns whether there are any sets.
    ///
    /// # Errors
    /// Returns the kernel's error; nothing has changed then.
    fn replace(&self, clear: &[IpNet]) -> io::Result<bool>;
}

/// The rules in the kernel of this node.
#[derive(Debug, Default)]
pub struct NodeGuard;

impl Guard for NodeGuard {
    fn tables(&self) -> io::Result<Option<Tables>> {
        capture_rules::tables_with_clear_sets()
    }

    fn replace(&self, clear: &[IpNet]) -> io::Result<bool> {
        capture_rules::replace_clear(clear)
    }
}

impl<G: Guard> ClearSets<G> {
    /// Whether the kernel has sets that this agent has not filled: those of the first captured pod, or of tables that
    /// the agent restored after somebody flushed them.
    #[must_use]
    pub fn are_outdated(&self) -> bool {
        let there = self.guard.tables().unwrap_or_else(|error| {
            tracing::debug!(%error, "cannot list the tables of captured pods");
            None
        });
        there.is_some() && there != self.written.as_ref().map(|(_, tables)| *tables)
    }

    /// Makes these addresses the only ones. A failure is tried again with the next change or look; until then the
    /// kernel keeps what it has.
    pub fn replace(&mut self, clear: &BTreeSet<IpAddr>) {
        if let Err(error) = self.try_replace(clear) {
            tracing::warn!(%error, "cannot tell the kernel which addresses are known not to be enrolled");
        }
    }

    fn try_replace(&mut self, clear: &BTreeSet<IpAddr>) -> io::Result<()> {
        let known = self.written.take();
        // Read the handles before writing: if the tables are recreated in between, the next look finds new handles.
        let Some(tables) = self.guard.tables()? else { return Ok(()) };
        if known.as_ref().is_some_and(|(written, into)| written == clear && *into == tables) {
            self.written = known;
            return Ok(());
        }
        let prefixes: Vec<IpNet> = clear.iter().copied().map(IpNet::from).collect();
        self.written = self.guard.replace(&prefixes)?.then(|| (clear.clone(), tables));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A kernel, with the number of addresses of each replacement.
    #[derive(Default)]
    struct Kernel {
        tables: RefCell<Option<Tables>>,
        refuses: RefCell<bool>,
        replaced: RefCell<Vec<usize>>,
    }

    impl Guard for Kernel {
        fn tables(&self) -> io::Result<Option<Tables>> {
            Ok(*self.tables.borrow())
        }

        fn replace(&self, clear: &[IpNet]) -> io::Result<bool> {
            self.replaced.borrow_mut().push(clear.len());
            if *self.refuses.borrow() { Err(io::Error::other("no")) } else { Ok(self.tables.borrow().is_some()) }
        }
    }

    #[test]
    fn the_kernel_is_told_only_what_it_does_not_know() {
        let mut sets = ClearSets::<Kernel>::default();
        let [one, two] = [1, 2].map(|count| (0..count).map(|last| IpAddr::from([10, 0, 0, last])).collect());
        sets.replace(&one);
        assert!(!sets.are_outdated(), "there is no captured pod");
        assert!(sets.guard.replaced.borrow().is_empty());

        *sets.guard.tables.borrow_mut() = Some([1, 2]);
        assert!(sets.are_outdated(), "the first captured pod came");
        sets.replace(&one);
        sets.replace(&one);
        sets.replace(&two);
        assert!(!sets.are_outdated());
        *sets.guard.refuses.borrow_mut() = true;
        sets.replace(&one);
        assert!(sets.are_outdated(), "the kernel refused");
        *sets.guard.refuses.borrow_mut() = false;
        sets.replace(&one);
        assert!(!sets.are_outdated());
        assert_eq!(*sets.guard.replaced.borrow(), [1, 2, 1, 1]);
    }

    #[test]
    fn recreated_tables_get_the_addresses_again() {
        let mut sets = ClearSets::<Kernel>::default();
        let clear = BTreeSet::from([IpAddr::from([10, 0, 0, 1])]);
        for (round, tables) in [[1, 2], [3, 2], [3, 4]].into_iter().enumerate() {
            *sets.guard.tables.borrow_mut() = Some(tables);
            assert!(sets.are_outdated());
            sets.replace(&clear);
            assert!(!sets.are_outdated());
            assert_eq!(sets.guard.replaced.borrow().len(), round + 1);
        }
        *sets.guard.tables.borrow_mut() = None;
        assert!(!sets.are_outdated(), "the last captured pod left");
        sets.replace(&clear);
        *sets.guard.tables.borrow_mut() = Some([3, 4]);
        assert!(sets.are_outdated(), "nothing is known of tables that were away");
    }
}

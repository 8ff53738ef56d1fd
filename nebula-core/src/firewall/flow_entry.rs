//! Entries of the flow table, and the lists that link them by age.

use crate::counters::Direction;
use crate::wire::ip::FlowKey;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// An allowed flow.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) flow: FlowKey,
    /// Whose it is.
    pub(super) owner: u64,
    /// What the owner's certificate entitled it to when the flow was judged last.
    pub(super) rights: u64,
    /// In which it began.
    pub(super) direction: Direction,
    /// Packets went both ways.
    pub(super) answered: bool,
    /// Of the rules that allowed it last.
    pub(super) generation: u32,
    pub(super) last_used: u64,
    pub(super) hash: u32,
    /// Place in the shares.
    pub(super) holder: u32,
    /// In the list of its class, and in that of its holder.
    pub(super) links: [Link; 2],
}

/// Whose a flow is, as the table knows it: keyed digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// Flows of others are never found.
    pub(super) owner: u64,
    /// When the peer's rights change, a flow is evaluated again.
    pub(super) rights: u64,
}

/// Position of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct At(pub(super) u32);

/// Neighbours in a list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link {
    pub(super) newer: u32,
    pub(super) older: u32,
}

/// Which of an entry's links a list uses.
#[derive(Debug, Clone, Copy)]
pub(super) enum By {
    Class,
    Holder,
}

/// Entries by age.
#[derive(Debug, Clone, Copy)]
pub(super) struct List {
    pub(super) oldest: u32,
    pub(super) newest: u32,
}

impl Entry {
    pub(super) fn new(flow: FlowKey, owner: Owner, direction: Direction, generation: u32, now: u64) -> Self {
        let links = [Link { newer: NONE, older: NONE }; 2];
        let Owner { owner, rights } = owner;
        Self { flow, owner, rights, direction, answered: false, generation, last_used: now, hash: 0, holder: 0, links }
    }

    /// Whether nothing changed of what the flow was allowed by.
    pub(super) fn stands(&self, rights: u64, generation: u32) -> bool {
        self.rights == rights && self.generation == generation
    }

    pub(super) fn class(&self) -> usize {
        match self.flow.protocol {
            6 => 0,
            17 => 1,
            _ => 2,
        }
    }
}

impl List {
    pub(super) const EMPTY: Self = Self { oldest: NONE, newest: NONE };

    pub(super) fn oldest(&self) -> Option<At> {
        (self.oldest != NONE).then_some(At(self.oldest))
    }

    pub(super) fn push(&mut self, entries: &mut [Entry], by: By, at: u32) {
        let older = std::mem::replace(&mut self.newest, at);
        entries[at as usize].links[by as usize] = Link { newer: NONE, older };
        match entries.get_mut(older as usize) {
            Some(entry) => entry.links[by as usize].newer = at,
            None => self.oldest = at,
        }
    }

    pub(super) fn unlink(&mut self, entries: &mut [Entry], by: By, at: u32) {
        let Link { older, newer } = entries[at as usize].links[by as usize];
        match entries.get_mut(older as usize) {
            Some(entry) => entry.links[by as usize].newer = newer,
            None => self.oldest = newer,
        }
        match entries.get_mut(newer as usize) {
            Some(entry) => entry.links[by as usize].older = older,
            None => self.newest = older,
        }
    }
}

//! Entries of the flow table, and the lists that link them by age.

use super::filter::Admitted;
use super::records::Recorded;
use crate::counters::{Direction, DropReason};
use crate::wire::ip::FlowKey;

/// No entry.
pub(super) const NONE: u32 = u32::MAX;

/// An allowed flow.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) flow: FlowKey,
    /// Keyed digest of its owner.
    pub(super) owner: u64,
    /// Keyed digest of the owner's rights when the flow was last evaluated.
    pub(super) rights: u64,
    /// Direction of its first packet.
    pub(super) direction: Direction,
    /// Whether packets went both ways.
    pub(super) answered: bool,
    /// Whether it was refused when it was last evaluated.
    pub(super) ended: bool,
    /// Generation of the rules that last allowed it.
    pub(super) generation: u32,
    pub(super) last_used: u64,
    pub(super) hash: u32,
    /// Position of its peer in the shares.
    pub(super) holder: u32,
    /// Links in the list of its class and in that of its holder.
    pub(super) links: [Link; 2],
    /// What its record says, if flows are recorded.
    pub(super) recorded: Option<Box<Recorded>>,
}

/// The owner of a flow, as keyed digests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    /// A lookup never finds flows of another owner.
    pub(super) owner: u64,
    /// When these change, a flow is evaluated again.
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

/// What can be in lists.
pub(super) trait Linked {
    /// Its neighbours, by list.
    fn links(&mut self) -> &mut [Link; 2];
}

impl Linked for Entry {
    fn links(&mut self) -> &mut [Link; 2] {
        &mut self.links
    }
}

/// Which of an entry's links a list uses.
#[derive(Debug, Clone, Copy)]
pub(super) enum By {
    Class,
    Holder,
}

/// A list of entries in order of age.
#[derive(Debug, Clone, Copy)]
pub(super) struct List {
    pub(super) oldest: u32,
    pub(super) newest: u32,
}

impl Entry {
    pub(super) fn new(flow: FlowKey, owner: Owner, direction: Direction, generation: u32, now: u64) -> Self {
        let links = [Link::NONE; 2];
        let Owner { owner, rights } = owner;
        Self {
            flow,
            owner,
            rights,
            direction,
            answered: false,
            ended: false,
            generation,
            last_used: now,
            hash: 0,
            holder: 0,
            links,
            recorded: None,
        }
    }

    /// The entry, which is of no use any more here.
    pub(super) fn take(&mut self) -> Self {
        let recorded = self.recorded.take();
        Self { recorded, ..self.without_record() }
    }

    /// A copy without what its record says.
    pub(super) fn without_record(&self) -> Self {
        let Self {
            flow, owner, rights, direction, answered, ended, generation, last_used, hash, holder, links, ..
        } = *self;
        Self {
            flow,
            owner,
            rights,
            direction,
            answered,
            ended,
            generation,
            last_used,
            hash,
            holder,
            links,
            recorded: None,
        }
    }

    /// Whether the rights and rules that allowed the flow are unchanged.
    pub(super) fn stands(&self, rights: u64, generation: u32) -> bool {
        !self.ended && self.rights == rights && self.generation == generation
    }

    /// Judges a packet under other rules or rights. An answer revives a flow that has ended only if whoever sends it
    /// may begin one.
    pub(super) fn judge_again(
        &self,
        direction: Direction,
        judge: impl Fn(Direction) -> Result<Admitted, DropReason>,
    ) -> Result<Admitted, DropReason> {
        let admitted = judge(self.direction)?;
        if self.ended && direction != self.direction { judge(direction) } else { Ok(admitted) }
    }

    pub(super) fn class(&self) -> usize {
        match self.flow.protocol {
            6 => 0,
            17 => 1,
            _ => 2,
        }
    }
}

impl Link {
    pub(super) const NONE: Self = Self { newer: NONE, older: NONE };
}

impl List {
    pub(super) const EMPTY: Self = Self { oldest: NONE, newest: NONE };

    pub(super) fn oldest(&self) -> Option<At> {
        (self.oldest != NONE).then_some(At(self.oldest))
    }

    pub(super) fn push(&mut self, entries: &mut [impl Linked], by: By, at: u32) {
        let older = std::mem::replace(&mut self.newest, at);
        entries[at as usize].links()[by as usize] = Link { newer: NONE, older };
        match entries.get_mut(older as usize) {
            Some(entry) => entry.links()[by as usize].newer = at,
            None => self.oldest = at,
        }
    }

    pub(super) fn unlink(&mut self, entries: &mut [impl Linked], by: By, at: u32) {
        let Link { older, newer } = entries[at as usize].links()[by as usize];
        match entries.get_mut(older as usize) {
            Some(entry) => entry.links()[by as usize].newer = newer,
            None => self.oldest = newer,
        }
        match entries.get_mut(newer as usize) {
            Some(entry) => entry.links()[by as usize].older = older,
            None => self.newest = older,
        }
    }
}

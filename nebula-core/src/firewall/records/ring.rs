//! The last records, within a bound. Where there is no room, the peer with most records gives way: nobody pushes out
//! the records of others.

use std::collections::HashMap;
use std::sync::Arc;

use super::recorded::Recorded;
use super::{Amount, Decision};
use crate::firewall::flow_entry::{At, By, Link, Linked, List, NONE};
use crate::firewall::shares::Shares;

/// Records in order of their numbers.
#[derive(Debug)]
pub(super) struct Ring {
    rows: Vec<Row>,
    /// First of the free rows, which are linked through `newer` of their first link.
    vacant: u32,
    len: usize,
    by_number: List,
    shares: Shares,
    /// By [`Recorded::id`], or by the hash of what was refused.
    index: HashMap<u64, u32>,
    most: usize,
    next_number: u64,
    /// Who asks in turns has seen all up to here.
    seen: u64,
    lost: u64,
}

#[derive(Debug)]
struct Row {
    /// `None`: the row is free.
    recorded: Option<Recorded>,
    /// What it is found by.
    key: u64,
    /// Whether it says something else than when it got its number.
    has_changed: bool,
    holder: u32,
    links: [Link; 2],
}

impl Linked for Row {
    fn links(&mut self) -> &mut [Link; 2] {
        &mut self.links
    }
}

impl Default for Ring {
    fn default() -> Self {
        Self {
            rows: Vec::new(),
            vacant: NONE,
            len: 0,
            by_number: List::EMPTY,
            shares: Shares::default(),
            index: HashMap::new(),
            most: 0,
            next_number: 1,
            seen: 0,
            lost: 0,
        }
    }
}

/// Rows as they were read.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) rows: Vec<Recorded>,
    pub(super) next: u64,
    pub(super) lost: u64,
    pub(super) is_cut: bool,
}

impl Ring {
    pub(super) fn set_first_number(&mut self, first: u64) {
        self.next_number = self.next_number.max(first);
        self.seen = self.next_number.saturating_sub(1);
    }

    pub(super) fn set_most(&mut self, most: usize) {
        self.most = most;
        while self.is_over() && self.evict(None) {}
        if most == 0 {
            let Self { next_number, seen, lost, .. } = *self;
            *self = Self { next_number, seen, lost, ..Self::default() };
        }
    }

    /// Tells of a flow: its beginning, that it goes on, or its end.
    pub(super) fn tell(&mut self, recorded: &mut Recorded, now: u64) {
        (recorded.number, recorded.numbered_at) = (self.take_number(), now);
        if recorded.id == 0 {
            recorded.id = recorded.number;
        }
        self.put(recorded.id, recorded.clone());
    }

    /// Notes what was added to a flow. If its record is gone, it is told anew, but not within a minute.
    pub(super) fn refresh(&mut self, recorded: &mut Recorded, now: u64) {
        if let Some(row) = self.find(recorded.id).map(|at| &mut self.rows[at as usize])
            && let Some(known) = &mut row.recorded
        {
            known.refresh(recorded);
            row.has_changed = true;
        } else if now >= recorded.numbered_at.saturating_add(TELL_EVERY_MS) {
            self.tell(recorded, now);
        }
    }

    /// Adds what a lane told of a flow only after its end. Returns whether the flow's record is there.
    pub(super) fn add_late(&mut self, id: u64, add: impl FnOnce(&mut Recorded)) -> bool {
        let row = self.find(id).map(|at| &mut self.rows[at as usize]);
        let Some(row) = row else { return false };
        row.recorded.as_mut().map(add);
        row.has_changed = true;
        true
    }

    /// Counts a refused packet; `new` makes the record of the first one. `hash` is that of its kind.
    pub(super) fn refuse(
        &mut self,
        hash: u64,
        now: u64,
        amount: Amount,
        is_same: impl Fn(&Recorded) -> bool,
        new: impl FnOnce() -> Recorded,
    ) {
        let key = hash | REFUSAL;
        let row = self.find(key).map(|at| &mut self.rows[at as usize]);
        if let Some(row) = row
            && let Some(known) = row.recorded.as_mut().filter(|known| is_same(known))
        {
            known.add(known.direction, amount);
            known.last = now;
            row.has_changed = true;
            return;
        }
        let mut recorded = new();
        recorded.add(recorded.direction, amount);
        (recorded.number, recorded.numbered_at) = (self.take_number(), now);
        recorded.id = recorded.number;
        self.put(key, recorded);
    }

    /// The records after this number, the oldest first, at most so many; all that there are if the number is not one of
    /// this ring's. Who asks in turns gets those that have changed under a new number.
    pub(super) fn read_after(&mut self, after: u64, most: usize, now: u64) -> Read {
        let after = if after < self.next_number { after } else { 0 };
        let mut at = self.by_number.oldest;
        // Those that get a number go to the end, and are not looked at twice.
        for _ in 0..self.len {
            let Some(row) = self.rows.get_mut(at as usize) else { break };
            let (this, newer) = (at, row.links[By::Class as usize].newer);
            at = newer;
            if let Some(known) = &mut row.recorded
                && row.has_changed
                && now >= known.numbered_at.saturating_add(TELL_EVERY_MS)
            {
                row.has_changed = false;
                (known.number, known.numbered_at) = (self.next_number, now);
                self.next_number += 1;
                self.move_to_end(this);
            }
        }
        let wanted = |known: &Recorded| known.number > after;
        let mut read = self.read(self.by_number.oldest, |links| links.newer, wanted, most);
        if let Some(last) = read.rows.last() {
            read.next = last.number;
        } else {
            read.next = self.next_number - 1;
        }
        self.seen = self.seen.max(read.next);
        read
    }

    /// The newest records that are wanted, at most `most`, the oldest of them first.
    pub(super) fn read_newest(&self, wanted: impl Fn(&Recorded) -> bool, most: usize) -> Read {
        let mut read = self.read(self.by_number.newest, |links| links.older, wanted, most);
        read.next = self.next_number - 1;
        read.rows.reverse();
        read
    }

    /// The records that are wanted, at most `most`, from the row at `at` on.
    fn read(
        &self,
        mut at: u32,
        follow: impl Fn(&Link) -> u32,
        wanted: impl Fn(&Recorded) -> bool,
        most: usize,
    ) -> Read {
        let mut read = Read { lost: self.lost, ..Read::default() };
        while let Some(row) = self.rows.get(at as usize) {
            at = follow(&row.links[By::Class as usize]);
            if let Some(known) = row.recorded.as_ref().filter(|known| wanted(known)) {
                if read.rows.len() == most {
                    read.is_cut = true;
                    break;
                }
                read.rows.push(known.clone());
            }
        }
        read
    }

    /// Those of which nobody has looked up yet what decided, by rules of this generation.
    pub(super) fn undecided(&self, generation: u32) -> Vec<(usize, Recorded)> {
        let is_undecided = |known: &&Recorded| known.decision.is_none() && known.generation == generation;
        let rows = self.rows.iter().enumerate();
        rows.filter_map(|(at, row)| Some((at, row.recorded.as_ref().filter(is_undecided)?.clone()))).collect()
    }

    /// Notes what decided about one of them, unless another record took its place meanwhile.
    pub(super) fn decide(&mut self, (at, recorded): &(usize, Recorded), decision: Arc<Decision>) {
        let known = self.rows.get_mut(*at).and_then(|row| row.recorded.as_mut());
        if let Some(known) = known.filter(|known| known.id == recorded.id && known.generation == recorded.generation) {
            known.decision = Some(decision);
        }
    }

    fn take_number(&mut self) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        number
    }

    fn find(&self, key: u64) -> Option<u32> {
        self.index.get(&key).copied()
    }

    /// Adds a record, or replaces the one with this key, as the newest.
    fn put(&mut self, key: u64, mut recorded: Recorded) {
        if let Some(at) = self.find(key) {
            let row = &mut self.rows[at as usize];
            if let Some(known) = row.recorded.take_if(|known| known.id == recorded.id) {
                recorded.decision =
                    recorded.decision.or_else(|| known.decision.filter(|_| known.generation == recorded.generation));
                (row.recorded, row.has_changed) = (Some(recorded), false);
                return self.move_to_end(at);
            }
        }
        if self.most == 0 {
            return;
        }
        let holder = self.shares.join(recorded.holder());
        let row = Row { recorded: Some(recorded), key, has_changed: false, holder, links: [Link::NONE; 2] };
        let at = if self.vacant == NONE {
            if self.rows.len() == self.rows.capacity() {
                self.rows.reserve_exact(STEP);
            }
            self.rows.push(row);
            (self.rows.len() - 1) as u32
        } else {
            let at = self.vacant;
            self.vacant = self.rows[at as usize].links[0].newer;
            self.rows[at as usize] = row;
            at
        };
        self.index.insert(key, at);
        self.link(at);
        self.len += 1;
        while self.is_over() && self.evict(Some(holder)) {}
    }

    /// Whether the records, with the certificates of their peers, need more than they may.
    fn is_over(&self) -> bool {
        self.len * ROW_BYTES + self.shares.len() * PEER_BYTES > self.most * RECORD_BYTES || self.len > self.most
    }

    /// Removes the oldest record of the peer that has most; of this one if it has more than its share.
    fn evict(&mut self, newest_of: Option<u32>) -> bool {
        let own = newest_of.filter(|at| self.shares.holds_more_than_its_share(*at, self.len));
        let oldest = match own {
            Some(at) => self.shares.lists(at)[0].oldest(),
            None => {
                let heaviest = self.shares.heaviest(self.len).filter(|holder| holder.flows > 1);
                heaviest.and_then(|holder| holder.lists[0].oldest())
            }
        };
        let Some(At(at)) = oldest.or_else(|| self.by_number.oldest()) else { return false };
        let row = &self.rows[at as usize];
        let was_told = row.recorded.as_ref().is_some_and(|known| known.number <= self.seen) && !row.has_changed;
        self.lost += u64::from(!was_told);
        self.remove(at);
        true
    }

    fn remove(&mut self, at: u32) {
        self.unlink(at);
        let row = &mut self.rows[at as usize];
        let (key, holder) = (row.key, row.holder);
        row.recorded = None;
        row.links[0].newer = self.vacant;
        self.vacant = at;
        self.len -= 1;
        self.shares.leave(holder);
        if self.index.get(&key) == Some(&at) {
            self.index.remove(&key);
        }
    }

    fn move_to_end(&mut self, at: u32) {
        self.unlink(at);
        self.link(at);
    }

    fn link(&mut self, at: u32) {
        self.by_number.push(&mut self.rows, By::Class, at);
        let holder = self.rows[at as usize].holder;
        self.shares.lists(holder)[0].push(&mut self.rows, By::Holder, at);
    }

    fn unlink(&mut self, at: u32) {
        self.by_number.unlink(&mut self.rows, By::Class, at);
        let holder = self.rows[at as usize].holder;
        self.shares.lists(holder)[0].unlink(&mut self.rows, By::Holder, at);
    }
}

/// A record is told again after this at the earliest, unless its flow ends.
pub(super) const TELL_EVERY_MS: u64 = 60_000;
/// What one of the records that may be kept stands for.
const RECORD_BYTES: usize = 256;
/// A row with its place in the index.
const ROW_BYTES: usize = size_of::<Row>() + 24;
/// A peer's place among the shares. Its certificate belongs to its tunnel as long as there is one.
const PEER_BYTES: usize = 256;
const STEP: usize = 16;
const _: () = assert!(ROW_BYTES <= RECORD_BYTES);
/// No number of a record gets so high.
const REFUSAL: u64 = 1 << 63;

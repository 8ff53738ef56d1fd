//! All translated flows, by both of their forms; bounded, with the idle ones evicted first.

use std::collections::{HashMap, VecDeque};

use super::affinity::Affinities;
use super::bypassed::Bypassed;
use super::entry::{Class, Entry, SHORTEST_TIMEOUT, State};
use super::hash::{Hashed, Key, Keyed};
use super::led::Led;
use super::sealed::Sealed;
use super::translation::Translation;
use crate::wire::ip::FlowKey;

/// Maximum number of idle flows looked at for each new one.
const MAX_SWEPT_PER_FLOW: usize = 4;
/// Maximum number of flows looked at to make room for a new one.
const MAX_SEARCHED: usize = 64;

/// The content of [`super::Translations`], under its lock.
#[derive(Debug, Default)]
pub(super) struct Table {
    keyed: Keyed,
    by_original: HashMap<Key, Entry, Hashed>,
    by_wire: HashMap<Key, Key, Hashed>,
    /// Flows of each class, roughly in order of their last use: a flow that was used since it was queued goes to the
    /// end when its turn comes.
    queues: [VecDeque<Turn>; 2],
    next_id: u64,
    pub(super) affinities: Affinities,
    pub(super) bypassed: Bypassed,
    pub(super) led: Led,
    pub(super) sealed: Sealed,
}

#[derive(Debug, Clone, Copy)]
struct Turn {
    original: Key,
    id: u64,
    last_used: u64,
}

/// What became of the flow whose turn it was.
enum Swept {
    Nothing,
    Busy,
    Idle(Key),
}

impl Table {
    pub(super) fn len(&self) -> usize {
        self.by_original.len()
    }

    /// All flows, in no order; the time of some may be over.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.by_original.values()
    }

    /// What the other methods find a flow by.
    #[inline]
    pub(super) fn key(&self, flow: &FlowKey) -> Key {
        self.keyed.key(flow)
    }

    /// The flow that the pod knows by these addresses; its time may be over.
    pub(super) fn of_original(&mut self, original: &Key) -> Option<&mut Entry> {
        self.by_original.get_mut(original)
    }

    /// The flow that has these addresses in the tunnel.
    pub(super) fn of_wire(&mut self, wire: &Key) -> Option<&mut Entry> {
        self.by_original.get_mut(self.by_wire.get(wire)?)
    }

    /// Whether a flow has these addresses in either form.
    pub(super) fn has(&self, flow: &Key) -> bool {
        self.by_wire.contains_key(flow) || self.by_original.contains_key(flow)
    }

    pub(super) fn remove(&mut self, original: &Key) -> Option<Entry> {
        let entry = self.by_original.remove(original)?;
        self.by_wire.remove(&self.keyed.key(&entry.translation.wire));
        Some(entry)
    }

    /// Adds a flow, neither of whose forms is in the table. Returns `false` if there is no room and nothing idle.
    pub(super) fn insert(
        &mut self,
        translation: Translation,
        (incarnation, version): (u64, u64),
        now: u64,
        most: usize,
    ) -> bool {
        for _ in 0..MAX_SWEPT_PER_FLOW {
            if !self.expire_one(now) {
                break;
            }
        }
        if self.len() >= most && !self.make_room() {
            return false;
        }
        let id = self.next_id;
        self.next_id += 1;
        let [original, wire] = [&translation.original, &translation.wire].map(|flow| self.keyed.key(flow));
        self.by_wire.insert(wire, original);
        let entry = Entry { translation, id, incarnation, version, last_used: now, state: State::New };
        self.queues[entry.class() as usize].push_back(Turn { original, id, last_used: now });
        self.by_original.insert(original, entry);
        true
    }

    /// Changes a flow. If that moves it to another class, it queues there.
    pub(super) fn change(&mut self, original: &FlowKey, change: impl FnOnce(&mut Entry)) {
        let original = self.key(original);
        let Some(entry) = self.by_original.get_mut(&original) else { return };
        let class = entry.class();
        change(entry);
        if entry.class() != class {
            self.queue(original);
        }
    }

    /// Removes all flows whose time is over, and frees memory.
    pub(super) fn expire(&mut self, now: u64) {
        for _ in 0..self.queues.iter().map(VecDeque::len).sum() {
            if !self.expire_one(now) {
                break;
            }
        }
        self.affinities.expire(now);
        self.sealed.expire(now);
        self.led.expire(now);
        if 4 * self.len() < self.by_original.capacity() {
            self.by_original.shrink_to(2 * self.len());
            self.by_wire.shrink_to(2 * self.len());
            self.queues.iter_mut().for_each(|queue| queue.shrink_to(2 * queue.len()));
        }
    }

    /// Removes a flow whose time is over. Returns whether looking for more is worth it.
    fn expire_one(&mut self, now: u64) -> bool {
        let is_due = |table: &Self, class: Class| {
            let queue = &table.queues[class as usize];
            let turn = queue.front()?;
            // Most often there is nothing to look up: a queue is only swept earlier if most of it is left of former
            // flows.
            if now < turn.last_used.saturating_add(SHORTEST_TIMEOUT) && queue.len() <= 2 * table.len() {
                return Some(false);
            }
            let known =
                table.by_original.get(&turn.original).filter(|entry| entry.id == turn.id && entry.class() == class);
            // What is left of a flow that is gone is swept, too, and so is a flow that was used since.
            Some(known.is_none_or(|entry| !entry.is_live(now) || entry.last_used != turn.last_used))
        };
        for class in [Class::Short, Class::Long] {
            if is_due(self, class) == Some(true) {
                if let Swept::Idle(original) = self.sweep(class) {
                    self.remove(&original);
                }
                return true;
            }
        }
        false
    }

    /// Evicts a flow that was not used since its last turn.
    fn make_room(&mut self) -> bool {
        for class in [Class::Short, Class::Long] {
            for _ in 0..MAX_SEARCHED.min(self.queues[class as usize].len()) {
                if let Swept::Idle(original) = self.sweep(class) {
                    self.remove(&original);
                    return true;
                }
            }
        }
        false
    }

    /// Takes the first of a queue. A flow that was used since it was queued goes to its end.
    fn sweep(&mut self, class: Class) -> Swept {
        let queue = &mut self.queues[class as usize];
        let Some(turn) = queue.pop_front() else { return Swept::Nothing };
        let known = self.by_original.get(&turn.original);
        match known.filter(|entry| entry.id == turn.id && entry.class() == class) {
            None => Swept::Nothing,
            Some(entry) if entry.last_used != turn.last_used => {
                queue.push_back(Turn { last_used: entry.last_used, ..turn });
                Swept::Busy
            }
            Some(_) => Swept::Idle(turn.original),
        }
    }

    fn queue(&mut self, original: Key) {
        if let Some(entry) = self.by_original.get(&original) {
            let turn = Turn { original, id: entry.id, last_used: entry.last_used };
            self.queues[entry.class() as usize].push_back(turn);
        }
    }
}

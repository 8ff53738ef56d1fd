//! One shard of the flow table: a compact hash table whose entries are also linked by age.

use std::net::IpAddr;

use super::flow_entry::{At, By, Entry, List, NONE};
use super::records::Recorded;
use super::shares::Shares;
use crate::wire::ip::{FlowKey, protocol};

/// Number of protocol classes. Each has a single timeout, so its flows expire in order of age.
const TIMEOUT_CLASSES: usize = 3;
/// A table with no more entries than this is not worth shrinking.
const MIN_SHRINKABLE_LEN: usize = if cfg!(test) { 8 } else { 64 };

/// Open addressing over 4-byte positions, so an entry is stored once and a flow costs about 110 bytes.
#[derive(Debug)]
pub(super) struct FlowTable {
    /// Positions of entries plus one; 0 is empty. The length is a power of two, or 0.
    slots: Vec<u32>,
    entries: Vec<Entry>,
    /// First free position in `entries`; free positions are linked through `newer` of their first link.
    vacant: u32,
    len: usize,
    classes: [List; TIMEOUT_CLASSES],
    shares: Shares,
}

impl Default for FlowTable {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            entries: Vec::new(),
            vacant: NONE,
            len: 0,
            classes: [List::EMPTY; TIMEOUT_CLASSES],
            shares: Shares::default(),
        }
    }
}

impl FlowTable {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn entry(&self, at: At) -> &Entry {
        &self.entries[at.0 as usize]
    }

    /// What the record of a flow says, if it is this one.
    pub(super) fn recorded(&mut self, at: At, id: u64) -> Option<&mut Recorded> {
        self.entries.get_mut(at.0 as usize)?.recorded.as_deref_mut().filter(|recorded| recorded.id == id)
    }

    /// What the record of a flow says.
    pub(super) fn recorded_of(&mut self, At(at): At) -> Option<&mut Recorded> {
        self.entries[at as usize].recorded.as_deref_mut()
    }

    /// Begins the record of a flow.
    pub(super) fn record(&mut self, at: At, recorded: Option<Box<Recorded>>) {
        self.entries[at.0 as usize].recorded = recorded;
    }

    /// All flows, in no order.
    pub(super) fn flows(&self) -> impl Iterator<Item = &FlowKey> {
        self.entries().map(|entry| &entry.flow)
    }

    /// All entries, in no order.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.slots.iter().filter_map(|slot| Some(&self.entries[slot.checked_sub(1)? as usize]))
    }

    /// The oldest entry of each class.
    pub(super) fn oldest(&self) -> impl Iterator<Item = At> {
        self.classes.iter().filter_map(List::oldest)
    }

    /// Whether `peer` holds at least as many flows as it would if all peers held equally many.
    pub(super) fn has_its_share(&self, peer: IpAddr) -> bool {
        let (held, peers) = self.shares.of(peer).map_or((0, 1), |holder| (holder.flows, 0));
        held * (self.shares.len() + peers) >= self.len
    }

    /// The oldest unanswered flow of `peer`, and its oldest answered one.
    pub(super) fn oldest_of(&self, peer: IpAddr) -> [Option<At>; 2] {
        self.shares.of(peer).map_or([None; 2], |holder| holder.lists.map(|list| list.oldest()))
    }

    /// The same for a peer that holds at least its share.
    pub(super) fn oldest_of_heaviest(&mut self) -> [Option<At>; 2] {
        self.shares.heaviest(self.len).map_or([None; 2], |holder| holder.lists.map(|list| list.oldest()))
    }

    pub(super) fn find(&self, hash: u64, flow: &FlowKey, owner: u64) -> Option<At> {
        let hash = hash as u32;
        let mask = self.slots.len().wrapping_sub(1);
        let mut slot = hash as usize & mask;
        loop {
            let at = self.slots.get(slot)?.checked_sub(1)?;
            let entry = &self.entries[at as usize];
            if entry.hash == hash && entry.flow == *flow && entry.owner == owner {
                return Some(At(at));
            }
            slot = (slot + 1) & mask;
        }
    }

    /// Records a packet of the flow, which becomes the newest.
    pub(super) fn touch(&mut self, At(at): At, now: u64, rights: u64, generation: u32, answered: bool) {
        self.unlink(at);
        let entry = &mut self.entries[at as usize];
        entry.last_used = now;
        entry.rights = rights;
        entry.generation = generation;
        entry.answered |= answered;
        entry.ended = false;
        self.link_newest(at);
    }

    /// Records that a flow is no longer allowed. A connection that goes on all the same does not expire, so it stays
    /// refused; in other protocols its other end may begin a flow of its own with the same ports after the timeout.
    pub(super) fn end(&mut self, at: At, now: u64) {
        let Entry { rights, generation, ref flow, .. } = *self.entry(at);
        if flow.protocol == protocol::TCP {
            self.touch(at, now, rights, generation, false);
        }
        self.entries[at.0 as usize].ended = true;
    }

    /// Adds a flow of `peer` that is not in the table.
    pub(super) fn insert(&mut self, hash: u64, peer: IpAddr, mut entry: Entry) -> At {
        entry.hash = hash as u32;
        entry.holder = self.shares.join(peer);
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            self.rehash((self.slots.len() * 2).max(16));
        }
        let at = if self.vacant == NONE {
            self.entries.push(entry);
            (self.entries.len() - 1) as u32
        } else {
            let at = self.vacant;
            self.vacant = self.entries[at as usize].links[0].newer;
            self.entries[at as usize] = entry;
            at
        };
        self.place(at);
        self.link_newest(at);
        self.len += 1;
        At(at)
    }

    /// Removes a flow. Returns what its record says, and when it was last used.
    pub(super) fn remove(&mut self, At(at): At) -> Option<(Box<Recorded>, u64)> {
        self.unlink(at);
        let mask = self.slots.len() - 1;
        let mut hole = self.entries[at as usize].hash as usize & mask;
        while self.slots[hole] != at + 1 {
            hole = (hole + 1) & mask;
        }
        // Move later entries of the same cluster back, unless that would put them before their home.
        let mut slot = hole;
        loop {
            slot = (slot + 1) & mask;
            let Some(other) = self.slots[slot].checked_sub(1) else {
                break;
            };
            let home = self.entries[other as usize].hash as usize & mask;
            if slot.wrapping_sub(home) & mask >= slot.wrapping_sub(hole) & mask {
                self.slots[hole] = self.slots[slot];
                hole = slot;
            }
        }
        self.slots[hole] = 0;
        self.shares.leave(self.entries[at as usize].holder);
        self.entries[at as usize].links[0].newer = self.vacant;
        self.vacant = at;
        self.len -= 1;
        let entry = &mut self.entries[at as usize];
        Some((entry.recorded.take()?, entry.last_used))
    }

    /// Frees memory when few of the entries are left.
    pub(super) fn shrink(&mut self) {
        if self.len == 0 {
            *self = Self::default();
        } else if self.entries.len() > MIN_SHRINKABLE_LEN && 4 * self.len < self.entries.len() {
            self.rebuild();
        }
    }

    /// Moves the remaining entries into a table of the right size.
    fn rebuild(&mut self) {
        let mut positions = Vec::with_capacity(self.len);
        for class in self.classes {
            let mut at = class.oldest;
            while let Some(entry) = self.entries.get(at as usize) {
                positions.push(at);
                at = entry.links[By::Class as usize].newer;
            }
        }
        // The lists of the holders span all classes and must stay in order of age, too.
        positions.sort_by_key(|at| self.entries[*at as usize].last_used);
        let mut table = Self { entries: Vec::with_capacity(self.len), ..Self::default() };
        for at in positions {
            let entry = self.entries[at as usize].take();
            let peer = self.shares.peer(entry.holder);
            table.insert(entry.hash.into(), peer, entry);
        }
        *self = table;
    }

    fn rehash(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![0; slots]);
        for at in old.into_iter().filter_map(|slot| slot.checked_sub(1)) {
            self.place(at);
        }
    }

    fn place(&mut self, at: u32) {
        let mask = self.slots.len() - 1;
        let mut slot = self.entries[at as usize].hash as usize & mask;
        while self.slots[slot] != 0 {
            slot = (slot + 1) & mask;
        }
        self.slots[slot] = at + 1;
    }

    fn link_newest(&mut self, at: u32) {
        let Entry { holder, answered, .. } = self.entries[at as usize];
        self.classes[self.entries[at as usize].class()].push(&mut self.entries, By::Class, at);
        self.shares.lists(holder)[usize::from(answered)].push(&mut self.entries, By::Holder, at);
    }

    fn unlink(&mut self, at: u32) {
        let Entry { holder, answered, .. } = self.entries[at as usize];
        self.classes[self.entries[at as usize].class()].unlink(&mut self.entries, By::Class, at);
        self.shares.lists(holder)[usize::from(answered)].unlink(&mut self.entries, By::Holder, at);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::flow_entry::Owner;
    use super::*;
    use crate::counters::Direction;

    const OWNER: Owner = Owner { owner: 1, rights: 2 };

    /// One peer for even ports and one for odd ports.
    fn peer(port: u16) -> IpAddr {
        [10, 0, 0, 2 + (port % 2) as u8].into()
    }

    fn flow(port: u16, protocol: u8) -> FlowKey {
        let address = [10, 0, 0, 1].into();
        FlowKey { local: address, remote: address, local_port: port, remote_port: 0, protocol, fragment: false }
    }

    proptest! {
        // Few hash values, so that clusters form, wrap around and are broken up in every way.
        #[test]
        fn the_table_agrees_with_a_map_and_keeps_every_list_in_order_of_age(
            steps in prop::collection::vec((0_u8..4, 0_u16..40, 0_u64..5), 1..400),
        ) {
            let mut table = FlowTable::default();
            let mut model = BTreeMap::new();
            for (now, (step, port, spread)) in steps.into_iter().enumerate() {
                let now = now as u64;
                let protocol = [6, 17, 1][usize::from(port % 3)];
                // The same port always has the same hash.
                let hash = u64::from(port % 5).wrapping_sub(2);
                let flow = flow(port, protocol);
                let found = table.find(hash, &flow, OWNER.owner);
                prop_assert_eq!(table.find(hash, &flow, OWNER.owner + 1), None);
                prop_assert_eq!(found.map(|at| table.entry(at).last_used), model.get(&port).map(|(used, _)| *used));
                match (step, found) {
                    (0 | 1, None) => {
                        table.insert(hash, peer(port), Entry::new(flow, OWNER, Direction::Inbound, 1, now));
                        model.insert(port, (now, false));
                    }
                    (0 | 1, Some(at)) => {
                        table.touch(at, now, OWNER.rights, 1, spread == 0);
                        let answered = model[&port].1 || spread == 0;
                        model.insert(port, (now, answered));
                    }
                    (_, Some(at)) => {
                        table.remove(at);
                        model.remove(&port);
                        table.shrink();
                        prop_assert!(table.entries.len() <= MIN_SHRINKABLE_LEN.max(4 * table.len()));
                    }
                    _ => {}
                }
                prop_assert_eq!(table.len(), model.len());
                let oldest = |wanted: &dyn Fn(u16, bool) -> bool| {
                    let of = model.iter().filter(|(port, (_, answered))| wanted(**port, *answered));
                    of.map(|(_, (used, _))| *used).min()
                };
                let mut expected: Vec<_> = (0..3).filter_map(|class| oldest(&|port, _| port % 3 == class)).collect();
                let mut actual: Vec<u64> = table.oldest().map(|at| table.entry(at).last_used).collect();
                expected.sort_unstable();
                actual.sort_unstable();
                prop_assert_eq!(actual, expected);
                for parity in [0, 1] {
                    let expected = [false, true].map(|with| oldest(&|port, answered| port % 2 == parity && answered == with));
                    let actual = table.oldest_of(peer(parity)).map(|at| at.map(|at| table.entry(at).last_used));
                    prop_assert_eq!(actual, expected);
                    let held = model.keys().filter(|port| *port % 2 == parity).count();
                    let both = model.keys().map(|port| port % 2).chain([parity]).collect::<std::collections::BTreeSet<_>>().len();
                    prop_assert_eq!(table.has_its_share(peer(parity)), held * both >= model.len());
                }
            }
        }
    }
}

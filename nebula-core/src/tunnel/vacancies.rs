//! Free indexes of the tunnel table, and those reserved for handshakes. Only the control plane changes them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, PoisonError};

use super::{HalfOpen, LocalIndex, Tunnel};
use crate::sync::Mutex;

/// Number of low bits of an index, before scrambling, that hold the slot. The rest is the slot's generation, so an
/// index is reused only after its slot was used 4096 times.
pub(super) const SLOT_BITS: u32 = 20;
const GENERATIONS: u32 = 1 << (32 - SLOT_BITS);
/// Chunk `k` holds `FIRST_CHUNK << k` slots, so that a node with few tunnels has a small table.
pub(super) const FIRST_CHUNK: u32 = if cfg!(all(test, loom)) { 1 } else { 16 };
pub(super) const CHUNKS: usize = 16;
pub(super) const SLOTS: u32 = FIRST_CHUNK * ((1 << CHUNKS) - 1);

/// Free and reserved slots; changed by the control plane only.
#[derive(Debug)]
pub(super) struct Vacancies {
    fresh: u32,
    /// Slot and last generation; oldest first, so an index rests as long as possible.
    freed: VecDeque<(u32, u32)>,
    pub(super) reserved: BTreeSet<LocalIndex>,
    /// Handshakes that this node answered, by their reserved index.
    pub(super) half_open: BTreeMap<LocalIndex, Arc<HalfOpen>>,
    /// Tunnels of an earlier process, whose indexes are in no slot of this table.
    pub(super) inherited: BTreeMap<LocalIndex, Arc<Tunnel>>,
    scramble: Scramble,
}

impl Vacancies {
    pub(super) fn new(scramble: Scramble) -> Self {
        Self {
            fresh: 0,
            freed: VecDeque::new(),
            reserved: BTreeSet::new(),
            half_open: BTreeMap::new(),
            inherited: BTreeMap::new(),
            scramble,
        }
    }

    /// Number of slots that were ever in use.
    pub(super) fn used_slots(&self) -> u32 {
        self.fresh
    }

    #[cfg(test)]
    #[cfg(not(loom))]
    pub(super) fn skip_to_slot(&mut self, slot: u32) {
        self.fresh = slot;
    }

    pub(super) fn reserve(&mut self, random: u32) -> Option<LocalIndex> {
        let (slot, generation) = if self.fresh < SLOTS && self.freed.len() < FIRST_CHUNK as usize {
            self.fresh += 1;
            (self.fresh - 1, random % GENERATIONS)
        } else {
            let (slot, generation) = self.freed.pop_front()?;
            (slot, generation + 1)
        };
        let index = |generation| self.scramble.index(slot | (generation % GENERATIONS) << SLOT_BITS);
        let is_usable = |index: &LocalIndex| *index != LocalIndex(0) && !self.inherited.contains_key(index);
        let index = (generation..generation + GENERATIONS).map(index).find(is_usable)?;
        self.reserved.insert(index);
        Some(index)
    }

    /// Gives back a reserved index. Does nothing if a tunnel with it was published meanwhile.
    pub(super) fn release(&mut self, index: LocalIndex) {
        self.half_open.remove(&index);
        if self.reserved.remove(&index) {
            self.free(index);
        }
    }

    /// Records that a tunnel with a reserved index was published.
    pub(super) fn publish(&mut self, index: LocalIndex) {
        self.half_open.remove(&index);
        self.reserved.remove(&index);
    }

    /// Makes the slot of this index available again.
    pub(super) fn free(&mut self, index: LocalIndex) {
        self.freed.push_back(self.scramble.parts(index));
    }
}

/// An index that is reserved for a handshake. Dropping it gives the index back, unless a tunnel with it was published.
pub(crate) struct ReservedIndex {
    index: LocalIndex,
    vacancies: Arc<Mutex<Vacancies>>,
}

impl ReservedIndex {
    pub(super) fn new(index: LocalIndex, vacancies: Arc<Mutex<Vacancies>>) -> Self {
        Self { index, vacancies }
    }

    /// The index, which stays reserved until somebody releases it.
    #[cfg(test)]
    pub(crate) fn keep(self) -> LocalIndex {
        let index = self.index;
        std::mem::forget(self);
        index
    }

    /// An index reserved in a table of its own.
    #[cfg(test)]
    pub(crate) fn lone(index: LocalIndex) -> Self {
        Self { index, vacancies: Arc::new(Mutex::new(Vacancies::new(Scramble(0)))) }
    }
}

impl Drop for ReservedIndex {
    fn drop(&mut self) {
        self.vacancies.lock().unwrap_or_else(PoisonError::into_inner).release(self.index);
    }
}

impl std::ops::Deref for ReservedIndex {
    type Target = LocalIndex;

    fn deref(&self) -> &LocalIndex {
        &self.index
    }
}

impl std::fmt::Debug for ReservedIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.index.fmt(f)
    }
}

/// A keyed permutation of `u32`. It hides which slots are in use; it is no cipher and need not be one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scramble(pub(super) u64);

impl Scramble {
    const FACTORS: [u32; 2] = [0x9e37_79b1, 0x85eb_ca77];
    const INVERSES: [u32; 2] = [inverse(Self::FACTORS[0]), inverse(Self::FACTORS[1])];

    fn index(&self, mut x: u32) -> LocalIndex {
        x = (x ^ self.0 as u32).wrapping_mul(Self::FACTORS[0]);
        x = ((x ^ x >> 16) ^ (self.0 >> 32) as u32).wrapping_mul(Self::FACTORS[1]);
        LocalIndex(x ^ x >> 16)
    }

    pub(super) fn parts(&self, LocalIndex(mut x): LocalIndex) -> (u32, u32) {
        x = (x ^ x >> 16).wrapping_mul(Self::INVERSES[1]) ^ (self.0 >> 32) as u32;
        x = (x ^ x >> 16).wrapping_mul(Self::INVERSES[0]) ^ self.0 as u32;
        (x & ((1 << SLOT_BITS) - 1), x >> SLOT_BITS)
    }
}

/// Inverse of an odd number modulo 2^32, by Newton's iteration.
const fn inverse(odd: u32) -> u32 {
    let mut x = odd;
    let mut bits = 3;
    while bits < 32 {
        x = x.wrapping_mul(2_u32.wrapping_sub(odd.wrapping_mul(x)));
        bits *= 2;
    }
    x
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn scrambling_loses_nothing_and_depends_on_the_key() {
        for key in [0, 5, u64::MAX, 0x0123_4567_89ab_cdef] {
            let scramble = Scramble(key);
            for x in (0..100_000_u32).chain((0..100_000).map(|n: u32| n.wrapping_mul(0x9e37_79b1))) {
                let (slot, generation) = scramble.parts(scramble.index(x));
                assert_eq!(slot | generation << SLOT_BITS, x);
            }
        }
        assert_ne!(Scramble(1).index(0), Scramble(2).index(0));
        assert_ne!(Scramble(1).index(0), Scramble(1 << 32 | 1).index(0));
    }
}

//! All live tunnels: slot by local index, primary by overlay address (SA database). Read without a lock.

use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use arc_swap::ArcSwapOption;

use super::{LocalIndex, Tunnel};

/// Low bits of an index before scrambling: the slot. The rest is the slot's generation, so an index comes back only
/// after its slot was used 4096 times.
const SLOT_BITS: u32 = 20;
const GENERATIONS: u32 = 1 << (32 - SLOT_BITS);
/// Chunk `k` holds `FIRST_CHUNK << k` slots, so that a node with few tunnels has a small table.
const FIRST_CHUNK: u32 = 16;
const CHUNKS: usize = 16;
const SLOTS: u32 = FIRST_CHUNK * ((1 << CHUNKS) - 1);

type Slot = ArcSwapOption<Tunnel>;

/// Readers never wait; only the control plane publishes and retires.
///
/// An index is a slot number and a generation, scrambled with a key: the slot is found without hashing, and somebody
/// who does not see the traffic cannot guess which indexes are in use.
#[derive(Debug)]
pub struct TunnelTable {
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    /// Indexes, not tunnels: a map reclaims late, but the keys of a retired tunnel must go at once.
    by_address: papaya::HashMap<IpAddr, LocalIndex>,
    version: AtomicU64,
    vacancies: Mutex<Vacancies>,
    scramble: Scramble,
}

/// Who has which slot; touched by the control plane only.
#[derive(Debug, Default)]
struct Vacancies {
    fresh: u32,
    /// Slot and last generation; oldest first, so an index rests as long as possible.
    freed: VecDeque<(u32, u32)>,
    reserved: BTreeSet<LocalIndex>,
}

impl Default for TunnelTable {
    fn default() -> Self {
        Self::new(0)
    }
}

impl TunnelTable {
    /// An empty table; `key` makes its indexes unpredictable.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self {
            chunks: Default::default(),
            by_address: papaya::HashMap::new(),
            version: AtomicU64::new(1),
            vacancies: Mutex::default(),
            scramble: Scramble(key),
        }
    }
    /// Reserves an unused index, never 0. `random` picks the generation. `None` if the table is full.
    #[must_use]
    pub fn reserve(&self, random: u32) -> Option<LocalIndex> {
        let mut vacancies = self.vacancies.lock().unwrap_or_else(PoisonError::into_inner);
        let (slot, mut generation) = if vacancies.fresh < SLOTS && vacancies.freed.len() < FIRST_CHUNK as usize {
            vacancies.fresh += 1;
            (vacancies.fresh - 1, random % GENERATIONS)
        } else {
            let (slot, generation) = vacancies.freed.pop_front()?;
            (slot, generation + 1)
        };
        let index = loop {
            let index = self.scramble.index(slot | (generation % GENERATIONS) << SLOT_BITS);
            if index != LocalIndex(0) {
                break index;
            }
            generation += 1;
        };
        vacancies.reserved.insert(index);
        Some(index)
    }
    /// Gives back an index that never became a tunnel.
    pub fn release(&self, index: LocalIndex) {
        let mut vacancies = self.vacancies.lock().unwrap_or_else(PoisonError::into_inner);
        if vacancies.reserved.remove(&index) {
            let (slot, generation) = self.scramble.parts(index);
            vacancies.freed.push_back((slot, generation));
        }
    }
    /// Makes `tunnel` reachable by its (reserved) index.
    pub fn publish(&self, tunnel: Arc<Tunnel>) {
        let index = tunnel.local_index;
        let (slot, _) = self.scramble.parts(index);
        let Some((chunk, offset)) = locate(slot) else {
            return;
        };
        self.vacancies.lock().unwrap_or_else(PoisonError::into_inner).reserved.remove(&index);
        let chunk = self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| Slot::empty()).collect());
        chunk[offset].store(Some(tunnel));
        self.changed();
    }
    /// Makes `tunnel` the one that carries packets to all of its peer's addresses.
    pub fn set_primary(&self, tunnel: &Arc<Tunnel>) {
        let by_address = self.by_address.pin();
        for address in &tunnel.peer_addresses {
            by_address.insert(*address, tunnel.local_index);
        }
        self.changed();
    }
    /// Removes a tunnel; addresses that pointed to it point to nothing.
    pub fn retire(&self, index: LocalIndex) -> Option<Arc<Tunnel>> {
        let slot = self.slot(index)?;
        let tunnel = slot.load_full().filter(|tunnel| tunnel.local_index == index)?;
        slot.store(None);
        let by_address = self.by_address.pin();
        for address in &tunnel.peer_addresses {
            // An error means that another tunnel carries this address by now.
            let _ = by_address.remove_if(address, |_, primary| *primary == index);
        }
        self.changed();
        let (slot, generation) = self.scramble.parts(index);
        self.vacancies.lock().unwrap_or_else(PoisonError::into_inner).freed.push_back((slot, generation));
        Some(tunnel)
    }
    /// By own index.
    #[must_use]
    pub fn by_index(&self, index: LocalIndex) -> Option<Arc<Tunnel>> {
        self.slot(index)?.load_full().filter(|tunnel| tunnel.local_index == index)
    }
    /// Primary tunnel to a peer.
    #[must_use]
    pub fn by_address(&self, address: IpAddr) -> Option<Arc<Tunnel>> {
        let index = *self.by_address.pin().get(&address)?;
        self.by_index(index)
    }
    /// Changes with every publish, change of primary and retire: what was looked up under the same version still holds.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn slot(&self, index: LocalIndex) -> Option<&Slot> {
        let (slot, _) = self.scramble.parts(index);
        let (chunk, offset) = locate(slot)?;
        self.chunks[chunk].get()?.get(offset)
    }
    fn changed(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// Chunk of a slot, and its place in there.
fn locate(slot: u32) -> Option<(usize, usize)> {
    let chunk = (slot / FIRST_CHUNK + 1).ilog2();
    let first = FIRST_CHUNK * ((1 << chunk) - 1);
    (slot < SLOTS).then_some((chunk as usize, (slot - first) as usize))
}

/// A keyed permutation of `u32`. It hides which slots are in use; it is no cipher and need not be one.
#[derive(Debug)]
struct Scramble(u64);

impl Scramble {
    const FACTORS: [u32; 2] = [0x9e37_79b1, 0x85eb_ca77];
    const INVERSES: [u32; 2] = [inverse(Self::FACTORS[0]), inverse(Self::FACTORS[1])];

    fn index(&self, mut x: u32) -> LocalIndex {
        x = (x ^ self.0 as u32).wrapping_mul(Self::FACTORS[0]);
        x = ((x ^ x >> 16) ^ (self.0 >> 32) as u32).wrapping_mul(Self::FACTORS[1]);
        LocalIndex(x ^ x >> 16)
    }
    fn parts(&self, LocalIndex(mut x): LocalIndex) -> (u32, u32) {
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

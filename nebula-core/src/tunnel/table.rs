//! All live tunnels by local index, and the primary ones by overlay address (SA database). Read without a lock.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock, PoisonError};

use super::vacancies::{CHUNKS, FIRST_CHUNK, ReservedIndex, SLOTS, Scramble, Vacancies};
use super::{HalfOpen, LocalIndex, Tunnel};
use crate::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::sync::{ArcSwapOption, HashMap, Loaded, Mutex, MutexGuard};

type Slot = ArcSwapOption<Tunnel>;

/// Readers never wait; only the control plane publishes and retires.
///
/// An index is a slot number and a generation, scrambled with a key: the slot is found without hashing, and somebody
/// who does not see the traffic cannot guess which indexes are in use.
#[derive(Debug)]
pub(crate) struct TunnelTable {
    chunks: [OnceLock<Box<[Slot]>>; CHUNKS],
    /// Indexes, not tunnels: a map frees its entries late, but the keys of a retired tunnel must be erased at once.
    by_address: HashMap<IpAddr, LocalIndex>,
    version: AtomicU64,
    /// Number of slots that were ever in use, so that lanes can reject indexes beyond them without the lock.
    used_slots: AtomicU32,
    /// Whether there are tunnels of an earlier process.
    inherits: AtomicBool,
    vacancies: Arc<Mutex<Vacancies>>,
    scramble: Scramble,
}

impl Default for TunnelTable {
    fn default() -> Self {
        Self::new(0)
    }
}

impl TunnelTable {
    /// An empty table; `key` makes its indexes unpredictable.
    #[must_use]
    pub(crate) fn new(key: u64) -> Self {
        Self {
            chunks: Default::default(),
            by_address: HashMap::new(),
            version: AtomicU64::new(1),
            used_slots: AtomicU32::new(0),
            inherits: AtomicBool::new(false),
            vacancies: Arc::new(Mutex::new(Vacancies::new(Scramble(key)))),
            scramble: Scramble(key),
        }
    }

    /// Reserves an unused index, never 0. `random` picks the generation. `None` if the table is full.
    #[must_use]
    pub(crate) fn reserve(&self, random: u32) -> Option<ReservedIndex> {
        let mut vacancies = self.lock();
        let index = vacancies.reserve(random)?;
        self.used_slots.store(vacancies.used_slots(), Ordering::Relaxed);
        Some(ReservedIndex::new(index, Arc::clone(&self.vacancies)))
    }

    /// Gives back an index that was [kept](ReservedIndex::keep).
    #[cfg(test)]
    pub(crate) fn release(&self, index: LocalIndex) {
        self.lock().release(index);
    }

    /// Lets lanes receive for a (reserved) index whose initiator is not confirmed yet.
    pub(crate) fn await_caller(&self, index: LocalIndex, half_open: Arc<HalfOpen>) {
        self.lock().half_open.insert(index, half_open);
    }

    /// The tunnel of an initiator that is not confirmed yet. Too slow for every packet; once the initiator is
    /// confirmed, [`TunnelTable::look_up`] finds the tunnel.
    pub(crate) fn unconfirmed(&self, index: LocalIndex) -> Option<Arc<Tunnel>> {
        let (slot, _) = self.scramble.parts(index);
        if slot >= self.used_slots.load(Ordering::Relaxed) {
            return None;
        }
        let half_open = {
            let vacancies = self.lock();
            vacancies.half_open.get(&index).map(Arc::clone)
        };
        half_open?.tunnel()
    }

    /// Lets lanes receive with a tunnel of an earlier process. Its index is not given to another tunnel meanwhile.
    /// Returns `false` if the index is in use.
    pub(crate) fn inherit(&self, tunnel: Arc<Tunnel>) -> bool {
        let index = tunnel.local_index;
        let mut vacancies = self.lock();
        let is_free = index != LocalIndex(0)
            && !vacancies.reserved.contains(&index)
            && !vacancies.inherited.contains_key(&index)
            && self.by_index(index).is_none();
        if is_free {
            vacancies.inherited.insert(index, tunnel);
            self.inherits.store(true, Ordering::Release);
        }
        is_free
    }

    /// The tunnel of an earlier process with this index. Too slow for every packet, but there are such tunnels for
    /// some seconds only.
    pub(crate) fn inherited(&self, index: LocalIndex) -> Option<Arc<Tunnel>> {
        if !self.inherits.load(Ordering::Acquire) {
            return None;
        }
        self.lock().inherited.get(&index).map(Arc::clone)
    }

    /// Ends a tunnel of an earlier process.
    pub(crate) fn disinherit(&self, index: LocalIndex) {
        let mut vacancies = self.lock();
        vacancies.inherited.remove(&index);
        self.inherits.store(!vacancies.inherited.is_empty(), Ordering::Release);
    }

    /// Makes `tunnel` reachable by its (reserved) index.
    pub(crate) fn publish(&self, tunnel: Arc<Tunnel>) {
        let index = tunnel.local_index;
        let (slot, _) = self.scramble.parts(index);
        let Some((chunk, offset)) = locate(slot) else {
            return;
        };
        let chunk = self.chunks[chunk].get_or_init(|| (0..FIRST_CHUNK << chunk).map(|_| Slot::empty()).collect());
        chunk[offset].store(Some(tunnel));
        // Not before, so that an index is reserved or leads to its tunnel at any time.
        self.lock().publish(index);
        self.changed();
    }

    /// Makes `tunnel` the one that carries packets to all of its peer's addresses.
    pub(crate) fn set_primary(&self, tunnel: &Arc<Tunnel>) {
        let by_address = self.by_address.pin();
        for address in &tunnel.peer_addresses {
            by_address.insert(*address, tunnel.local_index);
        }
        self.changed();
    }

    /// Removes a tunnel; addresses that pointed to it then have no primary tunnel.
    pub(crate) fn retire(&self, index: LocalIndex) -> Option<Arc<Tunnel>> {
        let slot = self.slot(index)?;
        let tunnel = slot.load_full().filter(|tunnel| tunnel.local_index == index)?;
        slot.store(None);
        let by_address = self.by_address.pin();
        for address in &tunnel.peer_addresses {
            // An error means that another tunnel carries this address by now.
            let _ = by_address.remove_if(address, |_, primary| *primary == index);
        }
        self.changed();
        self.lock().free(index);
        Some(tunnel)
    }

    /// The tunnel with this own index.
    #[must_use]
    pub(crate) fn by_index(&self, index: LocalIndex) -> Option<Arc<Tunnel>> {
        self.slot(index)?.load_full().filter(|tunnel| tunnel.local_index == index)
    }

    /// Primary tunnel to a peer.
    #[must_use]
    pub(crate) fn by_address(&self, address: IpAddr) -> Option<Arc<Tunnel>> {
        self.by_index(self.primary(address)?)
    }

    /// Whether this tunnel carries packets to its peer.
    pub(crate) fn is_primary(&self, tunnel: &Tunnel) -> bool {
        let first = tunnel.peer_addresses.first();
        first.and_then(|address| self.primary(*address)) == Some(tunnel.local_index)
    }

    /// Like [`TunnelTable::by_index`], for lanes: does not count a reference, which would be a write to memory that all
    /// lanes of the tunnel read.
    pub(crate) fn look_up(&self, index: LocalIndex) -> Lookup {
        Lookup { index, slot: self.slot(index).map(ArcSwapOption::load) }
    }

    /// Index of the primary tunnel to a peer.
    pub(crate) fn primary(&self, address: IpAddr) -> Option<LocalIndex> {
        Some(*self.by_address.pin().get(&address)?)
    }

    /// Number of overlay addresses with a primary tunnel.
    pub(crate) fn primaries(&self) -> usize {
        self.by_address.len()
    }

    /// Whether this index is reserved for a tunnel that is not published yet. Takes the lock of the control plane, so
    /// it is too slow for every packet.
    pub(crate) fn is_reserved(&self, index: LocalIndex) -> bool {
        self.lock().reserved.contains(&index)
    }

    /// Number of indexes reserved for tunnels that are not published yet.
    pub(crate) fn reserved(&self) -> usize {
        self.lock().reserved.len()
    }

    /// Changes with every publish, change of primary and retire: a lookup under the same version is still valid.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Vacancies> {
        self.vacancies.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The content of a slot. A tunnel that is retired meanwhile lives until this is dropped, so keep it for one packet
/// only.
#[derive(Debug)]
pub(crate) struct Lookup {
    index: LocalIndex,
    slot: Option<Loaded<Tunnel>>,
}

impl Lookup {
    /// Finds no tunnel.
    pub(crate) fn nothing() -> Self {
        Self { index: LocalIndex(0), slot: None }
    }

    /// The tunnel that was looked up.
    pub(crate) fn tunnel(&self) -> Option<&Tunnel> {
        self.slot.as_ref()?.as_deref().filter(|tunnel| tunnel.local_index == self.index)
    }
}

/// Chunk of a slot, and its offset in there.
fn locate(slot: u32) -> Option<(usize, usize)> {
    let chunk = (slot / FIRST_CHUNK + 1).ilog2();
    let first = FIRST_CHUNK * ((1 << chunk) - 1);
    (slot < SLOTS).then_some((chunk as usize, (slot - first) as usize))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::collections::BTreeSet;

    use super::super::vacancies::SLOT_BITS;
    use super::*;
    use crate::forward::testing::{self, tunnel};

    fn add(table: &TunnelTable, networks: &[&str]) -> LocalIndex {
        let index = table.reserve(3).unwrap().keep();
        let tunnel = tunnel(index, testing::verified(networks));
        table.publish(Arc::clone(&tunnel));
        table.set_primary(&tunnel);
        index
    }

    #[test]
    fn a_tunnel_is_found_by_its_index_and_by_every_address_of_its_peer() {
        let table = TunnelTable::new(0x0123_4567_89ab_cdef);
        let index = add(&table, &["10.1.0.2/16", "fd00::2/64"]);
        assert_eq!(table.by_index(index).unwrap().local_index, index);
        for address in ["10.1.0.2", "fd00::2"] {
            assert_eq!(table.by_address(address.parse().unwrap()).unwrap().local_index, index);
        }
        assert!(table.by_address("10.1.0.3".parse().unwrap()).is_none());
        assert!((0..10_000).all(|n| n == index.0 || table.by_index(LocalIndex(n)).is_none()));
        assert!((0..32).all(|bit| table.by_index(LocalIndex(index.0 ^ 1 << bit)).is_none()));
    }

    #[test]
    fn a_retired_tunnel_is_gone_at_once_with_its_keys() {
        let table = TunnelTable::new(1);
        let index = add(&table, &["10.1.0.2/16"]);
        let retired = Arc::downgrade(&table.retire(index).unwrap());
        assert!(retired.upgrade().is_none());
        assert!(table.by_index(index).is_none() && table.by_address("10.1.0.2".parse().unwrap()).is_none());
        assert!(table.retire(index).is_none());
    }

    #[test]
    fn the_index_of_an_inherited_tunnel_is_found_beside_the_slots_and_given_to_nobody() {
        let (one, other) = (TunnelTable::new(5), TunnelTable::new(5));
        let indexes: Vec<_> = (0..40).map(|n| one.reserve(n).unwrap().keep()).collect();
        let all_inherited = indexes.iter().all(|index| {
            let inherited = tunnel(*index, testing::verified(&["10.1.0.2/16"]));
            other.inherit(Arc::clone(&inherited)) && !other.inherit(inherited)
        });
        assert!(all_inherited, "each once");
        let others: BTreeSet<_> = (0..40).map(|n| other.reserve(n).unwrap().keep()).collect();
        assert!(indexes.iter().all(|index| !others.contains(index)), "the same key and numbers gave these indexes");
        for index in &indexes {
            assert_eq!(other.inherited(*index).unwrap().local_index, *index);
            assert!(other.look_up(*index).tunnel().is_none() && other.by_index(*index).is_none());
        }
        let taken = *others.first().unwrap();
        for index in [taken, LocalIndex(0)] {
            assert!(!other.inherit(tunnel(index, testing::verified(&["10.1.0.2/16"]))), "{index:?}");
        }
        let ended = Arc::downgrade(&other.inherited(indexes[0]).unwrap());
        other.disinherit(indexes[0]);
        assert!(ended.upgrade().is_none() && other.inherited(indexes[0]).is_none());
        assert!(other.inherited(indexes[1]).is_some());
    }

    #[test]
    fn retiring_an_old_tunnel_leaves_the_primary_in_place() {
        let table = TunnelTable::new(1);
        let [old, new] = [add(&table, &["10.1.0.2/16"]), add(&table, &["10.1.0.2/16"])];
        let before = table.version();
        assert!(table.retire(old).is_some());
        assert_eq!(table.by_address("10.1.0.2".parse().unwrap()).unwrap().local_index, new);
        assert_ne!(table.version(), before);
    }

    #[test]
    fn indexes_are_never_zero_never_taken_twice_and_rest_before_they_return() {
        for key in [0, 1, 0xfeed_beef_dead_cafe] {
            let table = TunnelTable::new(key);
            let taken: BTreeSet<_> = (0..5000).map(|random| table.reserve(random).unwrap().keep()).collect();
            assert_eq!(taken.len(), 5000);
            taken.iter().for_each(|index| table.release(*index));
            // Slots come back, each under a new index.
            let again: BTreeSet<_> = (0..5000).map(|random| table.reserve(random).unwrap().keep()).collect();
            assert!(again.is_disjoint(&taken) && !again.contains(&LocalIndex(0)));
        }
    }

    #[test]
    fn an_index_is_given_back_only_by_who_has_it() {
        let table = TunnelTable::new(1);
        let index = table.reserve(0).unwrap().keep();
        table.release(index);
        table.release(index);
        let next: Vec<_> = (0..40).map(|_| table.reserve(0).unwrap().keep()).collect();
        assert_eq!(next.iter().collect::<BTreeSet<_>>().len(), 40);
    }

    #[test]
    fn an_index_frees_itself_unless_it_became_a_tunnel() {
        let table = TunnelTable::new(1);
        let abandoned = table.reserve(0).unwrap();
        assert!(table.is_reserved(*abandoned));
        drop(abandoned);
        assert_eq!(table.reserved(), 0);
        let used = table.reserve(0).unwrap();
        let index = *used;
        table.publish(tunnel(index, testing::verified(&["10.1.0.2/16"])));
        drop(used);
        assert!(table.by_index(index).is_some() && table.reserved() == 0);
        let next: BTreeSet<_> = (0..40).map(|_| table.reserve(0).unwrap().keep()).collect();
        assert!(next.len() == 40 && !next.contains(&index), "the slot is in use");
    }

    #[test]
    fn every_slot_has_its_place_and_the_table_has_an_end() {
        let mut expected = (0, 0);
        for slot in 0..SLOTS {
            assert_eq!(locate(slot), Some(expected));
            expected.1 += 1;
            if expected.1 == (FIRST_CHUNK as usize) << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(expected, (CHUNKS, 0));
        assert_eq!(locate(SLOTS), None);
        assert_eq!(locate(u32::MAX), None);
        const { assert!(SLOTS <= 1 << SLOT_BITS) };
        let table = TunnelTable::new(1);
        table.lock().skip_to_slot(SLOTS - 1);
        assert!(table.reserve(0).is_some_and(|last| last.keep() != LocalIndex(0)));
        assert!(table.reserve(0).is_none());
    }

    #[test]
    fn readers_see_a_whole_tunnel_or_none_while_tunnels_come_and_go() {
        let table = TunnelTable::new(1);
        let stop = AtomicBool::new(false);
        let address: IpAddr = "10.1.0.2".parse().unwrap();
        let peer = testing::verified(&["10.1.0.2/16"]);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        if let Some(tunnel) = table.by_address(address) {
                            assert_eq!(tunnel.peer_addresses, [address]);
                            assert_ne!(tunnel.local_index, LocalIndex(0));
                        }
                    }
                });
            }
            for _ in 0..2000 {
                let tunnel = tunnel(table.reserve(0).unwrap().keep(), peer.clone());
                table.publish(Arc::clone(&tunnel));
                table.set_primary(&tunnel);
                assert!(table.by_address(address).is_some());
                table.retire(tunnel.local_index);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

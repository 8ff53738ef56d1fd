//! A lane's cache of recently allowed flows, which keeps known flows off the shared flow table.

use super::Amount;
use super::records::FlowId;
use crate::counters::Direction;
use crate::index::LocalIndex;
use crate::wire::ip::FlowKey;

const MIN_ENTRIES: usize = 64;
// About 300 KB.
const MAX_ENTRIES: usize = 4096;
/// As many audited flows are reported in a second as kinds of dropped packets.
const AUDITED_INTERVAL_MS: u64 = 125;

/// A direct-mapped cache that grows with the number of concurrent flows. Allocated with the first flow.
#[derive(Debug, Default)]
pub(crate) struct FlowCache {
    entries: Vec<Option<Entry>>,
    /// Number of unexpired flows displaced since the cache was last resized.
    displaced: usize,
    /// A flow that passed and that policies in audit would refuse, until the lane reports it.
    audited: Option<Passed>,
    /// Until when no other one is taken.
    audited_until: u64,
    /// When what was counted is to be told.
    due: Option<u64>,
    /// Until when something may be counted.
    latest: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) flow: FlowKey,
    pub(crate) direction: Direction,
    pub(crate) tunnel: LocalIndex,
    /// Generation of the rules that let it pass.
    pub(super) generation: u32,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    passed: Passed,
    until: u64,
    tally: Tally,
}

/// What passed of a flow since the lane last told the flow table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tally {
    pub(super) flow: FlowId,
    pub(super) direction: Direction,
    pub(super) amount: Amount,
}

/// Where the packets of a flow that has just passed are counted, until another one is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place(u32);

/// A place that another flow may get meanwhile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Claim {
    pub(crate) place: Place,
    id: u64,
}

impl Place {
    /// For packets of no flow.
    pub(crate) const NONE: Self = Self(u32::MAX);
}

impl Entry {
    fn has_untold(&self) -> bool {
        self.tally.amount.packets > 0 && self.tally.flow.id != 0
    }

    fn tell(&mut self, told: &mut impl FnMut(Tally)) {
        if self.has_untold() {
            told(self.tally);
            self.tally.amount = Amount::default();
        }
    }
}

impl FlowCache {
    /// Until when exactly this need not be looked up again, which may be over, and where it is counted; `None` if it is
    /// not cached.
    #[inline]
    pub(super) fn until(&self, hash: u64, passed: &Passed) -> Option<(u64, Place)> {
        let at = self.place(hash, passed.direction);
        let entry = self.entries.get(at)?.as_ref()?;
        (entry.passed == *passed).then_some((entry.until, Place(at as u32)))
    }

    /// Counts packets of a flow that has just passed.
    #[inline]
    pub(crate) fn count(&mut self, place: Place, packets: u64, bytes: u64) {
        if let Some(Some(entry)) = self.entries.get_mut(place.0 as usize) {
            entry.tally.amount.packets += packets;
            entry.tally.amount.bytes += bytes;
        }
    }

    /// Remembers whose place this is.
    pub(crate) fn claim(&self, place: Place) -> Claim {
        let entry = self.entries.get(place.0 as usize).and_then(Option::as_ref);
        Claim { place, id: entry.map_or(0, |entry| entry.tally.flow.id) }
    }

    /// Whether the place is that of the same flow.
    #[inline]
    pub(crate) fn has(&self, claim: &Claim) -> bool {
        matches!(self.entries.get(claim.place.0 as usize), Some(Some(entry)) if entry.tally.flow.id == claim.id)
    }

    /// Tells what was counted since the last time.
    pub(super) fn tell(&mut self, told: &mut impl FnMut(Tally)) {
        self.entries.iter_mut().flatten().for_each(|entry| entry.tell(told));
    }

    /// Whether something was counted since the last time.
    pub(crate) fn has_untold(&self) -> bool {
        self.entries.iter().flatten().any(Entry::has_untold)
    }

    /// When to tell what was counted if no flow comes to the flow table before; `None` if nothing is to be told.
    #[inline]
    pub(crate) fn due(&self) -> Option<u64> {
        self.due
    }

    /// Tells what was counted if it is time, and sets the next one if flows may still be counted without coming here.
    pub(super) fn tell_due(&mut self, now: u64, told: &mut impl FnMut(Tally)) {
        if self.due.take_if(|due| now >= *due).is_some() {
            self.due = Some(self.latest).filter(|latest| now < *latest);
            self.tell(told);
        }
    }

    /// Caches what passed at `now`, until `until`, and where it is counted. Tells what was counted for flows that have
    /// to give way.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        (passed, flow): (Passed, FlowId),
        (now, until): (u64, u64),
        told: &mut impl FnMut(Tally),
    ) -> Place {
        let displaced = self.entries.get(self.place(hash, passed.direction)).and_then(Option::as_ref);
        if displaced.is_some_and(|entry| now < entry.until && entry.passed.flow != passed.flow) {
            self.displaced += 1;
        }
        // Grow if flows evict each other often: two busy flows that share a place would otherwise look up the shared
        // table for every packet.
        if self.entries.is_empty() || self.displaced > self.entries.len() && self.entries.len() < MAX_ENTRIES {
            self.tell(told);
            self.entries = vec![None; (self.entries.len() * 2).max(MIN_ENTRIES)];
            self.displaced = 0;
        }
        let at = self.place(hash, passed.direction);
        let tally = Tally { flow, direction: passed.direction, amount: Amount::default() };
        if let Some(before) = &mut self.entries[at] {
            before.tell(told);
        }
        self.entries[at] = Some(Entry { passed, until, tally });
        self.latest = self.latest.max(until);
        if flow.id != 0 && self.due.is_none() {
            self.due = Some(until);
        }
        Place(at as u32)
    }

    /// Notes a flow that passed at `now` and that policies in audit would refuse, if none was noted a moment before.
    pub(super) fn note_audited(&mut self, passed: &Passed, now: u64) {
        if now >= self.audited_until {
            (self.audited, self.audited_until) = (Some(*passed), now + AUDITED_INTERVAL_MS);
        }
    }

    /// The flow that was noted since the last call.
    pub(crate) fn take_audited(&mut self) -> Option<Passed> {
        self.audited.take()
    }

    fn place(&self, hash: u64, direction: Direction) -> usize {
        // The length is a power of two, or 0.
        ((hash >> 32) as usize ^ direction as usize) & self.entries.len().wrapping_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn passed(port: u16) -> Passed {
        let address = [10, 0, 0, 1].into();
        let flow =
            FlowKey { local: address, remote: address, local_port: port, remote_port: 0, protocol: 6, fragment: false };
        Passed { flow, direction: Direction::Inbound, tunnel: LocalIndex(1), generation: 1 }
    }

    fn contains(cache: &FlowCache, port: u16, passed: &Passed, now: u64) -> bool {
        cache.until(hash(port), passed).is_some_and(|(until, _)| now < until)
    }

    fn hash(port: u16) -> u64 {
        u64::from(port).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// Sends one packet of each of `flows` flows in turn; returns how many had to ask the shared table.
    fn asked(cache: &mut FlowCache, flows: u16, rounds: u64) -> usize {
        let mut asked = 0;
        for now in 0..rounds {
            for port in 0..flows {
                if !contains(cache, port, &passed(port), now) {
                    asked += 1;
                    cache.insert(hash(port), (passed(port), FlowId::NONE), (now, now + 1000), &mut |_| {});
                }
            }
        }
        asked
    }

    #[test]
    fn a_flow_asks_once_until_its_time_is_over() {
        let mut cache = FlowCache::default();
        assert_eq!(asked(&mut cache, 1, 1000), 1);
        assert!(!contains(&cache, 0, &passed(0), 1000));
        assert!(!contains(&cache, 0, &Passed { generation: 2, ..passed(0) }, 1));
        assert!(!contains(&cache, 0, &Passed { direction: Direction::Outbound, ..passed(0) }, 1));
        assert!(!contains(&cache, 0, &Passed { tunnel: LocalIndex(2), ..passed(0) }, 1));
    }

    #[test]
    fn few_flows_keep_the_cache_small_and_many_make_it_grow_until_they_fit() {
        let mut cache = FlowCache::default();
        asked(&mut cache, 8, 100);
        assert_eq!(cache.entries.len(), MIN_ENTRIES);
        asked(&mut cache, 500, 100);
        assert!(cache.entries.len() > 500);
        let packets = 500 * 100;
        let asked = asked(&mut cache, 500, 100);
        assert!(asked < packets / 10, "{asked} of {packets}");
    }

    #[test]
    fn the_cache_does_not_grow_without_end() {
        let mut cache = FlowCache::default();
        asked(&mut cache, 30_000, 3);
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
    }
}

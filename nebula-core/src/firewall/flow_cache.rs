//! A lane's cache of recently allowed flows, which keeps known flows off the shared flow table.

use crate::counters::Direction;
use crate::index::LocalIndex;
use crate::wire::ip::FlowKey;

const MIN_ENTRIES: usize = 64;
// About 300 KB.
const MAX_ENTRIES: usize = 4096;

/// A direct-mapped cache that grows with the number of concurrent flows. Allocated with the first flow.
#[derive(Debug, Default)]
pub(crate) struct FlowCache {
    entries: Vec<Option<Entry>>,
    /// Number of unexpired flows displaced since the cache was last resized.
    displaced: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Passed {
    pub(super) flow: FlowKey,
    pub(super) direction: Direction,
    pub(super) tunnel: LocalIndex,
    /// Generation of the rules that let it pass.
    pub(super) generation: u32,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    passed: Passed,
    until: u64,
}

impl FlowCache {
    /// Until when exactly this need not be looked up again, which may be over; `None` if it is not cached.
    #[inline]
    pub(super) fn until(&self, hash: u64, passed: &Passed) -> Option<u64> {
        let entry = self.entries.get(self.place(hash, passed.direction))?.as_ref()?;
        (entry.passed == *passed).then_some(entry.until)
    }

    /// Caches what passed at `now`, until `until`.
    pub(super) fn insert(&mut self, hash: u64, passed: Passed, now: u64, until: u64) {
        let displaced = self.entries.get(self.place(hash, passed.direction)).and_then(Option::as_ref);
        if displaced.is_some_and(|entry| now < entry.until && entry.passed.flow != passed.flow) {
            self.displaced += 1;
        }
        // Grow if flows evict each other often: two busy flows that share a place would otherwise look up the shared
        // table for every packet.
        if self.entries.is_empty() || self.displaced > self.entries.len() && self.entries.len() < MAX_ENTRIES {
            self.entries = vec![None; (self.entries.len() * 2).max(MIN_ENTRIES)];
            self.displaced = 0;
        }
        let place = self.place(hash, passed.direction);
        self.entries[place] = Some(Entry { passed, until });
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
        cache.until(hash(port), passed).is_some_and(|until| now < until)
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
                    cache.insert(hash(port), passed(port), now, now + 1000);
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

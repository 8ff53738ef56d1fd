//! The hash tables of a table file: records ordered by bucket, and the index of each bucket's first record.

use std::ops::Range;

use super::format::Section;
use crate::hash::mix;

/// What a record is found by: an address, and port and protocol of a service.
pub(super) type Key = (u128, u32);

/// The bucket of a key among `buckets`, a power of two.
pub(super) fn bucket(seed: u64, key: Key, buckets: u32) -> u32 {
    let (address, n) = key;
    let hash = mix(mix(mix(seed ^ (address >> 64) as u64) ^ address as u64) ^ u64::from(n));
    hash as u32 & buckets.wrapping_sub(1)
}

/// The records in which `key` can be.
pub(super) fn candidates(bytes: &[u8], seed: u64, buckets: Section, key: Key) -> Range<u32> {
    let at = bucket(seed, key, buckets.count.saturating_sub(1));
    let start = |at| buckets.record::<4>(bytes, at).map_or(0, |record| record.u32(0));
    start(at)..start(at + 1)
}

/// Entries in the order of their buckets, as a file holds them.
#[derive(Debug)]
pub(super) struct HashTable<T> {
    seed: u64,
    /// The index of each bucket's first entry, and the number of entries.
    pub(super) starts: Vec<u32>,
    pub(super) entries: Vec<(Key, T)>,
}

impl<T> HashTable<T> {
    /// Of entries with the same key, the last one is kept.
    pub(super) fn new(seed: u64, entries: Vec<(Key, T)>) -> Self {
        // Between one and two entries in a bucket.
        let wanted = u32::try_from(entries.len() / 2 + 1).unwrap_or(u32::MAX).checked_next_power_of_two();
        let buckets = wanted.unwrap_or(1 << 31);
        let of: Vec<u32> = entries.iter().map(|(key, _)| bucket(seed, *key, buckets)).collect();
        // A counting sort: `ends` begins with the start of each bucket, and each entry moves that on.
        let mut ends = vec![0_u32; buckets as usize + 1];
        for bucket in &of {
            ends[*bucket as usize + 1] += 1;
        }
        for at in 1..ends.len() {
            ends[at] += ends[at - 1];
        }
        let mut order = vec![0_u32; of.len()];
        for (index, bucket) in (0..).zip(&of) {
            let end = &mut ends[*bucket as usize];
            order[*end as usize] = index;
            *end += 1;
        }
        let mut entries: Vec<Option<(Key, T)>> = entries.into_iter().map(Some).collect();
        let mut starts = Vec::with_capacity(buckets as usize + 1);
        let mut placed: Vec<(Key, T)> = Vec::with_capacity(entries.len());
        let mut begin = 0;
        for end in ends.into_iter().take(buckets as usize) {
            let start = placed.len();
            starts.push(number(start));
            for index in &order[begin..end as usize] {
                let Some(entry) = entries[*index as usize].take() else { continue };
                // In the order of their keys; a later one replaces the one with the same key.
                let at = placed[start..].partition_point(|(key, _)| *key < entry.0) + start;
                match placed.get_mut(at) {
                    Some(before) if before.0 == entry.0 => *before = entry,
                    _ => placed.insert(at, entry),
                }
            }
            begin = end as usize;
        }
        starts.push(number(placed.len()));
        Self { seed, starts, entries: placed }
    }

    /// The index of an entry.
    pub(super) fn position(&self, key: Key) -> Option<u32> {
        let at = bucket(self.seed, key, u32::try_from(self.starts.len() - 1).unwrap_or(u32::MAX)) as usize;
        let (start, end) = (*self.starts.get(at)?, *self.starts.get(at + 1)?);
        (start..end).find(|index| self.entries.get(*index as usize).is_some_and(|(other, _)| *other == key))
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

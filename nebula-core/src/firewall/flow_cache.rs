//! Flows one lane saw pass a moment ago: keeps bulk traffic off the shared flow table.

use crate::counters::Direction;
use crate::tunnel::LocalIndex;
use crate::wire::ip::FlowKey;

const ENTRIES: usize = 64;

/// A small direct-mapped cache. Taken into memory with the first flow.
#[derive(Debug, Default)]
pub(crate) struct FlowCache {
    entries: Vec<Option<Entry>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Passed {
    pub(super) flow: FlowKey,
    pub(super) direction: Direction,
    pub(super) tunnel: LocalIndex,
    /// Of the rules that let it pass.
    pub(super) generation: u32,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    passed: Passed,
    until: u64,
}

impl FlowCache {
    /// Whether exactly this passed and need not be looked up again before `until`.
    pub(super) fn contains(&self, hash: u64, passed: &Passed, now: u64) -> bool {
        let entry = self.entries.get(place(hash, passed.direction)).and_then(Option::as_ref);
        entry.is_some_and(|entry| entry.passed == *passed && now < entry.until)
    }
    pub(super) fn insert(&mut self, hash: u64, passed: Passed, until: u64) {
        if self.entries.is_empty() {
            self.entries = vec![None; ENTRIES];
        }
        self.entries[place(hash, passed.direction)] = Some(Entry { passed, until });
    }
}

fn place(hash: u64, direction: Direction) -> usize {
    ((hash >> 48) as usize % ENTRIES) ^ direction as usize
}

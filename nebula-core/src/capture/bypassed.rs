//! Flows to Services that leave on the primary network: a flow goes on as it began, also when the Service has other
//! endpoints meanwhile.

use std::collections::HashSet;

use super::hash::{Hashed, Key};

/// After so many new flows the oldest ones are forgotten, at most twice as many are remembered. About 20 KB.
const GENERATION: usize = 1024;

/// The last flows, by their hash, in two generations. Of a flow that was forgotten, the Service's endpoints of the
/// moment decide again.
#[derive(Debug, Default)]
pub(super) struct Bypassed {
    recent: HashSet<u64, Hashed>,
    older: HashSet<u64, Hashed>,
}

impl Bypassed {
    /// Whether the flow is one of them, which then counts as recent.
    pub(super) fn goes_on(&mut self, flow: &Key) -> bool {
        let is_known = self.has(flow);
        if is_known {
            self.note(flow);
        }
        is_known
    }

    /// Whether the flow is one of them.
    pub(super) fn has(&self, flow: &Key) -> bool {
        self.recent.contains(&flow.number()) || self.older.contains(&flow.number())
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn len(&self) -> usize {
        self.recent.len() + self.older.len()
    }

    pub(super) fn note(&mut self, flow: &Key) {
        if self.recent.len() >= GENERATION {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(flow.number());
    }

    /// The flow ended, and another one with the same addresses and ports has a course of its own.
    pub(super) fn forget(&mut self, flow: &Key) {
        self.recent.remove(&flow.number());
        self.older.remove(&flow.number());
    }
}

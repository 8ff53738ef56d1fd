//! A lane's cache of courses, which keeps known flows off the table that all lanes share.

use std::time::{Duration, Instant};

use super::{Course, Translation};
use crate::firewall::Claim;
use crate::index::LocalIndex;
use crate::wire::ip::FlowKey;

const MIN_ENTRIES: usize = 32;
// About 180 KB.
const MAX_ENTRIES: usize = 1024;
/// How long a lane may use a course before it must ask the shared table again, which by then may take the flow for
/// idle.
const KEEP_FOR: Duration = Duration::from_secs(1);

/// A direct-mapped cache that grows with the number of concurrent flows. Allocated with the first flow.
#[derive(Debug)]
pub(crate) struct Courses<T> {
    entries: Vec<Option<Known<T>>>,
    /// Number of flows displaced since the cache was last resized.
    displaced: usize,
}

/// For flows of the pod, by the version of the directory.
pub(crate) type OutboundCourses = Courses<Course>;
/// For flows to the pod, by the version of the directory. Those that are not translated are cached, too.
pub(crate) type InboundCourses = Courses<Option<Translation>>;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Known<T> {
    flow: FlowKey,
    pub(crate) course: T,
    /// A course is valid only as long as this is the same.
    stamp: u64,
    /// The pass is valid only this long, too.
    until: Instant,
    /// What else a packet on this course need not be asked again, and where it is counted; `None` if that is not known
    /// yet.
    pub(crate) pass: Option<(Pass, Claim)>,
}

/// The firewall lets a flow pass through this tunnel, and the routes lead to its peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pass {
    pub(crate) tunnel: LocalIndex,
    /// Generation of the rules and routes.
    pub(crate) generation: u32,
}

impl<T> Default for Courses<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), displaced: 0 }
    }
}

impl<T: Copy> Courses<T> {
    /// The course of a flow, if it is known and still valid.
    #[inline]
    pub(crate) fn get(&self, hash: u64, flow: &FlowKey, now: Instant, stamp: impl Fn(&T) -> u64) -> Option<&Known<T>> {
        let known = self.entries.get(self.place(hash))?.as_ref()?;
        (known.flow == *flow && known.stamp == stamp(&known.course) && now < known.until).then_some(known)
    }

    /// Adds a pass, valid until then, to the course of a flow, if that is in the cache.
    pub(crate) fn note_pass(&mut self, hash: u64, flow: &FlowKey, pass: (Pass, Claim), until: Instant) {
        let place = self.place(hash);
        if let Some(Some(known)) = self.entries.get_mut(place)
            && known.flow == *flow
        {
            known.pass = Some(pass);
            known.until = known.until.min(until);
        }
    }

    pub(crate) fn insert(&mut self, hash: u64, flow: &FlowKey, now: Instant, (stamp, course): (u64, T)) {
        let displaced = self.entries.get(self.place(hash)).and_then(Option::as_ref);
        if displaced.is_some_and(|known| now < known.until && known.flow != *flow) {
            self.displaced += 1;
        }
        if self.entries.is_empty() || self.displaced > self.entries.len() && self.entries.len() < MAX_ENTRIES {
            self.entries = vec![None; (self.entries.len() * 2).max(MIN_ENTRIES)];
            self.displaced = 0;
        }
        let place = self.place(hash);
        self.entries[place] = Some(Known { flow: *flow, course, stamp, until: now + KEEP_FOR, pass: None });
    }

    fn place(&self, hash: u64) -> usize {
        // The length is a power of two, or 0. Another part of the hash than the firewall's cache uses.
        (hash >> 16) as usize & self.entries.len().wrapping_sub(1)
    }
}

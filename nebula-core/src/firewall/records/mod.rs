//! Records of flows: who spoke to whom, how much, and by which rule; who was refused.
//!
//! Records are made where the flow table changes: when a flow begins, ends, or a lane reports what it counted, about
//! once a second. Packets of known flows only add to the cache of their lane. A [`Ring`] holds the last records.

mod lookup;
mod record;
mod recorded;
mod ring;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::sync::{Arc, PoisonError};

pub use self::lookup::AskedRecords;
pub(crate) use self::lookup::Completion;
pub use self::record::{Amount, Decision, End, FlowEvent, FlowPath, FlowRecord, FlowRecords, PolicyDecision};
pub(in crate::firewall) use self::recorded::Recorded;
use self::recorded::{State, Way};
use self::ring::Ring;
use super::Peer;
use crate::config::MAX_FLOW_RECORDS;
use crate::counters::{Direction, DropReason};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard};
use crate::wire::ip::FlowKey;

/// The records of one node. Lanes write them, who asks reads them.
#[derive(Debug)]
pub(crate) struct Records {
    is_on: AtomicBool,
    ring: Mutex<Ring>,
}

impl Default for Records {
    fn default() -> Self {
        Self { is_on: AtomicBool::new(false), ring: Mutex::new(Ring::default()) }
    }
}

/// Where a lane counts for a flow in the flow table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::firewall) struct FlowId {
    /// Of its record; 0 if flows are not recorded.
    pub(in crate::firewall) id: u64,
    pub(in crate::firewall) at: u32,
    pub(in crate::firewall) shard: u8,
}

impl FlowId {
    pub(in crate::firewall) const NONE: Self = Self { id: 0, at: 0, shard: 0 };
}

/// A packet about which the rules have decided, for the record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Judged<'a> {
    pub(crate) now: u64,
    pub(crate) direction: Direction,
    pub(crate) flow: &'a FlowKey,
    /// As this node's programs know it, if it is translated.
    pub(crate) original: Option<&'a FlowKey>,
    /// `None`: it got no further than to the routes.
    pub(crate) peer: Option<&'a Peer<'a>>,
    pub(crate) generation: u32,
}

impl Judged<'_> {
    fn recorded(&self, state: State, is_in_audit: bool) -> Recorded {
        Recorded {
            id: 0,
            number: 0,
            numbered_at: 0,
            flow: *self.flow,
            original: self.original.filter(|original| *original != self.flow).map(|original| Box::new(*original)),
            peer: self.peer.and_then(|peer| Some(Arc::clone(peer.certificate?))),
            direction: self.direction,
            state,
            is_in_audit,
            generation: self.generation,
            started: self.now,
            last: self.now,
            sent: Amount::default(),
            received: Amount::default(),
            path: self.peer.and_then(|peer| Way::of(peer.tunnel?)),
            decision: None,
        }
    }
}

impl Records {
    /// Keeps so many records; none if it is 0. Those of the flows that are known begin with their next packets.
    pub(crate) fn set_most(&self, most: usize) {
        self.is_on.store(most > 0, Ordering::Relaxed);
        self.lock().set_most(most.min(MAX_FLOW_RECORDS));
    }

    /// Numbers records from here, before there are any.
    pub(crate) fn set_first_number(&self, first: u64) {
        self.lock().set_first_number(first);
    }

    #[inline]
    pub(crate) fn are_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    /// The record of a flow that begins; `None` if flows are not recorded.
    pub(in crate::firewall) fn begin(&self, judged: &Judged<'_>, is_in_audit: bool) -> Option<Box<Recorded>> {
        if !self.are_on() {
            return None;
        }
        let mut recorded = Box::new(judged.recorded(State::Open, is_in_audit));
        self.lock().tell(&mut recorded, judged.now);
        Some(recorded)
    }

    /// A packet of a known flow came to the flow table.
    pub(in crate::firewall) fn touch(recorded: &mut Recorded, judged: &Judged<'_>, rejudged: Option<bool>) {
        recorded.last = judged.now;
        recorded.path = judged.peer.and_then(|peer| Way::of(peer.tunnel?)).or(recorded.path);
        recorded.state = State::Open;
        if let Some(is_in_audit) = rejudged {
            (recorded.is_in_audit, recorded.generation, recorded.decision) = (is_in_audit, judged.generation, None);
        }
    }

    /// Tells what was added to a flow, unless that was told a moment ago.
    pub(in crate::firewall) fn refresh(&self, recorded: &mut Recorded, now: u64) {
        self.lock().refresh(recorded, now);
    }

    /// Adds what a lane told only after the flow had ended.
    pub(in crate::firewall) fn add_late(&self, id: u64, direction: Direction, amount: Amount) {
        self.lock().add_late(id, |recorded| recorded.add(direction, amount));
    }

    /// The flow table has forgotten a flow; it was last used then.
    pub(in crate::firewall) fn end(&self, removed: Option<(Box<Recorded>, u64)>, end: End, now: u64) {
        if let Some((mut recorded, last_used)) = removed {
            recorded.last = recorded.last.max(last_used);
            // Once it is no longer allowed, it has ended, and it stays in the table only to be refused.
            if !matches!(recorded.state, State::Ended(_)) {
                recorded.state = State::Ended(end);
                self.lock().tell(&mut recorded, now);
            }
        }
    }

    /// A known flow is no longer allowed.
    pub(in crate::firewall) fn end_refused(&self, recorded: &mut Recorded, reason: DropReason, judged: &Judged<'_>) {
        if !matches!(recorded.state, State::Ended(_)) {
            recorded.state = State::Ended(End::Refused(reason));
            (recorded.generation, recorded.decision) = (judged.generation, None);
            self.lock().tell(recorded, judged.now);
        }
    }

    /// Counts refused packets. `hash` is that of [`kind_of_refused`].
    pub(crate) fn refuse(&self, hash: u64, reason: DropReason, judged: &Judged<'_>, amount: Amount) {
        let kind = kind_of_refused(judged.direction, judged.flow);
        let certificate = judged.peer.and_then(|peer| peer.certificate);
        let is_same = |known: &Recorded| {
            let same_peer =
                known.peer.as_ref().map(|peer| peer.fingerprint()) == certificate.map(|peer| peer.fingerprint());
            let same_kind = known.flow == kind && known.direction == judged.direction;
            same_kind && same_peer && known.state == State::Refused(reason)
        };
        let new = || {
            let original = judged.original.map(|original| kind_of_refused(judged.direction, original));
            let judged = Judged { flow: &kind, original: original.as_ref(), ..*judged };
            judged.recorded(State::Refused(reason), false)
        };
        self.lock().refuse(hash, judged.now, amount, is_same, new);
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What refused packets of a flow have in common with those of the next attempt: not the port that they come from.
pub(crate) fn kind_of_refused(direction: Direction, flow: &FlowKey) -> FlowKey {
    match direction {
        Direction::Inbound => FlowKey { remote_port: 0, ..*flow },
        Direction::Outbound => FlowKey { local_port: 0, ..*flow },
    }
}

//! Reads records, with what decided about them: off the packet path.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use super::recorded::{Recorded, State, Way};
use super::ring::Read;
use super::{FlowEvent, FlowPath, FlowRecord, Records, kind_of_refused};
use crate::DropReason;
use crate::counters::Direction;
use crate::firewall::{Firewall, Peer, Policy};
use crate::index::LocalIndex;
use crate::tunnel::PeerIdentity;
use crate::wire::ip::FlowKey;

/// Which records are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedRecords {
    /// Those that are told under a higher number than this, the oldest first: for one who asks in turns, each time from
    /// [`super::FlowRecords::next`]. What has changed is told again after a minute, with a new number.
    After(u64),
    /// The newest, as they are now. Asking so changes nothing.
    Newest,
}

impl Firewall<'_> {
    /// Looks up what decided about flows whose records do not say so yet. `policy` is the one that the filter was built
    /// from.
    pub(crate) fn decide_records(&self, policy: &Policy) {
        let records = self.conntrack.records();
        if !records.are_on() {
            return;
        }
        let undecided = records.lock().undecided(self.filter.generation());
        let mut known = HashMap::new();
        let mut tried = 0;
        for of in &undecided {
            let Recorded { flow, peer, direction, state, .. } = &of.1;
            let Some(certificate) = peer else { continue };
            let rules = match direction {
                Direction::Inbound => policy.inbound.len(),
                Direction::Outbound => policy.outbound.len(),
            };
            let alike = (kind_of_refused(*direction, flow), *direction as usize, Arc::as_ptr(certificate));
            let decision = match known.get(&alike) {
                Some(decision) => Arc::clone(decision),
                None if tried > 0 && tried + rules > MAX_RULES_TRIED => continue,
                None => {
                    tried += rules;
                    let peer = Peer::with(certificate, PeerIdentity::from(&**certificate), None);
                    let decision = Arc::new(self.filter.decision(policy, *direction, flow, peer));
                    known.insert(alike, Arc::clone(&decision));
                    decision
                }
            };
            // What the rules of this node refuse was not shown to the policies.
            let decision = match state {
                State::Refused(DropReason::NoRule) => Arc::default(),
                _ => decision,
            };
            records.lock().decide(of, decision);
        }
    }
}

impl Records {
    /// Records as they are now, at most so many.
    pub(crate) fn read(&self, asked: AskedRecords, most: usize, now: u64) -> RecordsRead {
        let mut ring = self.lock();
        RecordsRead(match asked {
            AskedRecords::After(number) => ring.read_after(number, most, now),
            AskedRecords::Newest => ring.read_newest(|_| true, most),
        })
    }
}

/// Records that were read, to be completed without a lock.
#[derive(Debug)]
pub(crate) struct RecordsRead(Read);

/// What completes records.
pub(crate) struct Completion<'a> {
    /// Time of the flow table to time since the Unix epoch.
    pub(crate) unix: &'a dyn Fn(u64) -> Duration,
    /// The relay at the other end of a tunnel.
    pub(crate) relay: &'a dyn Fn(LocalIndex) -> Option<IpAddr>,
    /// A flow of a tunnel as this node's programs know it, if it is translated.
    pub(crate) original: &'a dyn Fn(&FlowKey) -> Option<FlowKey>,
}

impl RecordsRead {
    pub(crate) fn complete(self, by: &Completion<'_>) -> super::FlowRecords {
        let Read { rows, next, lost, is_cut } = self.0;
        super::FlowRecords { records: rows.into_iter().map(|row| row.complete(by)).collect(), next, lost, is_cut }
    }
}

impl Recorded {
    fn complete(self, by: &Completion<'_>) -> FlowRecord {
        let event = match self.state {
            State::Open if self.number == self.id => FlowEvent::Created,
            State::Open => FlowEvent::Updated,
            State::Ended(end) => FlowEvent::Ended(end),
            State::Refused(reason) => FlowEvent::Refused(reason),
        };
        let path = self.path.map(|way| match way {
            Way::Direct { .. } => FlowPath::Direct,
            Way::Relayed { hop, .. } => FlowPath::Relay((by.relay)(hop)),
        });
        let original = self.original.map(|original| *original).or_else(|| (by.original)(&self.flow));
        FlowRecord {
            number: self.number,
            id: self.id,
            event,
            direction: self.direction,
            flow: self.flow,
            original,
            peer: self.peer,
            started: (by.unix)(self.started),
            last: (by.unix)(self.last),
            sent: self.sent,
            received: self.received,
            is_in_audit: self.is_in_audit,
            decision: self.decision,
            path,
            is_post_quantum: self.path.is_some_and(Way::is_post_quantum),
        }
    }
}

/// Each takes about a microsecond, during which the control plane does nothing else.
const MAX_RULES_TRIED: usize = 20_000;

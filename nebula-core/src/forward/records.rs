//! Records of flows, completed from the tables that all lanes share.

use std::time::Instant;

use super::{Forwarder, Lane};
use crate::WallClock;
use crate::firewall::{AskedRecords, Completion, Firewall, FlowRecords, Policy};
use crate::wire::ip::FlowKey;

impl Forwarder {
    /// Keeps at most so many records of flows; 0: none.
    pub(crate) fn set_flow_records(&self, most: usize) {
        self.conntrack.records().set_most(most);
    }

    /// Numbers records by the time at which the node starts, so that those of a later process have higher numbers.
    pub(crate) fn number_records_from(&self, wall: WallClock) {
        let first = u64::try_from(wall.unix_at(wall.at).as_micros()).unwrap_or(u64::MAX >> 1);
        self.conntrack.records().set_first_number(first.clamp(1, u64::MAX >> 1));
    }

    /// Looks up which rules and policies decided about recorded flows, before they are replaced.
    pub(crate) fn decide_records(&self, policy: &Policy) {
        let snapshot = self.snapshot.load();
        Firewall { filter: &snapshot.filter, conntrack: &self.conntrack }.decide_records(policy);
    }

    /// Records of flows, at most so many.
    pub(crate) fn flow_records(&self, now: Instant, asked: AskedRecords, most: usize, wall: WallClock) -> FlowRecords {
        let read = self.conntrack.records().read(asked, most, self.conntrack.millis(now));
        read.complete(&Completion {
            unix: &|millis| wall.unix_at(self.conntrack.instant(millis)),
            relay: &|tunnel| self.tunnels.by_index(tunnel)?.peer_addresses.first().copied(),
            original: &|flow: &FlowKey| self.explain_back(flow),
        })
    }

    /// When to call [`Forwarder::settle`] with this lane, if it handles no packet before; `None` if there is nothing to
    /// tell.
    #[must_use]
    pub fn settle_due(&self, lane: &Lane) -> Option<Instant> {
        Some(self.conntrack.instant(lane.flows.due()?))
    }

    /// Tells the flow table what a lane has counted of its flows, if it is time: see [`Forwarder::settle_due`].
    #[inline]
    pub fn settle(&self, lane: &mut Lane, now: Instant) {
        if lane.flows.due().is_some() {
            let snapshot = self.snapshot.load();
            Firewall { filter: &snapshot.filter, conntrack: &self.conntrack }.tell_due(&mut lane.flows, now);
        }
    }

    /// The same at once.
    pub(crate) fn settle_now(&self, lane: &mut Lane, now: Instant) {
        if lane.flows.due().is_some() {
            let snapshot = self.snapshot.load();
            Firewall { filter: &snapshot.filter, conntrack: &self.conntrack }.tell_all(&mut lane.flows, now);
        }
    }
}

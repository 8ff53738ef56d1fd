//! Configured features that the daemon does not provide at the moment, for status, `doctor` and metrics: nobody should
//! have to read the log to learn of them.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::host::documents::{self, FullFlowTable, MissingListener};
use crate::host::listener_slot::Missing;

/// Noted by the parts that do it.
#[derive(Debug, Default)]
pub(crate) struct Unmet(Mutex<Facts>);

#[derive(Debug, Default)]
struct Facts {
    /// By the key of the configuration that asks for it, the longest missing first.
    listeners: Vec<(&'static str, Missing)>,
    /// Keys of settings that differ from those at the start and need another start.
    at_next_start: Vec<&'static str>,
    flows: RefusedFlows,
}

/// Packets of new flows for which the flow table had no room.
#[derive(Debug, Default)]
struct RefusedFlows {
    total: u64,
    last: Option<Instant>,
    reported: Option<Instant>,
}

impl Unmet {
    /// Notes why nobody listens where `key` asks for it; `None`: somebody does, or nothing is asked.
    pub(crate) fn note_listener(&self, key: &'static str, missing: Option<&Missing>) {
        let listeners = &mut self.facts().listeners;
        match (listeners.iter().position(|(other, _)| *other == key), missing) {
            (Some(at), Some(missing)) => listeners[at].1 = missing.clone(),
            (Some(at), None) => drop(listeners.remove(at)),
            (None, Some(missing)) => listeners.push((key, missing.clone())),
            (None, None) => {}
        }
    }

    /// Notes which settings wait for the next start.
    pub(crate) fn note_at_next_start(&self, keys: Vec<&'static str>) {
        self.facts().at_next_start = keys;
    }

    /// Looks for flows that a full table refused, and logs them now and then, whoever looks.
    pub(crate) fn look_at_flows(&self, counters: &BTreeMap<&'static str, u64>, now: Instant) {
        if self.note_flows(counters, now) {
            tracing::warn!(
                "The flow table is full of live flows, new ones are refused: raise firewall.conntrack.max_flows"
            );
        }
    }

    /// Notes how many packets were refused for a full flow table. Returns whether to log it.
    fn note_flows(&self, counters: &BTreeMap<&'static str, u64>, now: Instant) -> bool {
        let of = |name| counters.get(name).copied().unwrap_or_default();
        let total = of("dropped_in_conntrack_full") + of("dropped_out_conntrack_full");
        let flows = &mut self.facts().flows;
        let grew = total > flows.total;
        if grew {
            (flows.total, flows.last) = (total, Some(now));
        }
        let is_news = grew && flows.reported.is_none_or(|at| now >= at + REPORT_INTERVAL);
        if is_news {
            flows.reported = Some(now);
        }
        is_news
    }

    /// How many listeners are missing, and how many settings wait for the next start.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let facts = self.facts();
        (facts.listeners.len(), facts.at_next_start.len())
    }

    /// All of them; of renewals this does not know.
    pub(crate) fn document(&self, now: Instant) -> documents::Unmet {
        let facts = self.facts();
        let listeners = facts.listeners.iter().map(|(key, missing)| MissingListener {
            section: (*key).to_owned(),
            error: missing.error.clone(),
            for_seconds: now.saturating_duration_since(missing.since).as_secs(),
        });
        let ago = facts.flows.last.map(|last| now.saturating_duration_since(last)).filter(|ago| *ago < RECENT);
        documents::Unmet {
            missing_listeners: listeners.collect(),
            at_next_start: facts.at_next_start.iter().map(|key| (*key).to_owned()).collect(),
            full_flow_table: ago.map(|ago| FullFlowTable { refused: facts.flows.total, seconds_ago: ago.as_secs() }),
            enrolment: None,
        }
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often the flow table is looked at.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_secs(60);
const REPORT_INTERVAL: Duration = Duration::from_secs(600);
// As for the drops that doctor names.
const RECENT: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;
    use nebula_linux::clock::now;

    fn full(unmet: &Unmet, now: Instant) -> Option<FullFlowTable> {
        unmet.document(now).full_flow_table
    }

    #[test]
    fn a_full_flow_table_is_told_as_long_as_it_refuses_and_logged_now_and_then() {
        let (unmet, start) = (Unmet::default(), now());
        let refused =
            |n| BTreeMap::from([("dropped_in_conntrack_full", n), ("dropped_out_conntrack_full", 1), ("x", 7)]);
        assert!(!unmet.note_flows(&BTreeMap::new(), start));
        assert_eq!(full(&unmet, start), None);
        assert!(unmet.note_flows(&refused(5), start));
        assert_eq!(full(&unmet, start), Some(FullFlowTable { refused: 6, seconds_ago: 0 }));
        let later = start + Duration::from_secs(60);
        assert!(!unmet.note_flows(&refused(9), later), "it was said a minute ago");
        assert_eq!(full(&unmet, later + LOOK_INTERVAL), Some(FullFlowTable { refused: 10, seconds_ago: 60 }));
        let end = later + RECENT;
        assert!(!unmet.note_flows(&refused(9), end));
        assert_eq!(full(&unmet, end), None);
        assert!(unmet.note_flows(&refused(10), end));
    }
}

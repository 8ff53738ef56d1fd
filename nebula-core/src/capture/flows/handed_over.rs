//! Translated flows and affinities as values, so that another process of this node goes on with them.

use std::time::{Duration, Instant};

use super::{Translations, translation};
use crate::capture::entry::State;
use crate::capture::{Current, Endpoint, Target};
use crate::sync::atomic::Ordering;
use crate::wire::ip::FlowKey;

/// A translated flow of the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandedOverCourse {
    /// As the pod knows it.
    pub(crate) original: FlowKey,
    /// What it leads to; the pod that had this incarnation.
    pub(crate) endpoint: Endpoint,
    /// The port that stands for the pod's own one in the tunnel.
    pub(crate) port: u16,
    /// How far it has come.
    pub(crate) state: State,
    /// Time since its last packet.
    pub(crate) idle: Duration,
}

/// The endpoint that all new flows to a Service get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandedOverAffinity {
    pub(crate) service: Target,
    /// `None`: one that is not enrolled.
    pub(crate) endpoint: Option<Endpoint>,
    /// Until this much time has passed without a new flow.
    pub(crate) lasts: Duration,
}

impl Translations {
    /// All translated flows that have not expired.
    pub(crate) fn courses(&self, now: Instant) -> Vec<HandedOverCourse> {
        let now = self.millis(now);
        let table = self.lock();
        let live = table.entries().filter(|entry| entry.is_live(now));
        let courses = live.map(|entry| {
            let (wire, incarnation) = (&entry.translation.wire, entry.incarnation);
            let (address, at, port) = match entry.translation.is_own {
                true => (wire.local, wire.local_port, wire.remote_port),
                false => (wire.remote, wire.remote_port, wire.local_port),
            };
            HandedOverCourse {
                original: entry.translation.original,
                endpoint: Endpoint { address, port: at, incarnation },
                port,
                state: entry.state,
                idle: Duration::from_millis(now.saturating_sub(entry.last_used)),
            }
        });
        courses.collect()
    }

    /// All affinities that have not ended.
    pub(crate) fn affinities(&self, now: Instant) -> Vec<HandedOverAffinity> {
        let now = self.millis(now);
        self.lock().affinities.entries(now).collect()
    }

    /// Goes on with a flow that an earlier process of this node translated, if its endpoint may keep it by the present
    /// directory; if not, nothing of it goes anywhere else. Flows are to be passed in the order of their age, the
    /// oldest first. Returns whether it goes on.
    pub(crate) fn take_over(&self, current: &Current, course: &HandedOverCourse, now: Instant) -> bool {
        let HandedOverCourse { original, endpoint, port, state, idle } = course;
        let translation = translation(original, endpoint, *port);
        let now = self.millis(now);
        let idle = u64::try_from(idle.as_millis()).unwrap_or(u64::MAX);
        let mut table = self.lock();
        let is_known = [&translation.original, &translation.wire].into_iter().any(|flow| table.has(&table.key(flow)));
        // Checked by another directory than the present one, so its next packet checks it again.
        let made = (endpoint.incarnation, !current.version);
        if is_known || !table.insert(translation, made, now.saturating_sub(idle), self.most()) {
            return false;
        }
        table.change(original, |entry| entry.state = *state);
        let key = table.key(original);
        let Some(entry) = table.of_original(&key) else { return false };
        let (is_live, stands, is_tcp) = (entry.is_live(now), entry.stands(&*current.directory), entry.is_tcp());
        if is_live && !stands && is_tcp {
            table.change(original, |entry| entry.state = State::Gone);
        } else if !is_live || !stands {
            table.remove(&key);
            if is_live {
                table.sealed.note(&key, now, self.most());
            }
            return false;
        }
        self.added.fetch_add(1, Ordering::Release);
        stands
    }

    /// Goes on with an affinity of an earlier process of this node.
    pub(crate) fn keep_affinity(&self, affinity: &HandedOverAffinity, now: Instant) {
        let now = self.millis(now);
        self.lock().affinities.restore(affinity, now);
    }
}

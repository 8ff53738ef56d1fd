//! A queue of deadlines keyed by what is due; setting a key again moves its deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::index::LocalIndex;

/// Kinds of deadlines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    /// Next attempt of the handshake with this peer.
    Handshake(IpAddr),
    /// Traffic check of this tunnel.
    Tunnel(LocalIndex),
    /// Next step of the search for the path MTU of this tunnel.
    PathMtu(LocalIndex),
    /// Next round of measurements of the paths of this tunnel.
    PathChoice(LocalIndex),
    /// A challenge to a new endpoint of this tunnel is not answered yet.
    Validation(LocalIndex),
    /// Try the peer of this tunnel elsewhere if it still owes an answer.
    Elsewhere(LocalIndex),
    /// Look after the tunnels that are kept.
    Warm,
    /// Look at the gateways of subnet routes.
    Gateways,
    /// Look at the relays that lighthouses offer.
    RelayChoice,
    /// Tell the lighthouses where this node is.
    LighthouseUpdate,
    /// The next scheduled hole punch.
    HolePunch,
    /// Test the caller of this half-open tunnel again, or give it up.
    HalfOpen(LocalIndex),
    /// Packets to an unknown destination have waited long enough.
    Held,
    /// Look after what is left of an earlier process.
    Inheritance,
    /// Expire idle flows and stale entries, and release memory that bursts took.
    Housekeeping,
}

/// Deadlines in order of time. A key has at most one.
#[derive(Debug)]
pub(super) struct Timer {
    epoch: Instant,
    order: BTreeSet<(Instant, Due)>,
    at: BTreeMap<Due, Instant>,
}

impl Timer {
    /// Creates an empty queue; `epoch` is where the grid of [`Timer::set_on_grid`] begins.
    pub(super) fn new(epoch: Instant) -> Self {
        Self { epoch, order: BTreeSet::new(), at: BTreeMap::new() }
    }

    pub(super) fn set(&mut self, due: Due, at: Instant) {
        if let Some(old) = self.at.insert(due, at) {
            self.order.remove(&(old, due));
        }
        self.order.insert((at, due));
    }

    /// Like [`Timer::set`], but never later than before.
    pub(super) fn set_sooner(&mut self, due: Due, at: Instant) {
        if self.at.get(&due).is_none_or(|before| at < *before) {
            self.set(due, at);
        }
    }

    /// Like [`Timer::set`], but rounded up to a common grid, so that many tunnels share one wake-up.
    pub(super) fn set_on_grid(&mut self, due: Due, at: Instant) {
        let since = at.saturating_duration_since(self.epoch);
        let over = since.as_nanos() % CHECK_GRID.as_nanos();
        let missing = if over == 0 { 0 } else { CHECK_GRID.as_nanos() - over };
        self.set(due, at + Duration::from_nanos(u64::try_from(missing).unwrap_or_default()));
    }

    pub(super) fn cancel(&mut self, due: Due) {
        if let Some(old) = self.at.remove(&due) {
            self.order.remove(&(old, due));
        }
    }

    /// Takes the earliest deadline that is not after `now`.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Due> {
        let &(at, due) = self.order.first().filter(|(at, _)| *at <= now)?;
        self.order.remove(&(at, due));
        self.at.remove(&due);
        Some(due)
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }
}

const CHECK_GRID: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn deadlines_come_out_in_order_of_time_and_not_early() {
        let start = base();
        let mut timer = Timer::new(start);
        timer.set(Due::Tunnel(LocalIndex(1)), start + Duration::from_secs(2));
        timer.set(Due::LighthouseUpdate, start + Duration::from_secs(1));
        assert_eq!(timer.pop(start), None);
        assert_eq!(timer.next(), Some(start + Duration::from_secs(1)));
        let late = start + Duration::from_secs(5);
        assert_eq!(timer.pop(late), Some(Due::LighthouseUpdate));
        assert_eq!(timer.pop(late), Some(Due::Tunnel(LocalIndex(1))));
        assert_eq!(timer.pop(late), None);
    }

    #[test]
    fn setting_a_key_again_moves_its_deadline() {
        let start = base();
        let mut timer = Timer::new(start);
        timer.set(Due::HolePunch, start);
        timer.set(Due::HolePunch, start + Duration::from_secs(3));
        assert_eq!(timer.pop(start + Duration::from_secs(1)), None);
        assert_eq!(timer.pop(start + Duration::from_secs(3)), Some(Due::HolePunch));
        assert_eq!(timer.next(), None);
    }

    #[test]
    fn a_cancelled_deadline_never_fires() {
        let start = base();
        let mut timer = Timer::new(start);
        timer.set(Due::LighthouseUpdate, start);
        timer.cancel(Due::LighthouseUpdate);
        assert_eq!(timer.pop(start + Duration::from_secs(1)), None);
    }
}

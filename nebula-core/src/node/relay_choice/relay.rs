//! One relay that a lighthouse offered: what is known of it, and whether it is better than another.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use super::RETRY_AFTER;
use super::gauge::Gauge;
use super::reports::Reports;
use super::status::{RelayReason, RelayTrouble};
use crate::node::prober::worth_a_change;

/// One relay that a lighthouse offered.
#[derive(Debug)]
pub(super) struct Relay {
    /// Rendezvous hash of this node and the relay.
    pub(super) lot: u64,
    /// Lighthouses whose last offer names it.
    pub(super) by: BTreeSet<IpAddr>,
    /// When the last of them stopped naming it.
    pub(super) withdrawn: Option<Instant>,
    pub(super) gauge: Gauge,
    pub(super) reports: Reports,
    /// How often it was left because it dropped what it was given to carry.
    pub(super) drops: u32,
    pub(super) stage: Stage,
    /// Whether it answered a request for a hop.
    pub(super) serves: Option<bool>,
    /// Unanswered requests in a row, and when the last one was sent.
    pub(super) requests: (u32, Option<Instant>),
    pub(super) trouble: Option<RelayTrouble>,
    pub(super) reason: Option<RelayReason>,
    pub(super) failures: u32,
    pub(super) retry_at: Instant,
    /// The last pass in which it was surveyed.
    pub(super) pass: u32,
    /// This node made the tunnel to it, for the survey.
    pub(super) is_opened: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Idle,
    /// It is tried. `reached`: since when there is a tunnel.
    Trial {
        since: Instant,
        reached: Option<Instant>,
    },
    Chosen {
        since: Instant,
    },
}

/// Why one relay is better than another; the stronger, the greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Better {
    Hash,
    Faster,
    LessLoss,
}

impl From<Better> for RelayReason {
    fn from(better: Better) -> Self {
        match better {
            Better::Hash => Self::Hash,
            Better::Faster => Self::Faster,
            Better::LessLoss => Self::LessLoss,
        }
    }
}

impl Relay {
    pub(super) fn new(now: Instant, lot: u64, lighthouse: IpAddr) -> Self {
        Self {
            lot,
            by: BTreeSet::from([lighthouse]),
            withdrawn: None,
            gauge: Gauge::default(),
            reports: Reports::default(),
            drops: 0,
            stage: Stage::Idle,
            serves: None,
            requests: (0, None),
            trouble: None,
            reason: None,
            failures: 0,
            retry_at: now,
            pass: 0,
            is_opened: false,
        }
    }

    pub(super) fn is_chosen(&self) -> bool {
        matches!(self.stage, Stage::Chosen { .. })
    }

    pub(super) fn no_longer_by(&mut self, now: Instant, lighthouse: IpAddr) {
        if self.by.remove(&lighthouse) && self.by.is_empty() {
            self.withdrawn = Some(now);
        }
    }

    pub(super) fn may_be_tried(&self, now: Instant) -> bool {
        self.stage == Stage::Idle && now >= self.retry_at && self.withdrawn.is_none()
    }

    /// Whether it is used beside another one, or may be tried in its place.
    pub(super) fn may_replace(&self, now: Instant) -> bool {
        match self.stage {
            Stage::Idle => self.may_be_tried(now),
            Stage::Trial { .. } => false,
            Stage::Chosen { .. } => self.serves == Some(true) && !self.reports.say_dropped(now),
        }
    }

    pub(super) fn idle(&mut self, pass: u32) {
        (self.stage, self.pass, self.reason) = (Stage::Idle, pass, None);
    }

    /// The requests for a hop were not answered.
    pub(super) fn is_unanswered(&self, now: Instant) -> bool {
        self.requests.0 >= REQUESTS && self.requests.1.is_some_and(|at| now >= at + REQUEST_PATIENCE)
    }

    /// When the next request for a hop is due.
    pub(super) fn next_request(&self, now: Instant) -> Instant {
        let pause = match (self.requests.0, self.serves) {
            (0, Some(true)) => REQUEST_EVERY,
            (0, Some(false)) => RETRY_AFTER,
            _ => REQUEST_PATIENCE,
        };
        self.requests.1.map_or(now, |at| at + pause)
    }

    pub(super) fn wants_request(&self, now: Instant) -> bool {
        now >= self.next_request(now)
    }

    /// Why it is better than one that is chosen, if it is.
    pub(super) fn beats(&self, chosen: &Self) -> Option<Better> {
        if self.gauge.is_lossy() != chosen.gauge.is_lossy() {
            return chosen.gauge.is_lossy().then_some(Better::LessLoss);
        }
        let (Some(mine), Some(other)) = (self.gauge.round_trip(), chosen.gauge.round_trip()) else { return None };
        if other > worth_a_change(mine) {
            return Some(Better::Faster);
        }
        (mine <= worth_a_change(other) && self.lot > chosen.lot).then_some(Better::Hash)
    }
}

/// Requests for a hop, and how long each may take.
const REQUESTS: u32 = 3;
const REQUEST_PATIENCE: Duration = Duration::from_secs(2);
/// A relay may be told not to relay any more.
const REQUEST_EVERY: Duration = Duration::from_secs(600);

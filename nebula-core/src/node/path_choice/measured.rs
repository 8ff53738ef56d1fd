//! What the probes of one path say about it, and what makes one path better than another.

use std::time::{Duration, Instant};

use super::carrying::{Carrying, Load};
use super::{Candidate, PathReason, Way};
use crate::node::prober::{Patience, Prober, worth_a_change};

/// One path with its latest probes.
#[derive(Debug)]
pub(in crate::node) struct Measured {
    pub(super) candidate: Candidate,
    prober: Prober,
    /// Answers since the last loss.
    held: u32,
    is_lossy: bool,
    /// There was an outcome since the last round.
    has_news: bool,
    answered_at: Option<Instant>,
    /// How often it was left because it proved unreliable, and when it last was.
    falls: (u32, Option<Instant>),
    carrying: Carrying,
}

impl Measured {
    pub(super) fn new(candidate: Candidate) -> Self {
        Self {
            candidate,
            prober: Prober::new(PATIENCE),
            held: 0,
            is_lossy: false,
            has_news: false,
            answered_at: None,
            falls: (0, None),
            carrying: Carrying::default(),
        }
    }

    pub(in crate::node) fn way(&self) -> Way {
        self.candidate.way
    }

    /// The median of the last round trips; `None` if there is none, or if the path does not answer any more.
    pub(in crate::node) fn round_trip(&self) -> Option<Duration> {
        self.prober.round_trip()
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(in crate::node) fn loss(&self) -> Option<u32> {
        self.prober.loss()
    }

    pub(super) fn merit(&self) -> Option<Merit> {
        let round_trip = self.round_trip()?;
        Some(Merit { is_other_range: !self.candidate.is_preferred, is_lossy: self.is_lossy, round_trip })
    }

    /// What it may be like now: the newest round trip counts if it is shorter, for the median is slow to follow where
    /// other paths have most of the probes.
    pub(super) fn promise(&self) -> Option<Merit> {
        let merit = self.merit()?;
        let newest = self.prober.newest_round_trip().unwrap_or(merit.round_trip);
        Some(Merit { round_trip: merit.round_trip.min(newest), ..merit })
    }

    pub(super) fn awaits(&self, number: u32) -> bool {
        self.prober.awaited() == Some(number)
    }

    pub(super) fn probed_at(&self) -> Option<Instant> {
        self.prober.probed_at()
    }

    pub(super) fn probed(&mut self, now: Instant, number: u32) {
        self.prober.probed(now, number);
    }

    pub(super) fn answered(&mut self, now: Instant, number: u32) {
        if self.prober.answered(now, number) {
            self.held += 1;
            self.answered_at = Some(now);
            self.judge_loss();
        }
    }

    /// Counts a probe as lost if its answer is overdue.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.prober.expire(now) {
            self.held = 0;
            self.judge_loss();
            if self.is_silent() {
                // What it was like before says little about when it is back.
                self.prober.forget_round_trips();
            }
        }
        if self.falls.1.is_some_and(|at| now >= at + FORGIVEN_AFTER) {
            self.falls = (0, None);
        }
    }

    /// The peer told what became of datagrams that were sent by this path.
    pub(super) fn note_load(&mut self, now: Instant, load: Load) {
        self.carrying.note(now, load);
    }

    /// It answers probes and drops everything else, or did so lately.
    pub(super) fn is_distrusted(&self, now: Instant) -> bool {
        self.carrying.is_distrusted(now)
    }

    /// Whether there was an outcome since the last call.
    pub(super) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    /// The answer to the probe under way would not be known.
    pub(super) fn forget_probe(&mut self) {
        self.prober.forget_probe();
    }

    fn judge_loss(&mut self) {
        self.has_news = true;
        self.is_lossy = if self.is_lossy { self.held < self.probation() } else { self.prober.lost_among(6) >= 3 };
    }

    /// Answers in a row that make a lossy path a good one again.
    fn probation(&self) -> u32 {
        CLEAN << self.falls.0.saturating_sub(1).min(4)
    }

    /// It was left because it proved unreliable.
    pub(super) fn fell(&mut self, now: Instant) {
        self.falls = (self.falls.0 + 1, Some(now));
        self.is_lossy = true;
    }

    /// It answered so recently that its silence means nothing.
    pub(super) fn answered_lately(&self, now: Instant) -> bool {
        self.answered_at.is_some_and(|at| now < at + LATELY)
    }

    /// Probes lost since the last answer.
    pub(super) fn missed(&self) -> u32 {
        self.prober.missed()
    }

    /// Its last probe was lost.
    pub(super) fn is_missing(&self) -> bool {
        self.missed() > 0
    }

    /// It does not answer any more, or never did.
    pub(super) fn is_silent(&self) -> bool {
        self.prober.is_silent()
    }

    /// It answered the last probe.
    pub(super) fn is_answering(&self) -> bool {
        self.answered_at.is_some() && self.missed() == 0
    }

    /// It was measured often enough to be chosen without need.
    pub(super) fn is_trusted(&self) -> bool {
        self.is_answering() && self.prober.is_known()
    }

    /// Whether it is to be probed at this time. A path that never answers is probed less and less often.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let patient = if self.answered_at.is_some() { ANSWERED_BEFORE } else { NEVER_ANSWERED };
        let pause = match self.missed().checked_sub(patient) {
            None => Duration::ZERO,
            Some(more) => (MIN_PAUSE * (1 << more.min(8))).min(MAX_PAUSE),
        };
        self.prober.is_due(now, pause)
    }
}

/// What counts about a path, the most important first; the less, the better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Merit {
    pub(super) is_other_range: bool,
    pub(super) is_lossy: bool,
    pub(super) round_trip: Duration,
}

impl Merit {
    /// Why the other is better by so much that it is worth a change.
    pub(super) fn beaten_by(self, other: Self) -> Option<PathReason> {
        if self.is_other_range != other.is_other_range {
            return self.is_other_range.then_some(PathReason::Preferred);
        }
        if self.is_lossy != other.is_lossy {
            return self.is_lossy.then_some(PathReason::LessLoss);
        }
        (self.round_trip > worth_a_change(other.round_trip)).then_some(PathReason::Faster)
    }

    /// Whether it is no reason to change that the other one is better.
    pub(super) fn is_as_good(self, other: Self) -> bool {
        self.beaten_by(other).is_none()
    }
}

/// Answers in a row after which a path that lost probes is trusted again. It doubles each time it has to be left.
const CLEAN: u32 = 4;
/// What happened so long ago does not count.
const FORGIVEN_AFTER: Duration = Duration::from_secs(300);
/// How long an answer shows that a path lives.
const LATELY: Duration = Duration::from_secs(5);
/// At least a little less than a round.
const PATIENCE: Patience = Patience { least: Duration::from_millis(900), most: Duration::from_secs(3) };
/// Lost probes in a row after which a path is probed less often.
const NEVER_ANSWERED: u32 = 3;
const ANSWERED_BEFORE: u32 = 60;
const MIN_PAUSE: Duration = Duration::from_secs(5);
const MAX_PAUSE: Duration = Duration::from_secs(300);

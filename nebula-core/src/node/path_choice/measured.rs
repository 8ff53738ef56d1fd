//! What the probes of one path say about it, and what makes one path better than another.

use std::time::{Duration, Instant};

use super::carrying::{Carrying, Load};
use super::{Candidate, PathReason, Way};
use crate::node::samples::{Samples, worth_a_change};

/// One path with its latest probes.
#[derive(Debug)]
pub(in crate::node) struct Measured {
    pub(super) candidate: Candidate,
    /// The probe under way, and when it was sent.
    probe: Option<(u32, Instant)>,
    probed_at: Option<Instant>,
    samples: Samples,
    /// Probes lost since the last answer.
    missed: u32,
    /// Answers since the last loss.
    held: u32,
    is_lossy: bool,
    /// There was an outcome since the last round.
    has_news: bool,
    has_answered: bool,
    answered_at: Option<Instant>,
    /// How often it was left because it proved unreliable, and when it last was.
    falls: (u32, Option<Instant>),
    carrying: Carrying,
}

impl Measured {
    pub(super) fn new(candidate: Candidate) -> Self {
        Self {
            candidate,
            probe: None,
            probed_at: None,
            samples: Samples::default(),
            missed: 0,
            held: 0,
            is_lossy: false,
            has_news: false,
            has_answered: false,
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
        self.samples.round_trip()
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(in crate::node) fn loss(&self) -> Option<u32> {
        self.samples.loss()
    }

    pub(super) fn merit(&self) -> Option<Merit> {
        let round_trip = self.round_trip()?;
        Some(Merit { is_other_range: !self.candidate.is_preferred, is_lossy: self.is_lossy, round_trip })
    }

    /// What it may be like now: the newest round trip counts if it is shorter, for the median is slow to follow where other paths
    /// have most of the probes.
    pub(super) fn promise(&self) -> Option<Merit> {
        let merit = self.merit()?;
        let newest = self.samples.newest().unwrap_or(merit.round_trip);
        Some(Merit { round_trip: merit.round_trip.min(newest), ..merit })
    }

    pub(super) fn awaits(&self, number: u32) -> bool {
        self.probe.is_some_and(|(sent, _)| sent == number)
    }

    pub(super) fn probed_at(&self) -> Option<Instant> {
        self.probed_at
    }

    pub(super) fn probed(&mut self, now: Instant, number: u32) {
        (self.probe, self.probed_at) = (Some((number, now)), Some(now));
    }

    pub(super) fn answered(&mut self, now: Instant) {
        let Some((_, sent)) = self.probe.take() else { return };
        self.samples.note_answer(now.saturating_duration_since(sent));
        (self.missed, self.has_answered) = (0, true);
        self.held += 1;
        self.answered_at = Some(now);
        self.judge_loss();
    }

    /// Counts a probe as lost if its answer is overdue.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.probe.is_some_and(|(_, sent)| now >= sent + self.patience()) {
            self.probe = None;
            self.missed += 1;
            self.held = 0;
            self.samples.note_loss();
            self.judge_loss();
            if self.is_silent() {
                // What it was like before says little about when it is back.
                self.samples.forget_round_trips();
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
        self.probe = None;
    }

    fn judge_loss(&mut self) {
        self.has_news = true;
        self.is_lossy = if self.is_lossy { self.held < self.probation() } else { self.samples.lost_among(6) >= 3 };
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
        self.missed
    }

    /// Its last probe was lost.
    pub(super) fn is_missing(&self) -> bool {
        self.missed > 0
    }

    /// It does not answer any more, or never did.
    pub(super) fn is_silent(&self) -> bool {
        self.missed >= SILENT
    }

    /// It answered the last probe.
    pub(super) fn is_answering(&self) -> bool {
        self.has_answered && self.missed == 0
    }

    /// It was measured often enough to be chosen without need.
    pub(super) fn is_trusted(&self) -> bool {
        self.is_answering() && self.samples.round_trips() >= TRUSTED
    }

    /// Whether it is to be probed at this time. A path that never answers is probed less and less often.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        let patient = if self.has_answered { ANSWERED_BEFORE } else { NEVER_ANSWERED };
        let pause = match self.missed.checked_sub(patient) {
            None => Duration::ZERO,
            Some(more) => (MIN_PAUSE * (1 << more.min(8))).min(MAX_PAUSE),
        };
        self.probe.is_none() && self.probed_at.is_none_or(|at| now >= at + pause)
    }

    fn patience(&self) -> Duration {
        self.round_trip().map_or(MAX_PATIENCE, |usual| (usual * 2 + MIN_PATIENCE / 2).clamp(MIN_PATIENCE, MAX_PATIENCE))
    }
}

/// Round trips to know before a path is chosen.
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

const TRUSTED: usize = 3;
/// Lost probes in a row after which a path counts as dead.
const SILENT: u32 = 3;
/// Answers in a row after which a path that lost probes is trusted again. It doubles each time it has to be left.
const CLEAN: u32 = 4;
/// What happened so long ago does not count.
const FORGIVEN_AFTER: Duration = Duration::from_secs(300);
/// How long an answer shows that a path lives.
const LATELY: Duration = Duration::from_secs(5);
/// A little less than a round.
const MIN_PATIENCE: Duration = Duration::from_millis(900);
const MAX_PATIENCE: Duration = Duration::from_secs(3);
/// Lost probes in a row after which a path is probed less often.
const NEVER_ANSWERED: u32 = 3;
const ANSWERED_BEFORE: u32 = 60;
const MIN_PAUSE: Duration = Duration::from_secs(5);
const MAX_PAUSE: Duration = Duration::from_secs(300);

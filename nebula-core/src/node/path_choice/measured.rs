//! What the probes of one path say about it.

use std::time::{Duration, Instant};

use super::{Candidate, Way};

/// One path with its latest probes.
#[derive(Debug)]
pub(in crate::node) struct Measured {
    pub(super) candidate: Candidate,
    /// The probe under way, and when it was sent.
    probe: Option<(u32, Instant)>,
    probed_at: Option<Instant>,
    /// The last round trips, newest last.
    round_trips: Vec<Duration>,
    /// Outcomes of the last probes, the newest in the lowest bit; 1 is a loss.
    losses: u8,
    /// Number of outcomes, as far as they matter.
    outcomes: u32,
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
}

/// What makes one path better than another; the less, the better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Merit {
    pub(super) is_other_range: bool,
    pub(super) is_lossy: bool,
    pub(super) round_trip: Duration,
}

impl Measured {
    pub(super) fn new(candidate: Candidate) -> Self {
        Self {
            candidate,
            probe: None,
            probed_at: None,
            round_trips: Vec::new(),
            losses: 0,
            outcomes: 0,
            missed: 0,
            held: 0,
            is_lossy: false,
            has_news: false,
            has_answered: false,
            answered_at: None,
            falls: (0, None),
        }
    }

    pub(in crate::node) fn way(&self) -> Way {
        self.candidate.way
    }

    /// The median of the last round trips; `None` if there is none, or if the path does not answer any more.
    pub(in crate::node) fn round_trip(&self) -> Option<Duration> {
        let mut sorted = self.round_trips.clone();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }

    /// The share of the last probes that were lost, in percent; `None` before the first outcome.
    pub(in crate::node) fn loss(&self) -> Option<u32> {
        let known = self.outcomes.min(u8::BITS);
        (known > 0).then(|| self.losses.count_ones() * 100 / known)
    }

    pub(super) fn merit(&self) -> Option<Merit> {
        let round_trip = self.round_trip()?;
        Some(Merit { is_other_range: !self.candidate.is_preferred, is_lossy: self.is_lossy, round_trip })
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
        if self.round_trips.len() >= ROUND_TRIPS {
            self.round_trips.remove(0);
        }
        self.round_trips.push(now.saturating_duration_since(sent));
        (self.missed, self.has_answered) = (0, true);
        self.held += 1;
        self.answered_at = Some(now);
        self.note(false);
    }

    /// Counts a probe as lost if its answer is overdue.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.probe.is_some_and(|(_, sent)| now >= sent + self.patience()) {
            self.probe = None;
            self.missed += 1;
            self.held = 0;
            self.note(true);
            if self.is_silent() {
                // What it was like before says little about when it is back.
                self.round_trips.clear();
            }
        }
        if self.falls.1.is_some_and(|at| now >= at + FORGIVEN_AFTER) {
            self.falls = (0, None);
        }
    }

    /// Whether there was an outcome since the last call.
    pub(super) fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.has_news)
    }

    /// The answer to the probe under way would not be known.
    pub(super) fn forget_probe(&mut self) {
        self.probe = None;
    }

    fn note(&mut self, is_lost: bool) {
        self.losses = self.losses << 1 | u8::from(is_lost);
        self.outcomes = self.outcomes.saturating_add(1);
        self.has_news = true;
        let among = |last: u8| (self.losses & ((1 << last) - 1)).count_ones();
        self.is_lossy = if self.is_lossy { self.held < self.probation() } else { among(6) >= 3 };
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
        self.is_answering() && self.round_trips.len() >= TRUSTED
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

const ROUND_TRIPS: usize = 5;
/// Round trips to know before a path is chosen.
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

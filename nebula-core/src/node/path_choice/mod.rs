//! Chooses the path to a peer by measurement: round trip and loss of probes by every path there is.
//!
//! The two ends of a tunnel see the same direct paths, so only one of them measures and chooses; the other follows,
//! as it follows a peer that moves. Each end chooses the relay of its own packets. Everything is paid for by traffic:
//! a probe and its answer for every 200 datagrams, and a small advance for a new tunnel. An idle tunnel is not
//! probed.

mod budget;
mod carrying;
mod judge;
mod measured;
mod probing;
mod status;
mod verdict;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

use self::budget::Budget;
pub(super) use self::carrying::Load;
use self::measured::Measured;
pub use self::status::PathStatus;
pub use self::verdict::{PathReason, PathVerdict};
use crate::index::Hop;
use crate::tunnel::Tunnel;
use crate::wire::path_probe::{Answerer, PathProbe, PathReply};

/// A path to the peer of a tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// To this endpoint.
    Direct(SocketAddr),
    /// Through a relay.
    Relayed(Hop),
}

/// A path that may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) way: Way,
    /// It is in a preferred range.
    pub(super) is_preferred: bool,
    /// Rendezvous hash of host and relay. Of equally good relays the one with the highest is used: it distributes
    /// hosts.
    pub(super) lot: u64,
}

impl Way {
    pub(super) fn is_direct(self) -> bool {
        matches!(self, Self::Direct(_))
    }
}

/// What is known about the paths of one tunnel. Sends nothing: each round returns what to send.
#[derive(Debug)]
pub(super) struct Choice {
    ways: Vec<Measured>,
    current: Way,
    reason: PathReason,
    /// How the peer answers; `None` while that is not known.
    peer: Option<Answerer>,
    /// The peer measures the direct paths itself until then, at least.
    led_until: Instant,
    /// Makes the numbers of probes: a peer that could guess them would answer before they arrive.
    numbers: ChaCha20Rng,
    budget: Budget,
    /// Rounds in a row in which another way was better than the current one.
    beaten: u32,
    /// Rounds in a row in which an equally good relay had a higher hash than the current one.
    outdrawn: u32,
    /// Whether a relay was chosen by lot once.
    settled: bool,
    /// Moves that may be made at once.
    moves: f64,
    at: Instant,
    /// Highest counter received at the last round, and answers and probes of the peer since.
    received: u64,
    own_received: u64,
    /// There was traffic in the last round, but none from the peer.
    is_unheard: bool,
    /// Rounds in a row without traffic.
    quiet: u32,
    /// A round is due.
    is_running: bool,
    /// What the current way was given since the last probe by it.
    load: Given,
    /// The probe that asks what became of a load, how much that was, and how many probes took other ways meanwhile.
    asked: Option<(u32, u64, u64)>,
}

/// Where the datagrams begin that a way was given.
#[derive(Debug, Clone, Copy, Default)]
struct Given {
    /// Send counter.
    from: u64,
    /// Probes since that took other ways.
    elsewhere: u64,
}

/// Counters of a tunnel: the next one to send, and the highest received.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Carried {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl Carried {
    /// Those of this tunnel at this time.
    pub(super) fn of(tunnel: &Tunnel) -> Self {
        Self { sent: tunnel.session.next_counter(), received: tunnel.session.received.replay.highest() }
    }

    fn both(self) -> u64 {
        self.sent.saturating_add(self.received)
    }
}

/// What a round comes to.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Round {
    /// Leave the current way for this one.
    pub(super) move_to: Option<Way>,
    pub(super) probes: Vec<(Way, PathProbe)>,
    /// When the next round is due; `None`: not before there is traffic.
    pub(super) next: Option<Instant>,
}

impl Choice {
    /// For a new tunnel, or one that has more than one path for the first time. `seed` is random.
    pub(super) fn new(now: Instant, current: Way, carried: Carried, seed: u64) -> Self {
        Self {
            ways: Vec::new(),
            current,
            reason: PathReason::Peer,
            peer: None,
            led_until: now,
            numbers: ChaCha20Rng::seed_from_u64(seed),
            budget: Budget::new(carried.both()),
            beaten: 0,
            outdrawn: 0,
            settled: false,
            moves: MAX_MOVES,
            at: now,
            received: carried.received,
            own_received: 0,
            is_unheard: false,
            quiet: 0,
            is_running: false,
            load: Given { from: carried.sent, elsewhere: 0 },
            asked: None,
        }
    }

    /// Sets the paths that may be used. What is known about those that stay is kept.
    pub(super) fn set_candidates(&mut self, candidates: &[Candidate]) {
        let candidates = candidates.get(..MAX_WAYS).unwrap_or(candidates);
        self.ways.retain(|known| candidates.iter().any(|candidate| candidate.way == known.way()));
        for candidate in candidates {
            if let Some(known) = self.ways.iter_mut().find(|known| known.way() == candidate.way) {
                known.candidate = *candidate;
            } else {
                self.ways.push(Measured::new(*candidate));
                self.budget.advance();
            }
        }
    }

    pub(super) fn current(&self) -> Way {
        self.current
    }

    pub(super) fn reason(&self) -> PathReason {
        self.reason
    }

    /// Whether this end measures the direct paths at this time, and has a choice.
    pub(super) fn leads(&self, now: Instant) -> bool {
        matches!(self.current, Way::Direct(_))
            && self.may_measure(now)
            && self.ways.iter().filter(|way| way.is_answering()).count() > 1
    }

    /// Whether the peer measures the direct paths and chooses.
    pub(super) fn is_led(&self, now: Instant) -> bool {
        now < self.led_until
    }

    /// Whether there is a reason to begin a round.
    pub(super) fn may_measure(&self, now: Instant) -> bool {
        self.ways.len() > 1
            && match self.current {
                Way::Direct(_) => self.peer != Some(Answerer::Echoes) && !self.is_led(now),
                Way::Relayed(_) => true,
            }
    }

    /// There is traffic. Returns whether that is a reason to begin with rounds.
    pub(super) fn begins(&mut self, now: Instant, current: Way) -> bool {
        if self.is_running || self.current.is_direct() != current.is_direct() || !self.may_measure(now) {
            return false;
        }
        (self.is_running, self.quiet) = (true, 0);
        true
    }

    /// Another tunnel to the same peer takes over.
    pub(super) fn move_over(&mut self, carried: Carried) {
        self.budget.move_over(carried.both());
        (self.received, self.own_received) = (carried.received, 0);
        self.is_running = false;
        (self.load, self.asked) = (Given { from: carried.sent, elsewhere: 0 }, None);
        self.ways.iter_mut().for_each(Measured::forget_probe);
    }

    /// The peer probed a path, which is no traffic.
    pub(super) fn note_foreign(&mut self) {
        self.budget.note_own(2);
        self.own_received += 1;
    }

    /// Judges the paths, and chooses what to probe. `current` is the way that the tunnel uses.
    pub(super) fn round(&mut self, now: Instant, carried: Carried, current: Way) -> Round {
        if self.current != current {
            (self.current, self.reason) = (current, PathReason::Peer);
            (self.beaten, self.outdrawn) = (0, 0);
            self.load = Given { from: carried.sent, elsewhere: 0 };
        }
        let fresh = self.budget.earn(carried.both(), self.ways.len());
        let heard = carried.received.saturating_sub(self.received).saturating_sub(self.own_received);
        (self.received, self.own_received) = (carried.received, 0);
        self.is_unheard = fresh > 0 && heard == 0;
        self.quiet = if fresh == 0 { self.quiet + 1 } else { 0 };
        if self.quiet >= QUIET_ROUNDS || !self.may_measure(now) {
            self.is_running = false;
            return Round::default();
        }
        let passed = now.saturating_duration_since(self.at);
        (self.at, self.moves) = (now, MAX_MOVES.min(self.moves + passed.as_secs_f64() / MOVE_EVERY.as_secs_f64()));
        for way in &mut self.ways {
            way.expire(now);
        }
        let had_news = self.ways.iter_mut().fold(false, |had, way| way.take_news() | had);
        let move_to = self.judge(now, had_news);
        if let Some((way, reason)) = move_to {
            (self.current, self.reason) = (way, reason);
            (self.beaten, self.outdrawn) = (0, 0);
            self.moves = (self.moves - 1.0).max(0.0);
            self.load = Given { from: carried.sent, elsewhere: 0 };
        }
        let probes = self.probes(now, carried.sent);
        Round { move_to: move_to.map(|(way, _)| way), probes, next: Some(now + ROUND) }
    }

    /// What an answer says about the datagrams that a relay was given; `None` if it says nothing about them.
    pub(super) fn load_of(&self, reply: PathReply) -> Option<Load> {
        let (_, sent, elsewhere) = self.asked.filter(|(number, ..)| *number == reply.number)?;
        let is_awaited = self.ways.iter().any(|way| way.awaits(reply.number));
        let missing = u64::from(reply.missing.filter(|_| is_awaited)?);
        // The relay in use is not to blame for what another one lost.
        Some(Load { sent, missing: missing.saturating_sub(elsewhere) })
    }

    /// The answer to a probe, which came back by `came_by`; `None` if it cannot be told by which way. Returns whether
    /// it is the first by which the peer shows that it measures.
    pub(super) fn answered(&mut self, now: Instant, reply: PathReply, came_by: Option<Way>) -> bool {
        let load = self.load_of(reply);
        let Some(way) = self.ways.iter_mut().find(|way| way.awaits(reply.number)) else { return false };
        self.budget.note_own(1);
        self.own_received += 1;
        // By which way Go Nebula answers what it got through a relay is its own choice.
        if reply.by != Answerer::Echoes && came_by != Some(way.way()) {
            return false;
        }
        way.answered(now, reply.number);
        if let Some(load) = load {
            way.note_load(now, load);
        }
        let is_news = self.peer != Some(reply.by);
        self.peer = Some(reply.by);
        if reply.by == Answerer::Leads {
            self.led_until = now + LED_FOR;
        }
        is_news && self.may_measure(now)
    }

    /// The probes of a round, as far as they are paid for.
    /// `sent` is the send counter of the next datagram.
    fn probes(&mut self, now: Instant, sent: u64) -> Vec<(Way, PathProbe)> {
        let current = self.ways.iter().find(|way| way.way() == self.current);
        let is_missing = current.is_some_and(Measured::is_missing);
        let is_urgent = is_missing || self.is_unheard && !current.is_some_and(|way| way.answered_lately(now));
        let affordable = self.budget.probes(is_urgent);
        let current = self.current;
        // Until the peer showed that it measures, no direct path but the present one is probed: see `path_probe`.
        let only_current = current.is_direct() && self.peer.is_none();
        let due = self.ways.iter().enumerate();
        let due = due.filter(|(_, way)| way.is_due(now) && (!only_current || way.way() == current));
        let mut due: Vec<_> = due
            .map(|(n, way)| {
                let promise = way.promise();
                // Each path is tried once before one that did not answer is tried again.
                ((way.way() != current, promise.is_none(), promise, way.missed(), n), way.probed_at())
            })
            .collect();
        // The current way and the best others in each round, all others in turn.
        let mut chosen = Vec::with_capacity(EACH_ROUND + 1);
        while chosen.len() < EACH_ROUND
            && let Some(best) = (0..due.len()).min_by_key(|&at| due[at].0)
        {
            chosen.push(due.swap_remove(best).0.4);
        }
        chosen.extend(due.iter().min_by_key(|(place, probed_at)| (*probed_at, *place)).map(|(place, _)| place.4));
        if affordable < chosen.len() {
            // Whether the current way is dead; and if it seems so, whether others live.
            let most = if is_missing { chosen.len() } else { usize::from(is_urgent) };
            chosen.truncate(affordable.min(most));
        }
        self.budget.spend(chosen.len());
        let leads = self.leads(now);
        let mut probes = Vec::with_capacity(chosen.len());
        for n in chosen {
            let Some(way) = self.ways.get_mut(n) else { continue };
            let number = PathProbe::number(self.numbers.next_u32());
            way.probed(now, number);
            probes.push((way.way(), PathProbe { number, in_use: leads && way.way() == current, span: 0 }));
        }
        // First, so that its span ends where the probes by other ways begin.
        probes.sort_by_key(|(way, _)| *way != current);
        let elsewhere = probes.iter().filter(|(way, _)| *way != current).count() as u64;
        if let Some((_, probe)) = probes.first_mut().filter(|(way, _)| *way == current && !way.is_direct()) {
            let span = sent.saturating_sub(self.load.from).min(MAX_SPAN);
            self.asked = Some((probe.number, span.saturating_sub(self.load.elsewhere), self.load.elsewhere));
            probe.span = u16::try_from(span).unwrap_or(u16::MAX);
            self.load = Given { from: sent + 1, elsewhere };
        } else {
            self.load.elsewhere += elsewhere;
        }
        probes
    }
}

/// Time between two rounds.
const ROUND: Duration = Duration::from_secs(1);
/// A tunnel without traffic in so many rounds is idle.
const QUIET_ROUNDS: u32 = 2;
/// Moves that may follow each other at once, and how often there may be one in the long run. A way that does not
/// answer is left at any time.
const MAX_MOVES: f64 = 8.0;
const MOVE_EVERY: Duration = Duration::from_secs(20);
/// Datagrams of which the peer is asked what became of them: about as many as its replay window tells.
const MAX_SPAN: u64 = 4096;
/// How long the peer is left to measure.
const LED_FOR: Duration = Duration::from_secs(60);
/// Ways that are probed in each round; one more is probed in turn.
const EACH_ROUND: usize = 3;
/// More ways to one peer are not looked at: lighthouses and the configuration name them.
const MAX_WAYS: usize = 64;

//! One round over all relays: which are tried, chosen, left or surveyed.

use std::cmp::Reverse;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rand_chacha::rand_core::RngCore as _;

use super::relay::{Relay, Stage};
use super::status::{RelayReason, RelayTrouble};
use super::{RETRY_AFTER, RelayChoice, SOON, SURVEY_EVERY};
use crate::node::prober::worth_a_change;
use crate::wire::path_probe::PathProbe;

/// The tunnel to a relay.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standing {
    pub(super) is_direct: bool,
    /// Its certificate has one of the groups.
    pub(super) is_member: bool,
}

/// What a round comes to.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// Relays to make a tunnel to.
    pub(super) call: Vec<IpAddr>,
    /// Relays to request a hop from.
    pub(super) request: Vec<IpAddr>,
    /// Relays to send a test request to, with its number.
    pub(super) probe: Vec<(IpAddr, u32)>,
    /// Relays whose tunnel is of no use any more, unless somebody else uses it.
    pub(super) release: Vec<IpAddr>,
    /// Other relays are chosen: the lighthouses are to be told, at this time.
    pub(super) tell_at: Option<Instant>,
    /// When the next round is due.
    pub(super) next: Option<Instant>,
}

impl RelayChoice {
    /// Looks at every relay. `standing` tells of the tunnel to one, if there is any.
    pub(super) fn round(&mut self, now: Instant, standing: impl Fn(IpAddr) -> Option<Standing>) -> Round {
        let mut round = Round::default();
        let before = self.advertised();
        for address in self.relays.keys().copied().collect::<Vec<_>>() {
            match self.look_at(now, address, standing(address), &mut round) {
                Some(Outcome::Fails(trouble)) => self.fail(now, address, trouble, &mut round),
                Some(Outcome::Passes) => self.passed(now, address, &mut round),
                None => {}
            }
        }
        self.relays.retain(|_, relay| {
            relay.stage != Stage::Idle || relay.withdrawn.is_none_or(|since| now < since + FORGET_AFTER)
        });
        self.begin_trials(now, &standing, &mut round);
        let after = self.advertised();
        if after != before {
            // Not all at once where a relay left that had many hosts.
            round.tell_at = Some(now + self.jitter(SOON));
        }
        round.next = self.next_round(now);
        round
    }

    fn look_at(
        &mut self,
        now: Instant,
        address: IpAddr,
        standing: Option<Standing>,
        round: &mut Round,
    ) -> Option<Outcome> {
        let has_others = self.relays.iter().any(|(at, relay)| *at != address && relay.may_replace(now));
        let relay = self.relays.get_mut(&address)?;
        relay.gauge.expire(now);
        let is_chosen = match relay.stage {
            Stage::Idle => return None,
            Stage::Chosen { .. } => true,
            Stage::Trial { .. } => false,
        };
        let trouble = match standing {
            None => match relay.stage {
                Stage::Trial { since, reached: None } if now < since + CALL_WITHIN => return None,
                _ => Some(RelayTrouble::Unreachable),
            },
            Some(Standing { is_direct: false, .. }) => Some(RelayTrouble::Indirect),
            Some(Standing { is_member: false, .. }) => Some(RelayTrouble::NotMember),
            Some(_) if relay.withdrawn.is_some_and(|since| now >= since + FORGET_AFTER) => {
                Some(RelayTrouble::Withdrawn)
            }
            Some(_) => None,
        };
        if let Some(trouble) = trouble {
            return Some(Outcome::Fails(trouble));
        }
        if let Stage::Trial { reached, .. } = &mut relay.stage {
            reached.get_or_insert(now);
        }
        // Without another one, it may still carry something.
        if has_others && relay.reports.say_dropped(now) {
            return Some(Outcome::Fails(RelayTrouble::Drops));
        }
        if relay.gauge.is_silent() {
            return Some(Outcome::Fails(RelayTrouble::Silent));
        }
        if relay.is_unanswered(now) {
            let was_last_resort = is_chosen && relay.serves == Some(false);
            (relay.serves, relay.requests.0) = (Some(false), 0);
            relay.trouble = Some(RelayTrouble::Refuses);
            if !was_last_resort {
                return Some(Outcome::Fails(RelayTrouble::Refuses));
            }
        }
        if relay.wants_request(now) {
            relay.requests = (relay.requests.0 + 1, Some(now));
            round.request.push(address);
        }
        if relay.gauge.is_due(now) {
            let number = PathProbe::number(self.numbers.next_u32());
            relay.gauge.probed(now, number);
            round.probe.push((address, number));
        }
        // A host that has no relay waits for no measurement.
        let is_needed = self.serving().count() < CHOSEN;
        let relay = self.relays.get(&address)?;
        let passes = !is_chosen && relay.serves == Some(true) && (is_needed || relay.gauge.is_trusted());
        passes.then_some(Outcome::Passes)
    }

    fn serving(&self) -> impl Iterator<Item = (IpAddr, &Relay)> {
        self.relays
            .iter()
            .filter(|(_, relay)| relay.is_chosen() && relay.serves == Some(true))
            .map(|(at, it)| (*at, it))
    }

    /// A relay cannot be used.
    fn fail(&mut self, now: Instant, address: IpAddr, trouble: RelayTrouble, round: &mut Round) {
        let others = self.relays.iter().filter(|(at, relay)| **at != address && relay.is_chosen()).count();
        let jitter = self.jitter(RETRY_AFTER);
        let fill_jitter = self.jitter(if others == 0 { SOON } else { SPREAD });
        let Some(relay) = self.relays.get_mut(&address) else { return };
        let was_chosen = relay.is_chosen();
        relay.trouble = Some(trouble);
        if trouble == RelayTrouble::Refuses && others == 0 && !was_chosen {
            (relay.stage, relay.reason) = (Stage::Chosen { since: now }, Some(RelayReason::LastResort));
            return;
        }
        if matches!(relay.stage, Stage::Chosen { since } if now >= since + FORGIVEN_AFTER) {
            relay.failures = 0;
        }
        relay.failures = relay.failures.saturating_add(1);
        let backoff = RETRY_AFTER.saturating_mul(1 << (relay.failures - 1).min(6)).min(MAX_RETRY_AFTER);
        relay.retry_at = now + backoff + jitter;
        if trouble == RelayTrouble::Drops {
            // Its answers to probes are no reason to try it again: only time is.
            relay.drops = relay.drops.saturating_add(1);
            relay.retry_at = now + MAX_RETRY_AFTER.saturating_mul(relay.drops.min(MAX_DROPS)) + jitter;
            relay.reports.forget();
        }
        relay.idle(self.pass);
        if std::mem::take(&mut relay.is_opened) {
            round.release.push(address);
        }
        if was_chosen {
            self.fill_at = self.fill_at.max(now + fill_jitter);
            self.survey_pause = SURVEY_EVERY;
        }
    }

    /// The trial of a relay is over: it can be used. Uses it if there is room for it, or if it is better than one of
    /// those that are chosen.
    fn passed(&mut self, now: Instant, address: IpAddr, round: &mut Round) {
        let serving: Vec<_> = self.serving().map(|(at, _)| at).collect();
        let (mut reason, mut leaves) = (Some(RelayReason::Hash), Vec::new());
        if serving.len() >= CHOSEN {
            let better = |worse: &IpAddr| {
                let (candidate, worse_one) = (self.relays.get(&address)?, self.relays.get(worse)?);
                Some((candidate.beats(worse_one)?, *worse))
            };
            let best = serving.iter().filter_map(better).max_by_key(|(reason, worse)| {
                let relay = self.relays.get(worse);
                let round_trip = relay.and_then(|relay| relay.gauge.round_trip());
                (*reason, round_trip, Reverse(relay.map(|relay| relay.lot)))
            });
            reason = best.map(|(reason, _)| reason.into());
            leaves.extend(best.map(|(_, worse)| worse));
        } else {
            // Relays that only were a last resort.
            leaves
                .extend(self.relays.iter().filter(|(_, it)| it.is_chosen() && it.serves != Some(true)).map(|it| *it.0));
        }
        let pass = self.pass;
        for left in leaves {
            if let Some(relay) = self.relays.get_mut(&left) {
                relay.idle(pass);
                relay.retry_at = now + RETRY_AFTER;
                round.release.push(left);
            }
        }
        let Some(relay) = self.relays.get_mut(&address) else { return };
        relay.trouble = None;
        match reason {
            Some(_) => (relay.stage, relay.reason, relay.is_opened) = (Stage::Chosen { since: now }, reason, false),
            None => {
                relay.idle(pass);
                if std::mem::take(&mut relay.is_opened) {
                    round.release.push(address);
                }
            }
        }
    }

    /// Tries as many relays as are missing, or else surveys the next one.
    fn begin_trials(&mut self, now: Instant, standing: impl Fn(IpAddr) -> Option<Standing>, round: &mut Round) {
        let trials = self.relays.values().filter(|relay| matches!(relay.stage, Stage::Trial { .. })).count();
        let missing = CHOSEN.saturating_sub(self.serving().count());
        let is_lossy = self.serving().any(|(_, relay)| relay.gauge.is_lossy());
        let was_lossy = std::mem::replace(&mut self.is_lossy, is_lossy);
        if is_lossy && !was_lossy {
            self.survey_pause = SURVEY_EVERY;
            self.survey_at = self.survey_at.min(now + self.jitter(SPREAD));
        }
        let mut begun = Vec::new();
        if missing > 0 {
            let may = if now >= self.fill_at { missing.saturating_sub(trials) } else { 0 };
            begun = self.best_idle(now, may);
        } else if trials == 0 && now >= self.survey_at && self.relays.len() > CHOSEN {
            begun.extend(self.next_to_survey(now));
            let pause = self.survey_pause;
            self.survey_at = now + pause + self.jitter(pause / 2);
        }
        for address in begun {
            let has_tunnel = standing(address).is_some();
            let Some(relay) = self.relays.get_mut(&address) else { continue };
            relay.stage = Stage::Trial { since: now, reached: None };
            relay.gauge.restart();
            (relay.serves, relay.requests) = (None, (0, None));
            relay.is_opened |= !has_tunnel;
            if !has_tunnel {
                round.call.push(address);
            }
        }
        if missing > 0 {
            self.survey_at = self.survey_at.max(now + self.survey_pause);
        }
    }

    /// At most `count` relays that may be tried, the most promising ones first.
    fn best_idle(&self, now: Instant, count: usize) -> Vec<IpAddr> {
        let idle = || self.relays.iter().filter(|(_, relay)| relay.may_be_tried(now));
        let good = idle().filter(|(_, relay)| !relay.gauge.is_lossy());
        let fastest = good.filter_map(|(_, relay)| relay.gauge.round_trip()).min();
        // First the relays about as fast as the fastest, then those not measured yet, then slower ones; lossy ones
        // last.
        let rank = |relay: &Relay| match (relay.gauge.round_trip(), fastest) {
            _ if relay.gauge.is_lossy() => 3,
            (Some(round_trip), Some(fastest)) if round_trip <= worth_a_change(fastest) => 0,
            (Some(_), _) => 2,
            (None, _) => 1,
        };
        let mut best = Vec::new();
        while best.len() < count
            && let Some((address, _)) = idle()
                .filter(|(at, _)| !best.contains(*at))
                .min_by_key(|(at, relay)| (rank(relay), Reverse(relay.lot), **at))
        {
            best.push(*address);
        }
        best
    }

    /// The relay whose turn it is. Each pass over all of them is slower than the one before.
    fn next_to_survey(&mut self, now: Instant) -> Option<IpAddr> {
        let next = |choice: &Self| {
            let idle = choice.relays.iter().filter(|(_, relay)| relay.may_be_tried(now) && relay.pass < choice.pass);
            idle.max_by_key(|(_, relay)| relay.lot).map(|(address, _)| *address)
        };
        next(self).or_else(|| {
            self.pass = self.pass.wrapping_add(1);
            self.survey_pause = (self.survey_pause * 2).min(MAX_SURVEY_EVERY);
            next(self)
        })
    }

    /// When something is due, if anything is.
    fn next_round(&self, now: Instant) -> Option<Instant> {
        let mut next = Vec::new();
        for relay in self.relays.values() {
            match relay.stage {
                Stage::Trial { .. } => next.push(now + TRIAL_ROUND),
                Stage::Chosen { .. } => {
                    next.push(relay.gauge.next(now).max(now + MIN_PAUSE));
                    next.push(relay.next_request(now).max(now + MIN_PAUSE));
                }
                Stage::Idle => {}
            }
        }
        let waits = self.relays.values().filter(|relay| relay.stage == Stage::Idle && relay.withdrawn.is_none());
        if let Some(retry_at) = waits.map(|relay| relay.retry_at).min() {
            let is_missing = self.serving().count() < CHOSEN;
            let at = if is_missing { self.fill_at } else { self.survey_at };
            next.push(at.max(retry_at).max(now + MIN_PAUSE));
        }
        next.into_iter().min()
    }
}

/// How the look at a relay ends.
#[derive(Debug)]
enum Outcome {
    Fails(RelayTrouble),
    Passes,
}

/// Relays that are used at a time: one that carries, and another one for when that ends.
const CHOSEN: usize = 2;
/// A relay that no lighthouse offers any more is left after this time: an offer may be missing for a while.
const FORGET_AFTER: Duration = Duration::from_secs(300);
/// How long the handshake with a relay may take.
const CALL_WITHIN: Duration = Duration::from_secs(8);
const TRIAL_ROUND: Duration = Duration::from_millis(500);
const MIN_PAUSE: Duration = Duration::from_millis(500);
const MAX_SURVEY_EVERY: Duration = Duration::from_secs(600);
const MAX_RETRY_AFTER: Duration = Duration::from_secs(600);
/// A relay that drops what it carries is not tried for [`MAX_RETRY_AFTER`], and so many times that if it is found out
/// again.
const MAX_DROPS: u32 = 6;
/// Failures before a relay worked for so long do not count.
const FORGIVEN_AFTER: Duration = Duration::from_secs(600);
/// Hosts of a relay that ends call others within this time, not all at once. Meanwhile each has its second relay.
const SPREAD: Duration = Duration::from_secs(10);

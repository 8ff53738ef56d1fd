//! Judges the paths of a tunnel: when to leave the current one, and for which other.

use std::time::Instant;

use super::measured::Measured;
use super::verdict::PathReason;
use super::{Choice, Way};

impl Choice {
    /// The best path that answers, apart from the one in use.
    pub(in crate::node) fn best_other(&self) -> Option<Way> {
        let answering = self.ways.iter().filter(|way| way.way() != self.current && way.is_answering());
        let (way, _) = answering.filter_map(|way| Some((way.way(), way.merit()?))).min_by_key(|(_, merit)| *merit)?;
        Some(way)
    }

    /// Whether the tunnel may follow an answer that came by another relay while the peer is silent: not away from one
    /// that answers probes, nor to one that drops what it carries.
    pub(in crate::node) fn may_follow(&self, now: Instant, to: Way) -> bool {
        let answers = |way: &Measured| way.way() == self.current && way.is_answering() && way.answered_lately(now);
        let is_distrusted = |way: &Measured| way.way() == to && way.is_distrusted(now);
        to == self.current || !self.ways.iter().any(|way| answers(way) || is_distrusted(way))
    }

    /// The best relay that answers and is not known to drop what it carries, apart from the one in use.
    fn best_trusted(&self, now: Instant) -> Option<Way> {
        let others = self.ways.iter().filter(|way| way.way() != self.current && way.is_answering());
        let trusted = others.filter(|way| !way.is_distrusted(now));
        trusted.filter_map(|way| Some((way.way(), way.merit()?))).min_by_key(|(_, merit)| *merit).map(|(way, _)| way)
    }

    /// The way to change to, and why.
    pub(super) fn judge(&mut self, now: Instant, had_news: bool) -> Option<(Way, PathReason)> {
        let current = self.ways.iter().find(|way| way.way() == self.current)?;
        if current.is_silent() {
            let way = self.best_other()?;
            self.leave(now);
            return Some((way, PathReason::Silence));
        }
        if !had_news {
            return None;
        }
        if current.is_distrusted(now) {
            // Another one that is known to drop is no better.
            let way = self.best_trusted(now)?;
            self.leave(now);
            return Some((way, PathReason::Drops));
        }
        let mine = current.merit()?;
        let may_be_chosen = |way: &Measured| way.is_trusted() && !way.is_distrusted(now);
        let eligible = || self.ways.iter().filter(|way| way.way() != self.current && may_be_chosen(way));
        let best = eligible().filter_map(Measured::merit).min()?;
        let is_relayed = matches!(self.current, Way::Relayed(_));
        let Some(reason) = mine.beaten_by(best) else {
            self.beaten = 0;
            // The first relay is the one that answered first. Later, hosts are distributed over equally good ones.
            let fair = |way: &&Measured| way.merit().is_some_and(|merit| merit.is_as_good(mine.min(best)));
            let luckiest = eligible().filter(fair).max_by_key(|way| way.candidate.lot)?;
            if !is_relayed || luckiest.candidate.lot <= current.candidate.lot {
                self.outdrawn = 0;
                self.settled |= is_relayed;
                return None;
            }
            self.outdrawn += 1;
            let wait = if self.settled { RESETTLE_ROUNDS + (luckiest.candidate.lot % 64) as u32 } else { ROUNDS };
            let may = self.outdrawn >= wait && self.moves >= 1.0;
            self.settled |= may;
            return may.then_some((luckiest.way(), PathReason::Spread));
        };
        self.outdrawn = 0;
        self.beaten += 1;
        if self.beaten < ROUNDS || self.moves < 1.0 {
            return None;
        }
        // The best one. Of equally good relays, the one with the highest hash.
        let fair =
            |way: &&Measured| way.merit().is_some_and(|merit| merit == best || is_relayed && merit.is_as_good(best));
        let to = eligible().filter(fair).max_by_key(|way| way.candidate.lot)?.way();
        if reason == PathReason::LessLoss {
            self.leave(now);
        }
        Some((to, reason))
    }

    /// The current way proved unreliable.
    pub(super) fn leave(&mut self, now: Instant) {
        if let Some(way) = self.ways.iter_mut().find(|way| way.way() == self.current) {
            way.fell(now);
        }
    }
}

/// Rounds in a row in which another way has to be better.
const ROUNDS: u32 = 3;
/// Rounds before a host moves to an equally good relay, such as one that has restarted; up to a minute of jitter is
/// added.
const RESETTLE_ROUNDS: u32 = 60;

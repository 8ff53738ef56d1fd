//! How often the API server is asked, so that whoever reaches the port can neither make an agent burden it nor keep
//! others from being answered. Pure: time is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::cluster::throttle::Quota;

/// Quotas by source. A source from which a token came that the API server accepts is known for an hour, and those
/// have a quota of their own: the API server's proxy is one.
#[derive(Debug)]
pub(super) struct Quotas<S> {
    known: Quota,
    strangers: Quota,
    again: Quota,
    sources: HashMap<S, Of>,
}

#[derive(Debug)]
struct Of {
    quota: Quota,
    last: Instant,
    known_until: Option<Instant>,
}

impl<S: Copy + Eq + Hash> Quotas<S> {
    pub(super) fn new() -> Self {
        let quota = |most| Quota::new(most, MINUTE);
        Self { known: quota(OF_KNOWN), strangers: quota(OF_STRANGERS), again: quota(OF_KNOWN), sources: HashMap::new() }
    }

    /// Whether the API server may be asked at `now` for a connection of this source.
    pub(super) fn take(&mut self, source: S, now: Instant) -> bool {
        let of = self.of(source, now);
        let is_known = of.known_until.is_some_and(|until| now < until);
        if !of.quota.take(now) {
            return false;
        }
        if is_known { self.known.take(now) } else { self.strangers.take(now) }
    }

    /// Whether the API server may be asked again at `now` about a token that it accepted a while ago, wherever it
    /// comes from.
    pub(super) fn take_again(&mut self, now: Instant) -> bool {
        self.again.take(now)
    }

    /// A token came from this source that the API server accepts.
    pub(super) fn is_known(&mut self, source: S, now: Instant) {
        self.of(source, now).known_until = Some(now + KNOWN_FOR);
    }

    fn of(&mut self, source: S, now: Instant) -> &mut Of {
        if self.sources.len() >= MOST_SOURCES && !self.sources.contains_key(&source) {
            // Strangers first, and of equals the one that was silent longest.
            let gone =
                self.sources.iter().min_by_key(|(_, of)| (of.known_until.is_some_and(|until| now < until), of.last));
            if let Some(gone) = gone.map(|(source, _)| *source) {
                self.sources.remove(&gone);
            }
        }
        let new = || Of { quota: Quota::new(OF_ONE, MINUTE), last: now, known_until: None };
        let of = self.sources.entry(source).or_insert_with(new);
        of.last = now;
        of
    }
}

const MINUTE: Duration = Duration::from_secs(60);
const KNOWN_FOR: Duration = Duration::from_secs(3600);
/// All users of one API server are one source.
const OF_ONE: usize = 120;
const OF_STRANGERS: usize = 120;
const OF_KNOWN: usize = 360;
const MOST_SOURCES: usize = 256;

#[cfg(test)]
mod tests {
    use nebula_cni_contract::clock::{Clock, SystemClock};

    use super::*;

    #[test]
    fn strangers_take_nothing_from_those_that_are_known_and_one_source_takes_no_more_than_its_own() {
        let now = SystemClock.now();
        let mut quotas = Quotas::new();
        assert!(quotas.take(0, now));
        quotas.is_known(0, now);
        let taken = |quotas: &mut Quotas<u32>, source, now| (0..1000).filter(|_| quotas.take(source, now)).count();
        assert_eq!(taken(&mut quotas, 1, now), OF_STRANGERS - 1, "the first one took one");
        for source in 2..100_000 {
            assert!(!quotas.take(source, now), "strangers share theirs");
        }
        assert!(quotas.sources.len() <= MOST_SOURCES);
        assert_eq!(taken(&mut quotas, 0, now), OF_ONE - 1, "it is still known");
        assert!(quotas.take_again(now), "whatever was taken for others");
        let later = now + MINUTE;
        assert_eq!(taken(&mut quotas, 1, later), OF_ONE);
        assert_eq!(taken(&mut quotas, 0, now + KNOWN_FOR), OF_ONE, "a stranger again");
    }
}

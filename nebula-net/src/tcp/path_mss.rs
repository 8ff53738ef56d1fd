//! The largest segment that the path takes: what errors say about it (RFC 1191, RFC 8201), and what is guessed of a
//! path that drops long packets and says nothing (a black hole; RFC 4821 section 7.7).

use std::time::{Duration, Instant};

/// How long an error is believed (RFC 1191 section 6.3, RFC 8201 section 4), and the longest that a guess is.
const MAX_AGE: Duration = Duration::from_secs(600);
/// How long the first guess is believed; each further one twice as long. A path that was only down shall not have
/// small segments for long.
const MIN_AGE: Duration = Duration::from_secs(10);
/// Timeouts in a row after which the path is guessed to be a black hole, and what segments have then: packets of
/// about 1000 bytes, which pass tunnels in tunnels, and of 576, which IPv4 asks of every host.
const GUESSES: [(u32, u16); 2] = [(2, 960), (4, 536)];

/// The size of segments. It is lowered at once, and the largest is tried again after a time.
#[derive(Debug)]
pub(crate) struct PathMss {
    /// What both ends take.
    largest: u16,
    size: u16,
    /// When the largest is tried again.
    retry: Option<Instant>,
    /// Guesses since segments of the largest size arrived.
    guesses: u32,
    /// What was sent up to this offset since the largest is tried again proves that it passes once it is acknowledged.
    proof: Option<u64>,
}

impl PathMss {
    pub(crate) fn new(largest: u16) -> Self {
        Self { largest, size: largest, retry: None, guesses: 0, proof: None }
    }

    pub(crate) fn size(&self) -> u16 {
        self.size
    }

    /// The peer takes no more than this.
    pub(crate) fn take_peer(&mut self, largest: u16) {
        self.largest = self.largest.min(largest);
        self.size = self.size.min(largest);
    }

    /// The path takes no more than this, says an error. Returns whether that is news.
    pub(crate) fn limit(&mut self, now: Instant, size: u16) -> bool {
        self.lower(now, size, MAX_AGE)
    }

    /// So many timeouts in a row went by while `outstanding` bytes wait for their acknowledgement. Returns whether
    /// the size was lowered.
    pub(crate) fn suspect(&mut self, now: Instant, timeouts: u32, outstanding: u64) -> bool {
        // A path that was a black hole before is suspected sooner.
        let timeouts = timeouts + u32::from(self.guesses > 0);
        let guess = GUESSES.iter().rev().find(|(patience, _)| timeouts >= *patience);
        let Some(&(_, size)) = guess.filter(|(_, size)| outstanding > u64::from(*size)) else { return false };
        let is_first = self.retry.is_none();
        // A second step down is part of the same guess.
        let earlier = self.guesses - u32::from(!is_first && self.guesses > 0);
        let age = (MIN_AGE * (1 << earlier.min(6))).min(MAX_AGE);
        let is_lower = self.lower(now, size, age);
        self.guesses += u32::from(is_lower && is_first);
        is_lower
    }

    fn lower(&mut self, now: Instant, size: u16, age: Duration) -> bool {
        let is_lower = size < self.size;
        if is_lower {
            (self.size, self.retry, self.proof) = (size, Some(now + age), None);
        }
        is_lower
    }

    /// When the largest is to be tried again.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.retry.is_some_and(|at| at <= now)
    }

    /// Tries the largest again. `next` is the offset of the next byte to send.
    pub(crate) fn retry(&mut self, next: u64) {
        (self.size, self.retry) = (self.largest, None);
        self.proof = Some(next + u64::from(self.largest));
    }

    /// Everything before this offset was acknowledged.
    pub(crate) fn acknowledged(&mut self, offset: u64) {
        if self.proof.take_if(|proof| *proof <= offset).is_some() {
            self.guesses = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests;
    use super::*;

    #[test]
    fn a_black_hole_is_found_again_sooner_and_believed_for_longer() {
        let mut now = tests::now();
        let mut path = PathMss::new(1260);
        assert!(!path.suspect(now, 1, 5000), "one timeout is a loss");
        assert!(!path.suspect(now, 2, 300), "short segments were lost");
        assert!(path.suspect(now, 2, 5000));
        assert_eq!(path.size(), 960);
        assert!(path.suspect(now, 4, 5000));
        assert_eq!(path.size(), 536);
        for age in [10, 20, 40] {
            assert!(!path.is_due(now + Duration::from_secs(age) - Duration::from_millis(1)));
            now += Duration::from_secs(age);
            assert!(path.is_due(now));
            path.retry(10_000);
            assert_eq!(path.size(), 1260);
            assert!(path.suspect(now, 1, 5000), "after one timeout");
        }
        now += MAX_AGE;
        path.retry(10_000);
        path.acknowledged(11_259);
        path.acknowledged(11_260);
        assert!(!path.suspect(now, 1, 5000), "long segments arrived since");
    }

    #[test]
    fn an_error_lowers_the_size_for_ten_minutes() {
        let now = tests::now();
        let mut path = PathMss::new(1260);
        path.take_peer(1250);
        assert!(!path.limit(now, 1250));
        assert!(path.limit(now, 1100));
        assert!(!path.limit(now, 1200));
        assert!(!path.is_due(now + Duration::from_secs(599)));
        path.retry(1);
        assert_eq!(path.size(), 1250);
    }
}

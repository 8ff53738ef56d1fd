//! Limits how often something is told: the same thing of the same object once in a while, and all together only so
//! often. Pure: time is an argument.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// At most a number of times in a period.
#[derive(Debug)]
pub struct Quota {
    most: usize,
    period: Duration,
    taken: VecDeque<Instant>,
}

impl Quota {
    /// At most `most` times in any `period`.
    #[must_use]
    pub fn new(most: usize, period: Duration) -> Self {
        Self { most, period, taken: VecDeque::new() }
    }

    /// Takes one if one is left at `now`.
    pub fn take(&mut self, now: Instant) -> bool {
        while self.taken.front().is_some_and(|at| now.saturating_duration_since(*at) >= self.period) {
            self.taken.pop_front();
        }
        let is_left = self.taken.len() < self.most;
        if is_left {
            self.taken.push_back(now);
        }
        is_left
    }
}

/// Remembers what was told.
#[derive(Debug)]
pub struct Throttle {
    told: HashMap<(String, &'static str), Instant>,
    quota: Quota,
    /// Of what is no warning: an upgrade of a hundred pods must leave room for the one that failed.
    good_news: Quota,
    left_out: u64,
}

impl Default for Throttle {
    fn default() -> Self {
        let quota = |most| Quota::new(most, Duration::from_secs(60));
        Self {
            told: HashMap::new(),
            quota: quota(MOST_IN_A_MINUTE),
            good_news: quota(MOST_GOOD_NEWS_IN_A_MINUTE),
            left_out: 0,
        }
    }
}

impl Throttle {
    /// Whether `reason` may be told of `object` at `now`; then it counts as told.
    pub fn admits(&mut self, object: &str, reason: &'static str, is_warning: bool, now: Instant) -> bool {
        self.told.retain(|_, at| now.saturating_duration_since(*at) < REPEAT_AFTER);
        let key = (object.to_owned(), reason);
        if self.told.contains_key(&key) {
            return false;
        }
        let has_room = is_warning || self.good_news.take(now);
        if !has_room || self.told.len() >= MOST_REMEMBERED || !self.quota.take(now) {
            self.left_out += 1;
            return false;
        }
        self.told.insert(key, now);
        true
    }

    /// How many different things were left out since there were too many.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }
}

const REPEAT_AFTER: Duration = Duration::from_secs(600);
const MOST_IN_A_MINUTE: usize = 30;
const MOST_GOOD_NEWS_IN_A_MINUTE: usize = 15;
const MOST_REMEMBERED: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
    fn the_same_is_told_once_in_ten_minutes_and_a_crowd_is_cut() {
        let (mut throttle, start) = (Throttle::default(), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        assert!(throttle.admits("shop/web", "A", true, start));
        assert!(!throttle.admits("shop/web", "A", true, after(599)));
        assert!(throttle.admits("shop/web", "B", true, after(1)));
        assert!(throttle.admits("shop/db", "A", true, after(2)));
        assert!(throttle.admits("shop/web", "A", true, after(600)));
        let told = (0..100).filter(|pod| throttle.admits(&format!("x/{pod}"), "A", true, after(600))).count();
        assert_eq!((told, throttle.left_out()), (MOST_IN_A_MINUTE - 1, 71));
        assert!(throttle.admits("x/99", "A", true, after(660)), "what was left out comes later");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
    fn good_news_leaves_room_for_warnings() {
        let (mut throttle, start) = (Throttle::default(), Instant::now());
        let told = (0..100).filter(|pod| throttle.admits(&format!("x/{pod}"), "Good", false, start)).count();
        assert_eq!(told, MOST_GOOD_NEWS_IN_A_MINUTE);
        assert!(throttle.admits("x/0", "Bad", true, start));
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
    fn a_quota_holds_in_every_period() {
        let (mut quota, start) = (Quota::new(2, Duration::from_secs(60)), Instant::now());
        let taken: Vec<u64> = (0..200).filter(|second| quota.take(start + Duration::from_secs(*second))).collect();
        assert_eq!(taken, [0, 1, 60, 61, 120, 121, 180, 181]);
    }
}

//! Backoff for each container: what failed is tried again later, and later each time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Failures by container.
#[derive(Debug, Default)]
pub struct Backoff(HashMap<String, Failures>);

#[derive(Debug, Clone, Copy)]
struct Failures {
    count: u32,
    next: Instant,
}

impl Backoff {
    /// Whether something may be tried for `container` at `now`.
    #[must_use]
    pub fn is_due(&self, container: &str, now: Instant) -> bool {
        self.0.get(container).is_none_or(|failures| now >= failures.next)
    }

    /// Notes a failure; returns how many there were in a row.
    pub fn failed(&mut self, container: &str, now: Instant) -> u32 {
        let failures = self.0.entry(container.to_owned()).or_insert(Failures { count: 0, next: now });
        failures.next = now + (FIRST * 2u32.saturating_pow(failures.count.min(16))).min(LONGEST);
        failures.count += 1;
        failures.count
    }

    /// Notes a success.
    pub fn succeeded(&mut self, container: &str) {
        self.0.remove(container);
    }

    /// Forgets all containers but those for which `is_there` holds.
    pub fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|container, _| is_there(container));
    }
}

const FIRST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(clippy::disallowed_methods, reason = "any moment will do as the first")]
    fn delays_double_up_to_a_limit_and_end_with_a_success() {
        let mut backoff = Backoff::default();
        let mut now = Instant::now();
        let mut delays = Vec::new();
        for _ in 0..12 {
            backoff.failed("a", now);
            let began = now;
            while !backoff.is_due("a", now) {
                now += Duration::from_secs(1);
            }
            delays.push((now - began).as_secs());
        }
        assert_eq!(delays, [2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300]);
        assert!(backoff.is_due("b", now));
        backoff.failed("a", now);
        backoff.succeeded("a");
        assert!(backoff.is_due("a", now));
        backoff.failed("a", now);
        backoff.retain(|container| container != "a");
        assert!(backoff.is_due("a", now));
    }
}

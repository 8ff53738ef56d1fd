//! How often the instance of an attachment was started again, so that one that keeps dying does not use up the
//! certificates that the CA gives its pod.

use serde::{Deserialize, Serialize};

/// Restarts in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Restarts {
    /// How many.
    pub count: u32,
    /// Wall clock time of the last one, in seconds.
    pub last: i64,
}

impl Restarts {
    /// Whether the next one is due. The first few are at once, and then each waits twice as long as the one before.
    #[must_use]
    pub fn is_due(self, now: i64) -> bool {
        // A clock that was set back must not delay it.
        now < self.last || now - self.last >= self.wait()
    }

    /// Counts one more.
    #[must_use]
    pub fn another(self, now: i64) -> Self {
        let lived = now.saturating_sub(self.last);
        let count = if self.count > 0 && lived > FORGOTTEN_AFTER { 1 } else { self.count.saturating_add(1) };
        Self { count, last: now }
    }

    fn wait(self) -> i64 {
        match self.count.checked_sub(AT_ONCE) {
            None => 0,
            Some(more) => FIRST_WAIT.saturating_mul(1 << more.min(16)).min(LONGEST_WAIT),
        }
    }
}

const AT_ONCE: u32 = 5;
const FIRST_WAIT: i64 = 10;
// A fraction of a kubelet's own longest wait, because the pod is closed meanwhile.
const LONGEST_WAIT: i64 = 120;
const FORGOTTEN_AFTER: i64 = 600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_loop_is_slowed_down_and_forgotten_once_the_instance_lives() {
        let (mut restarts, mut now, mut times) = (Restarts::default(), 1_000_000, Vec::new());
        for _ in 0..3600 {
            if restarts.is_due(now) {
                restarts = restarts.another(now);
                times.push(now - 1_000_000);
            }
            now += 1;
        }
        assert_eq!(times[..8], [0, 1, 2, 3, 4, 14, 34, 74]);
        assert!(times.len() < 40, "{} in an hour", times.len());
        assert!(restarts.is_due(restarts.last - 5), "the clock was set back");
        let later = restarts.another(now + 2 * FORGOTTEN_AFTER);
        assert_eq!(later.count, 1);
    }
}

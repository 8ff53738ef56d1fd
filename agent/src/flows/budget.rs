//! How much of a core a thread may take.

use std::time::{Duration, Instant};

use nebula_cni_contract::clock::{Clock, SystemClock};
use nix::time::{ClockId, clock_gettime};

/// What the thread that asks has left.
#[derive(Debug)]
pub(super) struct Budget {
    /// CPU time of the thread, and when.
    at: (Duration, Instant),
    left: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { at: (Duration::ZERO, SystemClock.now()), left: MOST_SAVED }
    }
}

impl Budget {
    /// Sleeps if it was too much lately.
    pub(super) fn wait(&mut self) {
        let Ok(used) = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from) else { return };
        let now = SystemClock.now();
        let earned = now.saturating_duration_since(self.at.1) / ONE_OF;
        let spent = used.saturating_sub(self.at.0);
        self.at = (used, now);
        let saved = (self.left + earned).min(MOST_SAVED);
        self.left = saved.saturating_sub(spent);
        let owed = spent.saturating_sub(saved);
        if !owed.is_zero() {
            std::thread::sleep(owed.saturating_mul(ONE_OF).min(LONGEST_SLEEP));
        }
    }
}

/// A quarter of a core.
const ONE_OF: u32 = 4;
const MOST_SAVED: Duration = Duration::from_millis(500);
const LONGEST_SLEEP: Duration = Duration::from_secs(5);

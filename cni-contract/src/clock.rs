//! Clocks passed as arguments: the time a verb reads, its waits, and the deadline that all its parts share.

use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A clock, passed as an argument so that tests can replace it.
pub trait Clock {
    /// Monotonic time, for deadlines.
    fn now(&self) -> Instant;
    /// Wall clock time, for certificates.
    fn unix_seconds(&self) -> i64;
    /// Waits.
    fn sleep(&self, time: Duration);
}

/// The machine's clocks.
#[derive(Debug)]
pub struct SystemClock;

#[expect(clippy::disallowed_methods, reason = "the rim: the only place of the plugin that reads clocks")]
impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn unix_seconds(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    }

    fn sleep(&self, time: Duration) {
        thread::sleep(time);
    }
}

/// One absolute point in time that all parts of a verb share.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Instant);

impl Deadline {
    /// `time` from now.
    #[must_use]
    pub fn after(clock: &dyn Clock, time: Duration) -> Self {
        Self(clock.now() + time)
    }

    /// Time left; zero once it has passed.
    #[must_use]
    pub fn left(self, clock: &dyn Clock) -> Duration {
        self.0.saturating_duration_since(clock.now())
    }

    /// Whether it has passed.
    #[must_use]
    pub fn is_over(self, clock: &dyn Clock) -> bool {
        self.left(clock).is_zero()
    }
}

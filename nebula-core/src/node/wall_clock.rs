//! The wall clock beside the monotonic one.

use std::time::{Duration, Instant, SystemTime};

use nebula_cert::UnixTime;

/// Maps the monotonic clock to the wall clock, for certificates and the handshake's Time field. It is the only place
/// where wall-clock time enters a node: everything else is an [`Instant`] of the caller's clock.
#[derive(Debug, Clone, Copy)]
pub struct WallClock {
    /// Monotonic time of the reading.
    pub at: Instant,
    /// Wall-clock time at that moment, since the Unix epoch.
    pub unix: Duration,
}

impl WallClock {
    /// The two clocks, read at the same moment: `WallClock::new(Instant::now(), SystemTime::now())`. A time before
    /// the Unix epoch counts as the epoch.
    #[must_use]
    pub fn new(at: Instant, time: SystemTime) -> Self {
        Self { at, unix: time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default() }
    }

    /// Returns the wall-clock time at `now`, since the Unix epoch.
    #[must_use]
    pub fn unix_at(&self, now: Instant) -> Duration {
        match now.checked_duration_since(self.at) {
            Some(since) => self.unix.saturating_add(since),
            None => self.unix.saturating_sub(self.at.saturating_duration_since(now)),
        }
    }

    /// Like [`WallClock::unix_at`], in whole seconds.
    pub(crate) fn unix_seconds(&self, now: Instant) -> UnixTime {
        UnixTime::try_from(self.unix_at(now).as_secs()).unwrap_or(UnixTime::MAX)
    }
}

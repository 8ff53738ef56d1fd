//! Reads the system's clocks. Parts that decide something take the time as an argument; only the outermost layer calls
//! this.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nebula_cert::UnixTime;

/// The monotonic clock.
#[allow(clippy::disallowed_methods, reason = "the outermost layer reads the clock and passes it on as an argument")]
pub fn now() -> Instant {
    Instant::now()
}

/// The wall clock, as time since the Unix epoch.
#[allow(clippy::disallowed_methods, reason = "the outermost layer reads the clock and passes it on as an argument")]
pub fn since_epoch() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// The wall clock, in seconds since the Unix epoch.
#[must_use]
pub fn unix_now() -> UnixTime {
    UnixTime::try_from(since_epoch().as_secs()).unwrap_or(UnixTime::MAX)
}

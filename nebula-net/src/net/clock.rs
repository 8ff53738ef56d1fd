//! The clocks; the only place of the crate that reads them.

use std::time::{Instant, SystemTime};

use nebula_core::WallClock;

#[allow(clippy::disallowed_methods, reason = "the rim, where time becomes an argument")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

#[allow(clippy::disallowed_methods, reason = "the rim, where time becomes an argument")]
pub(crate) fn wall() -> WallClock {
    WallClock::new(Instant::now(), SystemTime::now())
}

//! The only place that reads the clocks.
#![allow(clippy::disallowed_methods, reason = "the I/O layer reads the clocks for the rest of the crate")]

use std::time::{Duration, Instant, SystemTime};

use nix::time::{ClockId, clock_gettime};

use crate::WallClock;

// The node follows small drift through the monotonic clock; it only needs to hear about steps.
const MIN_CLOCK_STEP: Duration = Duration::from_millis(500);

pub(super) fn now() -> Instant {
    Instant::now()
}

pub(super) fn wall() -> WallClock {
    let time = SystemTime::now();
    WallClock::new(Instant::now(), time)
}

/// How long the host has slept since it was booted.
pub(super) fn asleep() -> Duration {
    let read = |clock| clock_gettime(clock).map(Duration::from).unwrap_or_default();
    let awake = read(ClockId::CLOCK_MONOTONIC);
    read(ClockId::CLOCK_BOOTTIME).saturating_sub(awake)
}

/// A new anchor, if the wall clock has stepped away from where `anchor` says it should be.
pub(super) fn step_since(anchor: &WallClock) -> Option<WallClock> {
    let wall = wall();
    is_step(anchor, &wall).then_some(wall)
}

fn is_step(anchor: &WallClock, wall: &WallClock) -> bool {
    let expected = anchor.unix + wall.at.saturating_duration_since(anchor.at);
    expected.abs_diff(wall.unix) > MIN_CLOCK_STEP
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_does_not_sleep_has_not_slept_longer() {
        let before = asleep();
        std::thread::sleep(Duration::from_millis(50));
        assert!(asleep().abs_diff(before) < Duration::from_millis(40));
    }

    #[test]
    fn only_a_step_of_the_wall_clock_moves_the_anchor() {
        let anchor = wall();
        let later = |unix_ms: u64| WallClock {
            at: anchor.at + Duration::from_secs(100),
            unix: anchor.unix + Duration::from_millis(unix_ms),
        };
        assert!(!is_step(&anchor, &later(100_000)));
        assert!(!is_step(&anchor, &later(100_400)));
        assert!(is_step(&anchor, &later(101_000)), "set forward");
        assert!(is_step(&anchor, &later(0)), "set back");
    }
}

//! Whether a relay carries what it is given, and not only the probes.
//!
//! A relay knows probes by their type and size, so it could answer for a quick path and drop or delay everything
//! else. The peer therefore says, in its answer to a probe, how many of the datagrams before that one did not arrive.
//! It reads that from its replay window, so it costs no datagram anything, and one-way traffic is measured as well as
//! any other.

use std::time::{Duration, Instant};

/// Datagrams that a relay was given for one tunnel, between two probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::node) struct Load {
    /// How many were sent.
    pub(in crate::node) sent: u64,
    /// How many of them did not arrive.
    pub(in crate::node) missing: u64,
}

impl Load {
    /// Whether it says something: fewer datagrams may be lost by chance, or be on their way still.
    pub(in crate::node) fn is_telling(self) -> bool {
        self.sent >= MIN_LOAD
    }

    /// Whether most of them did not arrive.
    pub(in crate::node) fn is_dropped(self) -> bool {
        self.is_telling() && self.missing * 2 >= self.sent
    }
}

/// What a relay is trusted with, by what became of earlier datagrams.
#[derive(Debug, Default)]
pub(super) struct Carrying {
    /// Loads in a row that were dropped.
    dropped: u32,
    /// How often it was found to drop, and until when it is not trusted for that.
    faults: u32,
    distrusted_until: Option<Instant>,
}

impl Carrying {
    /// The peer told what became of a load.
    pub(super) fn note(&mut self, now: Instant, load: Load) {
        if !load.is_telling() {
            return;
        }
        if !load.is_dropped() {
            (self.dropped, self.distrusted_until) = (0, None);
            return;
        }
        self.dropped += 1;
        if self.dropped >= DROPPED {
            // More of the same while it is in use for want of another one is no new fault.
            self.faults += u32::from(!self.is_distrusted(now));
            let pause = DISTRUSTED_FOR.saturating_mul(1 << self.faults.saturating_sub(1).min(6)).min(MAX_DISTRUST);
            (self.dropped, self.distrusted_until) = (0, Some(now + pause));
        }
    }

    /// Whether it drops what it carries, as far as is known.
    pub(super) fn is_distrusted(&self, now: Instant) -> bool {
        self.distrusted_until.is_some_and(|until| now < until)
    }
}

/// Datagrams that say something.
const MIN_LOAD: u64 = 4;
/// Loads in a row after which a relay is left.
const DROPPED: u32 = 2;
/// Answers to probes do not make up for it. Only time does, which doubles with each time that it is found out.
const DISTRUSTED_FOR: Duration = Duration::from_secs(120);
const MAX_DISTRUST: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::disallowed_methods, reason = "a base for virtual time")]
    fn base() -> Instant {
        Instant::now()
    }

    #[test]
    fn two_loads_of_which_most_are_dropped_make_a_relay_distrusted_for_longer_each_time() {
        let (mut carrying, mut now) = (Carrying::default(), base());
        for pause in [120, 240, 480, 960, 1920, 3600, 3600] {
            carrying.note(now, Load { sent: 10, missing: 5 });
            assert!(!carrying.is_distrusted(now));
            carrying.note(now, Load { sent: 10, missing: 10 });
            now += Duration::from_secs(pause - 1);
            assert!(carrying.is_distrusted(now));
            now += Duration::from_secs(1);
            assert!(!carrying.is_distrusted(now));
        }
    }

    #[test]
    fn some_loss_few_datagrams_and_a_single_bad_load_are_no_fault() {
        let (mut carrying, now) = (Carrying::default(), base());
        for _ in 0..100 {
            for (sent, missing) in [(10, 4), (3, 3), (200, 99), (10, 10), (1000, 0)] {
                carrying.note(now, Load { sent, missing });
                assert!(!carrying.is_distrusted(now));
            }
        }
    }
}
